"""Rows that were dropped for want of room, and where the slot store may still hold them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_side.capture.records import COMMIT_MASK
from engine_side.export.landing import LandingStep
from protocol.messages import Kind

MAX_ROWS: Final = 1 << 20
"""Lost rows remembered at once, 20 bytes each; what is lost beyond them stays lost."""

_LIFE, _POSITION, _SLOT, _TOKEN, _COMMIT = range(5)
_NEVER: Final = np.iinfo(np.int32).max


@dataclass(slots=True, frozen=True, eq=False)
class RepairAsk:
    """Rows to read back from the slot store of `origin`. lives, starts, counts: one entry a segment. asked: int32
    [3, N]: slots, token ids, positions. proof: int32 [N], the commit that wrote the row that was lost."""

    origin: object
    lives: tuple[str, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    asked: NDArray[np.int32]
    proof: NDArray[np.int32]


class Losses:
    """The lost rows of one slot store, in the order of their loss. One ask is under way at a time.

    A `forward` at s ends its life there, so it takes back the losses from s on: they are no rows of this life any more,
    whatever the store still holds.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._origin: object = None
        self.asked = False
        """Whether an ask is under way."""
        self._wanted = np.empty(0, np.bool_)
        self._reset()

    def _reset(self) -> None:
        # An ask that is under way is still to be answered, but nothing of it is wanted any more.
        self._wanted[:] = False
        self._asked = np.empty((5, 0), np.int32)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._top: list[int] = []
        self._table = np.empty((5, 0), np.int32)
        self._added: list[NDArray[np.int32]] = []
        self.rows = 0
        """Rows that wait to be asked for."""

    def __bool__(self) -> bool:
        return self.rows > 0 or self.asked

    def add(self, step: LandingStep) -> None:
        """All rows of a landed step are lost. Remembers those that some slot holds; of another store than before, and
        what was lost of that one is lost for good."""
        if step.slots is None or step.stamps is None:
            return
        if step.origin is not self._origin:
            self._reset()
            self._origin = step.origin
        plan = step.plan
        if self.rows + len(step.slots) > self._max_rows:
            return
        numbers = np.fromiter((self._number(life) for life in plan.req_ids), np.int32, len(plan.req_ids))
        rows = np.empty((5, len(step.slots)), np.int32)
        rows[_LIFE] = np.repeat(numbers, np.diff(plan.offsets))
        rows[_POSITION], rows[_SLOT], rows[_TOKEN] = step.positions, step.slots, step.token_ids
        rows[_COMMIT] = step.proof if step.proof is not None else (step.stamps >> 8) & COMMIT_MASK
        for number, last in zip(numbers, step.positions[plan.offsets[1:] - 1], strict=True):
            self._top[number] = max(self._top[number], int(last))
        rows = rows[:, step.status == 0]
        self._added.append(rows)
        self.rows += rows.shape[1]

    def cut(self, lives: Sequence[str], starts: NDArray[np.int32], kinds: NDArray[np.uint8]) -> None:
        """Segments of a step that was taken: take back what their `forward` rows overtake."""
        ends = {
            number: int(start)
            for life, start, kind in zip(lives, starts, kinds, strict=True)
            if kind == Kind.FORWARD and (number := self._numbers.get(life)) is not None and start <= self._top[number]
        }
        if not ends:
            return
        end = np.full(len(self._names), _NEVER, np.int32)
        for number, start in ends.items():
            end[number], self._top[number] = start, start - 1
        table = self._rows()
        self._table = table[:, table[_POSITION] < end[table[_LIFE]]]
        self.rows = self._table.shape[1]
        if self._asked.shape[1]:
            self._wanted &= self._asked[_POSITION] < end[self._asked[_LIFE]]

    def ask(self, max_rows: int) -> RepairAsk | None:
        """The oldest losses, at most `max_rows` rows; None when nothing waits or an ask is under way."""
        if self.asked or not self.rows:
            return None
        table = self._rows()
        part, self._table = table[:, :max_rows], table[:, max_rows:]
        self.rows = self._table.shape[1]
        part = part[:, np.lexsort((part[_POSITION], part[_LIFE]))]
        breaks = (np.diff(part[_LIFE]) != 0) | (np.diff(part[_POSITION]) != 1)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        self.asked, self._asked, self._wanted = True, part, np.ones(part.shape[1], np.bool_)
        return RepairAsk(
            origin=self._origin,
            lives=tuple(self._names[number] for number in part[_LIFE, first]),
            starts=tuple(part[_POSITION, first].tolist()),
            counts=tuple(np.diff(first, append=part.shape[1]).tolist()),
            asked=np.ascontiguousarray(part[[_SLOT, _TOKEN, _POSITION]]),
            proof=part[_COMMIT].copy(),
        )

    def answered(self) -> NDArray[np.bool_]:
        """The ask under way was answered, or cannot be: which of its rows are still wanted, bool [N]."""
        wanted, self._wanted = self._wanted, np.empty(0, np.bool_)
        self.asked, self._asked = False, np.empty((5, 0), np.int32)
        if not self.rows:
            self._reset()
        return wanted

    def _rows(self) -> NDArray[np.int32]:
        if self._added:
            self._table = np.concatenate([self._table, *self._added], axis=1)
            self._added.clear()
        return self._table

    def _number(self, life: str) -> int:
        number = self._numbers.setdefault(life, len(self._names))
        if number == len(self._names):
            self._names.append(life)
            self._top.append(-1)
        return number
