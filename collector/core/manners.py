"""Who sends nonsense is heard less: a bucket of patience for each connection."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

PATIENCE: Final = 64
"""Malformed messages that a connection may send in a row before it is slowed."""
PER_SECOND: Final = 8.0
"""How many of them are forgiven a second."""
_REMEMBERED: Final = 4_096


class Manners:
    """`offended` for each malformed message; `hears` says whether the next one is looked at at all. What an engine sent
    meanwhile is a gap in its sequence, and comes again. Times are seconds."""

    def __init__(self) -> None:
        self._owed: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self.ignored = 0

    def hears(self, peer: bytes, now: float) -> bool:
        """Whether this connection has patience left."""
        if peer not in self._owed:
            return True
        owed = self._now(peer, now)
        if owed <= 0.0:
            del self._owed[peer]
        if owed <= PATIENCE - 1:
            return True
        self.ignored += 1
        return False

    def offended(self, peer: bytes, now: float) -> None:
        """A malformed message came."""
        self._owed[peer] = (self._now(peer, now) + 1.0, now)
        self._owed.move_to_end(peer)
        if len(self._owed) > _REMEMBERED:
            self._owed.popitem(last=False)

    def _now(self, peer: bytes, now: float) -> float:
        owed, since = self._owed.get(peer, (0.0, now))
        return max(0.0, owed - (now - since) * PER_SECOND)
