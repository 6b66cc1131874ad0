"""Drives `Collector.handle` the way the daemon does: frames through the real codec, effects looked at, every
invariant checked after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.core.collector import Collector
from collector.core.config import CoreConfig
from collector.core.events import Effect, Event, FromTrainer, Logged, ServeRoutes, Tick, ToEngine, ToTrainer
from collector.core.life import Life, State
from collector.daemon.ingest import Ingest
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import (
    Bye,
    CollectorToEngine,
    CollectorToTrainer,
    FinishReason,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Problem,
    Pull,
    Refused,
    Release,
    RequestFinished,
    Routes,
    TrainerMessage,
)
from tests.harness.patches import SMALL, Seg, frames, rows_lost

PAGE = 96
"""4 rows of SMALL a page (24 bytes each with meta and seal), 2 of WIDE: page borders everywhere."""


class Bench:
    """A collector, its clock, and every effect that it ever emitted."""

    def __init__(self, pages: int = 200, page_bytes: int = PAGE, state_id: str = "state", **config: Any) -> None:
        self.core = Collector(
            np.zeros(pages * page_bytes, np.uint8), state_id, CoreConfig(**{"liveness_s": 1e9} | config), page_bytes
        )
        self.ingest = Ingest(self.core.geometry_of)
        self.now = 100.0
        self.logged = True
        self.records: list[bytes] = []
        self._nonce = 0

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        if self.logged and not isinstance(event, Logged):
            self.save()
            effects += self.core.handle(Logged(self.core.record), self.now)
        self.check()
        for effect in effects:
            codec.encode(effect.header if isinstance(effect, ServeRoutes) else effect.message)
        return effects

    def check(self) -> None:
        """After every event."""
        check_invariants(self.core)

    def save(self) -> None:
        """Take the record of what changed, as the daemon does before it says `Logged`."""
        if (record := self.core.take_record()) is not None:
            self.records.append(record.payload)

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.handle(Tick())

    def from_engine(self, peer: bytes, parts: Sequence[bytes]) -> list[Effect]:
        found = self.ingest.from_engine(peer, parts)
        return [ToEngine(peer, found)] if isinstance(found, Refused | HelloFirst) else self.handle(found)

    def ask(self, message: TrainerMessage, peer: bytes = b"trainer") -> list[Effect]:
        return self.handle(FromTrainer(peer, message))

    def pull(
        self, name: str, num_tokens: int | None = None, tokens: Sequence[int] | None = None, **more: Any
    ) -> Answer:
        """The answer to one pull, or an empty one while it waits."""
        self._nonce += 1
        digest = None if tokens is None else codec.token_digest(tokens)
        effects = self.ask(Pull(self._nonce, name, num_tokens, digest, **more))
        answers = answers_in(self.core, effects)
        return answers.get(self._nonce) or Answer(None, None, effects)

    def release(self, *names: str) -> list[Effect]:
        return self.ask(Release(0, names))

    def life(self, name: str) -> Life:
        (life,) = self.core.lives.named(name)
        return life

    def state(self, name: str) -> str:
        return str(self.life(name).state)


class Answer:
    """`array` with `routes`, or `problem`; all None while the pull waits. effects: all of that event."""

    def __init__(self, message: CollectorToTrainer | None, array: NDArray[Any] | None, effects: list[Effect]) -> None:
        self.routes = message if isinstance(message, Routes) else None
        self.problem = message if isinstance(message, Problem) else None
        self.array = array
        self.effects = effects

    @property
    def code(self) -> str:
        """The problem's code, "" for none."""
        return self.problem.code if self.problem else ""

    @property
    def waits(self) -> bool:
        return self.routes is None and self.problem is None


class Emitter:
    """One incarnation of one engine: numbers its messages and remembers nothing else."""

    def __init__(self, bench: Bench, name: str = "engine", geometry: Geometry = SMALL) -> None:
        self.bench = bench
        self.name = name
        self.incarnation = f"{name}-incarnation"
        self.geometry = geometry
        self.peer = name.encode()
        self.seq = 0

    def hello(self, first_seq: int = 0, state_id: str = "", peer: bytes | None = None) -> list[CollectorToEngine]:
        self.peer = peer or self.peer
        return self.say(Hello(self.name, self.incarnation, self.geometry, first_seq, state_id))

    def say(self, message: Any) -> list[CollectorToEngine]:
        """Any message without rows, as it is."""
        return engine_messages(self.bench.from_engine(self.peer, [codec.encode(message)]), self.peer)

    def raw(self, parts: Sequence[bytes]) -> list[CollectorToEngine]:
        return engine_messages(self.bench.from_engine(self.peer, parts), self.peer)

    def patch(self, *segs: Seg, **fields: Any) -> list[CollectorToEngine]:
        return self.raw(frames(self.geometry, self._take(), segs, **fields))

    def lost(self, *segs: Seg) -> list[CollectorToEngine]:
        return self.say(rows_lost(self._take(), segs))

    def finish(
        self, life: str, num_tokens: int | None, reason: FinishReason = "stop", detail: str = ""
    ) -> list[CollectorToEngine]:
        return self.say(RequestFinished(self._take(), life, num_tokens, reason, detail))

    def flushed(self, life: str, num_tokens: int) -> list[CollectorToEngine]:
        return self.say(Flushed(self._take(), life, num_tokens))

    def heartbeat(self) -> list[CollectorToEngine]:
        return self.say(Heartbeat(self.seq))

    def bye(self) -> list[CollectorToEngine]:
        return self.say(Bye())

    def _take(self) -> int:
        self.seq += 1
        return self.seq - 1


def engine_messages(effects: Sequence[Effect], peer: bytes | None = None) -> list[CollectorToEngine]:
    """What goes to engines (or to one)."""
    return [e.message for e in effects if isinstance(e, ToEngine) and (peer is None or e.peer == peer)]


def answers_in(core: Collector, effects: Sequence[Effect]) -> dict[int, Answer]:
    """Answers to trainers by nonce; rows are gathered as the daemon does when it sends."""
    found = {}
    for effect in effects:
        if isinstance(effect, ServeRoutes):
            payload = core.gather(effect, 0.0)
            if isinstance(payload, Problem):
                found[effect.pull.nonce] = Answer(payload, None, list(effects))
            else:
                found[effect.pull.nonce] = Answer(effect.header, payload, list(effects))
        elif isinstance(effect, ToTrainer):
            found[effect.message.nonce] = Answer(effect.message, None, list(effects))
    return found


def held(core: Collector, life: Life) -> dict[int, tuple[tuple[int, ...], int, int, int]]:
    """position -> (cells, token, kind, weight version), read from the arena."""
    end = int(core.lives.end[life.slot]) if any(True for _ in pages_of(life)) else 0
    meta = core.assembly.meta(life, 0, end)
    rows = core.assembly.rows(life, 0, end)
    dtype = life.session.geometry.wire_dtype
    return {
        p: (
            tuple(np.frombuffer(rows[p].tobytes(), dtype).tolist()),
            int(np.int64(meta[p]).astype(np.int32)),
            int(meta[p] >> 56),
            int(meta[p] >> 32) & 0xFF_FFFF,
        )
        for p in np.flatnonzero(meta).tolist()
    }


def pages_of(life: Life) -> dict[int, int]:
    """Number -> page of a life."""
    numbered = life.pages.items() if isinstance(life.pages, dict) else enumerate(life.pages)
    return {number: page for number, page in numbered if page >= 0}


def check_invariants(core: Collector) -> None:
    """What must hold between any two events."""
    lives = list(core.lives)
    owned = [page for life in lives for page in pages_of(life).values()]
    limbo = [page for _, pages in core.arena._limbo for page in pages]
    assert sorted(owned + core.arena._free + limbo) == list(range(core.arena.pages)), "a page is lost or owned twice"
    slots = [life.slot for life in lives]
    assert sorted(slots + core.lives._free) == list(range(len(core.lives.end))), "a slot is lost or owned twice"
    assert [life.serial for life in sorted(lives, key=lambda x: x.serial)] == list(core.lives.by_serial)
    assert Counter(life.name for life in lives) == Counter(
        {name: len(found) for name, found in core.lives._names.items()}
    )
    for life in lives:
        _check_life(core, life)
    for session in core.streams.sessions.values():
        assert {id(life) for life in session.lives.values()} == {id(x) for x in lives if x.session is session}
        assert session.acked <= session.applied
        assert session.peer is None or core.streams.by_peer.get(session.peer) is session
        batch = session.batch
        if batch is None:
            assert session.streak is None
            continue
        names = codec.decode_ids(batch.ids)
        expected = [life if (life := session.lives.get(name)) and life.takes_rows else None for name in names]
        assert [id(life) for life in batch.lives] == [id(life) for life in expected]
        assert batch.slots.tolist() == [-1 if life is None else life.slot for life in expected]
        single = [x is not None and x.state is State.OPEN and names.count(x.req_id) == 1 for x in expected]
        assert batch.single.tolist() == single
        assert batch.simple == all(single)
    assert core.queries.waiting == sum(core.queries._per_peer.values())


def _check_life(core: Collector, life: Life) -> None:
    table, pages = core.lives, pages_of(life)
    per_page = life.session.layout.rows_per_page
    assert not pages or life.state not in (State.LOST, State.FAILED), "nobody can read these pages"
    if life.takes_rows and table.tail_page[life.slot] >= 0:
        start = int(table.tail_start[life.slot])
        assert start % per_page == 0
        assert pages[start // per_page] == table.tail_page[life.slot], "the tail is another page"
