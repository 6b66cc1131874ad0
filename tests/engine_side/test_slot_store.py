"""The slot store: what may be read back, what a copy takes along, what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from engine_side.capture.records import UNPROVEN, RecordLayout
from engine_side.capture.slot_store import SlotStore
from protocol.geometry import Geometry
from tests.engine_side.rig import DEVICE, Rig, choices, rig, signed


def _filled(seed: int, narrow: bool = True) -> Rig:
    made = rig(narrow=narrow)
    made.keep(choices(seed, 6), choices(seed + 1, 6))
    made.commit([0, 1, 2, 3, 4, 5], version=4)
    return made


@pytest.mark.parametrize("narrow", [False, True])
def test_what_was_written_is_read_back_with_its_version(seed: int, narrow: bool) -> None:
    made = _filled(seed, narrow)
    found = made.read([5, 0, 3], [105, 100, 103], [5, 0, 3], 1)
    assert found.status.tolist() == [0] * 3
    assert found.versions.tolist() == [4] * 3
    assert found.token_ids.tolist() == [105, 100, 103]
    assert found.positions.tolist() == [5, 0, 3]
    assert signed(found.rows).tolist() == [made.stored(slot).tolist() for slot in (5, 0, 3)]


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
    found = _filled(seed).read([0, 1], tokens, positions, commit)
    assert found.status[1] == UNPROVEN
    assert (signed(found.rows)[1] == -1).all()


def test_never_written_and_stamped_slots_are_missing(seed: int) -> None:
    made = _filled(seed)
    assert made.read([20], [0], [0], 9).status.tolist() == [UNPROVEN]
    made.store.stamp_uncaptured(slice(2, 3))
    assert made.read([2, 3], [102, 103], [2, 3], 9).status.tolist() == [UNPROVEN, 0]


def test_a_row_that_was_not_clean_comes_back_with_its_status(seed: int) -> None:
    made = rig()
    made.keep(choices(seed, 1), None)
    status = made.commit([9]).status.tolist()
    assert made.read([9], [100], [0], 1).status.tolist() == status != [0]


def test_a_block_copy_is_mirrored(seed: int) -> None:
    import torch

    made = _filled(seed)
    made.store.copy(torch.arange(4, device=DEVICE), torch.arange(16, 20, device=DEVICE))
    found = made.read([16, 17, 18, 19], [100, 101, 102, 103], [0, 1, 2, 3], 1)
    assert found.status.tolist() == [0] * 4
    assert found.versions.tolist() == [4] * 4
    assert signed(found.rows).tolist() == [made.stored(slot).tolist() for slot in range(4)]


def test_the_pad_row_is_never_proven(seed: int) -> None:
    made = rig(slots=8)
    made.keep(choices(seed, 1), choices(seed + 1, 1))
    made.commit([-1], start=3, tokens=[70])
    for slot in (-1, 8, 9, 1 << 30):
        found = made.read([slot], [70], [3], 1)
        assert found.status.tolist() == [UNPROVEN]
        assert (signed(found.rows) == -1).all()


def test_the_store_starts_as_uncaptured(seed: int) -> None:
    for narrow in (False, True):
        made = rig(narrow=narrow)
        assert all((made.stored(slot) == -1).all() for slot in range(33))


def test_declared_bytes_are_the_allocated_ones_with_the_pad_row() -> None:
    for geometry in (Geometry(5, (1, 3), 2, 8), Geometry(61, tuple(range(3, 61)), 8, 256), Geometry(9, (0, 8), 3, 60)):
        for narrow in {False, geometry.num_experts <= 255}:
            layout = RecordLayout.of(geometry, narrow)
            assert SlotStore(layout, 100, DEVICE).nbytes == SlotStore.declared_bytes(layout, 100)


@pytest.mark.parametrize(
    ("geometry", "narrow", "most"),
    [
        (Geometry(61, tuple(range(3, 61)), 8, 256), False, 0.52),  # DeepSeek-R1
        (Geometry(48, tuple(range(48)), 8, 128), False, 0.52),  # Qwen3-30B-A3B
        (Geometry(48, tuple(range(48)), 8, 128), True, 0.30),
    ],
)
def test_bytes_of_a_token_against_int32_of_every_layer(geometry: Geometry, narrow: bool, most: float) -> None:
    everything = geometry.num_layers * geometry.top_k * 4
    assert SlotStore.slot_bytes(RecordLayout.of(geometry, narrow)) <= most * everything


def test_only_captured_layers_are_stored() -> None:
    first_dense = RecordLayout.of(Geometry(61, tuple(range(3, 61)), 8, 256))
    assert first_dense.row_bytes == 58 * 8 * 2
    assert np.prod(first_dense.geometry.row_shape) == 58 * 8
