"""The whole path: an engine process ships decode steps of 256 requests until they are acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from collector.cli.keygen import keygen
from collector.client import RouteClient
from tests.bench.path_steps import REQUESTS, STEP_BYTES, names
from tests.bench.record import Record
from tests.harness.daemon import running_daemon

STEPS = 1500
RAW_STEPS = 6000
"""More of the bare ones: they go faster, and both take about as long."""
ROUNDS = 5
ENGINES = 4


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
    rows = "at least 1 million rows/s"
    yield Record("path/engine-to-arena", "patches/s", rate, {"raw pyzmq one way": peer})
    yield Record("path/engine-to-arena-rows", "rows/s", rate * REQUESTS, bar=rows, holds=rate * REQUESTS >= 1e6)
    bar = "at least 1.5 GB/s, or 60 % of raw"
    holds = rate * size >= 1.5 or rate >= 0.6 * peer
    yield Record(
        "path/engine-to-arena-bytes", "GB/s", rate * size, {"raw pyzmq one way": peer * size}, bar=bar, holds=holds
    )
    four = _four(seed)
    yield Record(
        "path/four-engines",
        "GB/s",
        four * size,
        {"one": rate * size},
        bar="at least 80 % of one",
        holds=four >= 0.8 * rate,
    )
    yield Record("path/curve-over-tcp", "GB/s", _curve(seed) * size, {"ipc": rate * size})


def _four(seed: int) -> float:
    """Patches a second of four engines together, the slowest of them taken four times."""
    with (
        tempfile.TemporaryDirectory(prefix="r3-bench-") as folder,
        running_daemon(Path(folder), budget="2GiB") as daemon,
        RouteClient(daemon.trainers) as client,
        ThreadPoolExecutor(ENGINES) as pool,
    ):
        found: list[float] = []
        for _ in range(2):
            # The first round warms.
            each = [pool.submit(_output, "path_engine", daemon.engines, STEPS, seed + n) for n in range(ENGINES)]
            found = [one.result() for one in each]
            client.release(names())
    return ENGINES * min(found)


def _curve(seed: int) -> float:
    """Patches a second over TCP, encrypted."""
    with tempfile.TemporaryDirectory(prefix="r3-bench-") as base:
        keys = Path(base) / "keys"
        keygen(keys)
        options = ("--engines", "tcp://127.0.0.1:0", "--keys", str(keys / "collector"))
        with (
            running_daemon(Path(base), *options, budget="1GiB") as daemon,
            RouteClient(daemon.trainers, keys=keys / "trainer") as client,
        ):
            found = []
            for _ in range(3):
                found.append(_output("path_engine", daemon.engines, STEPS, seed, keys / "engine"))
                client.release(names())
    return median(found[1:])


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
