"""What shipping costs the engine's thread while the collector is well, gone, stopped, slow or full: a loop of steps at
a steady pace with a shipper, beside the same loop without one, block by block."""

from __future__ import annotations

import gc
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np

from engine_side.shipping.shipper import Shipper
from tests.bench.assembly import GEOMETRY
from tests.bench.path_steps import Steps
from tests.bench.record import Record
from tests.harness.daemon import running_daemon
from tests.net.proxy import through

BLOCK, BLOCKS = 100, 8
PACE_S = 0.01
WORK_S = 0.001
"""Of a step, what the engine does in Python; the rest of it waits for the device."""
BYTES_A_SECOND = 4 << 20
"""Of a slow collector: a sixth of what is shipped."""


def run(seed: int) -> Iterator[Record]:
    """Records `handoff/…`, microseconds."""
    for name, collector in STATES.items():
        with tempfile.TemporaryDirectory(prefix="r3-bench-") as folder, collector(Path(folder), seed) as endpoint:
            put, on, off = _pairs(endpoint, seed)
        p99 = float(np.quantile(put, 0.99)) * 1e6
        yield Record(f"handoff/{name}/put-p99", "us", p99, bar="at most 50 us", holds=p99 <= 50.0)
        with_, without = (float(np.quantile(times, 0.999)) * 1e6 for times in (on, off))
        holds = with_ - without <= 1_000.0
        yield Record(
            f"handoff/{name}/step-p99.9", "us", with_, {"no shipper": without}, bar="at most 1 ms above", holds=holds
        )


def _pairs(endpoint: str, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each hand-off, of each step with a shipper, of each without."""
    steps = Steps(seed)
    put: list[float] = []
    on: list[float] = []
    off: list[float] = []
    shipper = Shipper(endpoint, GEOMETRY, "bench", window_cap_bytes=64 << 20)
    shipper.start()
    gc.collect()
    gc.disable()
    try:
        number = 0
        for block in range(BLOCKS + 1):
            for ships in (True, False):
                for _ in range(BLOCK):
                    step = steps.landed(number) if ships else None
                    number += ships
                    shipper.quiet = True
                    began = time.perf_counter()
                    while time.perf_counter() - began < WORK_S:
                        pass
                    handed = time.perf_counter()
                    if step is not None:
                        shipper.put(step)
                    done = time.perf_counter()
                    shipper.quiet = False
                    # The first block warms.
                    if block and ships:
                        put.append(done - handed)
                        on.append(done - began)
                    elif block:
                        off.append(done - began)
                    time.sleep(max(0.0, PACE_S - (time.perf_counter() - began)))
    finally:
        gc.enable()
        shipper.close(0.0)
    return put, on, off


@contextmanager
def _well(folder: Path, _seed: int) -> Iterator[str]:
    with running_daemon(folder, budget="1GiB") as daemon:
        yield daemon.engines


@contextmanager
def _gone(folder: Path, _seed: int) -> Iterator[str]:
    yield f"ipc://{folder}/nobody.sock"


@contextmanager
def _stopped(folder: Path, _seed: int) -> Iterator[str]:
    with running_daemon(folder, budget="1GiB") as daemon, ExitStack() as undone:
        daemon.process.send_signal(signal.SIGSTOP)
        undone.callback(daemon.process.send_signal, signal.SIGCONT)
        yield daemon.engines


@contextmanager
def _slow(folder: Path, seed: int) -> Iterator[str]:
    with (
        running_daemon(folder, "--engines", "tcp://127.0.0.1:0", budget="1GiB") as daemon,
        through(daemon.engines, seed, rate=BYTES_A_SECOND) as proxy,
    ):
        yield proxy.endpoint


@contextmanager
def _full(folder: Path, _seed: int) -> Iterator[str]:
    with running_daemon(folder, budget="16MiB") as daemon:
        yield daemon.engines


STATES: dict[str, Callable[[Path, int], AbstractContextManager[str]]] = {
    "well": _well,
    "gone": _gone,
    "stopped": _stopped,
    "slow": _slow,
    "full": _full,
}
