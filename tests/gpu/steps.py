"""When each engine step ended, whether it replayed a CUDA graph, and whether it captured one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class GraphCounts:
    """Calls so far, in this process."""

    replays: int = 0
    captures: int = 0


@contextmanager
def counted_graphs() -> Iterator[GraphCounts]:
    """Count `torch.cuda.CUDAGraph.replay` and `.capture_end`, whoever calls them."""
    counts, kind = GraphCounts(), torch.cuda.CUDAGraph
    replay, capture_end = kind.replay, kind.capture_end

    def counted_replay(self: Any) -> None:
        counts.replays += 1
        replay(self)

    def counted_capture_end(self: Any) -> None:
        counts.captures += 1
        capture_end(self)

    kind.replay, kind.capture_end = counted_replay, counted_capture_end  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        kind.replay, kind.capture_end = replay, capture_end  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. end: host clock behind it. decode: every request of the full concurrency had one token."""

    end: float
    decode: bool
    replays: int
    captures: int
    queries: int


class StepClock:
    """Times the steps of one manager, from outside of everything that capture wraps.

    Without async batching a step ends when its tokens are on the host, so the time between two ends is a whole step:
    scheduling, forward, capture, bookkeeping. With it, ends are a step apart once the pipeline is full."""

    def __init__(self, graphs: GraphCounts, concurrency: int) -> None:
        self.steps: list[Step] = []
        self._graphs = graphs
        self._concurrency = concurrency

    def install(self, manager: Any) -> None:
        """On this instance only. Call it before the manager starts."""
        step, graphs, full = manager._generation_step, self._graphs, self._concurrency

        def timed() -> None:
            io = manager.batch_processor.inputs_and_outputs
            pairs = getattr(io, "io_pairs", None)
            batch = io if pairs is None else pairs[io.current_pair].host_io
            queries = batch.total_seqlen_q
            decode = queries == full and batch.num_request_in_batch == full
            replays, captures = graphs.replays, graphs.captures
            step()
            now = time.perf_counter()
            self.steps.append(
                Step(now, decode, graphs.replays - replays, graphs.captures - captures, queries),
            )

        manager._generation_step = timed

    def decode_seconds(self, graphs: bool) -> list[float]:
        """Seconds of each step that decoded the full batch, as did the two before it, none of them capturing. graphs:
        only steps that replayed a graph."""
        kept = []
        for first, before, step in zip(self.steps, self.steps[1:], self.steps[2:], strict=False):
            three = (first, before, step)
            if all(each.decode and not each.captures and (each.replays or not graphs) for each in three):
                kept.append(step.end - before.end)
        return kept
