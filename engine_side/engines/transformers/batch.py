"""One walk over a batch of the engine: what it runs, for whom, into which slots, and what it found in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_side.engines.transformers.compat import PagedSlots
from engine_side.engines.transformers.lives import Lives
from engine_side.engines.transformers.stats import CaptureStats
from engine_side.export.planner import ScheduledBatch


@dataclass(slots=True)
class PrefixHits:
    """Rows that some other forward computed, one entry a request; slots and tokens run over all entries' rows."""

    lives: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    forked_rows: int = 0


@dataclass(slots=True)
class Survey:
    """A batch as the planner wants it, the slot of each of its `num_tokens` tokens, and its prefix hits."""

    scheduled: ScheduledBatch
    num_tokens: int
    slots: list[int]
    hits: PrefixHits


def survey(batch: Sequence[Any], lives: Lives, slots: PagedSlots, counts: CaptureStats) -> Survey:
    """Walk the `FutureRequestState`s of a step that has run and whose tokens are not accepted yet."""
    ids: list[str] = []
    starts: list[int] = []
    lengths: list[int] = []
    accepted: list[int] = []
    opens: list[tuple[int, str]] = []
    written: list[int] = []
    hits = PrefixHits()
    for future in batch:
        state, length = future.state, future.query_length
        life = lives.of(state)
        if not length:
            # All but the last token of the prompt was in the cache: it only waits to be forked.
            continue
        start = state.position_offset - length
        if start < life.next:
            counts.preemptions += 1
            life.next = 0
        if start > life.next:
            count = start - life.next
            hits.lives.append(life.life_id)
            hits.starts.append(life.next)
            hits.counts.append(count)
            slots.extend(hits.slots, state.request_id, life.next, start)
            hits.tokens.extend(state.initial_tokens[life.next : start])
            if life.forked:
                hits.forked_rows += count
        if not life.opened:
            life.opened = True
            opens.append((len(ids), life.name))
        life.forked = False
        life.next = start + length
        # A request that is to be forked stops one token short of its prompt's end: that is no chunk.
        if not future.has_new_token and len(state.remaining_prefill_tokens) > (state.num_children > 0):
            counts.chunked_prefills += 1
        ids.append(life.life_id)
        starts.append(start)
        lengths.append(length)
        accepted.append(len(state.initial_tokens) + len(state.generated_tokens))
        slots.extend(written, state.request_id, start, start + length)
    return Survey(ScheduledBatch(ids, starts, lengths, accepted, opens), sum(lengths), written, hits)
