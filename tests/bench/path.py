"""The whole path: an engine process ships decode steps of 256 requests until they are acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from collector.client import RouteClient
from tests.bench.path_steps import STEP_BYTES, names
from tests.bench.record import Record
from tests.harness.daemon import running_daemon

STEPS = 1500
RAW_STEPS = 6000
"""More of the bare ones: they go faster, and both take about as long."""
ROUNDS = 5


def run(seed: int) -> Iterator[Record]:
    """Records `path/…`: rounds of ours and of bare pyzmq in turn, the median of each."""
    ours, raw = [], []
    with (
        tempfile.TemporaryDirectory(prefix="r3-bench-") as folder,
        running_daemon(Path(folder), budget="1GiB") as daemon,
        RouteClient(daemon.trainers) as client,
    ):
        for number in range(ROUNDS + 1):
            rate = _output("path_engine", daemon.engines, STEPS, seed)
            client.release(names())
            # The first round only warms: a daemon that has run for a while faults no row memory in.
            if number:
                ours.append(rate)
                raw.append(_raw(f"ipc://{folder}/raw{number}.sock", seed))
    rate, peer = median(ours), median(raw)
    size = STEP_BYTES / 1e9
    yield Record("path/engine-to-arena", "patches/s", rate, {"raw pyzmq one way": peer})
    yield Record("path/engine-to-arena-bytes", "GB/s", rate * size, {"raw pyzmq one way": peer * size})


def _raw(endpoint: str, seed: int) -> float:
    command = [sys.executable, "-m", "tests.bench.path_raw", "send", endpoint, str(RAW_STEPS), str(seed)]
    sender = subprocess.Popen(command)
    try:
        return _output("path_raw", "receive", endpoint, RAW_STEPS, seed)
    finally:
        sender.wait(60)


def _output(module: str, *arguments: object) -> float:
    command = [sys.executable, "-m", f"tests.bench.{module}", *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    return float(json.loads(out)["rate"])
