"""A collector out of its records and the arena they speak of. Pure: the daemon reads files, the simulator lists.

The arena may be ahead of the records: rows of messages that nobody was told are safe lie in it already, behind the end
of their life, or in a hole of it, or in place of rows that a `forward` had just taken back. So nothing is believed of a
life that may still get rows until its engine has sent them again, and what was half written is emptied.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from collector.core.arena import PAGE_BYTES
from collector.core.collector import Collector
from collector.core.config import CoreConfig
from collector.core.life import Life, State
from collector.core.records import Applied, Changed, CorruptState, Delta, NewSession, Opened
from collector.core.sessions import Session
from protocol.errors import GeometryError

_PAGELESS = (State.LOST, State.FAILED)


class Recovery:
    """Takes records in order, then fills a collector."""

    def __init__(self) -> None:
        self._sessions: dict[int, NewSession] = {}
        self._applied: dict[int, Applied] = {}
        self._lives: dict[int, Opened] = {}
        self._changed: dict[int, Changed] = {}
        self._pages: dict[int, dict[int, int]] = {}
        self._columns: dict[int, tuple[int, int]] = {}
        self._released: list[str] = []
        self._serial = 0

    @property
    def owns_pages(self) -> bool:
        """Whether any life holds rows: without them the arena may be new."""
        return any(self._pages_of(opened) for opened in self._lives.values())

    def add(self, delta: Delta) -> None:
        """Take the next record."""
        for session in delta.sessions:
            self._sessions[session.number] = session
        for number in delta.forgotten:
            self._sessions.pop(number, None)
            self._applied.pop(number, None)
        for serial in delta.closed:
            self._lives.pop(serial, None)
            self._changed.pop(serial, None)
        for opened in delta.opened:
            self._lives[opened.serial] = opened
            self._pages[opened.slot] = {}
            self._columns[opened.slot] = (0, 0)
        for slot, index, page in _ints(delta.pages).tolist():
            self._pages.setdefault(slot, {})[index] = page
        columns = _ints(delta.columns)
        self._columns.update(zip(columns[:, 0].tolist(), map(tuple, columns[:, 1:].tolist()), strict=True))
        for changed in delta.changed:
            self._changed[changed.serial] = changed
        for applied in delta.applied:
            self._applied[applied.session] = applied
        self._released += delta.released
        self._serial = max(self._serial, delta.serial)

    def collector(
        self,
        buffer: NDArray[np.uint8],
        state_id: str,
        now: float,
        shift: float = 0.0,
        config: CoreConfig | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> Collector:
        """The collector, at clock time `now`. shift: what to add to recorded times. Raises CorruptState when records
        contradict each other, or rows that nothing may change any more are not what was written."""
        core = Collector(buffer, state_id, config, page_bytes)
        try:
            sessions = {number: self._session(core, number, now) for number in self._sessions}
            core.streams.restore(sessions.values())
            lives = [self._life(self._lives[serial], sessions, now, shift) for serial in sorted(self._lives)]
            core.arena.restore(page for life in lives for page in life.pages if page >= 0)
        except (KeyError, ValueError, GeometryError) as error:
            raise CorruptState(f"the records of the log contradict each other: {error}") from None
        core.lives.restore(lives, self._serial)
        for life in lives:
            core.lives.end[life.slot], core.lives.last_forward[life.slot] = self._columns.get(life.slot, (0, 0))
        for name in self._released:
            core.retention.bury(name)
        _believe(core, lives, now)
        return core

    def _session(self, core: Collector, number: int, now: float) -> Session:
        said, applied = self._sessions[number], self._applied[number]
        geometry = said.geometry.validate()
        session = Session(
            number, said.incarnation, said.engine_id, geometry, core.arena.layout(geometry), applied.seq, now
        )
        session.acked, session.alive, session.opening = applied.seq, applied.alive, set(applied.opening)
        return session

    def _life(self, opened: Opened, sessions: dict[int, Session], now: float, shift: float) -> Life:
        session = sessions[opened.session]
        at = min(opened.at + shift, now)
        life = Life(session, opened.req_id, opened.name, opened.slot, opened.serial, at)
        if (changed := self._changed.get(opened.serial)) is not None:
            life.state = State(changed.state)
            life.num_tokens, life.ended, life.reason = changed.num_tokens, changed.ended, changed.reason
            life.settled_at = min(changed.settled_at + shift, now)
        found = self._pages_of(opened)
        life.pages = [found.get(index, -1) for index in range(max(found, default=-1) + 1)]
        return life

    def _pages_of(self, opened: Opened) -> dict[int, int]:
        changed = self._changed.get(opened.serial)
        gone = changed is not None and changed.state in _PAGELESS
        return {} if gone else self._pages.get(opened.slot, {})


def _believe(core: Collector, lives: Iterable[Life], now: float) -> None:
    """Look at every row, and start what runs by itself in a collector that was never down."""
    broken: list[Life] = []
    for life in lives:
        life.note(now, "found again by a restarted collector")
        if life.takes_rows:
            _empty_torn(core, life)
        elif life.pages and not _whole(core, life):
            broken.append(life)
        if life.state is State.INCOMPLETE and not life.ended:
            # A forward may have reopened it, and what tells of that was cut off: only a new barrier can settle it.
            life.state, life.num_tokens = State.OPEN, None
        core.settlement.refilled(life, now)
    if broken:
        names = ", ".join(life.name for life in broken[:4])
        raise CorruptState(f"rows of {len(broken)} settled requests are not what was written: {names}")
    for life in sorted(core.lives, key=lambda x: x.settled_at):
        if life.state is not State.OPEN:
            core.retention.settled(life, life.settled_at)


def _empty_torn(core: Collector, life: Life) -> None:
    torn = np.flatnonzero(~core.assembly.intact(life, 0, int(core.lives.end[life.slot])))
    if len(torn):
        core.assembly.drop(life, torn)


def _whole(core: Collector, life: Life) -> bool:
    rows = (life.num_tokens or 1) - 1
    if rows > int(core.lives.end[life.slot]):
        return False
    return bool(core.assembly.intact(life, 0, rows).all()) and not core.assembly.missing(life, rows)


def _ints(raw: bytes) -> NDArray[np.int32]:
    if len(raw) % 12:
        raise CorruptState(f"a column of {len(raw)} bytes is none of triplets")
    return np.frombuffer(raw, "<i4").reshape(-1, 3)
