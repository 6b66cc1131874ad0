"""The rules of how a life ends, one by one: aborts, two finishes, late rows, lives that never mix."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.messages import Kind, Refused
from tests.core.driver import Emitter, held
from tests.core.shipped import R, Shipped
from tests.harness.patches import SMALL, WIDE, random_seg


@pytest.fixture
def world(seed: int) -> Shipped:
    return Shipped(seed)


# ------------------------------------------------------------------ rule 5: aborted


def test_an_aborted_request_serves_at_most_its_length(world: Shipped) -> None:
    seg = world.seg(0, 8, opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 6, "aborted")
    assert world.bench.pull("x").code == "aborted"
    answer = world.served(partial=True)
    assert answer.routes is not None
    assert (answer.routes.status, answer.routes.num_tokens) == ("aborted", 6)
    assert np.array_equal(world.rows(answer), seg.rows[:5])


def test_without_a_length_an_abort_serves_up_to_the_first_row_of_the_last_forward(world: Shipped) -> None:
    first, drafts = world.seg(0, 4, R, opens="x"), world.seg(4, 3)
    world.engine.patch(first, drafts)
    world.engine.finish("1", None, "aborted")
    answer = world.served(partial=True)
    assert np.array_equal(world.rows(answer), np.concatenate([first.rows, drafts.rows[:1]]))


@pytest.mark.parametrize(("num_tokens", "rows"), [(9, 2), (None, 2), (2, 1), (1, 0)])
def test_an_aborted_prefix_ends_at_its_first_hole(world: Shipped, num_tokens: int | None, rows: int) -> None:
    world.engine.patch(world.seg(0, 2, opens="x"))
    world.engine.patch(world.seg(5, 3))
    world.engine.finish("1", num_tokens, "aborted")
    assert len(world.rows(world.served(partial=True))) == rows


def test_aborted_before_any_row(world: Shipped) -> None:
    world.engine.lost(world.seg(0, 3, opens="x"))
    world.engine.finish("1", None, "aborted")
    assert len(world.rows(world.served(partial=True))) == 0


# ------------------------------------------------------------------ rule 6: two ends


@pytest.mark.parametrize(("rows", "state"), [(9, "complete"), (4, "incomplete")])
def test_of_two_finishes_the_smaller_trims_and_a_larger_changes_nothing(world: Shipped, rows: int, state: str) -> None:
    world.engine.patch(world.seg(0, rows, opens="x"))
    world.engine.finish("1", 8)
    assert world.bench.state("x") == state
    world.engine.finish("1", 10)
    life = world.bench.life("x")
    assert life.num_tokens == 8
    assert any("conflict" in text for _, text in life.events)
    world.engine.finish("1", 5)
    assert world.bench.life("x").num_tokens == 5
    assert world.bench.state("x") == "complete", "a shorter end may need none of the missing rows"
    assert len(world.rows(world.served())) == 4


def test_a_pull_below_the_finish_is_trimmed_and_above_it_a_mismatch(world: Shipped) -> None:
    seg = world.seg(0, 9, opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 10)
    answer = world.served(num_tokens=4, tokens=seg.tokens[:3])
    assert answer.routes is not None
    assert answer.routes.trimmed
    assert np.array_equal(world.rows(answer), seg.rows[:3])
    assert world.bench.pull("x", 11).code == "length_mismatch"
    assert not world.served(num_tokens=10).routes.trimmed  # type: ignore[union-attr]


def test_a_failure_behind_an_end_that_could_still_be_filled_wins(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.finish("1", 9)
    world.engine.finish("1", None, "failed", "the device ran something else")
    assert world.bench.pull("x").code == "failed"


# ------------------------------------------------------------------ rule 7: after the end


def test_complete_is_final(world: Shipped) -> None:
    seg = world.seg(0, 6, opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 7)
    for kind in Kind:
        world.engine.patch(world.seg(3, 6, kind))
    world.engine.lost(world.seg(0, 6))
    world.engine.finish("1", None, "failed")
    answer = world.served()
    assert np.array_equal(world.rows(answer), seg.rows)
    assert world.bench.core.stats()["rows_dropped"] == 24


def test_the_surplus_of_an_async_step_takes_no_room_and_opens_nothing(seed: int) -> None:
    world = Shipped(seed, pages=3)
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.finish("1", 9)
    before = world.bench.core.arena.free_pages
    world.engine.patch(world.seg(3, 5))
    assert world.bench.state("x") == "incomplete"
    assert world.bench.core.arena.free_pages == before
    assert world.bench.core.stats()["rows_dropped"] == 5


def test_late_rows_of_a_released_request_are_dropped_and_counted(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"), world.seg(0, 3, life="2", opens="y"))
    world.bench.release("x")
    for at in (3, 4):
        world.engine.patch(world.seg(at, 1), world.seg(at, 1, life="2"))
    assert world.bench.core.stats()["rows_dropped"] == 2
    assert len(held(world.bench.core, world.bench.life("y"))) == 5
    assert world.bench.pull("x").code == "released"
    world.engine.finish("1", 6)
    assert world.bench.pull("x").code == "released"


def test_rows_of_a_life_that_was_never_opened_are_dropped(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, life="stranger"))
    world.engine.patch(world.seg(0, 3, life="stranger"), world.seg(7, 1, R, life="stranger"))
    world.engine.lost(world.seg(0, 3, life="stranger"))
    world.engine.finish("stranger", 4)
    assert len(world.bench.core.lives) == 0
    assert world.bench.core.stats()["rows_dropped"] == 5


def test_an_empty_step_changes_nothing(world: Shipped) -> None:
    world.engine.patch()
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.patch()
    world.engine.lost()
    assert len(held(world.bench.core, world.bench.life("x"))) == 3


def test_more_segments_than_the_batch_before_had_are_not_taken_for_it(world: Shipped) -> None:
    """The id column's bytes are equal, so a look-up by bytes alone would take the old batch for this one."""
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.engine.patch(world.seg(1, 1))
    one = world.seg(2, 1)
    answers = world.engine.patch(one, one, one, req_ids=b"\x91\xa11")
    assert [a.code for a in answers if isinstance(a, Refused)] == ["columns"]
    assert world.bench.state("x") == "lost"


def test_a_reason_longer_than_any_reader_wants_is_cut(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.engine.finish("1", None, "failed", "x" * 3_000_000)
    assert len(world.bench.life("x").reason) <= 1024
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert len(problem.message) < 2000


# ------------------------------------------------------------------ rule 1: lives never mix


def test_the_same_id_in_two_engines_is_two_lives(seed: int) -> None:
    world = Shipped(seed)
    other = Emitter(world.bench, "other", WIDE)
    other.hello()
    mine = world.seg(0, 4, opens="x")
    theirs = random_seg(world.rng, WIDE, "1", 0, 5, opens="y")
    world.engine.patch(mine)
    other.patch(theirs)
    world.engine.finish("1", 5)
    other.finish("1", 6)
    assert np.array_equal(world.rows(world.served("x")), mine.rows)
    assert np.array_equal(world.served("y").array, theirs.rows)


def test_two_geometries_whose_rows_have_equal_bytes_do_not_share_a_dtype(seed: int) -> None:
    narrow = SMALL  # 2 layers x 2 ids x 1 byte
    wide = type(SMALL)(num_layers=1, moe_layer_ids=(0,), top_k=2, num_experts=300)  # 1 layer x 2 ids x 2 bytes
    assert narrow.row_nbytes == wide.row_nbytes
    world = Shipped(seed)
    other = Emitter(world.bench, "other", wide)
    other.hello()
    mine, theirs = world.seg(0, 4, opens="x"), random_seg(world.rng, wide, "1", 0, 5, opens="y")
    world.engine.patch(mine)
    other.patch(theirs)
    for at in range(5, 9):
        other.patch(random_seg(world.rng, wide, "1", at, 1))
    world.engine.finish("1", 5)
    other.finish("1", 10)
    assert np.array_equal(world.rows(world.served("x")), mine.rows)
    answer = world.served("y")
    assert answer.array is not None
    assert np.array_equal(answer.array[:5], theirs.rows)
