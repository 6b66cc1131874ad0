"""How long a trainer's releases take, together with the records that they leave."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from collector.core.collector import Collector
from collector.core.events import FromEngine, FromTrainer, Logged
from collector.daemon.ingest import Ingest
from protocol import codec
from protocol.messages import Hello, Release, RequestFinished
from tests.bench.record import Record
from tests.harness.patches import SMALL, Seg, frames

REQUESTS = 200_000
PAGE = 96
AT_ONCE = 10_000
"""Ids of one Release."""
_STEP = 1_000


def run(_seed: int) -> Iterator[Record]:
    """Record `release/a-million`: seconds, from a fifth of them."""
    core = Collector(np.zeros((REQUESTS + 10) * PAGE, np.uint8), "bench", None, PAGE)
    _fill(core)
    began = time.perf_counter()
    for first in range(0, REQUESTS, AT_ONCE):
        core.handle(FromTrainer(b"t", Release(first, tuple(map(str, range(first, first + AT_ONCE))))), 1.0)
        _save(core)
    seconds = (time.perf_counter() - began) * 1e6 / REQUESTS
    assert core.arena.free_pages == core.arena.pages
    yield Record("release/a-million", "s", seconds, bar="seconds: at most 10", holds=seconds <= 10.0)


def _fill(core: Collector) -> None:
    ingest, rows = Ingest(core.geometry_of), np.tile(np.arange(2, dtype=np.int16), (1, 2, 1))
    core.handle(FromEngine(b"e", Hello("e", "e", SMALL, 0)), 1.0)
    seq = 0
    for first in range(0, REQUESTS, _STEP):
        numbers = range(first, first + _STEP)
        segs = [Seg(str(i), 0, rows, (1,), opens=str(i)) for i in numbers]
        core.handle(ingest.from_engine(b"e", frames(SMALL, seq, segs)), 1.0)  # type: ignore[arg-type]
        for i in numbers:
            finish = codec.encode(RequestFinished(seq + 1 + i - first, str(i), 2, "stop"))
            core.handle(ingest.from_engine(b"e", [finish]), 1.0)  # type: ignore[arg-type]
        seq += 1 + _STEP
        _save(core)


def _save(core: Collector) -> None:
    core.take_record()
    core.handle(Logged(core.record), 1.0)
