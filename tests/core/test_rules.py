"""The rules of assembly one by one, each where breaking it would serve a wrong row or lose a right one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from protocol.messages import Kind, Refused
from tests.core.driver import held, pages_of
from tests.core.shipped import REPAIR, C, F, R, Shipped


@pytest.fixture
def world(seed: int) -> Shipped:
    return Shipped(seed)


def test_a_request_in_one_piece_is_served_as_it_was_shipped(world: Shipped) -> None:
    seg = world.seg(0, 9, opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 10)
    answer = world.served(tokens=seg.tokens, num_tokens=10)
    assert np.array_equal(world.rows(answer), seg.rows)
    assert answer.array is not None
    assert (answer.array[:, [0, 2]] == -1).all(), "layers without a router"
    assert answer.routes is not None
    assert answer.routes.status == "complete"
    assert answer.routes.provenance == ((0, 9, F),)


# ------------------------------------------------------------------ rule 2: kinds


def test_a_forward_ends_the_life_at_its_start_before_it_writes(world: Shipped) -> None:
    drafts, accepted = world.seg(0, 6, opens="x"), world.seg(2, 2)
    world.engine.patch(drafts)
    world.engine.patch(accepted)
    world.engine.finish("1", 5)
    answer = world.served()
    assert np.array_equal(world.rows(answer), np.concatenate([drafts.rows[:2], accepted.rows]))
    assert len(held(world.bench.core, world.bench.life("x"))) == 4


def test_rows_of_rejected_drafts_are_not_in_the_way_of_a_shorter_end(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.patch(world.seg(2, 1))
    world.engine.finish("1", 6)
    assert world.bench.state("x") == "incomplete", "positions 3 and 4 held rejected drafts, and nothing since"
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((3, 5),)


@pytest.mark.parametrize("kind", [R, C, REPAIR])
def test_other_kinds_only_fill_what_is_empty(world: Shipped, kind: Kind) -> None:
    sampled, late = world.seg(2, 2, opens="x"), world.seg(0, 6, kind)
    world.engine.patch(sampled)
    world.engine.patch(late)
    world.engine.finish("1", 7)
    answer = world.served()
    expected = late.rows.copy()
    expected[2:4] = sampled.rows
    assert np.array_equal(world.rows(answer), expected), "sampling-time rows win"
    assert answer.routes is not None
    assert answer.routes.provenance == ((0, 2, kind), (2, 4, F), (4, 6, kind))


def test_rows_past_a_hole_are_kept_and_the_hole_is_named(world: Shipped) -> None:
    first, third, second = world.seg(0, 2, opens="x"), world.seg(5, 2), world.seg(2, 3, REPAIR)
    world.engine.patch(first)
    world.engine.patch(third)
    world.engine.finish("1", 8)
    answer = world.bench.pull("x", partial=True)
    assert answer.routes is not None
    assert (answer.routes.status, answer.routes.missing) == ("incomplete", ((2, 5),))
    assert (world.rows(answer)[2:5] == -1).all()
    assert np.array_equal(world.rows(answer)[5:], third.rows)
    world.engine.patch(second)
    answer = world.served()
    assert np.array_equal(world.rows(answer), np.concatenate([first.rows, second.rows, third.rows]))


def test_a_hole_left_by_one_forward_is_not_filled_by_what_the_pages_held_before(seed: int) -> None:
    world = Shipped(seed, pages=2)
    world.engine.patch(world.seg(0, 8, opens="old"))
    world.engine.finish("1", 9)
    world.bench.release("old")
    world.engine.patch(world.seg(0, 1, life="2", opens="new"))
    world.engine.patch(world.seg(6, 1, life="2"))
    world.engine.finish("2", 8)
    problem = world.bench.pull("new").problem
    assert problem is not None
    assert problem.missing == ((1, 6),)


def test_a_prefill_and_its_sampled_row_in_one_patch(world: Shipped) -> None:
    cached, chunk, sampled = world.seg(0, 4, C, opens="x"), world.seg(4, 5, R), world.seg(9, 1)
    world.engine.patch(cached, chunk, sampled)
    world.engine.finish("1", 11)
    answer = world.served()
    assert answer.routes is not None
    assert answer.routes.provenance == ((0, 4, C), (4, 9, R), (9, 10, F))
    assert np.array_equal(world.rows(answer), np.concatenate([cached.rows, chunk.rows, sampled.rows]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_mixed_batch_of_prefill_decode_and_opening_in_any_order(seed: int, order: tuple[int, ...]) -> None:
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 3, life="d", opens="decode"), world.seg(0, 2, R, life="p", opens="prefill"))
    parts = [world.seg(3, 1, life="d"), world.seg(2, 6, R, life="p"), world.seg(0, 1, life="n", opens="new")]
    world.engine.patch(*(parts[i] for i in order))
    names = {"d": "decode", "p": "prefill", "n": "new"}
    for part in parts:
        rows = held(world.bench.core, world.bench.life(names[part.life]))
        for i, row in enumerate(part.rows):
            assert rows[part.start + i][0] == tuple(row.ravel().tolist())


# ------------------------------------------------------------------ rule 3: rows that are not clean


@pytest.mark.parametrize("how", ["declared", "uncaptured"])
@pytest.mark.parametrize("decode", [False, True])
def test_a_row_that_is_not_clean_is_missing(world: Shipped, how: str, decode: bool) -> None:
    world.engine.patch(world.seg(0, 2, opens="x"))
    seg = world.seg(2, 1 if decode else 3, bad=(0,) if how == "declared" else ())
    if how == "uncaptured":
        seg.rows[0, 1, 0] = -1
    world.engine.patch(seg)
    world.engine.finish("1", 2 + len(seg.rows) + 1)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((2, 3),)


def test_a_row_that_is_not_clean_still_ends_what_stood_there(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 5, opens="x"))
    world.engine.patch(world.seg(2, 1, bad=(0,)))
    assert set(held(world.bench.core, world.bench.life("x"))) == {0, 1}
    world.engine.patch(world.seg(2, 1, REPAIR))
    assert set(held(world.bench.core, world.bench.life("x"))) == {0, 1, 2}


# ------------------------------------------------------------------ losses


def test_a_lost_forward_ends_the_life_at_its_start(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.lost(world.seg(3, 1))
    world.engine.finish("1", 7)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((3, 6),), "rows behind it were drafts that it might have rejected"


@pytest.mark.parametrize("kind", [R, C, REPAIR])
def test_a_lost_fill_ends_nothing(world: Shipped, kind: Kind) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.lost(world.seg(3, 2, kind))
    world.engine.finish("1", 7)
    assert world.bench.state("x") == "complete"


def test_a_loss_may_open_a_life(world: Shipped) -> None:
    world.engine.lost(world.seg(0, 3, opens="x"))
    world.engine.patch(world.seg(3, 1))
    world.engine.finish("1", 5)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((0, 3),)


def test_decode_goes_on_behind_a_loss(world: Shipped) -> None:
    """Also where decode steps of one batch are recognised by following each other."""
    world.engine.patch(world.seg(0, 1, opens="x"))
    for at in (1, 2, 3):
        world.engine.patch(world.seg(at, 1))
    world.engine.lost(world.seg(4, 1))
    for at in (5, 6):
        world.engine.patch(world.seg(at, 1))
    assert set(held(world.bench.core, world.bench.life("x"))) == {0, 1, 2, 3, 5, 6}


def test_a_refused_patch_acts_as_the_loss_of_its_rows(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"), world.seg(0, 6, life="2", opens="y"))
    bad = world.seg(3, 1)
    bad.rows[0, 0, 0] = 99
    (refused,) = [m for m in world.engine.patch(bad) if isinstance(m, Refused)]
    assert (refused.code, refused.seq) == ("rows", 1)
    assert set(held(world.bench.core, world.bench.life("x"))) == {0, 1, 2}
    assert len(held(world.bench.core, world.bench.life("y"))) == 6


@pytest.mark.parametrize("ids", [b"\xff", b"\x91\xa11", b"\x92\xa11"])
def test_a_patch_whose_ids_cannot_be_read_loses_every_unfinished_life(world: Shipped, ids: bytes) -> None:
    """Whose draft rows should have ended cannot be known any more."""
    world.engine.patch(world.seg(0, 6, opens="x"), world.seg(0, 6, life="2", opens="y"))
    world.engine.finish("2", 7)
    world.engine.patch(world.seg(3, 1), world.seg(3, 1, life="3"), req_ids=ids)
    assert world.bench.state("x") == "lost"
    assert world.bench.state("y") == "complete"


# ------------------------------------------------------------------ rule 4: a length is not an end


def test_a_trainers_length_counts_only_behind_the_barrier(world: Shipped) -> None:
    drafts, accepted = world.seg(0, 6, opens="x"), world.seg(4, 1)
    world.engine.patch(drafts)
    answer = world.bench.pull("x", 6, timeout_ms=5000)
    assert answer.waits, "five rows are there, but the fifth is of a draft"
    assert [type(e.message).__name__ for e in answer.effects] == ["Flush"]  # type: ignore[union-attr]
    world.engine.patch(accepted)
    world.engine.flushed("1", 6)
    answer = world.served(num_tokens=6)
    assert np.array_equal(world.rows(answer), np.concatenate([drafts.rows[:4], accepted.rows]))


def test_an_unasked_or_wrong_flushed_settles_nothing(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.flushed("1", 7)
    assert world.bench.state("x") == "open"
    world.bench.pull("x", 7)
    world.engine.flushed("1", 6)
    assert world.bench.state("x") == "open"
    world.engine.flushed("1", 7)
    assert world.bench.state("x") == "complete"


def test_rows_behind_a_length_that_was_too_long_open_the_life_again(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 4, opens="x"))
    world.bench.pull("x", 10)
    world.engine.flushed("1", 10)
    assert world.bench.state("x") == "incomplete"
    world.engine.patch(world.seg(4, 1))
    assert world.bench.state("x") == "open"
    world.engine.finish("1", 6)
    assert world.bench.state("x") == "complete"


def test_a_shorter_length_needs_a_barrier_of_its_own(world: Shipped) -> None:
    """The first trainer was early: what was held at its barrier may have been drafts."""
    drafts, accepted = world.seg(0, 6, opens="x"), world.seg(3, 1)
    world.engine.patch(drafts)
    world.bench.pull("x", 50)
    world.engine.flushed("1", 50)
    assert world.bench.pull("x", 50).code == "incomplete"
    answer = world.bench.pull("x", 5, timeout_ms=5000)
    assert answer.waits, "rows 0 to 3 are held, but nothing says that they are the accepted ones"
    world.engine.patch(accepted)
    world.bench.pull("x", 5, timeout_ms=5000)
    world.engine.flushed("1", 5)
    answer = world.served(num_tokens=5)
    assert np.array_equal(world.rows(answer), np.concatenate([drafts.rows[:3], accepted.rows]))


def test_a_length_of_another_runs_tokens_opens_the_life_again_once_its_hole_is_filled(world: Shipped) -> None:
    """With a hole the tokens cannot be compared; when it is filled they are, and the next steps take the fast path."""
    before, filler, behind = world.seg(0, 2, opens="x"), world.seg(2, 1, REPAIR), world.seg(3, 3)
    world.engine.patch(before)
    world.engine.patch(behind)
    world.bench.pull("x", 7, tokens=range(7))
    world.engine.flushed("1", 7)
    assert world.bench.state("x") == "incomplete"
    world.engine.patch(filler)
    assert world.bench.state("x") == "open"
    last = world.seg(6, 1)
    world.engine.patch(last)
    world.engine.finish("1", 8)
    answer = world.served(num_tokens=8)
    assert np.array_equal(world.rows(answer), np.concatenate([s.rows for s in (before, filler, behind, last)]))


def test_the_emitters_own_finish_is_length_and_end(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.finish("1", 5)
    assert world.served().routes.num_tokens == 5  # type: ignore[union-attr]


def test_exactly_num_tokens_minus_one_rows_or_the_exact_ranges(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.finish("1", 9)
    answer = world.bench.pull("x")
    assert answer.code == "incomplete"
    assert answer.problem is not None
    assert answer.problem.missing == ((6, 8),)
    assert "[6, 8)" in answer.problem.message


@pytest.mark.parametrize("num_tokens", [None, 0, -1, (1 << 22) + 1, 2**62])
def test_an_end_without_a_possible_length_fails_the_request(world: Shipped, num_tokens: int | None) -> None:
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.finish("1", num_tokens)
    assert world.bench.pull("x").code == "failed"
    assert not pages_of(world.bench.life("x"))


def test_a_one_token_request_has_no_rows(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.engine.finish("1", 1)
    answer = world.served(num_tokens=1, tokens=[])
    assert answer.array is not None
    assert answer.array.shape == (0, 4, 2)
