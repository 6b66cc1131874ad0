"""A collector process: the real core and ingest on simulated links, watched for what it applies and serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from collector.core.config import CoreConfig
from collector.core.events import (
    Effect,
    Logged,
    ServeRoutes,
    Tick,
    ToEngine,
    waits_for_record,
)
from collector.daemon.ingest import Ingest
from protocol import codec, codes
from protocol.messages import Flush, HelloFirst, Problem, Refused
from tests.sim.disk import Disk, half_written
from tests.sim.facts import Facts, Violation
from tests.sim.loop import Loop
from tests.sim.network import Frames, Link
from tests.sim.options import Chaos
from tests.sim.reference import Cell, Key
from tests.sim.story import told
from tests.sim.watch import GRACE_S, LIVENESS_S, TICK_S, Watch

CELL_BYTES = 24
"""What a row of either geometry takes in the arena."""


@dataclass(slots=True, frozen=True)
class Served:
    """An answer as the core gave it: of which life and state, and what had arrived of that life then."""

    state_id: str
    key: Key
    cells: dict[int, Cell]
    ahead: bool
    """Rows of messages that no record tells of may lie in its holes."""


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
        self._dying = False
        self._watch: Any = None
        self._states = 0
        self._renew()
        self._restart()
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
        self._die()
        for life in self._facts.lives.values():
            life.harmed.add("collector wiped")
        self._renew()
        self._loop.after(down_s, self._restart)

    def kill(self) -> None:
        """The process dies at once, or while it handles its next message; what it wrote is there when it comes back."""
        if self._chaos.rng.random() < 0.5:
            self._dying = True
        else:
            self._fall()

    def _fall(self) -> None:
        """Die, perhaps in the middle of a record, and be started again."""
        if self._chaos.rng.random() < 0.3 and (record := self.core.take_record()) is not None:
            self._chaos.note("log_torn")
            self._disk.tear(record, self._chaos.rng)
        self._die()
        self._loop.after(self._chaos.rng.uniform(0.1, 1.5), self._restart)

    def _die(self) -> None:
        self.up = self._dying = False
        self._asked.clear()
        for link in self._links.values():
            link.cut()
        self._links.clear()

    def _renew(self) -> None:
        self._states += 1
        options = self._chaos.options
        self._disk = Disk(f"state{self._states}", options.pages * options.page_rows * CELL_BYTES)
        self._watch = None

    def _restart(self) -> None:
        options = self._chaos.options
        self.generation += 1
        self.state_id = self._disk.state_id
        config = CoreConfig(
            window_bytes=options.window_bytes,
            liveness_s=LIVENESS_S,
            ttl_s=options.ttl_s,
            grace_s=GRACE_S,
            incomplete_wait_s=0.5,
        )
        self.core = self._disk.recovered(config, options.page_rows * CELL_BYTES, self._loop.now)
        before, self._watch = self._watch, Watch(self.core, self._chaos, self._facts)
        if before is not None:
            self._watch.follow(before, self._loop.now)
        self._ingest = Ingest(self.core.geometry_of)
        self._logging = False
        self._safe = 0
        self._held: list[Effect] = []
        self.up = True

    # ------------------------------------------------------------------ events

    def _from_engine(self, peer: bytes, frames: Frames) -> None:
        if self._chaos.tell:
            self._chaos.tell(f"{peer.decode()} -> {told(frames)}")
        found = self._ingest.from_engine(peer, frames)
        if isinstance(found, Refused | HelloFirst):
            self._to_engine(ToEngine(peer, found))
            return
        if self._dying:
            self._chaos.note("killed_in_a_message")
            before = self._disk.memory.copy()
            self.core.handle(found, self._loop.now)
            self._disk.memory[:] = half_written(before, self._disk.memory, self._chaos.rng)
            self._fall()
            return
        effects = self._watch.engine(peer, found, frames, self._loop.now)
        self._perform([effect for effect in effects if isinstance(effect, ToEngine)])
        self._hold([effect for effect in effects if not isinstance(effect, ToEngine)])
        self._log_soon()

    def _log_soon(self) -> None:
        if not self._logging:
            self._logging = True
            self._loop.after(self._chaos.options.log_lag_s, self._log_of(self.generation))

    def _log_of(self, generation: int) -> Callable[[], None]:
        def write() -> None:
            if self.up and self.generation == generation:
                self._logging = False
                self._commit()

        return write

    def _commit(self) -> None:
        """As the daemon does: a record of what changed, then `Logged`."""
        if self._chaos.strikes("disk_full"):
            self._disk.full_until = self._loop.now + self._chaos.rng.uniform(0.3, 3.0)
        saved = self._loop.now >= self._disk.full_until
        if saved:
            if (record := self.core.take_record()) is not None:
                self._disk.append(record)
                self._watch.saved()
                if self._chaos.rng.random() < 0.02:
                    self._chaos.note("checkpoint")
                    self._disk.replace(self.core.checkpoint())
                if self._chaos.strikes("killed_before_ack"):
                    self._fall()
                    return
            self._safe = self.core.record
        held, self._held = self._held, []
        for effect in held:
            # What is on no record is not final.
            if not saved and waits_for_record(effect):
                self._held.append(effect)
            else:
                self._perform([effect])
        self._perform(self.core.handle(Logged(self._safe), self._loop.now))

    def _from_trainer(self, peer: bytes, frames: Frames) -> None:
        if self._chaos.tell:
            self._chaos.tell(f"{peer.decode()} -> {told(frames)}")
        found = self._ingest.from_trainer(peer, frames)
        if isinstance(found, Problem):
            raise Violation(f"a trainer's message was refused: {found}")
        # A trainer hears nothing before what it asked for is on record.
        self._hold(self.core.handle(found, self._loop.now))
        self._watch.note_gone()
        self._log_soon()

    def _tick(self) -> None:
        if not self.up:
            return
        self._hold(self._watch.tick(Tick(), self._loop.now, self.calm_at))
        self._log_soon()

    # ------------------------------------------------------------------ effects

    def _hold(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ServeRoutes):
                self._remember(effect)
        self._held += effects

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

    def _remember(self, effect: ServeRoutes) -> None:
        key = (effect.life.session.incarnation, effect.life.req_id)
        cells, ahead = self._watch.reference.cells(key), key in self._watch.ahead
        self.served[effect.pull.nonce] = Served(self.state_id, key, cells, ahead)

    @contextmanager
    def _damaged(self, effect: ServeRoutes) -> Iterator[None]:
        """While rows are gathered one of their bits may be another than was written."""
        life, at = effect.life, effect.header.row_start
        held = life.serial in self.core.lives.by_serial and life.pages and effect.header.shape[0] > 0
        if not held or not self.core.assembly.meta(life, at, at + 1).all() or not self._chaos.strikes("bit_flipped"):
            yield
            return
        self._facts.lives[life.session.incarnation, life.req_id].harmed.add("memory damaged")
        layout = life.session.layout
        page, cell = life.pages[at // layout.rows_per_page], at % layout.rows_per_page
        bit = layout.rows.dtype.type(1 << self._chaos.rng.randrange(3))
        layout.rows[page, cell, 0] ^= bit
        try:
            yield
        finally:
            layout.rows[page, cell, 0] ^= bit

    def _serve(self, effect: ServeRoutes) -> None:
        generation, core = self.generation, self.core
        if effect.pull.nonce not in self.served:
            self._remember(effect)

        def send() -> None:
            if self.generation != generation:
                return
            with self._damaged(effect):
                payload = core.gather(effect, self._loop.now)
            if isinstance(payload, Problem):
                self._chaos.note("released_before_sent", payload.code == codes.RELEASED)
                self._to_peer(effect.peer, [codec.encode(payload)])
            else:
                self._to_peer(effect.peer, [codec.encode(effect.header), payload.tobytes()])

        slow = self._chaos.rng.uniform(0.2, 3.0) if self._chaos.strikes("slow_trainer") else 0.0
        self._loop.after(slow, send)
