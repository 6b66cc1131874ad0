"""What was asked about planning: chunks without output, prefixes, preemption, and what a planner may remember."""

from __future__ import annotations

import numpy as np
import pytest

from engine_side.export.planner import RoutePlanner
from protocol.messages import Kind
from tests.core.driver import held
from tests.seed.chain import Chain, Run, batch_of, landed


@pytest.fixture
def chain(seed: int) -> Chain:
    return Chain(seed, pages=600)


def test_question_1_a_middle_chunk_is_a_step_of_its_own_before_any_drafter(chain: Chain) -> None:
    """A chunk that yields no token is at the collector before the next step is planned, and what a drafter then writes
    into the same memory is nobody's row."""
    prompt = chain.tokens(90)
    plan = chain.planner.plan(batch_of([Run("1", 0, prompt[:30], 90, opens="x")]), 0)
    assert plan.kinds.tolist() == [Kind.RECOMPUTE], "no position of a middle chunk is sampled"
    first = chain.rows(30)
    step = landed(plan, range(30), prompt[:30], first.copy())
    packed = chain.packer.step(step)
    step.rows[:] = 0
    step.positions[:] = 7
    step.token_ids[:] = 9
    chain.engine.raw(packed.frames(chain.engine.seq))
    chain.engine.seq += 1
    assert len(held(chain.bench.core, chain.bench.life("x"))) == 30
    (second,) = chain.forward(Run("1", 30, prompt[30:60], 90))
    (third,) = chain.forward(Run("1", 60, prompt[60:], 90))
    chain.finish("1", 91)
    assert np.array_equal(chain.served("x", tokens=prompt), np.concatenate([first, second, third]))


def test_question_3_a_prefix_of_100_000_rows_is_read_in_bounded_pieces(seed: int) -> None:
    """Each piece is bounded whatever the prefix, stands behind the step that found it, and lets decode steps pass."""
    chain = Chain(seed, pages=800, page_bytes=1 << 12)
    length, room = 100_000, 4_096
    prefix = chain.tokens(length)
    (at,) = chain.forward(Run("1", length, prefix[:1], length + 1, opens="x"))
    rows, served = chain.rows(length), [at]
    for plan in chain.planner.prefix_hits(["1"], [0], [length], room):
        start, n = int(plan.starts[0]), int(plan.offsets[-1])
        assert n <= room
        chain.cached(plan, prefix[start : start + n], rows[start : start + n])
        served += chain.forward(Run("1", length + len(served), chain.tokens(1), length + len(served) + 1))
    assert len(served) == 1 + -(-length // room)
    chain.finish("1", length + len(served) + 1)
    assert np.array_equal(chain.served("x"), np.concatenate([rows, *served]))


def test_accumulation_6_rows_planned_and_never_delivered_are_filled_by_the_resume(chain: Chain) -> None:
    """Preempted after two steps whose rows were lost: nothing is rewound, the resume fills what is missing."""
    tokens = chain.tokens(15)
    (prefill,) = chain.forward(Run("1", 0, tokens[:8], 8, opens="x"))
    held_rows = [chain.forward(Run("1", p, tokens[p : p + 1], p + 1))[0] for p in range(8, 12)]
    for p in (12, 13):
        chain.forward(Run("1", p, tokens[p : p + 1], p + 1), lost=True)
    (resume,) = chain.forward(Run("1", 0, tokens, 15))
    chain.finish("1", 16)
    assert np.array_equal(chain.served("x", tokens=tokens), np.concatenate([prefill, *held_rows, resume[12:]]))
    routes = chain.bench.pull("x").routes
    assert routes is not None
    assert routes.provenance == (
        (0, 7, Kind.RECOMPUTE),
        (7, 12, Kind.FORWARD),
        (12, 14, Kind.RECOMPUTE),
        (14, 15, Kind.FORWARD),
    )


def test_export_6_a_decode_step_has_the_same_bytes_whatever_the_context(chain: Chain) -> None:
    def sizes(position: int) -> list[int]:
        runs = [Run(f"{i}", position + i, chain.tokens(1), position + i + 1) for i in range(50)]
        plan = RoutePlanner().plan(batch_of(runs), 0)
        step = landed(plan, [run.start for run in runs], chain.tokens(50), chain.rows(50))
        return [len(frame) for frame in chain.packer.step(step).frames(0)]

    assert sizes(10) == sizes(100_000)


def test_review_mixed_prefix_batches_every_row_lands_once(chain: Chain) -> None:
    """One step with a prefill, a decode, and two requests that found 40 and 7 rows in the cache."""
    old, miss, hit, brief = chain.tokens(6), chain.tokens(50), chain.tokens(64), chain.tokens(9)
    before = chain.forward(Run("0", 0, old[:5], 5, opens="old"))
    now = chain.forward(
        Run("1", 0, miss, 50, opens="miss"),
        Run("0", 5, old[5:], 6),
        Run("2", 40, hit[40:], 64, opens="hit"),
        Run("3", 7, brief[7:], 9, opens="brief"),
    )
    stored, found, at = chain.rows(47), [*hit[:40], *brief[:7]], 0
    for plan in chain.planner.prefix_hits(["2", "3"], [0, 0], [40, 7], 11):
        upto = at + int(plan.offsets[-1])
        chain.cached(plan, found[at:upto], stored[at:upto])
        at = upto
    for life, name, n in (("0", "old", 7), ("1", "miss", 51), ("2", "hit", 65), ("3", "brief", 10)):
        assert len(held(chain.bench.core, chain.bench.life(name))) == n - 1
        chain.finish(life, n)
    assert np.array_equal(chain.served("old", tokens=old), np.concatenate([*before, now[1]]))
    assert np.array_equal(chain.served("miss", tokens=miss), now[0])
    assert np.array_equal(chain.served("hit", tokens=hit), np.concatenate([stored[:40], now[2]]))
    assert np.array_equal(chain.served("brief", tokens=brief), np.concatenate([stored[40:], now[3]]))


def test_resolved_prefix_counted_twice_a_position_counts_once_however_often_it_came(chain: Chain) -> None:
    """More rows came than the request has tokens, and still five are missing."""
    tokens = chain.tokens(40)
    chain.forward(Run("1", 30, tokens[30:], 40, opens="x"))
    for _ in range(3):
        (plan,) = chain.planner.prefix_hits(["1"], [0], [25], 99)
        chain.cached(plan, tokens[:25], chain.rows(25))
    chain.finish("1", 41)
    problem = chain.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((25, 30),)
    (plan,) = chain.planner.prefix_hits(["1"], [25], [5], 99)
    chain.cached(plan, tokens[25:30], chain.rows(5))
    assert len(chain.served("x", tokens=tokens)) == 40


def test_smaller_3_the_planner_keeps_nothing_between_steps_but_their_number(chain: Chain) -> None:
    """Nothing to rewind at a preemption, and nothing to trim every step: a plan depends on its batch alone."""
    used, fresh = RoutePlanner(), RoutePlanner()
    for p in range(50):
        used.plan(batch_of([Run("1", p, chain.tokens(1), p + 1), Run("2", 0, chain.tokens(p + 1), p + 1)]), 0)
    assert vars(used) == {"step": 50}
    batch = batch_of([Run("1", 0, chain.tokens(51), 51), Run("2", 7, chain.tokens(4), 9)])
    one, other = used.plan(batch, 3), fresh.plan(batch, 3)
    assert one.req_ids == other.req_ids
    assert all(np.array_equal(getattr(one, x), getattr(other, x)) for x in ("starts", "offsets", "kinds"))
