"""How long a killed daemon needs to find a gigabyte again: its log replayed, every row looked at."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from collector.core.collector import Collector
from collector.core.events import FromEngine, Logged
from collector.core.life import State
from collector.daemon.config import DaemonConfig
from collector.daemon.state import OnDisk
from protocol.messages import Hello, RequestFinished
from tests.bench.decode_steps import GEOMETRY, PEER, Steps, arrived
from tests.bench.record import Record

BUDGET = 1 << 30
SHAPES = {"long": (256, 3_900), "short": (16_000, 60)}
"""(requests, rows of each): either way nearly all of the budget is held."""
EVERY = 4
"""Steps a record tells of, as with bursts of that many."""
AGAIN = 3


def run(seed: int) -> Iterator[Record]:
    """Records `recovery/…`: half of the requests are complete, half are under way."""
    for name, (requests, rows) in SHAPES.items():
        yield _start(name, requests, rows, seed)


def _start(name: str, requests: int, rows: int, seed: int) -> Record:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="r3-bench-", dir=shared if shared.is_dir() else None) as base:
        folder = Path(base) / "state"
        config = DaemonConfig(state=folder, budget=BUDGET)
        keeper = OnDisk(folder, config)
        core = keeper.collector(time.monotonic())
        _fill(keeper, core, requests, rows, seed)
        held = (core.arena.pages - core.arena.free_pages) * core.arena.page_bytes
        log = sum(path.stat().st_size for path in folder.glob("log-*"))
        states = _states(core, requests)
        took = []
        for _ in range(AGAIN):
            keeper.release()
            del core
            began = time.perf_counter()
            keeper = OnDisk(folder, config)
            core = keeper.collector(time.monotonic())
            took.append(time.perf_counter() - began)
            assert _states(core, requests) == states
        keeper.release()
        del core
        words = np.fromfile(folder / "arena", np.uint64)
        began = time.perf_counter()
        np.add.reduce(words)
        floor = time.perf_counter() - began
    seconds = max(took) / (held / 1e9)
    more = {"GB held": held / 1e9, "MB of log": log / 1e6}
    return Record(f"recovery/{name}", "s a GB", seconds, more, floor / (BUDGET / 1e9), "2 s", seconds <= 2.0)


def _states(core: Collector, requests: int) -> list[State]:
    states = [life.state for life in core.lives.by_serial.values()]
    assert states.count(State.COMPLETE) == requests // 2
    assert states.count(State.OPEN) == requests - requests // 2
    return states


def _fill(keeper: OnDisk, core: Collector, requests: int, rows: int, seed: int) -> None:
    now = time.monotonic()
    core.handle(FromEngine(PEER, Hello("bench", "i", GEOMETRY, 0)), now)
    steps = Steps(requests, np.random.default_rng(seed), apart=1)
    for seq in range(rows):
        core.handle(arrived(steps.at(seq, 0, seq)), now)
        if seq % EVERY == 0:
            _save(keeper, core)
    for i in range(requests // 2):
        core.handle(FromEngine(PEER, RequestFinished(rows + i, f"0.{i}", rows + 1, "stop")), now)
    _save(keeper, core)


def _save(keeper: OnDisk, core: Collector) -> None:
    record = core.take_record()
    assert record is not None
    assert keeper.save(record)
    core.handle(Logged(record.number), time.monotonic())
