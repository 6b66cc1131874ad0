"""When rows go: explicit release, time to live. Complete unread requests are never evicted for room."""

from __future__ import annotations

from collections import OrderedDict

from collector.core.config import CoreConfig
from collector.core.life import Life, State
from collector.core.lives import LifeTable


class Retention:
    """Forgets lives and remembers their names as bounded tombstones."""

    def __init__(self, config: CoreConfig, lives: LifeTable) -> None:
        self._config = config
        self._lives = lives
        self._settled: OrderedDict[int, float] = OrderedDict()
        # Serial -> (mark, when to look again) of lives that may still take rows, soonest first. What is over is taken
        # out at once: kept for an hour, what 183,000 requests left was 360 MB.
        self._watched: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.tombstones: OrderedDict[str, None] = OrderedDict()
        """Names of what was released or expired, oldest first."""
        self.released = 0
        self.expired = 0

    def settled(self, life: Life, now: float) -> None:
        """A life left `open`: its time to live starts."""
        self._settled[life.serial] = now
        self._settled.move_to_end(life.serial)
        if not life.takes_rows:
            self._watched.pop(life.serial, None)

    def was_released(self, name: str) -> bool:
        """Whether a request of this name was released or expired."""
        return name in self.tombstones

    def release(self, name: str) -> bool:
        """Forget every settled or open life of `name`. False when there was none."""
        lives = list(self._lives.named(name))
        for life in lives:
            self._forget(life)
        self.released += bool(lives)
        return bool(lives)

    def tick(self, now: float) -> bool:
        """Forget what outlived its time. True when pages came free."""
        freed = self._forget_idle(now)
        while self._settled:
            serial, since = next(iter(self._settled.items()))
            if now - since < self._config.ttl_s:
                break
            life = self._lives.by_serial.get(serial)
            if life is None or life.state is State.OPEN:
                self._settled.popitem(last=False)
                continue
            self._forget(life)
            self.expired += 1
            freed = True
        return freed

    def _forget_idle(self, now: float) -> bool:
        """An open life whose end nobody says, and for which nothing came for a whole time to live, goes too: a request
        of an engine that leaves the length to a trainer, which dropped the sample."""
        freed, due = False, now + self._config.ttl_s
        for life in self._lives.newborn:
            if life.serial in self._lives.by_serial and life.takes_rows:
                self._watched[life.serial] = (-1, due)
        self._lives.newborn.clear()
        while self._watched:
            serial, (mark, looked_at) = next(iter(self._watched.items()))
            if looked_at > now:
                break
            del self._watched[serial]
            life = self._lives.by_serial[serial]
            end = int(self._lives.end[life.slot])
            if life.state is State.OPEN and end == mark:
                self._forget(life)
                self.expired += 1
                freed = True
            else:
                self._watched[serial] = (end, due)
        return freed

    def _forget(self, life: Life) -> None:
        self._settled.pop(life.serial, None)
        self._watched.pop(life.serial, None)
        self._lives.close(life)
        self.bury(life.name)

    def bury(self, name: str) -> None:
        """Remember a name as released."""
        self.tombstones[name] = None
        self.tombstones.move_to_end(name)
        while len(self.tombstones) > self._config.tombstones:
            self.tombstones.popitem(last=False)
