"""The one object that the daemon, the simulator and recovery drive: events in, effects out."""

from __future__ import annotations

from collections.abc import Callable
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
from collector.core.journal import Journal
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.queries import Queries
from collector.core.records import Record
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
    `handle` never blocks, never reads a clock and raises only on bugs. After some events the caller takes the record of
    what they changed, makes it safe and says `Logged(core.record)`: only then is anything acknowledged.
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
        self.state_id = state_id
        self.arena = Arena(buffer, page_bytes)
        self._journal = Journal()
        self.lives = LifeTable(self.arena, self._journal, config.max_lives, state_id)
        self.assembly = Assembly(self.arena, self.lives, self._journal)
        self.settlement = Settlement(self.assembly, self.lives, self._journal)
        self.retention = Retention(config, self.lives)
        self.queries = Queries(config, self.lives, self.assembly, self.retention.was_released, self._out_append)
        self.streams = Streams(
            config,
            state_id,
            self.arena,
            self.assembly,
            self.lives,
            self.settlement,
            self._journal,
            self._out_append,
            self._changed,
        )
        self.stories = Stories(self.lives, self.assembly)
        self.more_stats: Callable[[], dict[str, float]] = dict
        """What the shell counts."""

    @property
    def record(self) -> int:
        """Number of the last record taken; `Logged(record)` acknowledges what it tells of."""
        return self._journal.number - 1

    def take_record(self) -> Record | None:
        """What changed since the last one, None when nothing did."""
        return self._journal.take(self.lives)

    def checkpoint(self) -> bytes:
        """A payload that replaces all records taken so far. There may be nothing left to take."""
        return self._journal.checkpoint(self.lives, self.streams.sessions.values(), self.retention.tombstones)

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

    def gather(self, effect: ServeRoutes, now: float) -> NDArray[Any] | Problem:
        """The payload of an answer, or why there is none: its rows were released, lost or replaced before it could be
        sent, or they are not what was written (then the request has failed)."""
        life, pull = effect.life, effect.pull
        if life.serial in self.lives.by_serial and life.state not in (State.OPEN, State.LOST, State.FAILED):
            start = effect.header.row_start
            if not self.assembly.intact(life, start, start + effect.header.shape[0]).all():
                self.settlement.corrupt(life, now)
                self._changed(life, now)
                return Problem(pull.nonce, codes.FAILED, f"{pull.request_id}: {life.reason}", pull.request_id)
            found = gather(self.assembly, life, effect.header)
            if found is not None:
                return found
        text = f"{pull.request_id}: released before it could be sent"
        return Problem(pull.nonce, codes.RELEASED, text, pull.request_id)

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
            "arena_used_bytes": float(self._used_pages() * self.arena.page_bytes),
            "arena_limbo_bytes": float(self.arena.pages_in_limbo * self.arena.page_bytes),
            **self.more_stats(),
        }

    def _used_pages(self) -> int:
        return self.arena.pages - self.arena.free_pages - self.arena.pages_in_limbo

    def _out_append(self, effect: Effect) -> None:
        self._out.append(effect)

    def _changed(self, life: Life, now: float) -> None:
        if life.state is not State.OPEN:
            self.retention.settled(life, now)
        if life.state in (State.LOST, State.FAILED):
            self.streams.eased()
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
