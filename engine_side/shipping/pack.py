"""A landed step as the frames of a patch. Runs on the shipper's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_side.capture.records import COMMIT_MASK
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Kind, RoutedExpertsPatch, RowsLost


@dataclass(slots=True, frozen=True)
class Packed:
    """Columns of a patch, ready but for its number, and copies of its rows and token ids."""

    columns: dict[str, Any]
    rows: NDArray[Any]
    token_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of row memory."""
        return self.rows.nbytes + self.token_ids.nbytes

    def frames(self, seq: int) -> tuple[Any, ...]:
        """Header, rows, token ids."""
        header = codec.encode(RoutedExpertsPatch(seq=seq, **self.columns))
        return (header, self.rows.reshape(-1).view(np.uint8).data, self.token_ids.view(np.uint8).data)


class Packer:
    """Packs steps of one geometry. Remembers the id column of the last decode batch: it rarely changes."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._ids: tuple[str, ...] = ()
        self._ids_column = codec.encode_ids(())

    @property
    def row_bytes(self) -> int:
        """Bytes of row memory that one row takes, its token id included."""
        layers, top_k = self._geometry.row_shape
        return layers * top_k * self._geometry.wire_dtype.itemsize + 4

    def step(self, landing: LandingStep) -> Packed:
        """Copy a landed step, once it is checked, out of the ring. The arrays of the result own their memory."""
        plan = landing.plan
        starts = landing.starts
        versions = np.full(len(starts), plan.weight_version, np.int32)
        ids, kinds, offsets, opens = plan.req_ids, plan.kinds, plan.offsets, plan.opens
        if landing.row_versions is not None:
            segment, cuts = _cut_by_version(plan.offsets, landing.row_versions)
            ids = tuple(plan.req_ids[i] for i in segment)
            kinds, versions = plan.kinds[segment], landing.row_versions[cuts].astype(np.int32)
            starts = landing.positions[cuts].astype(np.int32)
            opens = tuple((int(np.searchsorted(segment, i)), name) for i, name in plan.opens)
            offsets = np.append(cuts, plan.offsets[-1])
        columns = {
            "step": plan.step,
            "req_ids": self._column(ids),
            "starts": starts.astype("<i4").tobytes(),
            "offsets": offsets.astype("<i4").tobytes(),
            "kinds": kinds.astype(np.uint8).tobytes(),
            "weight_versions": versions.astype("<i4").tobytes(),
            "bad_rows": np.flatnonzero(landing.status).astype("<i4").tobytes(),
            "opens": opens,
        }
        # -1 as uint8 is 255, so the cast is the encoding. `array` always copies: the ring slot is reused.
        rows = np.array(landing.rows.astype(self._geometry.wire_dtype, copy=False), order="C")
        tokens = np.array(landing.token_ids.astype("<i4", copy=False), order="C")
        return Packed(columns, rows, tokens)

    def lost(self, plan: StepPlan, seq: int, starts: NDArray[np.int32] | None = None) -> bytes:
        """The `RowsLost` that stands for a step. Unknown starts are lost from 0."""
        known = np.maximum(plan.starts if starts is None else starts, 0)
        return codec.encode(
            RowsLost(
                seq=seq,
                req_ids=self._column(plan.req_ids),
                starts=known.astype("<i4").tobytes(),
                lengths=np.diff(plan.offsets).astype("<i4").tobytes(),
                kinds=plan.kinds.astype(np.uint8).tobytes(),
                opens=plan.opens,
            )
        )

    def reopened(self, lives: Sequence[tuple[str, str]], seq: int) -> bytes:
        """The `RowsLost` that reopens (life id, client's request id) pairs as lost from 0."""
        n = len(lives)
        return codec.encode(
            RowsLost(
                seq=seq,
                req_ids=codec.encode_ids([life for life, _ in lives]),
                starts=bytes(4 * n),
                lengths=np.ones(n, "<i4").tobytes(),
                kinds=bytes([Kind.FORWARD]) * n,
                opens=tuple(enumerate(name for _, name in lives)),
            )
        )

    def _column(self, ids: tuple[str, ...]) -> bytes:
        if ids != self._ids:
            self._ids, self._ids_column = ids, codec.encode_ids(ids)
        return self._ids_column


def check(landing: LandingStep) -> tuple[tuple[str, str], ...]:
    """(life id, why) of segments of a landed step whose device positions contradict the plan. Raises ValueError when
    its columns disagree in length with its plan, or its rows are not of the commit they should be of."""
    _require_rows(landing)
    plan = landing.plan
    return _contradictions(plan, landing.positions, landing.starts, np.diff(plan.offsets))


def _require_rows(landing: LandingStep) -> None:
    total = int(landing.plan.offsets[-1])
    for name in ("rows", "token_ids", "positions", "status", "row_versions"):
        column = getattr(landing, name)
        if column is not None and len(column) != total:
            raise ValueError(f"step {landing.plan.step} plans {total} rows, {name} holds {len(column)}")
    if landing.stamps is not None and landing.commit_no is not None:
        # A graph captured before capture was installed, or a forward that another path ran, commits nothing: what lies
        # in the step's memory is then some other step's.
        numbers = (landing.stamps >> 8) & COMMIT_MASK
        if (other := numbers != (landing.commit_no & COMMIT_MASK)).any():
            raise ValueError(
                f"step {landing.plan.step}: {int(other.sum())} of {total} rows were not committed by its forward"
            )


def _contradictions(
    plan: StepPlan, positions: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[Any]
) -> tuple[tuple[str, str], ...]:
    # One row a segment cannot jump; with the check of each row a decode step of 256 took 5 us more.
    if len(positions) == len(starts) and not (plan.starts != starts).any():
        return ()
    planned = (plan.starts >= 0) & (plan.starts != starts)
    expected = np.repeat(starts - plan.offsets[:-1], counts) + np.arange(len(positions))
    if not planned.any() and np.array_equal(expected, positions):
        return ()
    jumps = np.add.reduceat(expected != positions, plan.offsets[:-1]) > 0
    return tuple(
        (plan.req_ids[i], f"step {plan.step}: planned at {plan.starts[i]}, the device ran it at {starts[i]}")
        for i in np.flatnonzero(planned | jumps)
    )


def _cut_by_version(
    offsets: NDArray[np.int32], versions: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut segments where the weight version of their rows changes: (segment index, first row) of each piece."""
    changes = np.flatnonzero(np.diff(versions)) + 1
    cuts = np.union1d(offsets[:-1], changes).astype(np.int64)
    return np.searchsorted(offsets, cuts, side="right") - 1, cuts
