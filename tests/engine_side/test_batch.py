"""One walk over an engine's batch: what runs for whom, in which slots, found where."""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState

from engine_side.engines.transformers.batch import Survey, Surveyor
from engine_side.engines.transformers.compat import PagedSlots
from engine_side.engines.transformers.lives import Lives, Names
from engine_side.engines.transformers.stats import CaptureStats

PAGE = 16


class FullAttentionCacheAllocator:
    """Stands for the class of that name in transformers' cache."""

    tokens_per_page = PAGE
    blocks_per_sector = 1
    block_physical_stride = 4 * PAGE

    def __init__(self) -> None:
        self.block_table: dict[str, list[int]] = {}


class Engine:
    """As much of an engine as the walk looks at."""

    def __init__(self) -> None:
        self.allocator = FullAttentionCacheAllocator()
        cache = SimpleNamespace(cache_allocators={"full_attention": self.allocator}, num_sectors=70_000)
        self.slots = PagedSlots(cache)
        self.lives = Lives(itertools.count(1), Names())
        self.counts = CaptureStats()
        self.surveyor = Surveyor(self.lives, self.slots, self.counts)

    def ran(self, state: Any, start: int, length: int, remaining: int = 0) -> SimpleNamespace:
        """`state` as it stands in the batch after a step over [start, start + length)."""
        state.position_offset = start + length
        state.remaining_prefill_tokens = state.initial_tokens[len(state.initial_tokens) - remaining :]
        return SimpleNamespace(state=state, query_length=length, has_new_token=not remaining)

    def walk(self, *batch: SimpleNamespace) -> Survey:
        return self.surveyor.survey(batch)

    def give_blocks(self, state: Any, *blocks: int) -> Any:
        self.allocator.block_table[state.request_id] = list(blocks)
        return state


def _state(name: str, tokens: int, children: int = 0) -> Any:
    return RequestState(request_id=name, initial_tokens=list(range(tokens)), num_children=children)


def test_slots_are_those_of_a_position_by_position_walk(seed: int) -> None:
    engine, chance = Engine(), random.Random(seed)
    blocks = chance.sample(range(1000), 12)
    engine.give_blocks(_state("a", 1), *blocks)
    for _ in range(500):
        start = chance.randrange(0, 12 * PAGE)
        stop = chance.randint(start + 1, 12 * PAGE)
        found = engine.slots.of("a", start, stop)
        assert found.tolist() == [blocks[p // PAGE] * PAGE + p % PAGE for p in range(start, stop)]
    assert engine.slots.of_blocks([3, 1]).tolist() == [*range(48, 64), *range(16, 32)]


def test_a_prefix_hit_asks_for_just_the_rows_in_front_of_it() -> None:
    engine = Engine()
    state = engine.give_blocks(_state("a", 40), 7, 5, 9)
    found = engine.walk(engine.ran(state, 32, 8))
    assert (found.hits.starts, found.hits.counts) == ([0], [32])
    assert [x.tolist() for x in found.hits.slots] == [[*range(112, 128), *range(80, 96)]]
    assert [x.tolist() for x in found.hits.tokens] == [list(range(32))]
    assert found.scheduled.opens == [(0, "a")]
    assert engine.walk(engine.ran(state, 40, 1)).hits.lives == []


def test_a_parent_that_only_waits_opens_nothing_and_shifts_nobodys_opening() -> None:
    engine = Engine()
    parent = engine.give_blocks(_state("p", 33, children=1), 1, 2, 3)
    other = engine.give_blocks(_state("q", 5), 4)
    found = engine.walk(engine.ran(parent, 32, 0, remaining=1), engine.ran(other, 0, 5))
    assert found.scheduled.opens == [(0, "q")]
    assert found.num_tokens == 5
    child = engine.give_blocks(parent.fork("p__child#0"), 1, 2, 8)
    parent.num_children = child.num_children = 0
    found = engine.walk(engine.ran(parent, 32, 1), engine.ran(child, 32, 1))
    assert found.scheduled.opens == [(0, "p#0"), (1, "p#1")]
    assert found.hits.counts == [32, 32]
    assert found.forked_rows == 32


def test_a_stop_before_a_fork_is_no_chunk() -> None:
    engine = Engine()
    parent = engine.give_blocks(_state("p", 20, children=2), 1, 2)
    engine.walk(engine.ran(parent, 0, 19, remaining=1))
    assert engine.counts.chunked_prefills == 0
    plain = engine.give_blocks(_state("q", 20), 3, 4)
    engine.walk(engine.ran(plain, 0, 19, remaining=1))
    assert engine.counts.chunked_prefills == 1


def test_a_preempted_request_is_the_same_life_and_reads_its_prefix_again() -> None:
    engine = Engine()
    state = engine.give_blocks(_state("a", 20), 1, 2, 3)
    first = engine.walk(engine.ran(state, 0, 20))
    state.generated_tokens.append(99)
    again = state.create_equivalent_initial_request()
    state._status = type(state.status).FINISHED
    engine.give_blocks(again, 6, 2)
    second = engine.walk(engine.ran(again, 16, 5))
    assert first.scheduled.lives == second.scheduled.lives
    assert engine.counts.preemptions == 1
    assert (second.hits.starts, second.hits.counts) == ([0], [16])
    assert second.scheduled.accepted == [21]
    assert second.scheduled.opens == []


def test_a_decode_batch_that_goes_on_is_not_walked_and_says_the_same(seed: int) -> None:
    """Runs of decode steps, with requests that end and come: beside a walk that knows no short cut."""
    chance = random.Random(seed)
    engine, other = Engine(), Engine()
    for each in (engine, other):
        each.states = {}  # type: ignore[attr-defined]
    at: dict[str, int] = {}
    for _ in range(200):
        if chance.random() < 0.2 or not at:
            name, prompt = f"r{len(engine.lives._lives)}-{chance.random()}", chance.randint(1, 6)
            for each in (engine, other):
                each.states[name] = each.give_blocks(_state(name, prompt), 1)  # type: ignore[attr-defined]
            at[name] = 0
        if chance.random() < 0.1 and len(at) > 1:
            gone = chance.choice(list(at))
            del at[gone]
            for each in (engine, other):
                each.lives.end(gone)
        running = [name for name in at if chance.random() > 0.02]
        seen = []
        for each in (engine, other):
            batch = []
            for name in running:
                state = each.states[name]  # type: ignore[attr-defined]
                length = len(state.initial_tokens) if not at[name] else 1
                batch.append(each.ran(state, at[name], length))
            if each is other:
                each.surveyor._catch_up()
            seen.append(each.walk(*batch))
        for name in running:
            at[name] += len(engine.states[name].initial_tokens) if not at[name] else 1  # type: ignore[attr-defined]
        one, two = ((tuple(x.scheduled.lives), list(map(int, x.scheduled.starts)), x.num_tokens) for x in seen)
        assert one == two
        assert [getattr(x.scheduled, "opens", []) for x in seen] == [seen[1].scheduled.opens] * 2
    assert engine.counts == other.counts


def test_slots_on_the_device_are_those_of_the_host(seed: int) -> None:
    """Both ways the engine says them: indices to write, and a table of pages for the decode path."""
    engine, chance = Engine(), random.Random(seed)
    stride = engine.allocator.block_physical_stride
    tables = [chance.sample(range(500), 5) for _ in range(6)]
    at = [chance.randrange(5 * PAGE) for _ in tables]
    for i, blocks in enumerate(tables):
        engine.give_blocks(_state(str(i), 1), *blocks)
    expected = [int(engine.slots.of(str(i), p, p + 1)[0]) for i, p in enumerate(at)]
    written = torch.tensor([[blocks[p // PAGE] * stride + p % PAGE for blocks, p in zip(tables, at, strict=True)]])
    assert engine.slots.on_device({"write_index": written}).tolist() == expected
    # Pages of all the group's layers lie next to each other; a request that only pads has none.
    pages = torch.tensor([[[b * (stride // PAGE) for b in blocks] for blocks in tables] + [[-1] * 5]])
    positions = torch.tensor([[*at, 0]])
    found = engine.slots.on_device({"block_table": pages, "position_ids": positions}).tolist()
    assert found[:-1] == expected
    assert found[-1] < 0


def test_a_decode_step_costs_little_a_request_whatever_the_context() -> None:
    """An array a request took 1,500 us for the slots of 256 alone."""
    engine = Engine()
    states = [engine.give_blocks(_state(str(i), 1), *range(i * 250, i * 250 + 250)) for i in range(256)]
    best = float("inf")
    for step in range(3_000, 3_020):
        batch = [engine.ran(state, step, 1) for state in states]
        began = time.perf_counter()
        engine.walk(*batch)
        best = min(best, time.perf_counter() - began)
    assert best < 1e-3, f"{best * 1e6:.0f} us"
