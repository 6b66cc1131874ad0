"""The recorder and the slot store: what a commit writes, and what may be read back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_side.capture.errors import CaptureError
from engine_side.capture.recorder import DUPLICATE_EXPERT, OUT_OF_RANGE, UNCAPTURED_LAYER, RouteRecorder
from engine_side.capture.slot_store import UNPROVEN, SlotStore
from protocol.geometry import Geometry

GEOMETRY = Geometry(5, (1, 3), 2, 8)
CPU = torch.device("cpu")


def _ids(seed: int, tokens: int, width: int = 2, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, 8, generator=generator).topk(width, dim=1).indices.to(dtype)


def _inputs(tokens: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    at = torch.arange(start, start + tokens)
    return at.clone(), at.to(torch.int32), at + 100


def _recorder(slots: int = 32) -> tuple[RouteRecorder, SlotStore]:
    store = SlotStore(GEOMETRY, slots, CPU)
    return RouteRecorder(GEOMETRY, store), store


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_commit_holds_every_layer_in_batch_order_and_in_its_slots(seed: int, dtype: torch.dtype) -> None:
    recorder, store = _recorder()
    one, two = _ids(seed, 4, dtype=dtype), _ids(seed + 1, 4, dtype=dtype)
    recorder.keep(0, one)
    recorder.keep(1, two)
    slots = torch.tensor([7, 2, 9, 0])
    step = recorder.commit(slots, *_inputs(4)[1:], 4)
    expected = torch.stack([one, two], dim=1)
    assert torch.equal(step.rows.long(), expected.long())
    assert step.rows.dtype == torch.int16
    assert step.status.tolist() == [0, 0, 0, 0]
    assert step.token_ids.tolist() == [100, 101, 102, 103]
    assert torch.equal(store.rows[slots], step.rows)
    assert store.commit_nos[slots].tolist() == [1, 1, 1, 1]


def test_a_pad_slot_lands_on_the_pad_row_and_never_on_slot_0(seed: int) -> None:
    recorder, store = _recorder()
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 3))
    recorder.commit(torch.tensor([0, -1, -1]), *_inputs(3)[1:], 3)
    first = store.rows[0].clone()
    for layer in range(2):
        recorder.keep(layer, _ids(seed + 7 + layer, 2))
    recorder.commit(torch.tensor([-1, -1]), *_inputs(2)[1:], 2)
    assert torch.equal(store.rows[0], first)
    assert store.commit_nos[0] == 1
    assert store.commit_nos[store.num_slots] == 2


def test_a_layer_that_did_not_report_is_minus_one_also_in_a_used_slot(seed: int) -> None:
    recorder, store = _recorder()
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 1))
    recorder.commit(torch.tensor([5]), *_inputs(1)[1:], 1)
    assert (store.rows[5] >= 0).all()
    recorder.keep(0, _ids(seed, 1))
    step = recorder.commit(torch.tensor([5]), *_inputs(1)[1:], 1)
    assert step.status.tolist() == [UNCAPTURED_LAYER]
    assert store.rows[5, 1].tolist() == [-1, -1]


def test_duplicates_and_ids_out_of_range_are_marked() -> None:
    recorder, _ = _recorder()
    recorder.keep(0, torch.tensor([[3, 3], [1, 2], [1, 9], [1, 70_000]]))
    recorder.keep(1, torch.tensor([[0, 1], [1, 2], [1, 2], [1, 2]]))
    step = recorder.commit(*_inputs(4), 4)
    assert step.status.tolist() == [DUPLICATE_EXPERT, 0, OUT_OF_RANGE, OUT_OF_RANGE]
    assert step.rows[2, 0].tolist() == [1, -1]
    assert step.rows[3, 0].tolist() == [1, -1]


def test_wider_ids_are_cut_and_narrower_ones_padded(seed: int) -> None:
    recorder, _ = _recorder()
    wide = _ids(seed, 3, width=4)
    recorder.keep(0, wide)
    recorder.keep(1, wide[:, :1])
    step = recorder.commit(*_inputs(3), 3)
    assert torch.equal(step.rows[:, 0].long(), wide[:, :2])
    assert step.rows[:, 1, 1].tolist() == [-1, -1, -1]


def test_padding_behind_the_tokens_is_left_out(seed: int) -> None:
    recorder, _ = _recorder()
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 8))
    assert len(recorder.commit(*_inputs(8), 5).rows) == 5


def test_rows_do_not_alias_the_engines_static_inputs(seed: int) -> None:
    recorder, _ = _recorder()
    positions, tokens = torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 3))
    step = recorder.commit(torch.arange(3), positions, tokens, 3)
    positions.zero_()
    tokens.zero_()
    assert step.positions.tolist() == [0, 1, 2]
    assert step.token_ids.tolist() == [0, 1, 2]


def test_inputs_that_disagree_are_a_typed_error_and_the_next_step_is_fine(seed: int) -> None:
    recorder, _ = _recorder()
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 4))
    with pytest.raises(CaptureError, match="4 tokens, slots only 3"):
        recorder.commit(torch.arange(3), *_inputs(4)[1:], 4)
    recorder.keep(0, _ids(seed, 2))
    recorder.keep(1, _ids(seed, 4))
    with pytest.raises(CaptureError, match="layer 1: routes of shape"):
        recorder.commit(*_inputs(4), 4)
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 2))
    assert recorder.commit(*_inputs(2), 2).status.tolist() == [0, 0]


def test_a_router_that_ran_twice_is_a_typed_error(seed: int) -> None:
    recorder, _ = _recorder()
    for layer in (0, 1, 1):
        recorder.keep(layer, _ids(seed + layer, 2))
    with pytest.raises(CaptureError, match="layer 3: its router ran 2 times"):
        recorder.commit(*_inputs(2), 2)


def _filled(seed: int) -> tuple[RouteRecorder, SlotStore]:
    recorder, store = _recorder()
    recorder.weight_version = 4
    for layer in range(2):
        recorder.keep(layer, _ids(seed + layer, 6))
    recorder.commit(*_inputs(6), 6)
    return recorder, store


def test_what_was_written_is_read_back_with_its_version(seed: int) -> None:
    _, store = _filled(seed)
    found = store.read(torch.arange(6), torch.arange(100, 106), torch.arange(6), 1)
    assert found.status.tolist() == [0] * 6
    assert found.versions.tolist() == [4] * 6
    assert torch.equal(found.rows, store.rows[:6])


@pytest.mark.parametrize(
    ("tokens", "positions", "commit"),
    [
        ([100, 999], [0, 1], 1),  # another token stands there
        ([100, 101], [0, 7], 1),  # the token of another position
        ([100, 101], [0, 1], 0),  # written after the reader's step was planned
    ],
)
def test_a_row_that_cannot_be_proven_is_missing(
    seed: int, tokens: list[int], positions: list[int], commit: int
) -> None:
    _, store = _filled(seed)
    found = store.read(torch.tensor([0, 1]), torch.tensor(tokens), torch.tensor(positions), commit)
    assert found.status[1] == UNPROVEN
    assert (found.rows[1] == -1).all()


def test_never_written_and_stamped_slots_are_missing(seed: int) -> None:
    _, store = _filled(seed)
    assert store.read(torch.tensor([20]), torch.tensor([0]), torch.tensor([0]), 9).status.tolist() == [UNPROVEN]
    store.stamp_uncaptured(torch.tensor([2]))
    assert store.read(torch.tensor([2]), torch.tensor([102]), torch.tensor([2]), 9).status.tolist() == [UNPROVEN]


def test_a_block_copy_is_mirrored(seed: int) -> None:
    _, store = _filled(seed)
    store.copy(torch.arange(4), torch.arange(16, 20))
    found = store.read(torch.arange(16, 20), torch.arange(100, 104), torch.arange(4), 1)
    assert found.status.tolist() == [0] * 4
    assert np.array_equal(found.rows.numpy(), store.rows[:4].numpy())
