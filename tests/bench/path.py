"""The whole path: an engine process ships decode steps of 256 requests until they are acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.record import Record

STEPS = 1200
REQUESTS = 256


def run(seed: int) -> Iterator[Record]:
    """Records `path/…`: three rounds of both, the median of each."""
    ours, raw = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="r3-bench-") as folder:
            ours.append(_ours(Path(folder), seed))
            raw.append(_raw(Path(folder), seed))
    rate, peer = sorted(ours)[1], sorted(raw)[1]
    size = REQUESTS * (61 * 8 * 2 + 4)
    yield Record("path/engine-to-arena", "patches/s", rate, {"raw pyzmq one way": peer})
    yield Record("path/engine-to-arena-bytes", "GB/s", rate * size / 1e9, {"raw pyzmq one way": peer * size / 1e9})


def _ours(folder: Path, seed: int) -> float:
    engines, trainers = f"ipc://{folder}/e.sock", f"ipc://{folder}/t.sock"
    command = [sys.executable, "-m", "collector.cli", "serve", "--engines", engines, "--trainers", trainers]
    daemon = subprocess.Popen([*command, "--budget", "1GiB"], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        assert "ready" in daemon.stdout.readline()
        return _rate([sys.executable, "-m", "tests.bench.path_engine", engines, str(STEPS), str(REQUESTS), str(seed)])
    finally:
        daemon.terminate()
        daemon.wait(20)


def _raw(folder: Path, seed: int) -> float:
    endpoint = f"ipc://{folder}/raw.sock"
    command = [sys.executable, "-m", "tests.bench.path_raw"]
    receiver = subprocess.Popen([*command, "receive", endpoint, str(STEPS)], stdout=subprocess.PIPE, text=True)
    sender = subprocess.Popen([*command, "send", endpoint, str(STEPS)], stdout=subprocess.DEVNULL)
    try:
        out, _ = receiver.communicate(timeout=120)
        return float(json.loads(out)["rate"])
    finally:
        sender.wait(20)


def _rate(command: list[str]) -> float:
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return float(json.loads(out)["rate"])
