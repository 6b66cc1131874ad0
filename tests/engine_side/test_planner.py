"""Segments of a step: what only fills, what ends its life there, what opens."""

from __future__ import annotations

import random

import numpy as np

from engine_side.export.plan import StepPlan
from engine_side.export.planner import DecodeBatch, RoutePlanner, ScheduledBatch
from protocol.messages import Kind

Segment = tuple[str, int, int, int]


def _segments(plan: StepPlan) -> list[Segment]:
    return [
        (plan.req_ids[i], int(plan.starts[i]), int(plan.offsets[i + 1] - plan.offsets[i]), int(plan.kinds[i]))
        for i in range(len(plan.req_ids))
    ]


def _plan(lives: list[str], starts: list[int], counts: list[int], accepted: list[int], **more: object) -> StepPlan:
    return RoutePlanner().plan(ScheduledBatch(lives, starts, counts, accepted, **more), 3)  # type: ignore[arg-type]


def test_a_prefill_fills_below_the_sampled_position_and_is_forward_at_it() -> None:
    plan = _plan(["a"], [0], [10], [10], opens=[(0, "client")])
    assert _segments(plan) == [("a", 0, 9, Kind.RECOMPUTE), ("a", 9, 1, Kind.FORWARD)]
    assert plan.opens == ((0, "client"),)
    assert plan.weight_version == 3


def test_a_middle_chunk_only_fills() -> None:
    assert _segments(_plan(["a"], [32], [32], [100])) == [("a", 32, 32, Kind.RECOMPUTE)]


def test_a_decode_step_is_forward() -> None:
    assert _segments(_plan(["a", "b"], [9, 20], [1, 1], [10, 21])) == [
        ("a", 9, 1, Kind.FORWARD),
        ("b", 20, 1, Kind.FORWARD),
    ]


def test_a_resume_fills_what_was_accepted_and_is_forward_at_the_sampled_position() -> None:
    assert _segments(_plan(["a"], [0], [25], [25])) == [("a", 0, 24, Kind.RECOMPUTE), ("a", 24, 1, Kind.FORWARD)]


def test_verified_drafts_stand_in_one_forward_segment_from_the_sampled_position() -> None:
    assert _segments(_plan(["a"], [9], [4], [10])) == [("a", 9, 4, Kind.FORWARD)]
    # The next verify step starts behind what was accepted and so cuts what was rejected.
    assert _segments(_plan(["a"], [11], [4], [12])) == [("a", 11, 4, Kind.FORWARD)]


def test_a_one_token_prompt_is_forward_at_once() -> None:
    assert _segments(_plan(["a"], [0], [1], [1])) == [("a", 0, 1, Kind.FORWARD)]


def test_an_unknown_start_is_a_forward_whose_place_the_device_says() -> None:
    assert _segments(_plan(["a"], [-1], [1], [10])) == [("a", -1, 1, Kind.FORWARD)]


def test_opens_point_at_a_lifes_first_segment_in_a_mixed_batch() -> None:
    plan = _plan(["d", "p", "q"], [7, 0, 0], [1, 8, 1], [8, 8, 1], opens=[(1, "P"), (2, "Q")])
    assert [(plan.req_ids[i], name) for i, name in plan.opens] == [("p", "P"), ("q", "Q")]
    assert plan.opens[0][0] == 1


def test_against_a_walk_over_positions(seed: int) -> None:
    """Every position of a step lies in exactly one segment, of the kind the rule says, in batch order."""
    chance = random.Random(seed)
    planner = RoutePlanner()
    for step in range(1, 300):
        n = chance.randint(1, 9)
        lives = [f"life-{i}" for i in range(n)]
        accepted = [chance.randint(1, 40) for _ in range(n)]
        starts = [chance.randint(0, a - 1) for a in accepted]
        counts = [chance.randint(1, a - s + chance.randint(0, 3)) for a, s in zip(accepted, starts, strict=True)]
        plan = planner.plan(ScheduledBatch(lives, starts, counts, accepted), 0)
        expected = [
            (lives[i], p, Kind.RECOMPUTE if p + 1 < accepted[i] else Kind.FORWARD)
            for i in range(n)
            for p in range(starts[i], starts[i] + counts[i])
        ]
        found = [(life, start + k, kind) for life, start, count, kind in _segments(plan) for k in range(count)]
        assert found == expected
        assert plan.step == step
        assert np.array_equal(plan.offsets, np.sort(plan.offsets))


def test_a_decode_batch_is_planned_as_its_entries_one_by_one_would_be(seed: int) -> None:
    chance = random.Random(seed)
    one, other = RoutePlanner(), RoutePlanner()
    for _ in range(50):
        n = chance.randint(1, 9)
        lives = tuple(f"life-{i}" for i in range(n))
        starts = [chance.choice((-1, chance.randint(0, 9000))) for _ in lives]
        short = one.plan(DecodeBatch(lives, np.array(starts)), 7)
        long = other.plan(ScheduledBatch(lives, starts, [1] * n, [start + 1 for start in starts]), 7)
        assert short.req_ids == long.req_ids
        assert (short.step, short.weight_version, short.opens) == (long.step, long.weight_version, long.opens)
        for name in ("starts", "offsets", "kinds"):
            assert getattr(short, name).tolist() == getattr(long, name).tolist()
            assert getattr(short, name).dtype == getattr(long, name).dtype
