"""Answers for people: one request's story, a page of the list, the counters."""

from __future__ import annotations

import numpy as np

from collector.core.arena import meta_kinds, meta_versions
from collector.core.assembly import Assembly
from collector.core.life import Life, State
from collector.core.lives import LifeTable
from collector.core.serving import spans
from protocol import limits
from protocol.messages import Describe, Description, LifeStory, List, ListEntry, Listing

_ADVICE = {
    State.OPEN: "rows are coming; it settles when the engine says the end, or when a pull gives num_tokens",
    State.COMPLETE: "pull it, then release it",
    State.INCOMPLETE: "rows were lost on the way; pull with partial=True for what is here, or roll out again",
    State.ABORTED: "pull with partial=True for its prefix, or release it",
    State.LOST: "nobody can fill it any more: roll out again; see the reason",
    State.FAILED: "the engine could not vouch for its rows: see the reason and the engine's log",
}


class Stories:
    """Read-only views of the lives. Ages are seconds; a List page has at most `limits.MAX_LIST` entries."""

    def __init__(self, lives: LifeTable, assembly: Assembly) -> None:
        self._lives = lives
        self._assembly = assembly

    def describe(self, ask: Describe, now: float) -> Description:
        """Every life of a name, in full."""
        lives = self._lives.named(ask.request_id)[:16]
        return Description(ask.nonce, tuple(self._story(life, now) for life in lives))

    def page(self, ask: List, now: float) -> Listing:
        """One page of lives by age, oldest first."""
        limit = max(1, min(ask.limit, limits.MAX_LIST))
        entries: list[ListEntry] = []
        cursor = last = 0
        for serial, life in self._lives.by_serial.items():
            if serial <= ask.after or (ask.state and life.state != ask.state):
                continue
            if len(entries) == limit:
                cursor = last
                break
            entries.append(self._entry(life, now))
            last = serial
        return Listing(ask.nonce, tuple(entries), cursor, len(self._lives))

    def _entry(self, life: Life, now: float) -> ListEntry:
        rows = int(self._lives.end[life.slot]) if life.pages else 0
        age = now - life.opened_at
        return ListEntry(life.name, life.session.engine_id, str(life.state), rows, life.num_tokens, age)

    def _story(self, life: Life, now: float) -> LifeStory:
        end = int(self._lives.end[life.slot]) if life.pages else 0
        meta = self._assembly.meta(life, 0, end)
        held = meta != 0
        until = max(end, life.num_tokens - 1 if life.num_tokens else 0)
        return LifeStory(
            request_id=life.name,
            life=life.req_id,
            engine_id=life.session.engine_id,
            incarnation=life.session.incarnation,
            state=str(life.state),
            reason=life.reason,
            rows=int(held.sum()),
            end=end,
            num_tokens=life.num_tokens,
            age_s=now - life.opened_at,
            missing=self._assembly.missing(life, until)[:64] if life.pages else (),
            weight_spans=spans(np.where(held, meta_versions(meta), -1), 0)[:64],
            provenance=spans(np.where(held, meta_kinds(meta), -1), 0)[:64],
            events=tuple((now - at, text) for at, text in life.events),
            advice=_ADVICE[life.state],
        )
