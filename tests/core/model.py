"""The rules of assembly as dictionaries: position -> row, one life at a time. Shares no code with the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.geometry import Geometry
from protocol.messages import Kind
from tests.harness.patches import Seg

Row = tuple[tuple[int, ...], int, int, int]
"""Cells, token id, kind, weight version."""

DEAD = ("lost", "failed")


@dataclass
class ModelLife:
    """One life."""

    model: Model
    engine: ModelEngine
    life: str
    name: str
    serial: int
    state: str = "open"
    rows: dict[int, Row] = field(default_factory=dict)
    pages: set[int] = field(default_factory=set)
    num_tokens: int | None = None
    ended: bool = False
    flush: int | None = None
    flush_tokens: tuple[int, ...] | None = None
    length_tokens: tuple[int, ...] | None = None
    """What came with the last length that a barrier let through, not with one that was asked about since."""
    others: tuple[int, ...] | None = None
    """Tokens, less the last, that a barrier proved to be another's: their length settles nothing."""
    last_forward: int = 0
    settled_at: float = 0.0
    """When an end was last said, or a row filled in: the time to live runs from here."""

    @property
    def takes(self) -> bool:
        return self.state in ("open", "incomplete")

    def wants(self, kind: Kind) -> bool:
        """Whether a segment of this kind still changes anything."""
        return self.takes and not (self.state == "incomplete" and self.ended and kind is Kind.FORWARD)

    def begin(self, kind: Kind, start: int) -> None:
        """Rule 2: a `forward`, even a lost one, ends the life at its start; behind a mere length it opens it again."""
        if kind is not Kind.FORWARD:
            return
        if self.state == "incomplete":
            self.state, self.num_tokens, self.flush = "open", None, None
        self.rows = {p: row for p, row in self.rows.items() if p < start}
        self.last_forward = start

    def write(self, seg: Seg) -> None:
        """Rules 2, 3 and 8."""
        self.begin(seg.kind, seg.start)
        for i, row in enumerate(seg.rows):
            clean = i not in seg.bad and row.min() >= 0
            if clean and (seg.kind is Kind.FORWARD or seg.start + i not in self.rows):
                self.rows[seg.start + i] = (tuple(row.ravel().tolist()), seg.tokens[i], int(seg.kind), seg.version)

    def prefix(self, rows: int) -> int:
        """How many of the first `rows` positions are held without a hole."""
        return next((p for p in range(rows) if p not in self.rows), rows)

    def missing(self, rows: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for p in range(rows):
            if p in self.rows:
                continue
            if found and found[-1][1] == p:
                found[-1] = (found[-1][0], p + 1)
            else:
                found.append((p, p + 1))
        return found

    def count(self, num_tokens: int) -> None:
        """Rule 4, once the barrier is passed."""
        self.num_tokens = num_tokens
        self.settled_at = self.model.now
        self.state = "complete" if self.prefix(num_tokens - 1) == num_tokens - 1 else "incomplete"

    def finish(self, num_tokens: int | None, reason: str) -> None:
        """The emitter's own end (rules 4, 5 and 6)."""
        if self.takes:
            self.settled_at = self.model.now
        if not self.takes or (self.ended and reason != "failed"):
            if self.num_tokens is not None and num_tokens is not None and 1 <= num_tokens < self.num_tokens:
                self.num_tokens = num_tokens
                if self.state == "incomplete":
                    self.count(num_tokens)
            return
        self.ended = True
        no_length = num_tokens is None and reason != "aborted"
        if reason == "failed" or no_length or (num_tokens is not None and num_tokens < 1):
            self.die("failed")
        elif reason == "aborted":
            self.num_tokens = self.prefix(self.last_forward + 1 if num_tokens is None else num_tokens - 1) + 1
            self.state = "aborted"
        else:
            assert num_tokens is not None
            self.count(num_tokens)

    def flushed(self, num_tokens: int) -> None:
        """The barrier of a trainer's length."""
        if self.takes:
            self.settled_at = self.model.now
        if self.takes and not self.ended and self.flush == num_tokens:
            self.flush, self.length_tokens = None, self.flush_tokens
            if not self.is_of_others(num_tokens):
                self.count(num_tokens)

    def refilled(self) -> None:
        """Rows were filled in behind a length: it counts again, unless its tokens prove now to be another's."""
        if self.state != "incomplete":
            return
        assert self.num_tokens is not None
        if not self.ended and self.is_of_others(self.num_tokens):
            self.state, self.num_tokens = "open", None
        else:
            self.count(self.num_tokens)

    def is_of_others(self, num_tokens: int) -> bool:
        """Whether the tokens that came with a trainer's length are not those of the rows, all of which are here."""
        tokens = self.length_tokens
        if tokens is None or self.prefix(num_tokens - 1) < num_tokens - 1 or self.digest_matches(tokens):
            return False
        self.others = tokens
        return True

    def die(self, state: str) -> None:
        self.settled_at = self.model.now
        self.model.deaths += 1
        self.state, self.rows, self.pages = state, {}, set()

    def digest_matches(self, tokens: Sequence[int]) -> bool:
        return all(p in self.rows and self.rows[p][1] == token for p, token in enumerate(tokens))

    def array(self, start: int, stop: int, geometry: Geometry) -> np.ndarray:
        """int16 [stop-start, num_layers, top_k]."""
        out = np.full((stop - start, geometry.num_layers, geometry.top_k), -1, np.int16)
        for p in range(start, stop):
            if p in self.rows:
                out[p - start, list(geometry.moe_layer_ids)] = np.reshape(self.rows[p][0], geometry.row_shape)
        return out

    def spans(self, start: int, stop: int, column: int) -> list[tuple[int, int, int]]:
        """Runs of equal kind (column 2) or weight version (3); holes belong to none."""
        found: list[tuple[int, int, int]] = []
        for p in range(start, stop):
            if p not in self.rows:
                continue
            value = self.rows[p][column]
            if found and found[-1][1:] == (p, value):
                found[-1] = (found[-1][0], p + 1, value)
            else:
                found.append((p, p + 1, value))
        return found


@dataclass
class ModelEngine:
    """One incarnation. rows_per_page: of its geometry in the arena under test."""

    geometry: Geometry
    rows_per_page: int
    applied: int = -1
    stalled: bool = False
    connected: bool = True
    opening: set[str] = field(default_factory=set)
    lives: dict[str, ModelLife] = field(default_factory=dict)


class Model:
    """All lives under one page budget."""

    def __init__(self, pages: int, now: float) -> None:
        self.pages = pages
        self.now = now
        self.deaths = 0
        self.lives: list[ModelLife] = []
        self.released: set[str] = set()
        self._serial = 0

    @property
    def free(self) -> int:
        return self.pages - sum(len(life.pages) for life in self.lives)

    def named(self, name: str) -> list[ModelLife]:
        return [life for life in self.lives if life.name == name]

    def open(self, engine: ModelEngine, segs: Sequence[Seg]) -> None:
        for seg in segs:
            # A life that a stalled patch opened and a trainer released stays released when the patch comes again.
            if seg.opens is not None and seg.life not in engine.lives and seg.life not in engine.opening:
                self._serial += 1
                engine.opening.add(seg.life)
                life = ModelLife(self, engine, seg.life, seg.opens, self._serial)
                engine.lives[seg.life] = life
                self.lives.append(life)

    def patch(self, engine: ModelEngine, segs: Sequence[Seg]) -> bool:
        """Rule 9: whole, with its pages in hand, or not at all."""
        self.open(engine, segs)
        need: dict[str, set[int]] = {}
        for seg in segs:
            life = engine.lives.get(seg.life)
            if life is not None and life.wants(seg.kind) and not self._too_long(engine, seg):
                numbers = {p // engine.rows_per_page for p in range(seg.start, seg.stop)}
                need.setdefault(seg.life, set()).update(numbers - life.pages)
        if sum(map(len, need.values())) > self.free:
            engine.stalled = True
            return False
        for name, numbers in need.items():
            engine.lives[name].pages |= numbers
        touched, too_long = [], []
        for seg in segs:
            life = engine.lives.get(seg.life)
            if life is not None and life.wants(seg.kind):
                if self._too_long(engine, seg):
                    life.begin(seg.kind, seg.start)
                    too_long.append(life)
                else:
                    life.write(seg)
                    touched.append(life)
        for life in too_long:
            if life.takes:
                life.die("lost")
        self._refill(touched)
        return True

    def _too_long(self, engine: ModelEngine, seg: Seg) -> bool:
        """Whether no arena of this size could ever hold it: then it need not wait for room."""
        return seg.stop > self.pages * engine.rows_per_page

    def lost(self, engine: ModelEngine, segs: Sequence[Seg]) -> None:
        self.open(engine, segs)
        for seg in segs:
            life = engine.lives.get(seg.life)
            if life is not None and life.wants(seg.kind):
                life.begin(seg.kind, seg.start)

    def lose_all(self, engine: ModelEngine) -> None:
        for life in engine.lives.values():
            if life.takes:
                life.die("lost")

    def youngest(self) -> ModelLife | None:
        return max((life for life in self.lives if life.state == "open"), key=lambda x: x.serial, default=None)

    def release(self, name: str) -> bool:
        found = self.named(name)
        for life in found:
            self.forget(life)
        return bool(found)

    def forget(self, life: ModelLife) -> None:
        self.lives.remove(life)
        del life.engine.lives[life.life]
        self.released.add(life.name)

    def _refill(self, touched: Sequence[ModelLife]) -> None:
        for life in touched:
            life.refilled()
