"""One walk over a batch of the engine: what it runs, for whom, and what it found in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_side.engines.transformers.compat import PagedSlots
from engine_side.engines.transformers.lives import Life, Lives
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.export.pipeline import PrefixHits
from engine_side.export.planner import DecodeBatch, ScheduledBatch


@dataclass(slots=True)
class Survey:
    """A batch as the planner wants it, the tokens it runs, and its prefix hits, `forked_rows` of them a fork's."""

    scheduled: ScheduledBatch | DecodeBatch
    num_tokens: int
    hits: PrefixHits
    forked_rows: int = 0


class Surveyor:
    """Walks the `FutureRequestState`s of each step. A decode batch of the same requests as the step before is not
    walked at all: what it runs follows from what it ran."""

    def __init__(self, lives: Lives, slots: PagedSlots, counts: CaptureStats) -> None:
        self._lives = lives
        self._slots = slots
        self._counts = counts
        self._states: list[Any] = []
        self._ids: tuple[str, ...] = ()
        self._ran: list[Life] = []
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)

    def survey(self, batch: Sequence[Any]) -> Survey:
        """Of a batch that was launched, whose tokens may not be accepted yet."""
        states = [future.state for future in batch]
        same = len(states) == len(self._states) > 0 and all(map(is_, states, self._states))
        if same and [future.query_length for future in batch].count(1) == len(states):
            self._starts = self._starts + 1
            return Survey(DecodeBatch(self._ids, self._starts), len(states), PrefixHits())
        self._catch_up()
        return self._walk(batch, states)

    def _catch_up(self) -> None:
        """Write down where the requests of the decode batches that were not walked have got to."""
        for life, start in zip(self._ran, self._starts.tolist(), strict=True):
            life.next = start + 1
        self._states, self._ran, self._starts = [], [], np.zeros(0, np.int64)

    def _walk(self, batch: Sequence[Any], states: list[Any]) -> Survey:
        ids: list[str] = []
        ran: list[Life] = []
        starts: list[int] = []
        lengths: list[int] = []
        accepted: list[int] = []
        opens: list[tuple[int, str]] = []
        found = Survey(ScheduledBatch((), (), (), ()), 0, PrefixHits())
        find = self._lives.find
        decoding = True
        for future, state in zip(batch, states, strict=True):
            length = future.query_length
            life = find(state.request_id)
            if length == 1 and life is not None and life.state is state and life.opened and future.has_new_token:
                start = state.position_offset - 1
                if start == life.next:
                    # What nearly every entry is: a request that goes on decoding.
                    life.next = start + 1
                    ids.append(life.life_id)
                    ran.append(life)
                    starts.append(start)
                    lengths.append(1)
                    accepted.append(start + 1)
                    continue
            if not length:
                # All but the last token of the prompt was in the cache: it only waits to be forked.
                self._lives.of(state)
                decoding = False
                continue
            life = self._lives.of(state)
            start = state.position_offset - length
            self._look_up(found, life, state, start)
            if not life.opened:
                life.opened = True
                opens.append((len(ids), life.name))
            life.forked = False
            life.next = start + length
            # A request that is to be forked stops one token short of its prompt's end: that is no chunk.
            if not future.has_new_token and len(state.remaining_prefill_tokens) > (state.num_children > 0):
                self._counts.chunked_prefills += 1
            decoding &= length == 1 and future.has_new_token
            ids.append(life.life_id)
            ran.append(life)
            starts.append(start)
            lengths.append(length)
            accepted.append(len(state.initial_tokens) + len(state.generated_tokens))
        found.scheduled = ScheduledBatch(tuple(ids), starts, lengths, accepted, opens)
        found.num_tokens = sum(lengths)
        if decoding and ids:
            self._states, self._ids, self._ran = states, tuple(ids), ran
            self._starts = np.asarray(starts, np.int64)
        return found

    def _look_up(self, found: Survey, life: Life, state: Any, start: int) -> None:
        """Note a preemption, or the rows in front of `start` that this request found in the cache."""
        if start < life.next:
            self._counts.preemptions += 1
            life.next = 0
        if start > life.next:
            hits, count = found.hits, start - life.next
            hits.lives.append(life.life_id)
            hits.starts.append(life.next)
            hits.counts.append(count)
            hits.slots.append(self._slots.of(state.request_id, life.next, start))
            hits.tokens.append(np.asarray(state.initial_tokens[life.next : start], np.int32))
            if life.forked:
                found.forked_rows += count
