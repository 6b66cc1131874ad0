"""What was asked about device memory: a drafter's writes, slots used again, bytes, and what sleep may free."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.capture.records import UNCAPTURED_LAYER, UNPROVEN, RecordLayout
from engine_side.capture.slot_store import STAMP_BYTES, SlotStore
from engine_side.engines.transformers import capture_routes
from engine_side.export.pipeline import CapturePipeline, PrefixHits
from engine_side.export.planner import ScheduledBatch
from protocol.geometry import Geometry
from tests.engine_side.rig import DEVICE, Queue, choices, rig, signed, tensor
from tests.engines.running import batching, generation
from tests.harness.tiny import load_tiny

GEOMETRY = Geometry(5, (1, 3), 2, 8)
SLOTS = 16


def _pipeline() -> tuple[CapturePipeline, Queue]:
    queue = Queue()
    shipper: Any = queue
    made = CapturePipeline(RecordLayout.of(GEOMETRY), shipper, max_tokens=SLOTS, num_slots=SLOTS, device=DEVICE)
    return made, queue


def _run(pipeline: CapturePipeline, ids: list[torch.Tensor], slots: torch.Tensor, first: int = 0) -> torch.Tensor:
    """A forward and its commit, positions from `first` on. Returns what its routers chose, [T, layers, top_k]."""
    for layer, one in enumerate(ids):
        pipeline.recorder.keep(layer, one.to(DEVICE))
    at = list(range(first, first + len(slots)))
    pipeline.commit(slots, tensor(at), tensor([500 + p for p in at]))
    return torch.stack(ids, 1)


def _ids(seed: int, tokens: int) -> list[torch.Tensor]:
    return [choices(seed + layer, tokens) for layer in range(2)]


def test_question_1_slots_rewritten_in_place_behind_the_commit_change_no_row(seed: int) -> None:
    """A middle chunk: a drafter aligns its own slots in the same memory, then the step's rows are asked for."""
    pipeline, queue = _pipeline()
    pipeline.begin(0)
    slots = tensor([7, 8, 9])
    ids = _run(pipeline, _ids(seed, 3), slots)
    slots.fill_(12)
    pipeline.end(ScheduledBatch(["a"], [0], [3], [30]))
    pipeline.begin(0)
    hits = PrefixHits(["b"], [0], [3], [np.array([7, 8, 9], np.int32)], [np.array([500, 501, 502], np.int32)])
    _run(pipeline, _ids(seed + 9, 1), tensor([1]), 3)
    pipeline.end(ScheduledBatch(["b"], [3], [1], [4]), hits)
    chunk, _, prefix = queue.landings
    for landing in (chunk, prefix):
        landing.wait()
        assert not landing.status.any()
        assert np.array_equal(signed(landing.rows), ids)
    assert pipeline.store is not None
    assert int(pipeline.store.stamps[12, 0]) == 0, "the drafter's slots hold nobody's routes"


@pytest.mark.parametrize("tokens", [SLOTS, 1])
def test_open_dummy_prefill_writes_no_slot_and_exports_nothing(seed: int, tokens: int) -> None:
    pipeline, queue = _pipeline()
    pipeline.begin(3)
    before = _run(pipeline, _ids(seed, SLOTS), tensor(list(range(SLOTS))))
    pipeline.end(ScheduledBatch(["a"], [0], [SLOTS], [SLOTS]))
    assert pipeline.store is not None
    held = [column[:SLOTS].clone() for column in pipeline.store.tensors]
    pipeline.idle()
    _run(pipeline, _ids(seed + 5, tokens), tensor([-1] * tokens))
    assert pipeline.failed is None
    for column, known in zip(pipeline.store.tensors, held, strict=True):
        assert torch.equal(column[:SLOTS], known)
    assert (len(queue.landings), len(queue.plans), pipeline.steps) == (1, 0, 1)
    queue.landings[0].wait()
    assert np.array_equal(signed(queue.landings[0].rows), before)


def test_open_clear_reused_slots_no_layer_of_a_former_occupant_is_readable(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    made.commit([5, 6])
    made.keep(choices(seed + 2, 1), None)
    made.commit([5])
    found = made.read([5, 6], [100, 101], [0, 1], 2)
    assert found.status.tolist() == [UNCAPTURED_LAYER, 0]
    assert (signed(found.rows)[0, 1] == -1).all(), "the layer that did not report shows what the slot held before"
    # What a new occupant has not written yet is its predecessor's, and is not given out as anything else.
    assert made.read([6], [100], [0], 2).status.tolist() == [UNPROVEN]
    assert (signed(made.read([6], [100], [0], 2).rows) == -1).all()


@pytest.mark.parametrize(
    ("geometry", "nbytes"),
    [
        (Geometry(61, tuple(range(3, 61)), 8, 256), 58 * 8 * 2),
        (Geometry(48, tuple(range(48)), 8, 128), 48 * 8),
        (Geometry(48, tuple(range(1, 48, 4)), 8, 256), 12 * 8 * 2),
    ],
)
def test_question_4_a_slot_takes_a_byte_or_two_a_choice_and_a_dense_layer_nothing(
    geometry: Geometry, nbytes: int
) -> None:
    """And no cast a layer: routers' ids of any width are taken as they lie, `test_capture` shows it."""
    layout = RecordLayout.of(geometry)
    store = SlotStore(layout, 10, DEVICE)
    assert store.rows.numel() * store.rows.element_size() == 11 * nbytes
    assert store.nbytes == 11 * (nbytes + STAMP_BYTES)


def test_question_9_sleep_drains_every_copy_before_the_store_is_freed(seed: int) -> None:
    pipeline, queue = _pipeline()
    pipeline.begin(0)
    ids = _run(pipeline, _ids(seed, 4), tensor([0, 1, 2, 3]))
    pipeline.end(ScheduledBatch(["a"], [0], [4], [4]))
    store = weakref.ref(pipeline.store)
    seen: list[bool] = []

    class CopyStream:
        def synchronize(self) -> None:
            seen.append(store() is not None and pipeline.store is store() and pipeline.recorder.store is store())

    own, pipeline._exporter._stream = pipeline._exporter._stream, CopyStream()  # type: ignore[assignment]
    pipeline.free()
    if own is not None:
        own.synchronize()
    assert seen == [True], "what is on its way is waited for while its memory is still there"
    gc.collect()
    assert store() is None, "a cache that is made anew would have a second store beside it"
    queue.landings[0].wait()
    assert np.array_equal(signed(queue.landings[0].rows), ids)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_tiny(torch.float32, attention="sdpa")


def _processor(model: Any) -> Any:
    """What the engine's thread makes before its first step."""
    manager = model.init_continuous_batching(generation_config=generation(), continuous_batching_config=batching())
    return manager._create_batch_processor()


def test_open_paged_surcharge_the_store_is_part_of_no_other_pool(model: Any) -> None:
    """The engine's cache has the shape it has without capture, and shares no memory with the store."""
    sizes = _pools(_processor(model).cache)
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0) as capture:
        processor = _processor(model)
        assert _pools(processor.cache) == sizes
        (captured,) = (reference() for reference in capture._processors)
        store = captured.pipeline.store
        assert store.nbytes == SlotStore.declared_bytes(capture._layout, captured._slots.num_slots)
        of_cache = {each.untyped_storage().data_ptr() for each in _tensors(processor.cache)}
        for column in store.tensors:
            assert column.untyped_storage().nbytes() == column.numel() * column.element_size()
            assert column.untyped_storage().data_ptr() not in of_cache


def test_shutdown_drains_what_is_on_its_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[bool] = []
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0) as capture:
        processor = _processor(model)
        (captured,) = (reference() for reference in capture._processors)
        pipeline = captured.pipeline
        monkeypatch.setattr(pipeline, "drain", lambda: drained.append(pipeline.store is not None))
        assert not drained
    assert drained == [True]
    # Graphs that commit may still be replayed: their memory goes with the engine's cache, and not before.
    assert processor.r3_pipeline is pipeline


def _tensors(cache: Any) -> list[torch.Tensor]:
    lists = [value for value in vars(cache).values() if isinstance(value, (list, dict))]
    every = [each for value in lists for each in (value.values() if isinstance(value, dict) else value)]
    found = [each for each in (*every, *vars(cache).values()) if isinstance(each, torch.Tensor)]
    assert found, "the cache keeps its memory somewhere else in this version"
    return found


def _pools(cache: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(each.shape), each.dtype) for each in _tensors(cache)]
