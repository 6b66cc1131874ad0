"""What a trainer hears: waiting, choosing among runs, slices, dtypes, and nothing that drifts while it waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collector.core.events import ServeRoutes
from protocol import codec, limits
from protocol.messages import Kind, List, Listing, Problem, Pull, Release, Released, Stats
from protocol.messages import Stat as StatAsk
from tests.core.driver import Emitter, answers_in
from tests.core.test_rules import Shipped
from tests.harness.patches import WIDE, Seg


@pytest.fixture
def world(seed: int) -> Shipped:
    return Shipped(seed)


def finished(world: Shipped, name: str = "x", life: str = "1", n: int = 6, **more: Any) -> Seg:
    seg = world.seg(0, n, life=life, opens=name, **more)
    world.engine.patch(seg)
    world.engine.finish(life, n + 1)
    return seg


# ------------------------------------------------------------------ waiting


def test_a_pull_that_came_before_everything_is_answered_at_the_finish(world: Shipped) -> None:
    assert world.bench.pull("x", timeout_ms=60_000).waits
    effects: list[Any] = []
    original = world.bench.handle
    world.bench.handle = lambda event: effects.extend(found := original(event)) or found  # type: ignore[method-assign]
    seg = finished(world)
    (answer,) = answers_in(world.bench.core, effects).values()
    assert answer.array is not None
    assert np.array_equal(world.rows(answer), seg.rows)
    assert world.bench.core.queries.waiting == 0


@pytest.mark.parametrize(("opened", "code"), [(True, "not_ready"), (False, "unknown")])
def test_the_deadline_is_kept(world: Shipped, opened: bool, code: str) -> None:
    if opened:
        world.engine.patch(world.seg(0, 3, opens="x"))
    assert world.bench.pull("x", timeout_ms=3000).waits
    assert world.bench.tick(2.9) == []
    (effect,) = world.bench.tick(0.2)
    assert effect.message.code == code  # type: ignore[union-attr]
    assert world.bench.core.queries.waiting == 0


def test_a_pull_that_does_not_wait_is_answered_now(world: Shipped) -> None:
    assert world.bench.pull("x").code == "unknown"
    world.engine.patch(world.seg(0, 3, opens="x"))
    assert world.bench.pull("x").code == "not_ready"


def test_an_incomplete_request_is_waited_for_a_little_and_served_once_repaired(seed: int) -> None:
    world = Shipped(seed, incomplete_wait_s=2.0)
    seg = world.seg(0, 6, opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 9)
    assert world.bench.pull("x", timeout_ms=60_000).waits
    assert world.bench.tick(1.9) == []
    repair = world.seg(6, 2, Kind.REPAIR)
    effects: list[Any] = []
    original = world.bench.handle
    world.bench.handle = lambda event: effects.extend(found := original(event)) or found  # type: ignore[method-assign]
    world.engine.patch(repair)
    (answer,) = answers_in(world.bench.core, effects).values()
    assert np.array_equal(world.rows(answer), np.concatenate([seg.rows, repair.rows]))


def test_without_repair_the_ranges_are_told_long_before_the_deadline(seed: int) -> None:
    world = Shipped(seed, incomplete_wait_s=2.0)
    world.engine.patch(world.seg(0, 6, opens="x"))
    world.engine.finish("1", 9)
    assert world.bench.pull("x", timeout_ms=60_000).waits
    (effect,) = world.bench.tick(2.1)
    assert effect.message.code == "incomplete"  # type: ignore[union-attr]
    assert effect.message.missing == ((6, 8),)  # type: ignore[union-attr]


def test_a_waiting_pull_hears_of_the_release(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    assert world.bench.pull("x", timeout_ms=60_000).waits
    world.bench.release("x")
    (effect,) = world.bench.tick(0.1)
    assert effect.message.code == "released"  # type: ignore[union-attr]


def test_pulls_that_wait_are_bounded_per_trainer(world: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING_PULLS", 3)
    codes = [world.bench.pull("x", timeout_ms=1000).code for _ in range(4)]
    assert codes == ["", "", "", "too_many"]
    effects = world.bench.ask(Pull(99, "x", timeout_ms=1000), peer=b"another")
    assert effects == []
    world.bench.tick(1.1)
    assert world.bench.pull("x", timeout_ms=1000).waits


# ------------------------------------------------------------------ choosing among runs


def twins(world: Shipped) -> tuple[Seg, Seg]:
    """Two complete runs of one name."""
    return finished(world, life="1"), finished(world, life="2")


def test_two_runs_of_a_name_are_ambiguous_and_named(world: Shipped) -> None:
    twins(world)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.code == "ambiguous"
    assert "engine/1" in problem.message
    assert "engine/2" in problem.message


def test_tokens_choose_the_run(world: Shipped) -> None:
    for seg in twins(world):
        assert np.array_equal(world.rows(world.served("x", 7, tokens=seg.tokens)), seg.rows)
    assert world.bench.pull("x", 7, tokens=(1, 2, 3, 4, 5, 6)).code == "wrong_tokens"


@pytest.mark.parametrize("how", ["aborted", "failed", "lost"])
def test_a_run_that_can_serve_is_preferred_to_one_that_cannot(world: Shipped, how: str) -> None:
    if how == "lost":
        other = Emitter(world.bench, "other")
        other.hello()
        other.patch(world.seg(0, 3, life="1", opens="x"))
        other.bye()
    else:
        world.engine.patch(world.seg(0, 3, life="1", opens="x"))
        world.engine.finish("1", 4 if how == "aborted" else None, how)  # type: ignore[arg-type]
    assert world.bench.pull("x").code == how
    seg = finished(world, life="2")
    assert np.array_equal(world.rows(world.served("x")), seg.rows)


def test_rows_of_other_tokens_are_refused(world: Shipped) -> None:
    seg = finished(world)
    wrong = (*seg.tokens[:-1], seg.tokens[-1] ^ 1)
    assert world.bench.pull("x", 7, tokens=wrong).code == "wrong_tokens"
    assert world.bench.pull("x", 7, tokens=seg.tokens).routes is not None
    assert world.bench.pull("x", 4, tokens=wrong[:3]).routes is not None, "only the tokens of the rows asked for"


def test_the_answers_own_digest_is_of_its_tokens(world: Shipped) -> None:
    seg = finished(world)
    assert world.served(num_tokens=4).routes.token_digest == codec.token_digest(seg.tokens[:3])  # type: ignore[union-attr]


def test_negative_token_ids_are_token_ids(world: Shipped) -> None:
    seg = world.seg(0, 3, opens="x")
    seg = Seg(seg.life, seg.start, seg.rows, (-1, -(2**31), 2**31 - 1), opens="x")
    world.engine.patch(seg)
    world.engine.finish("1", 4)
    assert world.bench.pull("x", 4, tokens=seg.tokens).routes is not None


# ------------------------------------------------------------------ slices and dtypes


@pytest.mark.parametrize("geometry", [None, WIDE], ids=["uint8", "int16"])
@pytest.mark.parametrize("rows", [None, (0, 0), (0, 5), (3, 20), (19, 20), (20, 20)])
@pytest.mark.parametrize("more", [{}, {"axis": "moe"}, {"layers": (2, 1, 2)}, {"layers": ()}, {"dtype": "int32"}])
def test_a_slice_is_the_slice_of_the_whole(seed: int, geometry: Any, rows: Any, more: dict[str, Any]) -> None:
    world = Shipped(seed, **({"geometry": geometry} if geometry else {}))
    finished(world, n=20, version=3)
    whole = world.served().array
    assert whole is not None
    answer = world.served(rows=rows, **more)
    start, stop = rows or (0, 20)
    if "axis" in more:
        layers = world.geometry.moe_layer_ids
    else:
        layers = more.get("layers", tuple(range(world.geometry.num_layers)))
    assert answer.array is not None
    assert answer.routes is not None
    assert np.array_equal(answer.array, whole[start:stop][:, list(layers)])
    assert answer.array.dtype == np.dtype(more.get("dtype", "int16"))
    assert answer.array.flags.c_contiguous
    assert answer.routes.layers == tuple(layers)
    assert (answer.routes.row_start, answer.routes.shape) == (start, answer.array.shape)
    assert answer.routes.weight_spans == (((start, stop, 3),) if stop > start else ())


@pytest.mark.parametrize(
    "more",
    [
        {"rows": (0, 21)},
        {"rows": (5, 4)},
        {"rows": (-1, 4)},
        {"rows": (0, 10**18)},
        {"layers": (4,)},
        {"layers": (-1,)},
        {"layers": (1,) * 5},
        {"dtype": "uint8"},
        {"num_tokens": 0},
        {"num_tokens": -5},
        {"num_tokens": limits.MAX_TOKENS + 1},
        {"timeout_ms": -1},
    ],
)
def test_a_slice_that_is_none_is_a_bad_request(world: Shipped, more: dict[str, Any]) -> None:
    finished(world, n=20)
    assert world.bench.pull("x", **more).code == "bad_request"


def test_uint8_is_served_where_every_cell_fits(world: Shipped) -> None:
    seg = finished(world, n=20)
    answer = world.served(dtype="uint8", axis="moe")
    assert answer.array is not None
    assert answer.array.dtype == np.uint8
    assert np.array_equal(answer.array, seg.rows)


def test_uint8_is_refused_where_a_row_is_missing_or_an_id_does_not_fit(seed: int) -> None:
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.finish("1", 6)
    assert world.bench.pull("x", dtype="uint8", axis="moe", partial=True).code == "bad_request"
    wide = Shipped(seed, geometry=WIDE)
    finished(wide)
    assert wide.bench.pull("x", dtype="uint8", axis="moe").code == "bad_request"


def test_an_answer_larger_than_the_limit_is_refused_before_it_is_made(
    world: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(world, n=20)
    monkeypatch.setattr(limits, "MAX_REPLY_BYTES", 20 * 4 * 2 * 2)
    assert world.bench.pull("x").routes is not None
    problem = world.bench.pull("x", dtype="int32").problem
    assert problem is not None
    assert (problem.code, "pull row ranges" in problem.message) == ("too_large", True)
    assert world.bench.pull("x", dtype="int32", rows=(0, 10)).routes is not None


def test_an_id_too_long_is_not_repeated_back(world: Shipped) -> None:
    problem = world.bench.pull("x" * 1_000_000).problem
    assert problem is not None
    assert problem.code == "bad_request"
    assert len(codec.encode(problem)) < 3000


# ------------------------------------------------------------------ between the answer and its sending


def test_a_pull_is_idempotent(world: Shipped) -> None:
    finished(world)
    first, second = world.served(), world.served()
    assert np.array_equal(first.array, second.array)
    assert first.array is not second.array


def test_rows_released_before_they_could_be_sent_are_not_gathered_from_reused_pages(seed: int) -> None:
    world = Shipped(seed, pages=3)
    finished(world)
    (effect,) = [e for e in world.bench.ask(Pull(1, "x")) if isinstance(e, ServeRoutes)]
    world.bench.release("x")
    finished(world, name="y", life="2")
    problem = world.bench.core.gather(effect, 0.0)
    assert isinstance(problem, Problem)
    assert problem.code == "released"


def test_what_was_filled_in_after_the_header_stays_out_of_its_array(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.finish("1", 6)
    (effect,) = [e for e in world.bench.ask(Pull(1, "x", partial=True)) if isinstance(e, ServeRoutes)]
    assert effect.header.missing == ((3, 5),)
    world.engine.patch(world.seg(3, 2, Kind.REPAIR))
    array = world.bench.core.gather(effect, 0.0)
    assert not isinstance(array, Problem)
    assert (array[3:] == -1).all()


# ------------------------------------------------------------------ release, list, counters


def test_release_counts_what_it_knew_and_repeating_is_harmless(world: Shipped) -> None:
    finished(world, "x", "1")
    finished(world, "y", "2")
    for expected in ((2, 1), (0, 3)):
        (effect,) = [e.message for e in world.bench.ask(Release(7, ("x", "y", "z")))]  # type: ignore[union-attr]
        assert effect == Released(7, *expected)
    assert world.bench.core.arena.free_pages == world.bench.core.arena.pages


def test_released_ids_stay_as_bounded_tombstones(seed: int) -> None:
    world = Shipped(seed, tombstones=2)
    for i in range(3):
        finished(world, f"x{i}", f"{i}", n=1)
        world.bench.release(f"x{i}")
    assert [world.bench.pull(f"x{i}").code for i in range(3)] == ["unknown", "released", "released"]


def test_a_name_may_be_used_again_after_its_release(world: Shipped) -> None:
    finished(world, life="1")
    world.bench.release("x")
    seg = finished(world, life="2")
    assert np.array_equal(world.rows(world.served()), seg.rows)


def test_settled_requests_outlive_their_time_by_nothing(seed: int) -> None:
    world = Shipped(seed, ttl_s=100.0)
    finished(world, "x", "1")
    world.bench.tick(60.0)
    finished(world, "y", "2")
    world.bench.tick(45.0)
    assert (world.bench.pull("x").code, world.bench.pull("y").code) == ("released", "")
    assert world.bench.core.stats()["requests_expired"] == 1


def test_pages_of_a_list_meet_every_request_once(world: Shipped) -> None:
    for i in range(7):
        finished(world, f"x{i}", f"{i}", n=1)
    seen: list[str] = []
    after = 0
    while True:
        (page,) = [e.message for e in world.bench.ask(List(1, "complete", after, 3))]  # type: ignore[union-attr]
        assert isinstance(page, Listing)
        seen += [entry.request_id for entry in page.entries]
        if not (after := page.next):
            break
    assert seen == [f"x{i}" for i in range(7)]
    (page,) = [e.message for e in world.bench.ask(List(1, "open", 0, 3))]  # type: ignore[union-attr]
    assert page.entries == ()  # type: ignore[union-attr]


def test_counters_add_up(world: Shipped) -> None:
    finished(world)
    world.served()
    world.bench.pull("nobody")
    (stats,) = [e.message for e in world.bench.ask(StatAsk(3))]  # type: ignore[union-attr]
    assert isinstance(stats, Stats)
    expected = {
        "requests_complete": 1,
        "requests_open": 0,
        "patches": 1,
        "rows": 6,
        "pulls_served": 1,
        "pull_problems": 1,
        "engines": 1,
    }
    assert {name: stats.values[name] for name in expected} == expected


def test_runs_that_were_all_lost_are_lost_and_not_ambiguous(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.engine.patch(world.seg(0, 3, life="2", opens="x"))
    world.engine.bye()
    assert world.bench.pull("x", 4).code == "lost"


def test_captured_layers_alone_are_served_as_uint8(world: Shipped) -> None:
    seg = finished(world)
    answer = world.served("x", layers=world.geometry.moe_layer_ids[-1:], dtype="uint8")
    assert answer.array is not None
    assert answer.array.dtype == np.uint8
    assert np.array_equal(answer.array, seg.rows[:, -1:])


def test_an_answer_with_more_ranges_than_its_header_may_hold_is_too_large(
    world: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.limits.MAX_SPANS", 2)
    for start in range(0, 6, 2):
        world.engine.patch(
            world.seg(start, 2, opens="x" if start == 0 else None), weight_versions=np.array([start], "<i4").tobytes()
        )
    world.engine.finish("1", 7)
    assert world.bench.pull("x").code == "too_large"
    assert world.bench.pull("x", rows=(0, 4)).code == ""


def test_a_bug_in_one_answer_is_that_answers_alone(world: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(world)
    with monkeypatch.context() as broken:
        broken.setattr("collector.core.queries.header_for", lambda *_: 1 // 0)
        assert world.bench.pull("x").code == "internal"
    assert world.bench.pull("x").code == ""
