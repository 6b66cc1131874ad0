"""What changed since the last record, gathered while it changes. Pure; the shell writes what it gives.

Records say how things are, not what was done: rows are in the mapped arena already, and replaying a decision about rows
that later ones have overwritten would decide otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collector.core import records
from collector.core.records import Applied, Changed, Delta, NewSession, Opened, Record

if TYPE_CHECKING:
    from collector.core.life import Life
    from collector.core.lives import LifeTable
    from collector.core.sessions import Session


_MANY = 1024
"""Columns of slots that may wait for a log that cannot be written."""


class Journal:
    """`number` is that of the record which the changes of now will be part of."""

    def __init__(self) -> None:
        self.number = 1
        self._new_sessions: dict[int, Session] = {}
        self._sessions: dict[int, Session] = {}
        self._forgotten: list[int] = []
        self._opened: dict[int, Life] = {}
        self._changed: dict[int, Life] = {}
        self._closed: list[int] = []
        self._released: list[str] = []
        self._pages: dict[int, list[tuple[int, int, int]]] = {}
        self._slots: list[NDArray[np.int64]] = []

    # ------------------------------------------------------------------ what changes

    def said_hello(self, session: Session) -> None:
        """A new incarnation."""
        self._new_sessions[session.number] = self._sessions[session.number] = session

    def moved(self, session: Session) -> None:
        """A session applied a message, came, died, or opened lives for a message that waits."""
        self._sessions[session.number] = session

    def forgot(self, session: Session) -> None:
        """A session that nothing refers to any more."""
        self._sessions.pop(session.number, None)
        if self._new_sessions.pop(session.number, None) is None:
            self._forgotten.append(session.number)

    def opened(self, life: Life) -> None:
        """A life began."""
        self._opened[life.serial] = life

    def changed(self, life: Life) -> None:
        """Its state, length, reason or end."""
        self._changed[life.serial] = life

    def closed(self, life: Life) -> None:
        """A life was released or expired."""
        self._changed.pop(life.serial, None)
        self._pages.pop(life.serial, None)
        if self._opened.pop(life.serial, None) is None:
            self._closed.append(life.serial)
        self._released.append(life.name)

    def page(self, life: Life, index: int, page: int) -> None:
        """Page number `index` of a life is `page`."""
        self._pages.setdefault(life.serial, []).append((life.slot, index, page))

    def touched(self, slots: NDArray[np.int64]) -> None:
        """Ends and last forwards of these slots may have moved; -1 is nobody's."""
        self._slots.append(slots)
        if len(self._slots) > _MANY:
            self._slots = [np.unique(np.concatenate(self._slots))]

    # ------------------------------------------------------------------ what is written

    def take(self, lives: LifeTable) -> Record | None:
        """The record of everything since the last one, None when nothing changed. `number` moves on."""
        if not (self._sessions or self._opened or self._changed or self._closed or self._released or self._slots):
            return None
        delta = Delta(
            sessions=tuple(map(_session, self._new_sessions.values())),
            forgotten=tuple(self._forgotten),
            closed=tuple(self._closed),
            opened=tuple(map(_opened, self._opened.values())),
            pages=_pages(pages for pages in self._pages.values()),
            columns=_columns(lives, np.unique(np.concatenate(self._slots))) if self._slots else b"",
            changed=tuple(map(_changed, self._changed.values())),
            applied=tuple(map(_applied, self._sessions.values())),
            released=tuple(self._released),
            serial=lives.serial,
        )
        number = self.number
        self.__init__()  # type: ignore[misc]
        self.number = number + 1
        return Record(number, records.encode(delta))

    def checkpoint(self, lives: LifeTable, sessions: Iterable[Session], released: Iterable[str]) -> bytes:
        """The payload that stands for every record taken so far. Nothing may be left to take."""
        known = list(lives)
        slots = np.array([life.slot for life in known], np.int64)
        found = list(sessions)
        pages = ([(x.slot, i, page) for i, page in enumerate(x.pages) if page >= 0] for x in known)
        delta = Delta(
            sessions=tuple(map(_session, found)),
            opened=tuple(map(_opened, sorted(known, key=lambda x: x.serial))),
            pages=_pages(pages),
            columns=_columns(lives, slots),
            changed=tuple(map(_changed, known)),
            applied=tuple(map(_applied, found)),
            released=tuple(released),
            serial=lives.serial,
        )
        return records.encode(delta)


def _session(session: Session) -> NewSession:
    return NewSession(session.number, session.incarnation, session.engine_id, session.geometry)


def _applied(session: Session) -> Applied:
    return Applied(session.number, session.applied, session.alive, _opening(session))


def _opening(session: Session) -> tuple[str, ...]:
    return tuple(sorted(session.opening))


def _opened(life: Life) -> Opened:
    return Opened(life.serial, life.session.number, life.slot, life.req_id, life.name, life.opened_at)


def _changed(life: Life) -> Changed:
    return Changed(life.serial, str(life.state), life.num_tokens, life.ended, life.reason, life.settled_at)


def _pages(groups: Iterable[list[tuple[int, int, int]]]) -> bytes:
    return np.array([entry for pages in groups for entry in pages], "<i4").tobytes()


def _columns(lives: LifeTable, slots: NDArray[np.int64]) -> bytes:
    slots = slots[slots >= 0]
    return np.stack([slots, lives.end[slots], lives.last_forward[slots]], axis=1).astype("<i4").tobytes()
