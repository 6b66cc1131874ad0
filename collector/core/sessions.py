"""One incarnation of one emitter: sequence, acknowledgement, liveness, window."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.geometry import Geometry

if TYPE_CHECKING:
    from collector.core.arena import Layout
    from collector.core.life import Life


@dataclass(slots=True, frozen=True)
class Batch:
    """An id column that was looked up. slots: int64[n], -1 where no life takes rows. single: bool[n], the segment's
    life is open and has no other segment in the patch. simple: all are."""

    ids: bytes
    slots: NDArray[np.int64]
    lives: list[Life | None]
    single: NDArray[np.bool_]
    simple: bool


@dataclass(slots=True, eq=False)
class Streak:
    """Decode steps of one batch in a row: where the next row of each life goes, advanced in place. following: int64[n]
    positions. cell, word: int64[n] of the rows last written, in their pages and in the arena. place: uint64[n]."""

    following: NDArray[np.int64]
    cell: NDArray[np.int64]
    word: NDArray[np.int64]
    place: NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Session:
    """What the core knows of one incarnation. `applied` is the last sequence number applied, in order, once."""

    number: int
    incarnation: str
    engine_id: str
    geometry: Geometry
    layout: Layout
    applied: int
    heard_at: float
    peer: bytes | None = None
    alive: bool = True
    acked: int = -1
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    """(record number, seq) of applied messages whose record is not known to be logged."""
    told_gap: int = -1
    stalled_at: float | None = None
    lives: dict[str, Life] = field(default_factory=dict)
    opening: set[str] = field(default_factory=set)
    """Lives that the next message opened: one that waited for room must not reopen what was released meanwhile."""
    batch: Batch | None = None
    streak: Streak | None = None
    patches: int = 0
    rows: int = 0

    @property
    def next_seq(self) -> int:
        return self.applied + 1

    def forget_batch(self) -> None:
        """A life of this incarnation opened, closed or stopped taking rows: look the ids up again."""
        self.batch = None
        self.streak = None
