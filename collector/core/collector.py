"""The one object that the daemon, the simulator and recovery drive: events in, effects out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.core.arena import PAGE_BYTES, Arena
from collector.core.assembly import Assembly
from collector.core.config import CoreConfig
from collector.core.events import (
    Effect,
    Event,
    FromEngine,
    FromTrainer,
    Logged,
    PatchArrived,
    PatchRefused,
    ServeRoutes,
    Tick,
    ToTrainer,
)
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.queries import Queries
from collector.core.retention import Retention
from collector.core.serving import gather
from collector.core.settlement import Settlement
from collector.core.stories import Stories
from collector.core.streams import Streams
from protocol import codes, limits
from protocol.geometry import Geometry
from protocol.messages import Describe, List, Problem, Pull, Release, Released, Stat, Stats


class Collector:
    """Assembles patches into requests and answers pulls.

    buffer: uint8, the whole row memory, mapped by the caller. state_id: a new name for each empty state.
    `handle` never blocks, never reads a clock and raises only on bugs.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        state_id: str,
        config: CoreConfig | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        config = config or CoreConfig()
        self._out: list[Effect] = []
        self.arena = Arena(buffer, page_bytes)
        self.lives = LifeTable(self.arena, config.max_lives)
        self.assembly = Assembly(self.arena, self.lives)
        self.settlement = Settlement(self.assembly, self.lives)
        self.retention = Retention(config, self.lives)
        self.queries = Queries(config, self.lives, self.assembly, self.retention.was_released, self._out_append)
        self.streams = Streams(
            config,
            state_id,
            self.arena,
            self.assembly,
            self.lives,
            self.settlement,
            self._out_append,
            self._changed,
        )
        self.stories = Stories(self.lives, self.assembly)

    @property
    def record(self) -> int:
        """Number of the last message applied; `Logged(record)` acknowledges up to it."""
        return self.streams.record

    def geometry_of(self, peer: bytes) -> Geometry | None:
        """The geometry an engine connection said Hello with, or None."""
        session = self.streams.by_peer.get(peer)
        return session.geometry if session else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at clock time `now` (seconds, monotonic) and return what the shell must do, in order."""
        if isinstance(event, PatchArrived):
            self.streams.patch(event, now)
        elif isinstance(event, FromEngine):
            self.streams.message(event, now)
        elif isinstance(event, Logged):
            self.streams.logged(event.record)
        elif isinstance(event, FromTrainer):
            self._trainer(event, now)
        elif isinstance(event, PatchRefused):
            self.streams.refusal(event, now)
        elif isinstance(event, Tick):
            self._tick(now)
        else:
            self.queries.leave()
        out = self._out[:]
        self._out.clear()
        return out

    def gather(self, effect: ServeRoutes) -> NDArray[Any] | None:
        """The payload of an answer, or None when its rows were released, lost or replaced before it could be sent."""
        gone = (State.OPEN, State.LOST, State.FAILED)
        if effect.life.serial not in self.lives.by_serial or effect.life.state in gone:
            return None
        return gather(self.assembly, effect.life, effect.header)

    def stats(self) -> dict[str, float]:
        """Counters and gauges by stable name."""
        states = dict.fromkeys(State, 0)
        for life in self.lives:
            states[life.state] += 1
        sessions = self.streams.sessions.values()
        return {
            **{f"requests_{state}": float(count) for state, count in states.items()},
            "engines": float(sum(s.alive for s in sessions)),
            "engines_stalled": float(sum(s.stalled_at is not None for s in sessions)),
            "patches": float(sum(s.patches for s in sessions)),
            "rows": float(sum(s.rows for s in sessions)),
            "rows_dropped": float(self.assembly.dropped_rows),
            "patches_refused": float(self.streams.refused),
            "sequence_gaps": float(self.streams.gaps),
            "requests_shed": float(self.streams.shed),
            "pulls_served": float(self.queries.served),
            "pulls_waiting": float(self.queries.waiting),
            "pull_problems": float(sum(self.queries.problems.values())),
            "requests_released": float(self.retention.released),
            "requests_expired": float(self.retention.expired),
            "arena_bytes": float(self.arena.pages * self.arena.page_bytes),
            "arena_used_bytes": float((self.arena.pages - self.arena.free_pages) * self.arena.page_bytes),
        }

    def _out_append(self, effect: Effect) -> None:
        self._out.append(effect)

    def _changed(self, life: Life, now: float) -> None:
        if life.state is not State.OPEN:
            self.retention.settled(life, now)
        if life.state in (State.LOST, State.FAILED):
            self.streams.resume()
        self.queries.changed(life, now)

    def _trainer(self, event: FromTrainer, now: float) -> None:
        message, peer = event.message, event.peer
        if isinstance(message, Pull):
            self.queries.pull(peer, message, now)
        elif isinstance(message, Release):
            self._release(peer, message, now)
        elif isinstance(message, Describe):
            self._out.append(ToTrainer(peer, self.stories.describe(message, now)))
        elif isinstance(message, List):
            self._out.append(ToTrainer(peer, self.stories.page(message, now)))
        elif isinstance(message, Stat):
            self._out.append(ToTrainer(peer, Stats(message.nonce, self.stats())))

    def _release(self, peer: bytes, release: Release, now: float) -> None:
        ids = release.request_ids
        if len(ids) > limits.MAX_RELEASE_IDS:
            text = f"{len(ids)} ids in one release, at most {limits.MAX_RELEASE_IDS}"
            self._out.append(ToTrainer(peer, Problem(release.nonce, codes.TOO_MANY, text)))
            return
        known = sum(self.retention.release(name) for name in ids)
        self._out.append(ToTrainer(peer, Released(release.nonce, known, len(ids) - known)))
        if known:
            self.streams.room()

    def _tick(self, now: float) -> None:
        self.streams.tick(now)
        if self.retention.tick(now):
            self.streams.room()
        self.queries.tick(now)
