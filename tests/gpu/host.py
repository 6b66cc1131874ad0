"""What a decode step costs the engine's thread: planner, exporter and hand-off, beside an accumulation by request.

The peer is what the seed does on its scheduler's thread: one Python iteration and a few numpy calls a request a step.
The adapter's walk over engine objects is a figure of its own. The context is a parameter because nothing may depend on
it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_side.capture.records import RecordLayout
from engine_side.export.pipeline import CapturePipeline
from engine_side.export.planner import DecodeBatch, ScheduledBatch
from engine_side.shipping.shipper import Shipper
from protocol.geometry import Geometry
from tests.bench.record import Record, show
from tests.gpu import results
from tests.harness.daemon import running_daemon

GEOMETRIES = {"48x8": Geometry(48, tuple(range(48)), 8, 128), "61x8": Geometry(61, tuple(range(61)), 8, 256)}
REQUESTS = (64, 256, 1024)
CONTEXTS = (4096, 32768)
STEPS = 400
REPEATS = 4
"""Of each context, in turn: two runs of one context may differ by more than two contexts do."""
BURST = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Accumulated:
    """The seed's buffer of one request: int16 rows that double, written at their absolute start."""

    def __init__(self, context: int, cells: int) -> None:
        self.rows: NDArray[np.int16] = np.empty((context + 1, cells), np.int16)
        self.count = context

    def apply(self, start: int, rows: NDArray[np.int16]) -> None:
        end = start + len(rows)
        if start > self.count:
            raise ValueError(f"gap: {start} past {self.count}")
        if end > len(self.rows):
            grown = np.empty((2 * end, self.rows.shape[1]), np.int16)
            grown[: self.count] = self.rows[: self.count]
            self.rows = grown
        self.rows[start:end] = rows
        self.count = max(self.count, end)


def by_request(buffers: dict[str, Accumulated], ids: tuple[str, ...], start: int, rows: NDArray[np.int16]) -> None:
    """The seed's `_apply_routed_experts_patch` over one decode step."""
    offsets = np.arange(len(ids) + 1)
    starts = np.full(len(ids), start)
    for i, request in enumerate(ids):
        running = buffers.get(request)
        if running is None:
            continue
        running.apply(int(starts[i]), rows[offsets[i] : offsets[i + 1]])


def pipeline_times(geometry: Geometry, requests: int, context: int, engines: str) -> tuple[list[float], list[float]]:
    """Microseconds of begin, and of end with its plan, export and hand-off, of each step of a decode batch that goes
    on: back to back, and each behind half a millisecond of other Python, which finds every cache cold. The forward
    between begin and end is a graph with nothing but the commit in it, and is not timed."""
    shipper = Shipper(engines, geometry, "host-bench", window_cap_bytes=1 << 30)
    shipper.start()
    layout = RecordLayout.of(geometry, narrow=False)
    pipeline = CapturePipeline(layout, shipper, max_tokens=requests, num_slots=requests, device=DEVICE)
    forward = Forward(pipeline, geometry, requests)
    tag = f"{time.monotonic_ns():x}"
    lives = tuple(f"{tag}-{i}" for i in range(requests))
    starts = np.full(requests, context, np.int64)
    found: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    try:
        for step in range(STEPS):
            apart = step >= STEPS // 2
            now = starts + step
            forward.place(context + step)
            batch: ScheduledBatch | DecodeBatch = DecodeBatch(lives, now)
            if not step:
                opens = list(enumerate(lives))
                batch = ScheduledBatch(lives, now.tolist(), [1] * requests, (now + 1).tolist(), opens)
            if apart:
                be_an_engine()
            began = time.perf_counter_ns()
            pipeline.begin(0)
            middle = time.perf_counter_ns()
            forward.run()
            again = time.perf_counter_ns()
            pipeline.end(batch)
            found[apart].append((time.perf_counter_ns() - again + middle - began) / 1e3)
            # What was handed over is shipped before the next burst: an engine's steps are milliseconds apart.
            if apart or step % BURST == BURST - 1:
                shipper.quiet = False
                while not shipper._stream.drained:
                    time.sleep(0)
    finally:
        gc.enable()
    shipper.quiet = False
    for life in lives:
        shipper.finish(life, None, "aborted")
    assert shipper.close(60.0)
    assert shipper.stats().rows_lost == 0, shipper.stats()
    pipeline.free()
    return found[0][STEPS // 20 :], found[1]


def be_an_engine() -> int:
    """Half a millisecond of Python, as an engine that schedules."""
    until, table, at = time.perf_counter() + 5e-4, {i: [i] for i in range(512)}, 0
    while time.perf_counter() < until:
        at = (at + table[at % 512][0] + 1) & 0xFFFF
    return at


class Forward:
    """A forward of which only the routes are left: they are kept and committed, in a graph where there is one."""

    def __init__(self, pipeline: CapturePipeline, geometry: Geometry, tokens: int) -> None:
        self._pipeline = pipeline
        shape = (geometry.num_moe_layers, tokens, geometry.num_experts)
        self._ids = torch.rand(shape, device=DEVICE).topk(geometry.top_k).indices.to(torch.int32)
        self._slots = torch.arange(tokens, device=DEVICE)
        self._positions = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._commit()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._commit()

    def _commit(self) -> None:
        for layer, ids in enumerate(self._ids):
            self._pipeline.recorder.keep(layer, ids)
        self._pipeline.commit(self._slots, self._positions, self._positions)

    def place(self, position: int) -> None:
        """The position that every request runs next."""
        self._positions.fill_(position)
        if self._graph is not None:
            torch.cuda.synchronize()

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._commit()


def accumulated_us(requests: int, context: int, cells: int) -> float:
    """Median of the seed's accumulation, a step."""
    buffers = {str(i): Accumulated(context, cells) for i in range(requests)}
    ids, rows = tuple(buffers), np.zeros((requests, cells), np.int16)
    times = []
    for step in range(60):
        began = time.perf_counter_ns()
        by_request(buffers, ids, context + step, rows)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(times[5:])


def walked(requests: int, context: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The walk over a batch that goes on, and over one that the short cut never fits."""
    from transformers.generation.continuous_batching.requests import RequestState

    from engine_side.engines.transformers.batch import Surveyor
    from engine_side.engines.transformers.lives import Lives, Names
    from engine_side.engines.transformers.stats import CaptureStats

    slots: Any = None
    states = [RequestState(request_id=str(i), initial_tokens=[0] * 4) for i in range(requests)]
    batch = [SimpleNamespace(state=state, query_length=1, has_new_token=True) for state in states]
    surveyor = Surveyor(Lives(itertools.count(1), Names()), slots, CaptureStats())
    for state in states:
        surveyor._lives.of(state).next = context
    at = itertools.count(context + 1)

    def advance() -> None:
        now = next(at)
        for state in states:
            state.position_offset = now

    def same() -> object:
        return surveyor.survey(batch)

    def changed() -> object:
        surveyor._catch_up()
        return surveyor.survey(batch)

    changed.advance = same.advance = advance  # type: ignore[attr-defined]
    return same, changed


def measure(name: str, geometry: Geometry, engines: str) -> Iterator[Record]:
    """Every size of one geometry."""
    cells = geometry.num_moe_layers * geometry.top_k
    medians: dict[tuple[int, int], float] = {}
    for requests in REQUESTS:
        found: dict[int, tuple[list[float], list[float]]] = {context: ([], []) for context in CONTEXTS}
        for repeat in range(REPEATS):
            for context in CONTEXTS if repeat % 2 else reversed(CONTEXTS):
                for kept, times in zip(
                    found[context], pipeline_times(geometry, requests, context, engines), strict=True
                ):
                    kept.extend(times)
        for context in CONTEXTS:
            medians[requests, context] = statistics.median(found[context][0])
            yield _record(name, requests, context, found[context], medians, cells)
    for requests in REQUESTS:
        longer = medians[requests, CONTEXTS[1]] / medians[requests, CONTEXTS[0]]
        bar = "the context changes nothing (0.8 to 1.25)"
        yield Record(f"host/{name}/{requests}/context-ratio", "x", longer, {}, None, bar, 0.8 <= longer <= 1.25)


def _record(
    name: str,
    requests: int,
    context: int,
    found: tuple[list[float], list[float]],
    medians: dict[tuple[int, int], float],
    cells: int,
) -> Record:
    times, cold = found
    ours = medians[requests, context]
    peers = {
        "p99": sorted(times)[int(len(times) * 0.99)],
        "behind 0.5 ms of other Python": statistics.median(cold),
        "bytes": float(requests * cells * 2),
    }
    if context == CONTEXTS[0]:
        peers["per-request accumulation"] = accumulated_us(requests, context, cells)
    bar, holds = None, True
    if requests == 256:
        bar, holds = "at most 50 us", ours <= 50
    elif requests == 1024:
        bar, holds = "at most 1.5 times that of 256", ours <= 1.5 * medians[256, context]
    return Record(f"host/{name}/{requests}/context-{context}", "us a step", ours, peers, None, bar, holds)


def walk() -> Iterator[Record]:
    """The adapter's walk over engine objects, a request."""
    for requests in REQUESTS:
        for label, work in zip(("same batch", "changed batch"), walked(requests, 4096), strict=True):
            times = []
            for _ in range(300):
                work.advance()  # type: ignore[attr-defined]
                began = time.perf_counter_ns()
                work()
                times.append((time.perf_counter_ns() - began) / 1e3)
            each = statistics.median(times[30:]) / requests
            asked = label == "same batch"
            bar = "at most 0.15" if asked else None
            yield Record(f"walk/{label}/{requests}", "us a request", each, {}, None, bar, not asked or each <= 0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/gpu/host.json")
    out = parser.parse_args().out
    records = []
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder), budget="8GiB") as daemon:
        for name, geometry in GEOMETRIES.items():
            records += list(measure(name, geometry, daemon.engines))
    records += list(walk())
    results.write(out, "tests.gpu.host", records)
    show(records)


if __name__ == "__main__":
    main()
