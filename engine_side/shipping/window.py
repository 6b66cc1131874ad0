"""What was shipped and is not acknowledged: in order, numbered, resent from where the collector says. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Entry:
    """One message. frames: header, or header, rows, token ids; never changed while it stands here. nbytes counts row
    memory only, so that control messages are free."""

    seq: int
    frames: tuple[Any, ...]
    nbytes: int


class Window:
    """Unacknowledged messages. `cap_bytes` bounds the rows held here; `allow` is what the collector lets be under
    way. `_cursor` counts the entries already sent on this connection."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.allow = 0
        self.held_bytes = 0
        self._entries: deque[Entry] = deque()
        self._sent_bytes = 0
        self._cursor = 0
        self._first = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_seq(self) -> int:
        """Lowest number that can still be sent."""
        return self._first

    @property
    def next_seq(self) -> int:
        """Number of the next message added."""
        return self._first + len(self._entries)

    @property
    def send_seq(self) -> int:
        """Number of the next message to send: everything below it was sent on this connection."""
        return self._first + self._cursor

    @property
    def room(self) -> int:
        """Bytes of rows that may be added."""
        return self.cap_bytes - self.held_bytes

    @property
    def share(self) -> float:
        """The share of live requests whose rows are still taken, oldest first: all of them until the window is half
        full, then ever fewer, so that the oldest lose nothing for as long as there is any room."""
        return min(1.0, 2.0 * self.room / self.cap_bytes) if self.cap_bytes else 0.0

    def add(self, frames: tuple[Any, ...], nbytes: int) -> None:
        """Append the message numbered `next_seq`."""
        self._entries.append(Entry(self.next_seq, frames, nbytes))
        self.held_bytes += nbytes

    def put_first(self, frames: tuple[Any, ...]) -> None:
        """Prepend a control message, numbered `first_seq - 1`."""
        self._first -= 1
        self._entries.appendleft(Entry(self._first, frames, 0))
        self._cursor = 0
        self._sent_bytes = 0

    def acked(self, seq: int) -> None:
        """Forget everything up to and including `seq`."""
        while self._entries and self._entries[0].seq <= seq:
            entry = self._entries.popleft()
            self._first = entry.seq + 1
            self.held_bytes -= entry.nbytes
            if self._cursor:
                self._cursor -= 1
                self._sent_bytes -= entry.nbytes

    def go_to(self, seq: int) -> bool:
        """Send from `seq` on; what stands before it was applied, and stays here until it is acknowledged. False when it
        is not a number this window can send."""
        if seq > self.next_seq or seq < self._first:
            return False
        self._cursor = seq - self._first
        self._sent_bytes = sum(entry.nbytes for entry in itertools.islice(self._entries, self._cursor))
        return True

    def due(self) -> Entry | None:
        """The next message that may be sent now; call `sent` once it is."""
        if self._cursor == len(self._entries):
            return None
        entry = self._entries[self._cursor]
        # One message larger than the whole window must still pass, alone.
        if entry.nbytes and self._sent_bytes and self._sent_bytes + entry.nbytes > self.allow:
            return None
        if entry.nbytes and not self.allow:
            return None
        return entry

    def sent(self, entry: Entry) -> None:
        """`entry`, as given by `due`, is on its way."""
        self._cursor += 1
        self._sent_bytes += entry.nbytes
