"""Virtual time: callbacks in order of their moment, first come first served within one."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Loop:
    """`now` is seconds. `events` counts callbacks run."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.events = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Run `action` at `moment`, or now if that has passed."""
        self._order += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._order, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def every(self, period: float, action: Callable[[], None]) -> None:
        """Run `action` each `period` seconds, for good."""

        def again() -> None:
            action()
            self.after(period, again)

        self.after(period, again)

    def run_until(self, moment: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run what is due before `moment`, or until `done`. False when time ran out first."""
        while self._heap and self._heap[0][0] <= moment:
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
            if done():
                return True
        self.now = moment
        return False
