"""One decode step of 256 and of 1,024 requests through `Collector.handle`, 61 layers x top-8 int16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from collector.core.collector import Collector
from collector.core.events import FromEngine, FromTrainer, Logged
from protocol.messages import Hello, Release
from tests.bench.decode_steps import GEOMETRY, PEER, Steps, arrived
from tests.bench.record import Record
from tests.bench.timing import BLOCK, interleaved

BLOCKS = 8
STEPS = (BLOCKS + 1) * BLOCK
ARENA_BYTES = 1 << 30


def run(seed: int) -> Iterator[Record]:
    """Records `assembly/…`."""
    for requests in (256, 1024):
        yield from _decode_step(requests, seed)


def _decode_step(requests: int, seed: int) -> Iterator[Record]:
    """Steady state: requests come, run BLOCK steps, are released; their memory is used again by the next ones."""
    rng = np.random.default_rng(seed)
    steps = Steps(requests, rng)
    core = Collector(_touched(ARENA_BYTES), "bench")
    core.handle(FromEngine(PEER, Hello("bench", "i", GEOMETRY, 0)), 0.0)
    cells = GEOMETRY.row_nbytes // 2
    # Whole rows as one opaque element: the fastest scatter that numpy has for them.
    whole = np.dtype((np.void, GEOMETRY.row_nbytes))
    flat = _touched(ARENA_BYTES // GEOMETRY.row_nbytes * GEOMETRY.row_nbytes).view(whole)
    home = rng.permutation(len(flat) // 128)[:requests] * 128
    loop: dict[str, _Growable] = {}
    offsets = np.arange(requests + 1)
    plain = np.zeros((requests, cells), np.int16)
    # Received frames are memory that the allocator hands out again and again, warm from the copy off the socket: a few
    # buffers in turn stand for it, and all of the competitors read the same ones.
    raw = [steps.frames(i) for i in range(STEPS)]
    patches = [arrived(frames) for frames in raw]
    sources = [each.patch.rows.view(np.int16) for each in patches]
    opaque = [rows.view(whole)[:, 0] for rows in sources]

    def renew(name: str, block: int) -> None:
        if name == "ours":
            core.handle(FromTrainer(b"t", Release(1, tuple(steps.names))), 0.0)
            core.handle(arrived(steps.opening(block)), 0.0)
            core.take_record()
            core.handle(Logged(core.record), 0.0)
        elif name == "loop":
            loop.update((name, _Growable(cells)) for name in steps.names)

    def ours(i: int) -> None:
        core.handle(patches[i], 0.0)

    def scatter(i: int) -> None:
        flat[home + i % BLOCK] = opaque[i]

    def per_request(i: int) -> None:
        rows, meta = sources[i], patches[i].patch.token_ids | patches[i].patch.tags
        starts = patches[i].patch.starts.tolist()
        bounds = offsets.tolist()
        for name, start, a, b in zip(steps.names, starts, bounds, bounds[1:], strict=False):
            held = loop.get(name)
            if held is not None:
                held.write(start, rows[a:b], meta[a:b])

    def copy(i: int) -> None:
        plain[:] = sources[i]

    def decode(i: int) -> None:
        arrived(raw[i])

    took = interleaved(
        {"ours": ours, "loop": per_request, "scatter": scatter, "copy": copy, "decode": decode}, BLOCKS, renew
    )
    assert core.stats()["rows"] == requests * (STEPS + BLOCKS + 1)
    us = {name: seconds * 1e6 for name, seconds in took.items()}
    holds = us["ours"] * 5 <= us["loop"] and us["ours"] <= 2 * us["scatter"]
    peers = {"per-request loop": us["loop"], "bare scatter": us["scatter"]}
    name = f"assembly/decode-{requests}"
    yield Record(name, "us a step", us["ours"], peers, us["copy"], "loop/5 and 2x scatter", holds)
    yield Record(f"assembly/decoding-{requests}", "us a step", us["decode"], {"assembly": us["ours"]}, us["copy"])


class _Growable:
    """The obvious assembly of the same work: arrays a request, doubled when full, a gap check, a slice a step for the
    rows and one for their token id, weight version and kind."""

    def __init__(self, cells: int) -> None:
        self._rows = np.zeros((64, cells), np.int16)
        self._meta = np.zeros(64, np.int64)
        self.held: int | None = None

    def write(self, start: int, rows: NDArray[np.int16], meta: NDArray[np.int64]) -> None:
        stop = start + len(rows)
        if self.held is not None and start > self.held:
            raise AssertionError(f"a gap: {self.held} rows held, the next starts at {start}")
        if stop > len(self._rows):
            grown = np.zeros((max(stop, 2 * len(self._rows)), self._rows.shape[1]), np.int16)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
            self._meta = np.concatenate([self._meta, np.zeros(len(grown) - len(self._meta), np.int64)])
        self._rows[start:stop] = rows
        self._meta[start:stop] = meta
        self.held = stop


def _touched(size: int) -> NDArray[np.uint8]:
    """Memory the kernel has given already: a daemon that has run for a while faults nothing in."""
    return np.full(size, 255, np.uint8)
