"""What becomes of rows that arrive: assembly, lives and settlement with a rule off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import collector.daemon.ingest as ingest
from collector.core.assembly import Assembly
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.settlement import Settlement
from protocol.messages import Kind
from tests.sim.mutants.change import Change, Mutants, nothing


def _life() -> list[Change]:
    """A life is whoever carries the client's id."""
    original = LifeTable.open

    def open_(self: LifeTable, session: Any, req_id: str, name: str, now: float) -> Any:
        for life in self.named(name):
            if life.takes_rows and req_id not in session.lives and life.session.layout is session.layout:
                session.lives[req_id] = life
                self._lives[session.incarnation, req_id] = life
                session.forget_batch()
                return life
        return original(self, session, req_id, name, now)

    def close(self: LifeTable, life: Life) -> None:
        self.free_rows(life)
        for key in [key for key, one in self._lives.items() if one is life]:
            del self._lives[key]
        for key in [key for key, one in life.session.lives.items() if one is life]:
            del life.session.lives[key]
        self.by_serial.pop(life.serial, None)
        if life in self._names.get(life.name, []):
            self._names[life.name].remove(life)
            self._free.append(life.slot)

    return [(LifeTable, "open", open_), (LifeTable, "close", close)]


def _lost_forward() -> list[Change]:
    """A lost forward does not end its life."""
    original = Assembly.lose

    def lose(self: Assembly, session: Any, loss: Any, now: float) -> None:
        original(self, session, replace(loss, kinds=np.full_like(loss.kinds, Kind.REPAIR)), now)

    return [(Assembly, "lose", lose)]


def _in_place(self: Assembly, life: Life, start: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
    """Write a segment over whatever is there, and leave what follows it."""
    layout, slot, stop = life.session.layout, life.slot, start + len(meta)
    end = int(self._lives.end[slot])
    at = np.arange(start, stop)
    page, cell = self._cells(life, at)
    old = np.where(at < end, layout.meta[page, cell], 0)
    layout.meta[page, cell] = np.where(keep, meta, old)
    layout.rows[page[keep], cell[keep]] = rows[keep]
    layout.seal[page[keep], cell[keep]] = seal[keep]
    if stop >= end:
        self._lives.end[slot] = stop
        self._set_tail(life, stop - 1)


def _truncation() -> list[Change]:
    """A forward writes its rows and leaves those behind them."""
    original = Assembly._write

    def write(self: Assembly, life: Life, start: int, kind: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
        if kind == Kind.FORWARD and start < self._lives.end[life.slot]:
            self._lives.last_forward[life.slot] = start
            _in_place(self, life, start, rows, meta, seal, keep)
        else:
            original(self, life, start, kind, rows, meta, seal, keep)

    return [(Assembly, "_write", write)]


def _fill() -> list[Change]:
    """The other kinds overwrite too."""
    original = Assembly._write

    def write(self: Assembly, life: Life, start: int, kind: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
        if kind != Kind.FORWARD and start <= self._lives.end[life.slot]:
            _in_place(self, life, start, rows, meta, seal, keep)
        else:
            original(self, life, start, kind, rows, meta, seal, keep)

    return [(Assembly, "_write", write)]


def _bad_rows() -> list[Change]:
    """Rows that are not clean are held."""
    original = ingest.open_patch

    def open_patch(*args: Any) -> Any:
        return replace(original(*args), bad=np.zeros(0, np.int64))

    return [(ingest, "open_patch", open_patch)]


def _trim() -> list[Change]:
    """An aborted request serves whatever it holds."""
    original = Settlement._abort
    return [(Settlement, "_abort", lambda self, life, _n, now: original(self, life, 1 << 20, now))]


def _final() -> list[Change]:
    """A complete request takes what comes late."""
    taking = (State.OPEN, State.INCOMPLETE, State.COMPLETE)
    return [(Life, "takes_rows", property(lambda self: self.state in taking))]


def _incomplete() -> list[Change]:
    """An incomplete request takes nothing any more."""
    return [(Life, "takes_rows", property(lambda self: self.state is State.OPEN))]


def _clear() -> list[Change]:
    """A page shows its last owner where its new one left a hole."""
    return [(Assembly, "_clear", nothing)]


def _of_others() -> list[Change]:
    """A length settles a request whose tokens are not the ones it came with."""
    return [(Settlement, "_is_of_others", lambda _self, _life, _num_tokens: False)]


MUTANTS: Mutants = {
    "life": _life,
    "lost forward ends": _lost_forward,
    "forward truncates": _truncation,
    "fills only fill": _fill,
    "bad rows are missing": _bad_rows,
    "aborted is trimmed": _trim,
    "complete is final": _final,
    "incomplete can be filled": _incomplete,
    "holes are cleared": _clear,
    "length with other tokens": _of_others,
}
"""By the rule that is off."""
