"""A collector process: the real core and ingest on simulated links, watched for what it applies and serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collector.core.collector import Collector
from collector.core.config import CoreConfig
from collector.core.events import (
    Effect,
    Logged,
    ServeRoutes,
    Tick,
    ToEngine,
)
from collector.daemon.ingest import Ingest
from protocol import codec, codes
from protocol.messages import Flush, HelloFirst, Problem, Refused
from tests.sim.facts import Facts, Violation
from tests.sim.loop import Loop
from tests.sim.network import Frames, Link
from tests.sim.options import Chaos
from tests.sim.reference import Cell, Key
from tests.sim.story import told
from tests.sim.watch import GRACE_S, LIVENESS_S, TICK_S, Watch

CELL_BYTES = 16
"""What a row of either geometry takes in the arena."""


@dataclass(slots=True, frozen=True)
class Served:
    """An answer as the core gave it: of which life and state, and what had arrived of that life then."""

    state_id: str
    key: Key
    cells: dict[int, Cell]


class CollectorNode:
    """`served` holds, by nonce, what the trainers' checker compares answers with."""

    def __init__(self, loop: Loop, chaos: Chaos, facts: Facts) -> None:
        self._loop, self._chaos, self._facts = loop, chaos, facts
        self.up = False
        self.generation = 0
        self.served: dict[int, Served] = {}
        self.calm_at = float("inf")
        self._links: dict[bytes, Link] = {}
        self._peers = 0
        self._asked: dict[tuple[bytes, Flush], None] = {}
        self._start()
        loop.every(TICK_S, self._tick)

    def connect(self, trainer: bool, down: Callable[[Frames], None]) -> Link | None:
        """A new connection under a new name; None while the process is down."""
        if not self.up:
            return None
        self._peers += 1
        up = self._from_trainer if trainer else self._from_engine
        link = Link(self._loop, self._chaos, b"peer%d" % self._peers, up, down, not trainer)
        self._links[link.peer] = link
        return link

    def wipe(self, down_s: float) -> None:
        """The process dies and comes back with nothing."""
        self.up = False
        self._asked.clear()
        for link in self._links.values():
            link.cut()
        self._links.clear()
        for life in self._facts.lives.values():
            life.harmed.add("collector wiped")
        self._loop.after(down_s, self._start)

    def _start(self) -> None:
        options = self._chaos.options
        self.generation += 1
        self.state_id = f"state{self.generation}"
        config = CoreConfig(
            window_bytes=options.window_bytes,
            liveness_s=LIVENESS_S,
            ttl_s=options.ttl_s,
            grace_s=GRACE_S,
            incomplete_wait_s=0.5,
        )
        page_bytes = options.page_rows * CELL_BYTES
        # Whatever was in the memory must never show.
        buffer = np.full(options.pages * page_bytes, 0x11, np.uint8)
        self.core = Collector(buffer, self.state_id, config, page_bytes)
        self._watch = Watch(self.core, self._chaos, self._facts)
        self._ingest = Ingest(self.core.geometry_of)
        self._logging = False
        self.up = True

    # ------------------------------------------------------------------ events

    def _from_engine(self, peer: bytes, frames: Frames) -> None:
        if self._chaos.tell:
            self._chaos.tell(f"{peer.decode()} -> {told(frames)}")
        found = self._ingest.from_engine(peer, frames)
        if isinstance(found, Refused | HelloFirst):
            self._to_engine(ToEngine(peer, found))
            return
        self._perform(self._watch.engine(peer, found, frames, self._loop.now))
        if not self._logging:
            self._logging = True
            self._loop.after(self._chaos.options.log_lag_s, self._log_of(self.generation))

    def _log_of(self, generation: int) -> Callable[[], None]:
        def logged() -> None:
            if self.up and self.generation == generation:
                self._logging = False
                self._perform(self.core.handle(Logged(self.core.record), self._loop.now))

        return logged

    def _from_trainer(self, peer: bytes, frames: Frames) -> None:
        if self._chaos.tell:
            self._chaos.tell(f"{peer.decode()} -> {told(frames)}")
        found = self._ingest.from_trainer(peer, frames)
        if isinstance(found, Problem):
            raise Violation(f"a trainer's message was refused: {found}")
        self._perform(self.core.handle(found, self._loop.now))
        self._watch.note_gone()

    def _tick(self) -> None:
        if not self.up:
            return
        self._perform(self._watch.tick(Tick(), self._loop.now, self.calm_at))

    # ------------------------------------------------------------------ effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToEngine):
                self._to_engine(effect)
            elif isinstance(effect, ServeRoutes):
                self._serve(effect)
            else:
                self._to_peer(effect.peer, [codec.encode(effect.message)])

    def _to_engine(self, effect: ToEngine) -> None:
        # A full pipe drops what the core wanted said.
        message = effect.message
        self._chaos.note(f"said_{type(message).__name__}")
        if isinstance(message, Flush):
            self._chaos.note("ask_again", (effect.peer, message) in self._asked)
            self._asked[effect.peer, message] = None
        if not self._chaos.strikes("answer_dropped"):
            self._to_peer(effect.peer, [codec.encode(message)])

    def _to_peer(self, peer: bytes, frames: Frames) -> None:
        if self._chaos.tell:
            self._chaos.tell(f"{peer.decode()} <- {told(frames)}")
        if (link := self._links.get(peer)) is not None and link.alive:
            link.send_down(frames)

    def _serve(self, effect: ServeRoutes) -> None:
        life, generation, core = effect.life, self.generation, self.core
        key = (life.session.incarnation, life.req_id)
        self.served[effect.pull.nonce] = Served(self.state_id, key, self._watch.reference.cells(key))

        def send() -> None:
            if self.generation != generation:
                return
            payload = core.gather(effect)
            if payload is None:
                self._chaos.note("released_before_sent")
                problem = Problem(effect.pull.nonce, codes.RELEASED, "released", effect.pull.request_id)
                self._to_peer(effect.peer, [codec.encode(problem)])
            else:
                self._to_peer(effect.peer, [codec.encode(effect.header), payload.tobytes()])

        slow = self._chaos.rng.uniform(0.2, 3.0) if self._chaos.strikes("slow_trainer") else 0.0
        self._loop.after(slow, send)
