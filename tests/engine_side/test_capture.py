"""The recorder: what a commit writes, in batch order and by slot, and what it marks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_side.capture.errors import CaptureError
from engine_side.capture.records import DUPLICATE_EXPERT, OUT_OF_RANGE, UNCAPTURED_LAYER, RecordLayout
from protocol.geometry import Geometry
from tests.engine_side.rig import choices, rig, signed, tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_commit_holds_every_layer_in_batch_order_and_in_its_slots(
    seed: int, dtype: torch.dtype, narrow: bool
) -> None:
    made = rig(narrow=narrow)
    one, two = choices(seed, 4, dtype=dtype), choices(seed + 1, 4, dtype=dtype)
    made.keep(one, two)
    slots = [7, 2, 9, 0]
    step = made.commit(slots, version=3)
    expected = torch.stack([one, two], dim=1).numpy()
    assert step.rows.dtype == (np.uint8 if narrow else np.int16)
    assert np.array_equal(step.rows, expected)
    assert step.status.tolist() == [0, 0, 0, 0]
    assert step.token_ids.tolist() == [100, 101, 102, 103]
    assert step.positions.tolist() == [0, 1, 2, 3]
    assert step.slots.tolist() == slots
    assert (made.store.stamps[slots, 1] >> 32).tolist() == [3] * 4
    assert (step.stamps >> 8).tolist() == [1] * 4
    assert [made.stored(slot).tolist() for slot in slots] == expected.tolist()
    assert [made.number(slot) for slot in slots] == [1, 1, 1, 1]


def test_every_geometry_equals_a_loop_in_python(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(12):
        layers, experts = chance.randint(1, 9), chance.choice((3, 8, 60, 128, 250, 300, 1000))
        top_k = chance.randint(1, min(9, experts))
        geometry = Geometry(12, tuple(sorted(chance.sample(range(12), layers))), top_k, experts)
        narrow = chance.choice((False, experts <= 255))
        tokens, made = chance.randint(1, 40), rig(geometry, narrow=narrow)
        kept: list[torch.Tensor | None] = []
        for layer in range(layers):
            width = min(experts, top_k + chance.choice((0, 0, 2)))
            ids = choices(seed + 50 * case + layer, tokens, width, experts, chance.choice((torch.int32, torch.int64)))
            if chance.random() < 0.3:
                ids[chance.randrange(tokens), chance.randrange(width)] = chance.choice((-1, -5, 0, experts, 1 << 20))
            kept.append(None if chance.random() < 0.1 else ids)
        made.keep(*kept)
        slots = [chance.choice((-1, slot)) for slot in chance.sample(range(32), min(tokens, 32))]
        slots += [-1] * (tokens - len(slots))
        step = made.commit(slots, start=7)
        for t in range(tokens):
            want, status = [], 0
            for ids in kept:
                raw = [-1] * top_k if ids is None else ids[t, :top_k].tolist()
                row = [x if 0 <= x < experts else -1 for x in raw]
                status |= UNCAPTURED_LAYER * (-1 in raw) | OUT_OF_RANGE * (row != raw)
                status |= DUPLICATE_EXPERT * any(x >= 0 and row.count(x) > 1 for x in row)
                want.append(row)
            assert signed(step.rows[t]).tolist() == want
            assert step.status[t] == status
            if slots[t] >= 0:
                assert made.stored(slots[t]).tolist() == want


def test_a_pad_slot_lands_on_the_pad_row_and_never_on_slot_0(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 3), choices(seed + 1, 3))
    made.commit([0, -1, -1])
    first = made.stored(0)
    made.keep(choices(seed + 7, 2), choices(seed + 8, 2))
    made.commit([-1, -1])
    assert np.array_equal(made.stored(0), first)
    assert made.number(0) == 1
    assert made.number(made.store.num_slots) == 2


def test_a_slot_past_the_store_lands_on_the_pad_row(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    made.commit([4000, 1])
    assert made.number(made.store.num_slots) == 1
    assert made.number(1) == 1


def test_a_layer_that_did_not_report_is_minus_one_also_in_a_used_slot(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 1), choices(seed + 1, 1))
    made.commit([5])
    assert (made.stored(5) >= 0).all()
    made.keep(choices(seed, 1), None)
    assert made.commit([5]).status.tolist() == [UNCAPTURED_LAYER]
    assert made.stored(5)[1].tolist() == [-1, -1]
    assert made.recorder.unreported == {3}


def test_duplicates_and_ids_out_of_range_are_marked() -> None:
    made = rig()
    made.keep(torch.tensor([[3, 3], [1, 2], [1, 9], [1, 70_000]]), torch.tensor([[0, 1], [1, 2], [1, 2], [1, 2]]))
    step = made.commit([0, 1, 2, 3])
    assert step.status.tolist() == [DUPLICATE_EXPERT, 0, OUT_OF_RANGE, OUT_OF_RANGE]
    assert signed(step.rows)[2, 0].tolist() == [1, -1]
    assert signed(step.rows)[3, 0].tolist() == [1, -1]


def test_an_id_beyond_32_bits_is_out_of_range_and_no_other_expert() -> None:
    made = rig()
    made.keep(torch.tensor([[1, (1 << 32) + 3]]), torch.tensor([[1, 2]]))
    step = made.commit([0])
    assert step.status.tolist() == [OUT_OF_RANGE]
    assert signed(step.rows)[0, 0].tolist() == [1, -1]


def test_wider_ids_are_cut_and_narrower_ones_padded(seed: int) -> None:
    made = rig()
    wide = choices(seed, 3, width=4)
    made.keep(wide, wide[:, :1])
    step = made.commit([0, 1, 2])
    assert np.array_equal(step.rows[:, 0], wide[:, :2].numpy())
    assert signed(step.rows)[:, 1, 1].tolist() == [-1, -1, -1]


def test_padding_behind_the_tokens_is_left_out(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 8), choices(seed + 1, 8))
    assert len(made.commit([0, 1, 2, 3, 4]).rows) == 5


def test_rows_do_not_alias_the_engines_static_inputs(seed: int) -> None:
    made = rig()
    positions, tokens, ids = tensor([0, 1, 2]), tensor([5, 6, 7]), choices(seed, 3)
    made.keep(ids, ids)
    made.report()
    step = made.recorder.commit(tensor([0, 1, 2]), positions, tokens, 3)
    positions.zero_()
    tokens.zero_()
    columns = step.columns()
    assert columns.positions.tolist() == [0, 1, 2]
    assert columns.token_ids.tolist() == [5, 6, 7]


def test_inputs_that_disagree_are_a_typed_error_and_the_next_step_is_fine(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 4), choices(seed + 1, 4))
    made.report()
    with pytest.raises(CaptureError, match="4 tokens, slots only 3"):
        made.recorder.commit(tensor([0, 1, 2]), tensor([0, 1, 2, 3]), tensor([0, 1, 2, 3]), 4)
    made.keep(choices(seed, 2), choices(seed + 1, 4))
    with pytest.raises(CaptureError, match="layer 1: routes of shape"):
        made.commit([0, 1, 2, 3])
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    assert made.commit([0, 1]).status.tolist() == [0, 0]


def test_a_forward_beyond_the_announced_size_is_a_typed_error(seed: int) -> None:
    made = rig(max_tokens=4)
    made.keep(choices(seed, 5), choices(seed + 1, 5))
    with pytest.raises(CaptureError, match="5 tokens, the rows of a forward only 4"):
        made.commit([0, 1, 2, 3, 4])


def test_a_router_that_ran_twice_is_a_typed_error_and_its_slots_show_nobodys_rows(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    made.commit([4, 5])
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    made.keep(None, choices(seed + 2, 2))
    with pytest.raises(CaptureError, match="layer 3: its router ran 2 times"):
        made.commit([4, 5])
    assert (made.stored(4) == -1).all()
    assert made.read([4, 5], [100, 101], [0, 1], 2).status.tolist() == [UNCAPTURED_LAYER] * 2


def test_a_forward_outside_any_step_proves_nothing(seed: int) -> None:
    """A warm-up, a dummy batch of an idle replica: it commits before the first step, or behind `idle`."""
    made = rig()
    made.keep(choices(seed, 1), choices(seed + 1, 1))
    made.report()
    made.recorder.commit(tensor([3]), tensor([0]), tensor([100]), 1)
    made.keep(choices(seed, 1), choices(seed + 1, 1))
    made.commit([4])
    made.recorder.idle()
    made.keep(choices(seed, 1), choices(seed + 1, 1))
    made.report()
    made.recorder.commit(tensor([5]), tensor([0]), tensor([100]), 1)
    assert [made.number(slot) for slot in (3, 4, 5)] == [0, 1, 0]


def test_a_step_that_no_commit_reached_carries_another_number(seed: int) -> None:
    """What a graph captured before capture was installed leaves behind: the rows of the step before it."""
    made = rig()
    made.keep(choices(seed, 2), choices(seed + 1, 2))
    made.commit([0, 1])
    made.recorder.begin(0)
    step = made.recorder.rows(2)
    assert step.commit_no == 2
    assert (step.columns().stamps >> 8).tolist() == [1, 1]


def test_kept_copies_outlive_the_memory_they_were_copied_from(seed: int) -> None:
    made = rig()
    ids = choices(seed, 3, width=3)
    expected = ids[:, :2].clone().numpy()
    made.recorder.begin(0)
    for layer in range(2):
        made.recorder.keep_copy(layer, ids.to(tensor([0]).device))
    ids.zero_()
    step = made.recorder.commit(tensor([0, 1, 2]), tensor([0, 1, 2]), tensor([0, 1, 2]), 3)
    assert np.array_equal(step.columns().rows[:, 1], expected)


def test_uint8_is_refused_where_it_has_no_room_for_uncaptured() -> None:
    assert RecordLayout.of(Geometry(2, (0,), 2, 255)).narrow
    assert not RecordLayout.of(Geometry(2, (0,), 2, 256)).narrow
    with pytest.raises(ValueError, match="256 experts"):
        RecordLayout.of(Geometry(2, (0,), 2, 256), narrow=True)
