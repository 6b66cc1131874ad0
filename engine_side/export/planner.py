"""Which rows of a step belong to which life, and as what kind. Pure; knows nothing of delivery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_side.export.plan import StepPlan
from protocol.messages import Kind


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One forward as the scheduler sees it, in batch order, one entry a request.

    lives: life ids. starts: first position each runs, -1 where the host does not know. counts: tokens each runs, at
    least 1. accepted: tokens (prompt and generated) each life had when the step was planned; its sampled position is
    accepted-1. opens: (entry index, client request id) of lives that appear for the first time.
    """

    lives: Sequence[str]
    starts: Sequence[int]
    counts: Sequence[int]
    accepted: Sequence[int]
    opens: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A forward that runs one token of each request and samples from it, as nearly every step does. lives: life ids.
    starts: int64 positions, -1 where the host does not know."""

    lives: tuple[str, ...]
    starts: NDArray[np.int64]


class RoutePlanner:
    """Numbers steps and turns each into segments. Positions below the sampled one only fill (`recompute`); from the
    sampled one on they are `forward`, drafts included, and end the life there before they write."""

    def __init__(self) -> None:
        self.step = 0

    def plan(self, batch: ScheduledBatch | DecodeBatch, weight_version: int) -> StepPlan:
        """Segments of a forward, each attached exactly once, whether or not the step yields a token. Raises ValueError
        for an entry that runs nothing: it has no segment that could open its life."""
        if isinstance(batch, DecodeBatch):
            return self._plan_decode(batch, weight_version)
        starts = np.asarray(batch.starts, np.int64)
        counts = np.asarray(batch.counts, np.int64)
        accepted = np.asarray(batch.accepted, np.int64)
        if not (counts > 0).all():
            idle = batch.lives[int(np.argmin(counts))]
            raise ValueError(f"life {idle} runs no token in this step: leave it out of the batch")
        self.step += 1
        # An unknown start is a decode step of an engine that runs ahead of its host: it samples at once.
        fill = np.where(starts < 0, 0, np.clip(accepted - 1 - starts, 0, counts))
        pieces = np.stack([fill, counts - fill], axis=1)
        used = pieces > 0
        entry = np.repeat(np.arange(len(counts)), 2)[used.reshape(-1)]
        lengths = pieces[used]
        kinds = np.where(used.nonzero()[1] == 0, Kind.RECOMPUTE, Kind.FORWARD).astype(np.uint8)
        shift = np.stack([np.zeros_like(fill), fill], axis=1)[used]
        known = np.where(starts[entry] < 0, -1, starts[entry] + shift)
        first = np.searchsorted(entry, [index for index, _ in batch.opens])
        return StepPlan(
            step=self.step,
            req_ids=tuple(batch.lives[i] for i in entry),
            starts=known.astype(np.int32),
            offsets=_offsets(lengths),
            kinds=kinds,
            weight_version=weight_version,
            opens=tuple((int(at), name) for at, (_, name) in zip(first, batch.opens, strict=True)),
        )

    def _plan_decode(self, batch: DecodeBatch, weight_version: int) -> StepPlan:
        """In a time that hardly depends on the number of requests."""
        self.step += 1
        count = len(batch.lives)
        offsets, kinds = np.arange(count + 1, dtype=np.int32), np.full(count, Kind.FORWARD, np.uint8)
        return StepPlan(self.step, batch.lives, batch.starts.astype(np.int32), offsets, kinds, weight_version)

    def cached(self, life: str, start: int, count: int, name: str | None) -> StepPlan:
        """A read of `count` rows from the slot store, for positions some other forward computed. name: the client's
        request id if this is the life's first segment."""
        return self._cached((life,), (start,), (count,), ((0, name),) if name is not None else ())

    def prefix_hits(
        self, lives: Sequence[str], starts: Sequence[int], counts: Sequence[int], rows_per_plan: int
    ) -> Iterator[StepPlan]:
        """Reads of the prefixes that a step's requests found in the cache, one entry a request, in plans of at most
        `rows_per_plan` rows: together they cover the entries' rows, in order, each once."""
        some: list[tuple[str, int, int]] = []
        room = rows_per_plan
        for life, start, count in zip(lives, starts, counts, strict=True):
            while count > 0:
                part = min(count, room)
                some.append((life, start, part))
                start, count, room = start + part, count - part, room - part
                if room == 0:
                    yield self._cached(*zip(*some, strict=True))
                    some, room = [], rows_per_plan
        if some:
            yield self._cached(*zip(*some, strict=True))

    def repair(self, lives: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> StepPlan:
        """A read of rows that were shipped once and dropped, one entry a segment."""
        return self._cached(lives, starts, counts, kind=Kind.REPAIR)

    def _cached(
        self,
        lives: Sequence[str],
        starts: Sequence[int],
        counts: Sequence[int],
        opens: tuple[tuple[int, str], ...] = (),
        *,
        kind: Kind = Kind.CACHED,
    ) -> StepPlan:
        self.step += 1
        return StepPlan(
            step=self.step,
            req_ids=tuple(lives),
            starts=np.asarray(starts, np.int32),
            offsets=_offsets(np.asarray(counts, np.int64)),
            kinds=np.full(len(lives), kind, np.uint8),
            weight_version=0,
            opens=opens,
        )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
