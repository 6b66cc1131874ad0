"""Rows fit beside the KV cache: the engine's planner knows what they cost, and nothing else of the cache changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import CompileConfig
from transformers.generation.continuous_batching import cache as engine

from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.engines.transformers import capture_routes
from engine_side.engines.transformers.declared import DeclaredBytes, declaring
from protocol.geometry import Geometry
from tests.engines.memory import Planned, allow, kv_bytes, make_processor, noting, sized
from tests.engines.running import batching

pytestmark = pytest.mark.timeout(240)

LIMIT = 24 << 20


class Stopped(Exception):
    """Raised where the engine would allocate."""


def test_declared_bytes_of_a_geometry() -> None:
    layout = RecordLayout.of(Geometry(4, (1, 2, 3), 8, 256))
    plain, compiled = DeclaredBytes.of(layout, False), DeclaredBytes.of(layout, True)
    assert (plain.slot, plain.batch_token) == (3 * 8 * 2 + 20, 48 + 16)
    assert (compiled.slot, compiled.batch_token) == (plain.slot, plain.batch_token + 3 * 8 * 4)
    # 10 blocks of 32 tokens, and the two that are never allocated: with the pad row, what a store of them takes.
    assert 10 * 32 * plain.slot + plain.beside(32) == SlotStore.declared_bytes(layout, 12 * 32)


def test_blocks_shrink_by_what_rows_cost_and_both_fit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, LIMIT)
    planned = noting(monkeypatch)
    _, bare = make_processor(model, sized())
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0) as capture:
        _, processor = make_processor(model, sized())
        (alive,) = capture._processors
        pipeline = alive().pipeline  # type: ignore[union-attr]
        store = pipeline.store
        assert store is not None
        without, within = planned
        assert within.batch_tokens == without.batch_tokens == 64
        assert pipeline.recorder.nbytes == 64 * RecordLayout.of(capture.geometry).stride
        # All that was planned, without rows, and the rows as they were allocated: inside, and not two blocks more.
        needed = without.planner.compute_memory_footprint
        slot, tokens = SlotStore.slot_bytes(store.layout), without.block_tokens
        rows = store.nbytes + pipeline.recorder.nbytes
        assert needed(64, within.blocks) + rows <= LIMIT
        assert needed(64, within.blocks + 2) + rows + 2 * tokens * slot > LIMIT
        assert store.nbytes == within.blocks * tokens * slot + LIMIT - within.planner.available_memory
        assert kv_bytes(processor.cache) + store.nbytes <= LIMIT
        cost = needed(64, 101) - needed(64, 100)
        assert within.blocks / without.blocks == pytest.approx(cost / (cost + tokens * slot), rel=0.02)
        assert within.blocks < without.blocks
        # Only the number of blocks differs.
        assert kv_bytes(processor.cache) * (without.blocks + 2) == kv_bytes(bare.cache) * (within.blocks + 2)
    assert engine.PagedAttentionMemoryHandler is type(without.planner)


def test_how_many_tokens_a_batch_has_is_settled_as_without_capture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = set()
    for limit in (1 << 30, 4 << 30, 16 << 30):
        with monkeypatch.context() as patch:
            allow(patch, limit)
            planned = noting(patch, Stopped())
            attempt(model)
            with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0):
                attempt(model)
            without, within = planned
            assert within.batch_tokens == without.batch_tokens
            assert within.blocks < without.blocks
            batches.add(without.batch_tokens)
    # 5.17 makes batches smaller where memory is short, 5.24 never does.
    assert len(batches) > 1 or batches == {8192}


def attempt(model: Any) -> None:
    with pytest.raises(Stopped):
        make_processor(model, sized(max_batch_tokens=None))


def test_a_number_of_blocks_that_is_given_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = noting(monkeypatch)
    make_processor(model, batching(num_blocks=40, max_batch_tokens=64))
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0):
        make_processor(model, batching(num_blocks=40, max_batch_tokens=64))
    assert [type(each.planner) for each in planned] == [engine.PagedAttentionMemoryHandler] * 2
    assert planned[0].blocks == planned[1].blocks == 40


def test_compiled_forwards_declare_their_copies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, LIMIT)
    planned = noting(monkeypatch, Stopped())
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0):
        for config in (sized(max_batch_tokens=256), sized(max_batch_tokens=256, varlen_compile_config=CompileConfig())):
            with pytest.raises(Stopped):
                make_processor(model, config)
    eager, compiled = planned
    cost = [each.planner.compute_memory_footprint(256, 100) for each in (eager, compiled)]
    assert cost[1] - cost[0] == 256 * 6 * 4 * 4


def test_caches_of_other_threads_are_none_of_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, LIMIT)
    planned: list[Planned] = noting(monkeypatch, Stopped())
    layout = RecordLayout.of(Geometry(4, (1, 2), 4, 32))

    def beside() -> None:
        with pytest.raises(Stopped):
            make_processor(model, sized())

    with declaring(DeclaredBytes.of(layout, False), sized()):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join(60.0)
        beside()
    beside()
    other, own, after = planned
    assert other.blocks == after.blocks > own.blocks
    assert type(other.planner) is type(after.planner) is engine.PagedAttentionMemoryHandler
