"""Every life the collector knows: by (incarnation, engine's id), by the client's name, by slot."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from collector.core.arena import Arena
from collector.core.journal import Journal
from collector.core.life import Life, State
from collector.core.sessions import Session


class LifeTable:
    """Lives and their numpy columns, indexed by slot.

    end: 1 + the highest position that may hold a row. last_forward: start of the last `forward` segment.
    tail_page, tail_start: the page of the newest rows and its first position; a decode step finds its cells with
    these alone. salt: what marks the life's cells as its own. Slots are reused; a slot's columns are reset when it is.
    """

    def __init__(self, arena: Arena, journal: Journal, max_lives: int, state_id: str) -> None:
        self._arena = arena
        self._journal = journal
        self._max_lives = max_lives
        self.refused = 0
        self._lives: dict[tuple[str, str], Life] = {}
        self._names: dict[str, list[Life]] = {}
        self._free: list[int] = []
        self.serial = 0
        """The highest given so far."""
        self.by_serial: dict[int, Life] = {}
        self.newborn: list[Life] = []
        """Opened since the retention last looked."""
        self.end: NDArray[np.int64] = np.zeros(0, np.int64)
        self.last_forward: NDArray[np.int64] = np.zeros(0, np.int64)
        self.tail_page: NDArray[np.int64] = np.zeros(0, np.int64)
        self.tail_start: NDArray[np.int64] = np.zeros(0, np.int64)
        self.salt: NDArray[np.uint64] = np.zeros(0, np.uint64)
        # Of this state's lives alone: cells of another state's arena fit no life here.
        self._salt = int.from_bytes(hashlib.blake2b(state_id.encode(), digest_size=8).digest(), "little")
        self._grow()  # never empty: slot -1, "no life", must index something

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def get(self, session: Session, req_id: str) -> Life | None:
        """The life `req_id` of `session`, or None."""
        return self._lives.get((session.incarnation, req_id))

    def named(self, name: str) -> list[Life]:
        """Lives that carry the client's request id `name`, oldest first."""
        return self._names.get(name, [])

    def open(self, session: Session, req_id: str, name: str, now: float) -> Life | None:
        """The life `req_id`, made if it is new. Opening again is what a resent patch does: it changes nothing.
        None at the limit of lives: its rows are dropped and a pull hears `unknown`."""
        key = (session.incarnation, req_id)
        life = self._lives.get(key)
        if life is not None or req_id in session.opening:
            return life
        if len(self._lives) >= self._max_lives:
            self.refused += 1
            return None
        if not self._free:
            self._grow()
        life = Life(session, req_id, name, self._free.pop(), self.serial + 1, now)
        life.note(now, f"opened by {session.engine_id}")
        self._add(life)
        session.opening.add(req_id)
        session.forget_batch()
        self._journal.opened(life)
        return life

    def restore(self, lives: Iterable[Life], serial: int) -> None:
        """Lives that a log tells of, in the order of their serials; their pages are in their hands, their columns are
        not set. serial: the highest that was ever given."""
        for life in lives:
            while life.slot >= len(self.end):
                self._grow()
            self._add(life)
        taken = {life.slot for life in self}
        self._free = [slot for slot in range(len(self.end) - 1, -1, -1) if slot not in taken]
        self.serial = serial

    def _add(self, life: Life) -> None:
        slot = life.slot
        self.serial = life.serial
        self.end[slot] = 0
        self.last_forward[slot] = 0
        # Mixed by hand: numpy warns where a scalar overflows.
        self.salt[slot] = (self._salt + life.serial * 0xFF51_AFD7_ED55_8CCD) % (1 << 64)
        self.no_tail(life)
        self._lives[life.session.incarnation, life.req_id] = life
        self._names.setdefault(life.name, []).append(life)
        self.by_serial[life.serial] = life
        self.newborn.append(life)
        life.session.lives[life.req_id] = life

    def no_tail(self, life: Life) -> None:
        """No page of this life is its tail: a start far below any position makes every row look off it."""
        self.tail_page[life.slot] = -1
        self.tail_start[life.slot] = np.iinfo(np.int64).min // 2

    def free_rows(self, life: Life) -> None:
        """Give a life's pages back; it can never be served again."""
        self._arena.give([page for page in life.pages if page >= 0], self._journal.number)
        life.pages = []
        life.session.forget_batch()

    def close(self, life: Life) -> None:
        """Forget a life."""
        self.free_rows(life)
        self._journal.closed(life)
        del self._lives[(life.session.incarnation, life.req_id)]
        del life.session.lives[life.req_id]
        del self.by_serial[life.serial]
        siblings = self._names[life.name]
        siblings.remove(life)
        if not siblings:
            del self._names[life.name]
        self._free.append(life.slot)

    def youngest_open(self) -> Life | None:
        """The unfinished life that opened last and holds pages: the one to shed."""
        for serial in reversed(self.by_serial):
            life = self.by_serial[serial]
            if life.state is State.OPEN:
                return life
        return None

    def _grow(self) -> None:
        old = len(self.end)
        new = max(256, old * 2)
        for name in ("end", "last_forward", "tail_page", "tail_start", "salt"):
            column = getattr(self, name)
            grown = np.zeros(new, column.dtype)
            grown[:old] = column
            setattr(self, name, grown)
        self._free.extend(range(new - 1, old - 1, -1))
