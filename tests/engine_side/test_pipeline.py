"""From a forward to the shipper: what lands is what was committed, what cannot be proven is declared lost."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.capture.errors import CaptureError
from engine_side.capture.records import UNPROVEN, RecordLayout
from engine_side.capture.slot_store import SlotStore
from engine_side.export.exporter import StepExporter, nothing
from engine_side.export.pinned import PinnedFull, PinnedPool
from engine_side.export.pipeline import CapturePipeline, PrefixHits
from engine_side.export.planner import ScheduledBatch
from engine_side.shipping.losses import RepairAsk
from engine_side.shipping.pack import check
from protocol.geometry import Geometry
from protocol.messages import Kind
from tests.engine_side.rig import DEVICE, Queue, choices, signed, tensor

GEOMETRY = Geometry(5, (1, 3), 2, 8)


def _pipeline(max_tokens: int = 64, narrow: bool | None = None) -> tuple[CapturePipeline, Queue]:
    queue = Queue()
    shipper: Any = queue
    layout = RecordLayout.of(GEOMETRY, narrow)
    return CapturePipeline(layout, shipper, max_tokens=max_tokens, num_slots=64, device=DEVICE), queue


def _forward(
    pipeline: CapturePipeline, seed: int, slots: list[int], positions: list[int], version: int = 0
) -> torch.Tensor:
    """One forward under capture. Returns the ids its routers chose, [T, layers, top_k]."""
    pipeline.begin(version)
    ids = [choices(seed + layer, len(slots)) for layer in range(2)]
    for layer, one in enumerate(ids):
        pipeline.recorder.keep(layer, one.to(DEVICE))
    pipeline.commit(tensor(slots), tensor(positions), tensor([500 + p for p in positions]))
    return torch.stack(ids, dim=1)


@pytest.mark.parametrize("narrow", [False, True])
def test_what_lands_is_what_was_committed_and_read_back(seed: int, narrow: bool) -> None:
    pipeline, queue = _pipeline(narrow=narrow)
    ids = _forward(pipeline, seed, list(range(40)), list(range(40)), version=6)
    hits = PrefixHits(["b"], [8], [16], [np.arange(8, 24, dtype=np.int32)], [np.arange(508, 524, dtype=np.int32)])
    pipeline.end(ScheduledBatch(["a"], [0], [40], [40]), hits)
    step, prefix = queue.landings
    for each in (step, prefix):
        each.wait()
        assert not each.status.any()
    assert np.array_equal(step.rows, ids)
    assert step.token_ids.tolist() == list(range(500, 540))
    assert step.positions.tolist() == list(range(40))
    assert step.row_versions is None
    assert np.array_equal(prefix.rows, ids[8:24])
    assert prefix.token_ids.tolist() == list(range(508, 524))
    assert prefix.positions.tolist() == list(range(8, 24))
    assert prefix.row_versions is not None
    assert prefix.row_versions.tolist() == [6] * 16
    assert (prefix.plan.kinds == Kind.CACHED).all()
    for each in (step, prefix):
        each.free()


def test_rows_on_their_way_are_not_those_of_the_next_step(seed: int) -> None:
    pipeline, queue = _pipeline()
    expected = []
    for step in range(20):
        expected.append(_forward(pipeline, seed + 10 * step, list(range(9)), list(range(9))))
        pipeline.end(ScheduledBatch(["a"], [0], [9], [9]))
    for landing, ids in zip(queue.landings, expected, strict=True):
        landing.wait()
        assert np.array_equal(signed(landing.rows), ids)


def test_a_hit_in_blocks_computed_by_the_same_step_is_read_behind_its_commit(seed: int) -> None:
    pipeline, queue = _pipeline()
    ids = _forward(pipeline, seed, [4, 5, 6], [0, 1, 2])
    hits = PrefixHits(["b"], [0], [3], [np.array([4, 5, 6], np.int32)], [np.array([500, 501, 502], np.int32)])
    pipeline.end(ScheduledBatch(["a"], [0], [3], [3]), hits)
    queue.landings[1].wait()
    assert not queue.landings[1].status.any()
    assert np.array_equal(signed(queue.landings[1].rows), ids)


def test_a_forward_that_never_committed_is_lost_and_never_another_steps_rows(seed: int) -> None:
    """Capture installed late: a graph without the commit in it is replayed, and nothing reports."""
    pipeline, queue = _pipeline()
    _forward(pipeline, seed, [0, 1], [0, 1])
    pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
    pipeline.begin(0)
    pipeline.end(ScheduledBatch(["a"], [2], [2], [4]))
    for landing in queue.landings:
        landing.wait()
    check(queue.landings[0])
    with pytest.raises(ValueError, match="2 of 2 rows were not committed by its forward"):
        check(queue.landings[1])


def test_a_step_that_cannot_be_committed_is_lost_and_the_next_is_whole(seed: int) -> None:
    pipeline, queue = _pipeline()
    pipeline.begin(0)
    pipeline.recorder.keep(0, choices(seed, 1).to(DEVICE))
    pipeline.recorder.keep(1, choices(seed, 2).to(DEVICE))
    assert pipeline.commit(tensor([0, 1]), tensor([0, 1]), tensor([1, 2])) is None
    with pytest.raises(CaptureError, match="layer 1"):
        pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
    assert [set(plan.req_ids) for plan in queue.plans] == [{"a"}]
    ids = _forward(pipeline, seed, [2], [2])
    pipeline.end(ScheduledBatch(["a"], [2], [1], [3]))
    queue.landings[0].wait()
    assert np.array_equal(signed(queue.landings[0].rows), ids)


def test_a_middle_chunk_that_yields_no_token_is_delivered_once(seed: int) -> None:
    pipeline, queue = _pipeline()
    parts = [_forward(pipeline, seed, [0, 1, 2], [0, 1, 2])]
    pipeline.end(ScheduledBatch(["a"], [0], [3], [7], [(0, "client")]))
    parts.append(_forward(pipeline, seed + 9, [3, 4, 5, 6], [3, 4, 5, 6]))
    pipeline.end(ScheduledBatch(["a"], [3], [4], [7]))
    assert [landing.plan.starts.tolist() for landing in queue.landings] == [[0], [3, 6]]
    assert [landing.plan.kinds.tolist() for landing in queue.landings] == [
        [Kind.RECOMPUTE],
        [Kind.RECOMPUTE, Kind.FORWARD],
    ]
    rows = np.concatenate([signed(landing.rows) for landing in queue.landings])
    assert np.array_equal(rows, torch.cat(parts))


def test_a_dummy_prefill_and_decode_over_a_known_slot_0_leave_it_alone(seed: int) -> None:
    pipeline, queue = _pipeline()
    _forward(pipeline, seed, [0, 1], [0, 1])
    pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
    assert pipeline.store is not None
    before = [x[0].clone() for x in pipeline.store.tensors]
    for tokens in (8, 1):
        pipeline.idle()
        for layer in range(2):
            pipeline.recorder.keep(layer, choices(seed + 5, tokens).to(DEVICE))
        pipeline.commit(tensor([-1] * tokens), tensor([0] * tokens), tensor([0] * tokens))
    assert all(torch.equal(x[0], y) for x, y in zip(pipeline.store.tensors, before, strict=True))
    assert len(queue.landings) == 1


def test_rows_leave_before_a_drafter_rewrites_the_slot_mapping(seed: int) -> None:
    """The engine writes its slots in place: what the commit stored stays where the forward wrote its KV."""
    pipeline, queue = _pipeline()
    pipeline.begin(0)
    ids = [choices(seed + layer, 3) for layer in range(2)]
    for layer, one in enumerate(ids):
        pipeline.recorder.keep(layer, one.to(DEVICE))
    slots, positions, tokens = tensor([7, 8, 9]), tensor([0, 1, 2]), tensor([500, 501, 502])
    pipeline.commit(slots, positions, tokens)
    for static in (slots, positions, tokens):
        static.fill_(30)
    # The drafter's own MoE layers are never hooked; its forward commits nothing.
    pipeline.end(ScheduledBatch(["a"], [0], [3], [3]))
    queue.landings[0].wait()
    assert np.array_equal(signed(queue.landings[0].rows), torch.stack(ids, 1))
    assert queue.landings[0].positions.tolist() == [0, 1, 2]
    assert pipeline.store is not None
    assert (pipeline.store.stamps[[7, 8, 9], 0] >> 8).tolist() == [1, 1, 1]
    assert int(pipeline.store.stamps[30, 0]) == 0


def test_a_weight_version_marks_what_is_launched_after_it_and_stays_with_the_slot(seed: int) -> None:
    pipeline, queue = _pipeline()
    _forward(pipeline, seed, [0, 1], [0, 1], version=3)
    pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
    _forward(pipeline, seed + 4, [2], [2], version=4)
    hits = PrefixHits(["b"], [0], [3], [np.array([0, 1, 2], np.int32)], [np.array([500, 501, 502], np.int32)])
    pipeline.end(ScheduledBatch(["a"], [2], [1], [3]), hits)
    assert [landing.plan.weight_version for landing in queue.landings[:2]] == [3, 4]
    versions = queue.landings[2].row_versions
    assert versions is not None
    assert versions.tolist() == [3, 3, 4]


def test_nothing_of_before_sleep_crosses_into_what_wakes(seed: int) -> None:
    layout = RecordLayout.of(GEOMETRY)
    sizes = []
    for _ in range(3):
        pipeline, queue = _pipeline()
        # A new store: the same tokens at the same slots are not there any more.
        pipeline.begin(0)
        pipeline.commit(tensor([9]), tensor([9]), tensor([9]))
        hits = PrefixHits(["a"], [0], [2], [np.array([0, 1], np.int32)], [np.array([500, 501], np.int32)])
        pipeline.end(ScheduledBatch(["a"], [9], [1], [10]), hits)
        queue.landings[1].wait()
        assert queue.landings[1].status.tolist() == [UNPROVEN] * 2
        _forward(pipeline, seed, [0, 1], [0, 1])
        pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
        assert pipeline.store is not None
        sizes.append(pipeline.store.nbytes)
        pipeline.free()
        assert pipeline.store is None
        assert pipeline.recorder.store is None
        assert pipeline.nbytes == pipeline.recorder.nbytes
        # What was on its way landed all the same.
        queue.landings[2].wait()
        assert not queue.landings[2].status.any()
    assert set(sizes) == {SlotStore.declared_bytes(layout, 64)}


def test_a_prefix_of_many_chunks_arrives_once_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, queue = _pipeline()
    ids = _forward(pipeline, seed, list(range(40)), list(range(40)))
    monkeypatch.setattr(pipeline._exporter, "rows_per_chunk", 7)
    hits = PrefixHits(["b"], [0], [40], [np.arange(40, dtype=np.int32)], [np.arange(500, 540, dtype=np.int32)])
    pipeline.end(ScheduledBatch(["a"], [0], [40], [40]), hits)
    prefix = queue.landings[1:]
    for landing in prefix:
        landing.wait()
    assert [len(landing.rows) for landing in prefix] == [7, 7, 7, 7, 7, 5]
    assert np.array_equal(np.concatenate([signed(x.rows) for x in prefix]), ids)
    assert pipeline.nbytes >= SlotStore.declared_bytes(RecordLayout.of(GEOMETRY), 64)


class _Ringed(StepExporter):
    """What a step does with pinned memory on a GPU, without one."""

    def _copy(self, records: torch.Tensor) -> Any:
        if self._stream is not None:
            return super()._copy(records)
        assert self.pool is not None
        pool, buffer = self.pool, self.pool.take(records.numel())
        target, columns = buffer.views(self._layout, len(records))
        target.copy_(records)
        return columns, nothing, lambda: pool.give(buffer), None


def _ringed(buffers: int) -> tuple[CapturePipeline, Queue]:
    """A pipeline whose ring holds so many small steps."""
    pipeline, queue = _pipeline()
    pipeline._exporter = _Ringed(RecordLayout.of(GEOMETRY), DEVICE)
    pipeline._exporter.pool = PinnedPool(buffers * (64 << 10), pin=DEVICE.type == "cuda")
    return pipeline, queue


def test_a_full_ring_loses_the_step_and_never_waits(seed: int) -> None:
    """Nothing is freed while the shipper is away: what the engine's thread pays is a look at the budget."""
    pipeline, queue = _ringed(2)
    expected = [_forward(pipeline, seed, [0], [0])]
    pipeline.end(ScheduledBatch(["a"], [0], [1], [1]))
    expected.append(_forward(pipeline, seed + 2, [1], [1]))
    pipeline.end(ScheduledBatch(["a"], [1], [1], [2]))
    took = []
    for position in range(2, 22):
        _forward(pipeline, seed + 2 * position, [position], [position])
        began = time.perf_counter()
        with pytest.raises(PinnedFull):
            pipeline.end(ScheduledBatch(["a"], [position], [1], [position + 1]))
        took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 2] < 0.02
    assert pipeline.lost_steps == 20
    assert [plan.starts.tolist() for plan in queue.plans] == [[position] for position in range(2, 22)]
    assert [plan.step for plan in queue.plans] == list(range(3, 23)), "each is declared under a number of its own"
    for landing in queue.landings:
        landing.wait()
    queue.landings[0].free()
    expected.append(_forward(pipeline, seed + 90, [22], [22]))
    pipeline.end(ScheduledBatch(["a"], [22], [1], [23]))
    queue.landings[2].wait()
    # The freed one's memory is the new step's by now; the step that is still held is untouched.
    for at in (1, 2):
        assert np.array_equal(signed(queue.landings[at].rows), expected[at])


def test_a_ring_that_fills_within_a_prefix_loses_what_is_left_of_it_and_says_so(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, queue = _ringed(4)
    ids = _forward(pipeline, seed, list(range(40)), list(range(40)))
    monkeypatch.setattr(pipeline._exporter, "rows_per_chunk", 7)
    hits = PrefixHits(["b"], [0], [40], [np.arange(40, dtype=np.int32)], [np.arange(500, 540, dtype=np.int32)])
    with pytest.raises(PinnedFull):
        pipeline.end(ScheduledBatch(["a"], [0], [40], [40]), hits)
    prefix = queue.landings[1:]
    found = [(int(plan.starts[0]), int(plan.offsets[-1])) for plan in (*(x.plan for x in prefix), *queue.plans)]
    assert found == [(0, 7), (7, 7), (14, 7), (21, 7), (28, 7), (35, 5)], "every row is shipped or declared lost, once"
    assert prefix
    assert queue.plans
    for landing in queue.landings:
        landing.wait()
    assert np.array_equal(np.concatenate([signed(x.rows) for x in prefix]), ids[: 7 * len(prefix)])
    for landing in queue.landings:
        landing.free()
    # All of it was given back, what failed on the way included: the next step has room.
    _forward(pipeline, seed + 5, [41], [41])
    pipeline.end(ScheduledBatch(["a"], [41], [1], [42]))
    pool = pipeline._exporter.pool
    assert pool is not None
    queue.landings[-1].free()
    assert sum(map(len, pool._free.values())) * (64 << 10) == pool.held_bytes


def _ask(step: Any, lives: tuple[str, ...], starts: tuple[int, ...], counts: tuple[int, ...]) -> RepairAsk:
    """Of all rows of a landed step."""
    asked = np.stack([step.slots, step.token_ids, step.positions]).astype(np.int32)
    return RepairAsk(step.origin, lives, starts, counts, asked, (step.stamps >> 8).astype(np.int32))


def test_dropped_rows_are_read_back_behind_the_next_step_if_their_own_commit_still_stands_in_the_slot(
    seed: int,
) -> None:
    pipeline, queue = _pipeline()
    ids = _forward(pipeline, seed, [3, 4, 5, 9], [0, 1, 2, 0], version=6)
    pipeline.end(ScheduledBatch(["a", "b"], [0, 0], [3, 1], [3, 1]))
    (lost,) = queue.landings
    lost.wait()
    queue.asks.append(_ask(lost, ("a", "b"), (0, 0), (3, 1)))
    # Another request computes the same token at the same position in the same slot meanwhile.
    _forward(pipeline, seed + 50, [4], [1], version=7)
    pipeline.end(ScheduledBatch(["c"], [1], [1], [2]))
    repair = queue.landings[2]
    repair.wait()
    assert repair.plan.req_ids == ("a", "b")
    assert repair.plan.kinds.tolist() == [Kind.REPAIR] * 2
    assert repair.proof is not None
    assert repair.stamps is not None
    proven = repair.stamps >> 8 == repair.proof
    assert proven.tolist() == [True, False, True, True]
    assert np.array_equal(signed(repair.rows)[proven], ids[proven.nonzero()[0]])
    assert repair.row_versions is not None
    assert repair.row_versions.tolist() == [6, 7, 6, 6]
    assert not queue.asks


def test_nothing_of_before_sleep_is_read_back_after_it(seed: int) -> None:
    pipeline, queue = _pipeline()
    _forward(pipeline, seed, [3, 4], [0, 1])
    pipeline.end(ScheduledBatch(["a"], [0], [2], [2]))
    lost = queue.landings.pop()
    awake, _ = _pipeline()
    awake._shipper = pipeline._shipper
    queue.asks.append(_ask(lost, ("a",), (0,), (2,)))
    _forward(awake, seed, [3, 4], [0, 1])
    awake.end(ScheduledBatch(["b"], [0], [2], [2]))
    assert [landing.plan.req_ids for landing in queue.landings] == [("b", "b")]
    assert [plan.kinds.tolist() for plan in queue.plans] == [[Kind.REPAIR]]
