"""What both sides of the path bench ship: landed decode steps of the same requests, one position further each."""

from __future__ import annotations

import numpy as np

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from protocol.messages import Kind
from tests.bench.assembly import GEOMETRY

REQUESTS = 256
STEP_BYTES = REQUESTS * (GEOMETRY.row_nbytes + 4)


def names() -> list[str]:
    """Client request ids, by segment."""
    return [f"request-{i}" for i in range(REQUESTS)]


class Steps:
    """Makes landed steps. Their rows are a few buffers in turn, as a ring of pinned host memory would be."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (REQUESTS, GEOMETRY.num_moe_layers, GEOMETRY.top_k)
        self._rows = [rng.integers(0, GEOMETRY.num_experts, shape).astype(np.int16) for _ in range(4)]
        self._ids = tuple(str(i) for i in range(REQUESTS))
        self._offsets = np.arange(REQUESTS + 1, dtype=np.int32)
        self._kinds = np.full(REQUESTS, Kind.FORWARD, np.uint8)
        self._clean = np.zeros(REQUESTS, np.uint8)
        self._tokens = rng.integers(0, 1000, REQUESTS).astype(np.int32)
        # Different lengths, so that pages turn at different steps.
        self._first = rng.integers(0, 64, REQUESTS).astype(np.int32)

    def landed(self, step: int) -> LandingStep:
        """Step `step`; the first opens the requests."""
        at = self._first + np.int32(step)
        opens = tuple(enumerate(names())) if step == 0 else ()
        plan = StepPlan(step, self._ids, at, self._offsets, self._kinds, 0, opens)
        rows = self._rows[step % len(self._rows)]
        return LandingStep(plan, rows, self._tokens, at, self._clean, None, _nothing, _nothing)


def _nothing() -> None:
    """Nothing to wait for, nothing to give back."""
