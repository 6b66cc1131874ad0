"""The eye on one collector state: what its core applied, in which order, and what it may not wait for or keep."""

from __future__ import annotations

from collections.abc import Sequence

from collector.core.collector import Collector
from collector.core.events import Effect, Event, FromEngine, PatchArrived, PatchRefused
from collector.core.life import Life, State
from collector.core.sessions import Session
from protocol.errors import ProtocolError
from protocol.messages import RequestFinished, RowsLost
from tests.sim.facts import Facts, Violation
from tests.sim.network import Frames
from tests.sim.options import Chaos
from tests.sim.reference import Key, Reference

LIVENESS_S = 6.0
GRACE_S = 1.0
TICK_S = 0.25
_CALMED_S = 10.0
_ANSWER_S = 5.0


class Watch:
    """Runs the core's events and compares. Raises Violation; writes into the facts which lives came to harm."""

    def __init__(self, core: Collector, chaos: Chaos, facts: Facts) -> None:
        self._core, self._chaos, self._facts = core, chaos, facts
        self.reference = Reference()
        self._heard: dict[str, float] = {}
        self._seen: set[Key] = set()
        self._gone: set[Key] = set()
        self.ahead: set[Key] = set()
        """Lives that a restart found unfinished: the arena may hold more of them than the records tell."""
        self._saved = Reference()
        self._there: dict[Key, State] = {}
        self._gone_on_record: set[Key] = set()

    def engine(self, peer: bytes, event: Event, frames: Frames, now: float) -> list[Effect]:
        """Handle an engine's message: applied in order, once, or not at all."""
        session = self._core.streams.by_peer.get(peer)
        if session is None:
            effects = self._core.handle(event, now)
            if (known := self._core.streams.by_peer.get(peer)) is not None:
                self._heard[known.incarnation] = now
            return effects
        self._heard[session.incarnation] = now
        before = session.applied
        states = {life: life.state for life in session.lives.values()}
        alive, stalled = session.alive, session.stalled_at is not None
        effects = self._core.handle(event, now)
        seq = _number(event)
        if seq is not None and session.applied != before:
            if not session.applied == before + 1 == seq:
                raise Violation(f"message {seq} applied behind {before}: {session.incarnation}")
            takes = {life.req_id: state in (State.OPEN, State.INCOMPLETE) for life, state in states.items()}
            self._applied(session, event, frames, takes)
            self._note_changes(states)
        self._chaos.note("stalled", session.stalled_at is not None and not stalled)
        if alive and not session.alive:
            self._harm_all(session, "engine left")
        self._note_shed()
        return effects

    def saved(self) -> None:
        """Everything until now is on record."""
        if self._chaos.options.kills:
            self.note_gone()
            self._saved = self.reference.copy()
            self._there = {_key(life): life.state for life in self._core.lives}
            self._gone_on_record = self._seen - self._there.keys()

    def follow(self, before: Watch, now: float) -> None:
        """The core was found again: everything on record must be there."""
        self.reference, self._saved = before._saved.copy(), before._saved
        self._there = before._there
        here = {_key(life): life.state for life in self._core.lives}
        if here.keys() != self._there.keys():
            raise Violation(f"on record: {sorted(self._there)}, found again: {sorted(here)}")
        for key, state in self._there.items():
            # What was torn or unproven is open again; holes may have been filled by what is on no record.
            allowed = {state, *((State.OPEN, State.COMPLETE) if state is State.INCOMPLETE else ())}
            if here[key] not in allowed:
                raise Violation(f"{key} was {state} on record and is {here[key]}")
        taking = (State.OPEN, State.INCOMPLETE)
        self.ahead = before.ahead | {key for key, state in self._there.items() if state in taking}
        self._gone, self._gone_on_record = set(before._gone_on_record), before._gone_on_record
        self._seen = self._gone | here.keys()
        self._heard = dict.fromkeys(self._core.streams.sessions, now)
        self._chaos.note("found_again", bool(here))

    def tick(self, event: Event, now: float, calm_at: float) -> list[Effect]:
        """Handle the passing of time. calm_at: since when no fault strikes, infinity before."""
        streams, retention = self._core.streams, self._core.retention
        alive = [session for session in streams.sessions.values() if session.alive]
        shed, expired = streams.shed, retention.expired
        effects = self._core.handle(event, now)
        for session in alive:
            if not session.alive:
                silent = now - self._heard.get(session.incarnation, 0.0)
                if silent < LIVENESS_S:
                    raise Violation(f"{session.incarnation} declared dead after {silent:.2f} s of silence")
                self._chaos.note("engine_declared_dead")
                self._harm_all(session, "declared dead")
        self._chaos.note("shed", streams.shed - shed)
        self._chaos.note("expired", retention.expired - expired)
        self._note_shed()
        self._check_pages()
        self._check_stalls(now)
        if now > calm_at + _CALMED_S:
            self._check_questions(now)
        self.note_gone()
        return effects

    def _note_shed(self) -> None:
        """For want of room: shed after the grace time, or at once where the whole arena is too small for it."""
        for life in self._core.lives:
            if life.state is State.LOST and life.reason.startswith("budget"):
                self._facts.lives[life.session.incarnation, life.req_id].harmed.add("shed")

    def note_gone(self) -> None:
        """A life that was released or expired is over: whatever still comes for it is dropped."""
        here = set(map(_key, self._core.lives))
        if back := here & self._gone:
            raise Violation(f"released or expired before, and here again: {sorted(back)}")
        self._gone |= self._seen - here
        self._seen |= here

    # ------------------------------------------------------------------ what was applied

    def _applied(self, session: Session, event: Event, frames: Frames, takes: dict[str, bool]) -> None:
        reference, who = self.reference, session.incarnation
        for name in [name for (inc, name) in reference.lives if inc == who and name not in session.lives]:
            del reference.lives[who, name]
        if isinstance(event, PatchArrived | PatchRefused):
            refused = isinstance(event, PatchRefused)
            try:
                if refused and event.loss is None:
                    raise ProtocolError("columns", "not even what was lost can be read")
                hurt = reference.patch(who, frames, session.geometry, takes, refused)
            except ProtocolError:
                # Anybody's rows may have been in it: every life of the incarnation is lost.
                self._chaos.note("unreadable_patch")
                self._harm_all(session, "unreadable patch")
                return
            if refused:
                self._harm(who, hurt, "patch refused")
        elif isinstance(event, FromEngine) and isinstance(event.message, RowsLost):
            hurt = reference.loss(who, event.message, takes)
            self._harm(who, hurt, "rows lost")
            self._chaos.note("rows_lost_applied")
            self._chaos.note("reopened_after_wipe", len(event.message.opens) == len(hurt) > 1)
        elif isinstance(event, FromEngine) and isinstance(event.message, RequestFinished):
            reference.finished(who, event.message)

    def _harm(self, incarnation: str, lives: Sequence[str], why: str) -> None:
        for life in lives:
            self._facts.lives[incarnation, life].harmed.add(why)

    def _harm_all(self, session: Session, why: str) -> None:
        for life in self._facts.lives.values():
            if life.incarnation == session.incarnation:
                life.harmed.add(why)

    def _note_changes(self, before: dict[Life, State]) -> None:
        for life, state in before.items():
            if state is State.INCOMPLETE:
                self._chaos.note("filled_later", life.state is State.COMPLETE)
                self._chaos.note("reopened_by_forward", life.state is State.OPEN)

    # ------------------------------------------------------------------ what must always hold

    def _check_pages(self) -> None:
        arena = self._core.arena
        owned = [page for life in self._core.lives.by_serial.values() for page in life.pages if page >= 0]
        free = arena.free_pages + arena.pages_in_limbo
        if len(set(owned)) != len(owned) or len(owned) + free != arena.pages:
            raise Violation(f"{len(owned)} pages owned, {free} free, of {arena.pages}")

    def _check_stalls(self, now: float) -> None:
        for session in self._core.streams.sessions.values():
            stalled = 0.0 if session.stalled_at is None else now - session.stalled_at
            # What was shed is room once its record is safe, which a full disk delays.
            waits = self._core.arena.pages_in_limbo > 0
            if not waits and stalled > GRACE_S + 2 * TICK_S and self._core.lives.youngest_open() is not None:
                raise Violation(f"{session.incarnation} stalled for {stalled:.1f} s, and nothing is shed")

    def _check_questions(self, now: float) -> None:
        for life in self._core.lives:
            asked = life.flush_asked is not None and life.takes_rows and life.session.peer is not None
            # Under a name that is another's too, every trainer may have stopped asking.
            asked = asked and len(self._facts.named[life.name]) == 1
            if asked and now - life.flush_asked_at > _ANSWER_S:
                raise Violation(f"{life.name}: asked for its end {now - life.flush_asked_at:.1f} s ago, never told")


def _key(life: Life) -> Key:
    return life.session.incarnation, life.req_id


def _number(event: Event) -> int | None:
    if isinstance(event, PatchArrived | PatchRefused):
        return event.seq
    return getattr(event.message, "seq", None) if isinstance(event, FromEngine) else None
