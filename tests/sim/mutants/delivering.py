"""What is applied, when, and what is answered: streams, queries and retention with a rule off."""

from __future__ import annotations

from typing import Any

import collector.core.queries as queries
from collector.core.assembly import Assembly
from collector.core.collector import Collector
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.retention import Retention
from collector.core.serving import gather, header_for
from collector.core.streams import Streams
from tests.sim.mutants.change import Change, Mutants, nothing


def _barrier() -> list[Change]:
    """A trainer's length is an end."""
    said: list[tuple[Life, int]] = []
    handle = Collector.handle

    def ask_flush(_: Any, life: Life, pull: Any, _now: float) -> None:
        if pull.num_tokens is not None:
            said.append((life, pull.num_tokens))

    def handle_and_count(self: Collector, event: Any, now: float) -> list[Any]:
        effects = handle(self, event, now)
        while said:
            life, life.flush_asked = said.pop()
            self.settlement.flushed(life, life.flush_asked, now)
            self._changed(life, now)
            effects += self._out
            self._out.clear()
        return effects

    return [(queries.Queries, "_ask_flush", ask_flush), (Collector, "handle", handle_and_count)]


def _order() -> list[Change]:
    """What arrives is applied, whatever its number."""
    return [(Streams, "_in_turn", lambda self, peer, _seq, _now: self.by_peer.get(peer))]


def _once() -> list[Change]:
    """What was applied is applied again when it comes again."""
    original = Streams._in_turn

    def in_turn(self: Streams, peer: bytes, seq: int, now: float) -> Any:
        session = self.by_peer.get(peer)
        if session is not None and 0 <= seq < session.next_seq and session.stalled_at is None:
            session.applied = seq - 1
        return original(self, peer, seq, now)

    return [(Streams, "_in_turn", in_turn)]


def _pages() -> list[Change]:
    """A released request is still sent, from pages that may be another's."""
    original, kept = LifeTable.free_rows, {}

    def free_rows(self: LifeTable, life: Life) -> None:
        if life.pages:
            kept[life] = life.pages
        original(self, life)

    def send(self: Collector, effect: Any, _now: float) -> Any:
        effect.life.pages = kept.get(effect.life, effect.life.pages)
        try:
            return gather(self.assembly, effect.life, effect.header)
        finally:
            if effect.life in kept:
                effect.life.pages = []

    return [(Collector, "gather", send), (LifeTable, "free_rows", free_rows)]


def _newer_rows() -> list[Change]:
    """An answer shows what came after its header was made."""

    whole = Collector.gather

    def send(self: Collector, effect: Any, now: float) -> Any:
        life, header = effect.life, effect.header
        if life.serial not in self.lives.by_serial or life.state in (State.LOST, State.FAILED):
            return whole(self, effect, now)
        return gather(self.assembly, life, header_for(self.assembly, life, effect.pull, header.num_tokens))

    return [(Collector, "gather", send)]


def _streak() -> list[Change]:
    """A loss does not end a streak of decode steps."""
    original = Assembly.lose

    def lose(self: Assembly, session: Any, loss: Any, now: float) -> None:
        streak = session.streak
        original(self, session, loss, now)
        if session.batch is not None and session.batch.ids == loss.ids and not loss.opens:
            session.streak = streak

    return [(Assembly, "lose", lose)]


def _ask_again() -> list[Change]:
    """A question that was dropped is not asked again."""
    return [(queries, "_ASK_AGAIN_S", float("inf"))]


def _released_again() -> list[Change]:
    """A patch that waited for room reopens what was released meanwhile."""
    original = LifeTable.open

    def open_(self: LifeTable, session: Any, req_id: str, name: str, now: float) -> Any:
        session.opening.clear()
        return original(self, session, req_id, name, now)

    return [(LifeTable, "open", open_)]


MUTANTS: Mutants = {
    "barrier": _barrier,
    "order": _order,
    "once": _once,
    "released is not served": _pages,
    "answer of one moment": _newer_rows,
    "loss ends a streak": _streak,
    "dropped question asked again": _ask_again,
    "released stays released": _released_again,
    "stalled is shed": lambda: [(Streams, "_shed_youngest", nothing)],
    "gap is answered": lambda: [(Streams, "_go_back", nothing)],
    "open has its time": lambda: [(Retention, "_forget_idle", lambda _self, _now: False)],
}
"""By the rule that is off."""
