"""What arrived, by a dict for each life: the rules of assembly in their plainest form, apart from the core's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Kind, RequestFinished, RoutedExpertsPatch, RowsLost
from tests.sim.facts import read

Key = tuple[str, str]


@dataclass(slots=True, frozen=True)
class Cell:
    """A row that arrived clean."""

    row: int
    kind: int
    token: int
    version: int


@dataclass(slots=True)
class Arrived:
    """Of one life. ended: its emitter said the end."""

    cells: dict[int, Cell] = field(default_factory=dict)
    ended: bool = False


class Reference:
    """Of one collector state. Frames are given once each, in order; `takes` tells which lives still take rows."""

    def __init__(self) -> None:
        self.lives: dict[Key, Arrived] = {}

    def copy(self) -> Reference:
        """Another, of what arrived until now."""
        other = Reference()
        other.lives = {key: Arrived(dict(life.cells), life.ended) for key, life in self.lives.items()}
        return other

    def patch(
        self, incarnation: str, frames: Sequence[bytes], geometry: Geometry, takes: dict[str, bool], lost: bool
    ) -> list[str]:
        """A patch that was applied, or (lost) refused: the lives it named."""
        header = codec.decode_from_engine(frames)
        assert isinstance(header, RoutedExpertsPatch)
        ids = codec.decode_ids(header.req_ids)
        starts = np.frombuffer(header.starts, "<i4").tolist()
        offsets = np.frombuffer(header.offsets, "<i4").tolist()
        self._open(incarnation, ids, header.opens)
        if lost:
            self._lose(incarnation, ids, starts, header.kinds, takes)
            return ids
        versions = np.frombuffer(header.weight_versions, "<i4").tolist()
        tokens = np.frombuffer(frames[2], "<i4").tolist()
        bad = set(np.frombuffer(header.bad_rows, "<i4").tolist())
        cells = np.frombuffer(frames[1], geometry.wire_dtype).astype(np.int64)
        if geometry.wire_dtype.itemsize == 1:
            cells[cells == 255] = -1
        rows = read(cells, geometry)
        for i, life in enumerate(ids):
            mine, kind = self._taking(incarnation, life, header.kinds[i], takes), header.kinds[i]
            if mine is None:
                continue
            if kind == Kind.FORWARD:
                _cut(mine, starts[i])
            for at in range(offsets[i], offsets[i + 1]):
                position = starts[i] + at - offsets[i]
                if at in bad or rows[at] <= 0 or (kind != Kind.FORWARD and position in mine.cells):
                    continue
                mine.cells[position] = Cell(rows[at], kind, tokens[at], versions[i])
        return ids

    def loss(self, incarnation: str, message: RowsLost, takes: dict[str, bool]) -> list[str]:
        """A `RowsLost` that was applied: the lives it named."""
        ids = codec.decode_ids(message.req_ids)
        self._open(incarnation, ids, message.opens)
        self._lose(incarnation, ids, np.frombuffer(message.starts, "<i4").tolist(), message.kinds, takes)
        return ids

    def finished(self, incarnation: str, message: RequestFinished) -> None:
        """A finish that was applied."""
        if (life := self.lives.get((incarnation, message.req_id))) is not None:
            life.ended = True

    def cells(self, key: Key) -> dict[int, Cell]:
        """A copy of what a life holds now."""
        return dict(self.lives[key].cells)

    def _open(self, incarnation: str, ids: list[str], opens: tuple[tuple[int, str], ...]) -> None:
        for index, _ in opens:
            self.lives.setdefault((incarnation, ids[index]), Arrived())

    def _taking(self, incarnation: str, life: str, kind: int, takes: dict[str, bool]) -> Arrived | None:
        mine = self.lives.get((incarnation, life))
        if mine is None or not takes.get(life, True) or (mine.ended and kind == Kind.FORWARD):
            return None
        return mine

    def _lose(self, incarnation: str, ids: list[str], starts: list[int], kinds: bytes, takes: dict[str, bool]) -> None:
        for life, start, kind in zip(ids, starts, kinds, strict=True):
            mine = self._taking(incarnation, life, kind, takes)
            if mine is not None and kind == Kind.FORWARD:
                _cut(mine, start)


def _cut(life: Arrived, start: int) -> None:
    for position in [p for p in life.cells if p >= start]:
        del life.cells[position]
