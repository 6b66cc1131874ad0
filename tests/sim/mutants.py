"""The system with one rule off: every one must be caught. They replace pieces of the real core, planner and shipper;
those of the slot store's rule replace it in the simulated cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import collector.core.journal as journal
import collector.core.queries as queries
import collector.daemon.ingest as ingest
from collector.core.arena import Arena
from collector.core.assembly import Assembly
from collector.core.collector import Collector
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.retention import Retention
from collector.core.serving import gather, header_for
from collector.core.settlement import Settlement
from collector.core.streams import Streams
from engine_side.export.planner import RoutePlanner
from engine_side.shipping.live import LiveLives
from engine_side.shipping.pack import Packer
from engine_side.shipping.stream import Stream
from protocol.messages import Flush, Kind
from tests.sim.cache import Cache

Change = tuple[Any, str, Any]
"""(owner, attribute, what it becomes)."""


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what a rule does."""


def _kind() -> list[Change]:
    """The sampled position of a resume is `recompute`, as if shipped once were shipped for good."""
    original, following = RoutePlanner.plan, {}

    def plan(self: RoutePlanner, batch: Any, weight_version: int) -> Any:
        accepted = list(batch.accepted)
        for i, life in enumerate(batch.lives):
            start, stop = batch.starts[i], batch.starts[i] + batch.counts[i]
            expected, resumed = following.get((id(self), life), (0, False))
            resumed = start >= 0 and (resumed or start < expected) and start < accepted[i] - 1
            if resumed and stop >= accepted[i]:
                accepted[i] += 1
            following[id(self), life] = (stop, resumed)
        return original(self, replace(batch, accepted=accepted), weight_version)

    return [(RoutePlanner, "plan", plan)]


def _life() -> list[Change]:
    """A life is whoever carries the client's id."""
    original = LifeTable.open

    def open_(self: LifeTable, session: Any, req_id: str, name: str, now: float) -> Any:
        for life in self.named(name):
            if life.takes_rows and req_id not in session.lives and life.session.layout is session.layout:
                session.lives[req_id] = life
                self._lives[session.incarnation, req_id] = life
                session.forget_batch()
                return life
        return original(self, session, req_id, name, now)

    def close(self: LifeTable, life: Life) -> None:
        self.free_rows(life)
        for key in [key for key, one in self._lives.items() if one is life]:
            del self._lives[key]
        for key in [key for key, one in life.session.lives.items() if one is life]:
            del life.session.lives[key]
        self.by_serial.pop(life.serial, None)
        if life in self._names.get(life.name, []):
            self._names[life.name].remove(life)
            self._free.append(life.slot)

    return [(LifeTable, "open", open_), (LifeTable, "close", close)]


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


def _flushed_behind() -> list[Change]:
    """`Flushed` overtakes what was launched before the question was read."""
    original = Stream.hear

    def hear(self: Stream, message: Any) -> None:
        original(self, message)
        if isinstance(message, Flush):
            self.queue.appendleft(self.queue.pop())

    return [(Stream, "hear", hear)]


def _device_starts() -> list[Change]:
    """Starts are the host's optimistic guess, not the device's."""
    original, following = Packer.step, {}

    def step(self: Packer, landing: Any) -> Any:
        plan, positions = landing.plan, landing.positions.copy()
        for i, life in enumerate(plan.req_ids):
            part = slice(int(plan.offsets[i]), int(plan.offsets[i + 1]))
            count = part.stop - part.start
            if plan.starts[i] < 0 and (id(self), life) in following:
                first = following[id(self), life]
                positions[part] = np.arange(first, first + count)
            if plan.kinds[i] != Kind.CACHED:
                following[id(self), life] = int(positions[part.start]) + count
        landing.positions = positions
        return original(self, landing)

    return [(Packer, "step", step)]


def _stamp() -> list[Change]:
    """A row read back is proven by its token."""
    return [(Cache, "proves", lambda _self, stored, token, _position, _step: stored.fact.token == token)]


def _rows_lost() -> list[Change]:
    """Nothing stands in the sequence in place of what was dropped."""
    original = Stream._declare_lost

    def declare_lost(self: Stream, plan: Any, starts: Any = None) -> None:
        if plan.opens:
            original(self, plan, starts)

    return [(Stream, "_declare_lost", declare_lost)]


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


def _lost_forward() -> list[Change]:
    """A lost forward does not end its life."""
    original = Assembly.lose

    def lose(self: Assembly, session: Any, loss: Any, now: float) -> None:
        original(self, session, replace(loss, kinds=np.full_like(loss.kinds, Kind.REPAIR)), now)

    return [(Assembly, "lose", lose)]


def _in_place(self: Assembly, life: Life, start: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
    """Write a segment over whatever is there, and leave what follows it."""
    layout, slot, stop = life.session.layout, life.slot, start + len(meta)
    end = int(self._lives.end[slot])
    at = np.arange(start, stop)
    page, cell = self._cells(life, at)
    old = np.where(at < end, layout.meta[page, cell], 0)
    layout.meta[page, cell] = np.where(keep, meta, old)
    layout.rows[page[keep], cell[keep]] = rows[keep]
    layout.seal[page[keep], cell[keep]] = seal[keep]
    if stop >= end:
        self._lives.end[slot] = stop
        self._set_tail(life, stop - 1)


def _truncation() -> list[Change]:
    """A forward writes its rows and leaves those behind them."""
    original = Assembly._write

    def write(self: Assembly, life: Life, start: int, kind: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
        if kind == Kind.FORWARD and start < self._lives.end[life.slot]:
            self._lives.last_forward[life.slot] = start
            _in_place(self, life, start, rows, meta, seal, keep)
        else:
            original(self, life, start, kind, rows, meta, seal, keep)

    return [(Assembly, "_write", write)]


def _fill() -> list[Change]:
    """The other kinds overwrite too."""
    original = Assembly._write

    def write(self: Assembly, life: Life, start: int, kind: int, rows: Any, meta: Any, seal: Any, keep: Any) -> None:
        if kind != Kind.FORWARD and start <= self._lives.end[life.slot]:
            _in_place(self, life, start, rows, meta, seal, keep)
        else:
            original(self, life, start, kind, rows, meta, seal, keep)

    return [(Assembly, "_write", write)]


def _bad_rows() -> list[Change]:
    """Rows that are not clean are held."""
    original = ingest.open_patch

    def open_patch(*args: Any) -> Any:
        return replace(original(*args), bad=np.zeros(0, np.int64))

    return [(ingest, "open_patch", open_patch)]


def _trim() -> list[Change]:
    """An aborted request serves whatever it holds."""
    original = Settlement._abort
    return [(Settlement, "_abort", lambda self, life, _n, now: original(self, life, 1 << 20, now))]


def _final() -> list[Change]:
    """A complete request takes what comes late."""
    taking = (State.OPEN, State.INCOMPLETE, State.COMPLETE)
    return [(Life, "takes_rows", property(lambda self: self.state in taking))]


def _incomplete() -> list[Change]:
    """An incomplete request takes nothing any more."""
    return [(Life, "takes_rows", property(lambda self: self.state is State.OPEN))]


def _ring() -> list[Change]:
    """The ring slot is given back before it was copied."""
    original = Packer.step

    def step(self: Packer, landing: Any) -> Any:
        landing.rows.fill(3)
        return original(self, landing)

    return [(Packer, "step", step)]


def _clear() -> list[Change]:
    """A page shows its last owner where its new one left a hole."""
    return [(Assembly, "_clear", _nothing)]


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


def _reopen() -> list[Change]:
    """A wiped collector is not told again of what is under way."""
    return [(LiveLives, "opened_before", lambda _self, _seq: [])]


def _ask_again() -> list[Change]:
    """A question that was dropped is not asked again."""
    return [(queries, "_ASK_AGAIN_S", float("inf"))]


def _of_others() -> list[Change]:
    """A length settles a request whose tokens are not the ones it came with."""
    return [(Settlement, "_is_of_others", lambda _self, _life, _num_tokens: False)]


def _released_again() -> list[Change]:
    """A patch that waited for room reopens what was released meanwhile."""
    original = LifeTable.open

    def open_(self: LifeTable, session: Any, req_id: str, name: str, now: float) -> Any:
        session.opening.clear()
        return original(self, session, req_id, name, now)

    return [(LifeTable, "open", open_)]


def _before_the_record() -> list[Change]:
    """What was applied is acknowledged before any record tells of it."""
    original = Streams._applied

    def applied(self: Streams, session: Any, seq: int) -> None:
        original(self, session, seq)
        session.pending[-1] = (0, seq)

    return [(Streams, "_applied", applied)]


def _limbo() -> list[Change]:
    """Pages are written again before the record that freed them."""
    return [(Arena, "give", lambda self, pages, _record: self._free.extend(pages))]


def _seals() -> list[Change]:
    """What was half written counts."""

    def intact(_: Any, _life: Life, start: int, stop: int) -> Any:
        return np.ones(stop - start, np.bool_)

    return [(Assembly, "intact", intact)]


def _found_waiting() -> list[Change]:
    """A restarted collector forgets what a waiting patch had opened."""
    return [(journal, "_opening", lambda _session: ())]


MUTANTS: dict[str, Callable[[], list[Change]]] = {
    "kind": _kind,
    "life": _life,
    "barrier": _barrier,
    "barrier behind its rows": _flushed_behind,
    "device starts": _device_starts,
    "stamp": _stamp,
    "rows lost": _rows_lost,
    "order": _order,
    "once": _once,
    "lost forward ends": _lost_forward,
    "forward truncates": _truncation,
    "fills only fill": _fill,
    "bad rows are missing": _bad_rows,
    "aborted is trimmed": _trim,
    "complete is final": _final,
    "incomplete can be filled": _incomplete,
    "ring slot copied first": _ring,
    "holes are cleared": _clear,
    "released is not served": _pages,
    "answer of one moment": _newer_rows,
    "loss ends a streak": _streak,
    "wiped is told again": _reopen,
    "dropped question asked again": _ask_again,
    "length with other tokens": _of_others,
    "released stays released": _released_again,
    "record before ack": _before_the_record,
    "freed pages wait for their record": _limbo,
    "cells are sealed": _seals,
    "found with what it opened": _found_waiting,
    "stalled is shed": lambda: [(Streams, "_shed_youngest", _nothing)],
    "gap is answered": lambda: [(Streams, "_go_back", _nothing)],
    "open has its time": lambda: [(Retention, "_forget_idle", lambda _self, _now: False)],
}
"""By the rule that is off."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The system without rule `name`."""
    changes = [(owner, attribute, getattr(owner, attribute), new) for owner, attribute, new in MUTANTS[name]()]
    for owner, attribute, _, new in changes:
        setattr(owner, attribute, new)
    try:
        yield
    finally:
        for owner, attribute, old, _ in reversed(changes):
            setattr(owner, attribute, old)
