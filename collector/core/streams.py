"""The engines' side of the core: every message of an incarnation applied in order, exactly once (rule 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from collector.core.arena import Arena
from collector.core.assembly import Assembly
from collector.core.config import CoreConfig
from collector.core.events import Effect, FromEngine, PatchArrived, PatchRefused, ToEngine
from collector.core.journal import Journal
from collector.core.life import Life
from collector.core.lives import LifeTable
from collector.core.sessions import Session
from collector.core.settlement import Settlement
from protocol import codec, limits
from protocol.errors import GeometryError, ProtocolError
from protocol.messages import (
    Ack,
    Bye,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Refused,
    RequestFinished,
    RowsLost,
    Welcome,
)
from protocol.patch import open_loss


class Streams:
    """Sessions and their sequences. `emit` takes effects; `changed` is called with a life whose answer may have
    changed. What was applied is acknowledged once the record that tells of it is safe."""

    def __init__(
        self,
        config: CoreConfig,
        state_id: str,
        arena: Arena,
        assembly: Assembly,
        lives: LifeTable,
        settlement: Settlement,
        journal: Journal,
        emit: Callable[[Effect], None],
        changed: Callable[[Life, float], None],
    ) -> None:
        self._config = config
        self._state_id = state_id
        self._arena = arena
        self._assembly = assembly
        self._lives = lives
        self._settlement = settlement
        self._journal = journal
        self._emit = emit
        self._changed = changed
        self.sessions: dict[str, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        self._unacked: dict[Session, None] = {}
        self._shedding = self._eased = False
        self.refused = 0
        self.gaps = 0
        self._numbered = 0
        self.shed = 0

    # ------------------------------------------------------------------ messages

    def patch(self, event: PatchArrived, now: float) -> None:
        """Apply a patch if it is the next message of its incarnation and the arena has room."""
        session = self._in_turn(event.peer, event.seq, now)
        if session is None:
            return
        try:
            applied = self._assembly.apply(session, event.patch, now)
        except ProtocolError as error:
            # Whose rows these were cannot be read either: anybody's may be missing now.
            self._lose_all(session, "a patch could not be read", now)
            self._refuse(session, event.seq, error.reason, str(error))
            return
        if not applied:
            session.stalled_at = now
            self._journal.moved(session)
            self._ack(session)
            return
        session.patches += 1
        session.rows += len(event.patch.rows)
        self._applied(session, event.seq)
        self._refill(now)

    def refusal(self, event: PatchRefused, now: float) -> None:
        """A patch that failed its checks takes its number and acts as a loss."""
        session = self._in_turn(event.peer, event.seq, now)
        if session is None:
            return
        if event.loss is not None:
            try:
                self._assembly.lose(session, event.loss, now)
            except ProtocolError:
                self._lose_all(session, "a refused patch could not be read", now)
        else:
            self._lose_all(session, "a refused patch could not be read", now)
        self._refuse(session, event.seq, event.code, event.message)

    def message(self, event: FromEngine, now: float) -> None:
        """Everything but patches."""
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.peer, message, now)
            return
        session = self.by_peer.get(event.peer)
        if session is None:
            self._emit(ToEngine(event.peer, HelloFirst()))
            return
        session.heard_at = now
        if isinstance(message, Heartbeat):
            if message.next_seq > session.next_seq and session.stalled_at is None:
                self._go_back(session)
            else:
                # Always answered: an Ack may have been lost on the way, and silence reads as a dead collector.
                self._unacked[session] = None
            return
        if isinstance(message, Bye):
            self._die(session, "its engine left", now)
            return
        if isinstance(message, RowsLost | Flushed | RequestFinished):
            if self._in_turn(event.peer, message.seq, now) is None:
                return
            self._control(session, message, now)

    def _control(self, session: Session, message: RowsLost | Flushed | RequestFinished, now: float) -> None:
        if isinstance(message, RowsLost):
            try:
                self._assembly.lose(session, open_loss(message), now)
            except ProtocolError as error:
                self._lose_all(session, "a loss could not be read", now)
                self._refuse(session, message.seq, error.reason, str(error))
                return
        else:
            life = self._lives.get(session, message.req_id)
            if life is not None:
                unsettled = life.takes_rows
                if isinstance(message, Flushed):
                    self._settlement.flushed(life, message.num_tokens, now)
                else:
                    self._settlement.finished(life, message.num_tokens, message.reason, message.detail, now)
                if unsettled:
                    self._changed(life, now)
        self._applied(session, message.seq)
        self._refill(now)

    def _hello(self, peer: bytes, hello: Hello, now: float) -> None:
        try:
            codec.check_id(hello.incarnation)
            codec.check_id(hello.engine_id)
            geometry = hello.geometry.validate()
            layout = self._arena.layout(geometry)
            if not 0 <= hello.first_seq <= limits.MAX_SEQ:
                raise ProtocolError("columns", f"first_seq must be in [0, {limits.MAX_SEQ}], got {hello.first_seq}")
        except (ProtocolError, GeometryError) as error:
            self._emit(ToEngine(peer, Refused("hello", str(error))))
            return
        # A shipper that knew another state puts one message in front: which of its lives must reopen as lost.
        known_elsewhere = hello.state_id not in ("", self._state_id) and hello.first_seq > 0
        lowest = hello.first_seq - known_elsewhere
        session = self.sessions.get(hello.incarnation)
        if session is None:
            if len(self.sessions) >= self._config.max_sessions and not self._forget_session():
                self._emit(ToEngine(peer, Refused("sessions", f"{len(self.sessions)} sessions are open")))
                return
            self._numbered += 1
            session = Session(self._numbered, hello.incarnation, hello.engine_id, geometry, layout, lowest - 1, now)
            session.acked = session.applied
            self.sessions[hello.incarnation] = session
            self._journal.said_hello(session)
        elif session.geometry != geometry:
            self._emit(ToEngine(peer, Refused("geometry", "an incarnation cannot change its geometry")))
            return
        elif lowest > session.next_seq:
            # Only acknowledged messages are forgotten by a shipper: this state is older than what it acknowledged.
            self._lose_all(session, "messages acknowledged elsewhere are not in this state", now)
            session.applied = session.acked = lowest - 1
            session.pending.clear()
            self._journal.moved(session)
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
        if (other := self.by_peer.get(peer)) is not None:
            other.peer = None
        if not session.alive:
            self._journal.moved(session)
        session.peer, session.heard_at, session.alive = peer, now, True
        self.by_peer[peer] = session
        session.stalled_at = None
        self._go_back(session)
        for life in session.lives.values():
            # The question, or its answer's connection, may have gone with the old one.
            if life.flush_asked is not None and life.takes_rows:
                self._emit(ToEngine(peer, Flush(life.req_id, life.flush_asked)))

    # ------------------------------------------------------------------ sequence

    def _in_turn(self, peer: bytes, seq: int, now: float) -> Session | None:
        """The session if `seq` is its next message; None when there is nothing to apply."""
        session = self.by_peer.get(peer)
        if session is None:
            self._emit(ToEngine(peer, HelloFirst()))
            return None
        session.heard_at = now
        if seq == session.next_seq:
            return None if session.stalled_at is not None else session
        if seq < session.next_seq:
            self._ack(session)
        elif session.stalled_at is None and session.told_gap != session.next_seq:
            # Once per gap: what is under way behind the gap would only repeat the answer.
            self._go_back(session)
        return None

    def _go_back(self, session: Session) -> None:
        self.gaps += 1
        session.told_gap = session.next_seq
        if session.acked >= 0:
            # A Welcome acknowledges nothing, for what was applied may be on no record yet; and the Ack of what is may
            # have gone with an old connection.
            self._unacked[session] = None
        assert session.peer is not None
        self._emit(ToEngine(session.peer, Welcome(self._state_id, session.next_seq, self._config.window_bytes)))

    def _applied(self, session: Session, seq: int) -> None:
        session.applied = seq
        session.opening.clear()
        self._journal.moved(session)
        session.pending.append((self._journal.number, seq))
        self._unacked[session] = None

    def _refuse(self, session: Session, seq: int, code: str, message: str) -> None:
        self.refused += 1
        if session.peer is not None:
            self._emit(ToEngine(session.peer, Refused(code, message, seq)))
        self._applied(session, seq)

    def restore(self, sessions: Iterable[Session]) -> None:
        """Sessions that a log tells of: their engines have a whole liveness time to come back."""
        for session in sessions:
            self.sessions[session.incarnation] = session
            self._numbered = max(self._numbered, session.number)

    def logged(self, record: int) -> None:
        """Acknowledge what is safe now, one Ack a session, however many messages; take back its pages."""
        came = self._arena.safe(record)
        if came or (self._eased and not self._arena.pages_in_limbo):
            self._resume()
        for session in list(self._unacked):
            while session.pending and session.pending[0][0] <= record:
                session.acked = session.pending.popleft()[1]
            self._ack(session)
            if not session.pending:
                self._unacked.pop(session, None)

    def _ack(self, session: Session) -> None:
        if session.peer is not None:
            window = 0 if session.stalled_at is not None else self._config.window_bytes
            self._emit(ToEngine(session.peer, Ack(self._state_id, session.acked, window)))

    def _refill(self, now: float) -> None:
        while self._assembly.too_long:
            life = self._assembly.too_long.pop()
            self._settlement.lost(life, "budget: longer than the whole arena holds", now)
            self._changed(life, now)
        while self._assembly.touched:
            life = self._assembly.touched.pop()
            self._settlement.refilled(life, now)
            self._changed(life, now)

    # ------------------------------------------------------------------ time and room

    def tick(self, now: float) -> None:
        """Dead emitters, and a full arena that nobody empties (rule 9)."""
        for session in list(self.sessions.values()):
            if session.alive and now - session.heard_at > self._config.liveness_s:
                self._die(session, f"its engine was silent for {self._config.liveness_s:g} s", now)
        stalled = [s.stalled_at for s in self.sessions.values() if s.stalled_at is not None]
        # What was given up a moment ago is room, as soon as its record is safe.
        if stalled and not self._eased and (self._shedding or now - min(stalled) >= self._config.grace_s):
            self._shed_youngest(now)

    def room(self) -> None:
        """Something was released: a next stall waits for its own grace time."""
        self._shedding = False
        self._eased = True

    def eased(self) -> None:
        """A life takes no more rows: what waits for room may need less of it, or find some."""
        self._eased = True

    def _resume(self) -> None:
        """Stalled engines try again."""
        self._eased = False
        for session in self.sessions.values():
            if session.stalled_at is not None:
                session.stalled_at = None
                if session.peer is not None:
                    self._go_back(session)

    def _shed_youngest(self, now: float) -> None:
        life = self._lives.youngest_open()
        if life is None:
            return
        self.shed += 1
        # Until something is released, a next stall need not wait its own grace time.
        self._shedding = True
        self._settlement.lost(life, "budget: the arena was full and nothing was released", now)
        self._changed(life, now)

    def _die(self, session: Session, why: str, now: float) -> None:
        session.alive = False
        session.stalled_at = None
        self._journal.moved(session)
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
            session.peer = None
        self._unacked.pop(session, None)
        self._lose_all(session, why, now)

    def _lose_all(self, session: Session, why: str, now: float) -> None:
        for life in list(session.lives.values()):
            if life.takes_rows:
                self._settlement.lost(life, why, now)
                self._changed(life, now)

    def _forget_session(self) -> bool:
        for key, session in self.sessions.items():
            if not session.alive and not session.lives:
                del self.sessions[key]
                self._journal.forgot(session)
                return True
        return False
