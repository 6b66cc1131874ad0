"""A landed step and the patch that it becomes hold the same rows, whatever cuts were made between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_side.export.landing import LandingStep
from engine_side.shipping.pack import Packed, Packer, check
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Kind, RoutedExpertsPatch, RowsLost
from protocol.patch import Patch, open_loss, open_patch
from tests.harness.patches import SMALL, WIDE
from tests.shipping.landings import landing

F, R, C = Kind.FORWARD, Kind.RECOMPUTE, Kind.CACHED


def opened(packed: Packed, geometry: Geometry, seq: int = 3) -> tuple[RoutedExpertsPatch, Patch]:
    parts = packed.frames(seq)
    head = codec.decode_from_engine(parts)
    assert isinstance(head, RoutedExpertsPatch)
    assert head.seq == seq
    return head, open_patch(head, parts[1], parts[2], geometry)


def rows_by_place(step: LandingStep) -> list[tuple[str, int, int, int, list[int], int, bool]]:
    """(life, position, kind, version, cells, token, clean) for each row of a landing, by plain loops."""
    found = []
    for i, life in enumerate(step.plan.req_ids):
        for t in range(step.plan.offsets[i], step.plan.offsets[i + 1]):
            version = step.plan.weight_version if step.row_versions is None else int(step.row_versions[t])
            cells = step.rows[t].ravel().tolist()
            found.append(
                (life, int(step.positions[t]), int(step.plan.kinds[i]), version, cells, int(step.token_ids[t]),
                 not step.status[t])
            )  # fmt: skip
    return found


def rows_of_patch(patch: Patch) -> list[tuple[str, int, int, int, list[int], int, bool]]:
    lives, bad = codec.decode_ids(patch.ids), set(patch.bad.tolist())
    found = []
    for i, life in enumerate(lives):
        for t in range(patch.offsets[i], patch.offsets[i + 1]):
            cells = np.frombuffer(patch.rows[t].tobytes(), patch.rows.dtype).tolist()
            at = int(patch.starts[i] + t - patch.offsets[i])
            version = int(patch.tags[i]) >> 32 & 0xFF_FFFF
            token = int(np.int64(patch.token_ids[t]).astype(np.int32))
            found.append((life, at, int(patch.kinds[i]), version, cells, token, t not in bad))
    return found


@pytest.mark.parametrize("geometry", [SMALL, WIDE], ids=["uint8", "int16"])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 500), st.integers(1, 6), st.sampled_from(Kind)), max_size=6
    ),
    data=st.data(),
)
def test_a_patch_holds_the_rows_of_its_step(
    geometry: Geometry, parts: list[tuple[str, int, int, Kind]], data: st.DataObject
) -> None:
    total = sum(n for _, _, n, _ in parts)
    versions = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=total, max_size=total))
    bad = data.draw(st.sets(st.integers(0, max(0, total - 1)), max_size=min(2, total)))
    opens = tuple((i, f"name {i}") for i in range(len(parts)) if data.draw(st.booleans()))
    step = landing(parts, geometry, opens=opens, row_versions=versions, bad=sorted(bad))
    packed = Packer(geometry).step(step)
    head, patch = opened(packed, geometry)
    assert rows_of_patch(patch) == rows_by_place(step)
    assert head.step == step.plan.step
    assert check(step) == ()
    first_rows = {int(step.plan.offsets[i]): name for i, name in opens}
    assert {int(patch.offsets[i]): name for i, name in patch.opens} == first_rows
    assert step.starts.tolist() == [start for _, start, _, _ in parts], "of the plan's segments, not of the cuts"


def test_a_segment_is_cut_exactly_where_its_weight_version_changes() -> None:
    parts = [("a", 0, 4, C), ("b", 10, 3, C), ("c", 5, 1, F)]
    step = landing(parts, row_versions=[1, 1, 2, 2, 2, 2, 3, 3], opens=((0, "A"), (1, "B")))
    _, patch = opened(Packer(SMALL).step(step), SMALL)
    assert codec.decode_ids(patch.ids) == ["a", "a", "b", "b", "c"]
    assert patch.starts.tolist() == [0, 2, 10, 12, 5]
    assert patch.counts.tolist() == [2, 2, 2, 1, 1]
    assert patch.opens == ((0, "A"), (2, "B"))


def test_the_result_owns_its_memory_because_the_ring_slot_is_reused() -> None:
    for geometry in (SMALL, WIDE):
        step = landing([("a", 0, 2, F)], geometry)
        packed = Packer(geometry).step(step)
        before = [bytes(part) for part in packed.frames(0)]
        step.rows[:] = 0
        step.token_ids[:] = 0
        step.positions[:] = 0
        step.status[:] = 1
        assert [bytes(part) for part in packed.frames(0)] == before
        assert packed.nbytes == len(before[1]) + len(before[2])


def test_uncaptured_survives_the_narrow_wire() -> None:
    step = landing([("a", 0, 3, F)])
    step.rows[1, 0, 1] = -1
    parts = Packer(SMALL).step(step).frames(0)
    cells = np.frombuffer(parts[1], np.uint8).reshape(3, *SMALL.row_shape)
    assert cells[1, 0, 1] == 255
    assert np.count_nonzero(cells == 255) == 1
    _, patch = opened(Packer(SMALL).step(step), SMALL)
    assert patch.bad.tolist() == [1]


def test_starts_come_from_the_device_where_the_host_does_not_know() -> None:
    step = landing([("a", 41, 1, F), ("b", 7, 2, R)], planned=[-1, 7])
    packed = Packer(SMALL).step(step)
    _, patch = opened(packed, SMALL)
    assert patch.starts.tolist() == [41, 7]
    assert check(step) == ()


@pytest.mark.parametrize(
    ("planned", "positions", "blamed"),
    [
        ([4, 9], [4, 5, 6, 10, 11], {"b"}),
        ([3, 9], [4, 5, 6, 9, 10], {"a"}),
        ([-1, -1], [4, 5, 7, 9, 10], {"a"}),
        ([4, 9], [4, 5, 6, 9, 9], {"b"}),
        ([5, 8], [4, 5, 6, 9, 10], {"a", "b"}),
        ([4, 9], [4, 5, 6, 9, 10], set()),
    ],
)
def test_a_plan_that_the_device_contradicts_blames_exactly_its_lives(
    planned: list[int], positions: list[int], blamed: set[str]
) -> None:
    step = landing([("a", 4, 3, R), ("b", 9, 2, F)], planned=planned, positions=positions)
    failed = check(step)
    assert {life for life, _ in failed} == blamed
    assert all(f"step {step.plan.step}" in why for _, why in failed)


def test_an_empty_step_is_an_empty_patch() -> None:
    _, patch = opened(Packer(SMALL).step(landing([])), SMALL)
    assert len(patch.starts) == len(patch.rows) == 0


def test_the_id_column_of_an_unchanged_batch_is_the_same_object() -> None:
    packer = Packer(SMALL)
    parts = [("a", 0, 1, F), ("b", 0, 1, F)]
    first, second = packer.step(landing(parts)), packer.step(landing(parts, step=2))
    assert first.columns["req_ids"] is second.columns["req_ids"]
    third = packer.step(landing([("b", 0, 1, F), ("a", 0, 1, F)], step=3))
    assert codec.decode_ids(third.columns["req_ids"]) == ["b", "a"]


def test_a_lost_step_names_its_segments_and_openings() -> None:
    step = landing([("a", 4, 3, R), ("b", 9, 2, F)], planned=[4, -1], opens=((1, "B"),))
    for starts, expected in ((None, [4, 0]), (np.array([4, 9], np.int32), [4, 9])):
        lost = codec.decode_from_engine([Packer(SMALL).lost(step.plan, 8, starts)])
        assert isinstance(lost, RowsLost)
        loss = open_loss(lost)
        assert lost.seq == 8
        assert codec.decode_ids(loss.ids) == ["a", "b"]
        assert loss.starts.tolist() == expected, "an unknown start is lost from 0"
        assert loss.counts.tolist() == [3, 2]
        assert loss.kinds.tolist() == [R, F]
        assert loss.opens == ((1, "B"),)


def test_reopening_is_a_loss_from_0_that_opens() -> None:
    lost = codec.decode_from_engine([Packer(SMALL).reopened([("1", "x"), ("2", "y")], 4)])
    assert isinstance(lost, RowsLost)
    loss = open_loss(lost)
    assert lost.seq == 4
    assert loss.starts.tolist() == [0, 0]
    assert loss.kinds.tolist() == [F, F]
    assert loss.opens == ((0, "x"), (1, "y"))
    empty = codec.decode_from_engine([Packer(SMALL).reopened([], 4)])
    assert isinstance(empty, RowsLost)
    assert len(open_loss(empty).starts) == 0
