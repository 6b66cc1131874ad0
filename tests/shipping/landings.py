"""Landed steps made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from protocol.geometry import Geometry
from protocol.messages import Kind
from tests.harness.patches import SMALL, random_rows

Part = tuple[str, int, int, Kind]
"""Life, first position, number of rows, kind."""


def landing(
    parts: Sequence[Part],
    geometry: Geometry = SMALL,
    *,
    step: int = 1,
    version: int = 7,
    opens: tuple[tuple[int, str], ...] = (),
    row_versions: Sequence[int] | None = None,
    planned: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    bad: Sequence[int] = (),
    slots: Sequence[int] | None = None,
    commits: Sequence[int] | None = None,
    proof: Sequence[int] | None = None,
    origin: object = None,
    rng: np.random.Generator | None = None,
    wait: Callable[[], None] = lambda: None,
    free: Callable[[], None] = lambda: None,
) -> LandingStep:
    """A step of these parts with random rows. planned: the host's starts, if they are not the parts'. positions: the
    device's, if they are not the parts'. slots, commits: where each row is stored, and the commit that wrote it. proof:
    of a repair, the commit it should be."""
    rng = rng or np.random.default_rng(step)
    total = sum(n for _, _, n, _ in parts)
    run = [p for _, start, n, _ in parts for p in range(start, start + n)]
    status = np.zeros(total, np.uint8)
    status[list(bad)] = 1
    plan = StepPlan(
        step=step,
        req_ids=tuple(life for life, _, _, _ in parts),
        starts=_int32([start for _, start, _, _ in parts] if planned is None else planned),
        offsets=_int32(np.cumsum([0, *(n for _, _, n, _ in parts)])),
        kinds=np.array([kind for _, _, _, kind in parts], np.uint8),
        weight_version=version,
        opens=opens,
    )
    return LandingStep(
        plan=plan,
        rows=random_rows(rng, geometry, total),
        token_ids=rng.integers(0, 2**31, total).astype(np.int32),
        positions=_int32(run if positions is None else positions),
        status=status,
        row_versions=None if row_versions is None else _int32(row_versions),
        wait=wait,
        free=free,
        stamps=None if commits is None else _int32(commits) << 8,
        slots=None if slots is None else _int32(slots),
        origin=origin,
        proof=None if proof is None else _int32(proof),
    )


def decode(life: str, at: int, **more: Any) -> LandingStep:
    """One decode row of one life."""
    return landing([(life, at, 1, Kind.FORWARD)], step=at, **more)


def _int32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)
