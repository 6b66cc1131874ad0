"""Rule 9: a full arena, whole patches or none, who is shed, and memory that no message can make grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collector.core.arena import Arena
from protocol import limits
from protocol.errors import GeometryError
from protocol.geometry import Geometry
from protocol.messages import Ack, Heartbeat, Kind, Welcome
from tests.core.driver import PAGE, Emitter, engine_messages, held, pages_of
from tests.core.test_rules import Shipped
from tests.harness.patches import SMALL, random_seg


def of(kind: type, messages: Any) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def per_page(world: Shipped) -> int:
    return world.bench.core.arena.layout(SMALL).rows_per_page


@pytest.fixture
def full(seed: int) -> Shipped:
    """Four pages, held by the open requests a and b, two each; a patch of a third is waiting."""
    world = Shipped(seed, pages=4, grace_s=10.0)
    for name in "ab":
        world.engine.patch(world.seg(0, 2 * per_page(world), life=name, opens=name))
    answers = world.engine.patch(world.seg(0, 1, life="c", opens="c"), world.seg(2, 1, life="a"))
    assert [(a.logged_seq, a.window_bytes) for a in of(Ack, answers)] == [(1, 0)], "acked so far, and send no more"
    return world


def test_a_patch_without_room_is_not_applied_at_all(full: Shipped) -> None:
    rows = held(full.bench.core, full.bench.life("a"))
    assert len(rows) == 2 * per_page(full), "its forward at 2 would have ended the life there"
    assert not held(full.bench.core, full.bench.life("c"))
    assert full.bench.core.stats()["engines_stalled"] == 1


def test_a_release_lets_it_in_again(full: Shipped) -> None:
    patch = full.engine.seq - 1
    effects = full.bench.release("b")
    assert [m.next_seq for m in of(Welcome, engine_messages(effects))] == [patch]
    full.engine.seq = patch
    full.engine.patch(full.seg(0, 1, life="c", opens="c"), full.seg(2, 1, life="a"))
    assert len(held(full.bench.core, full.bench.life("a"))) == 3
    assert len(held(full.bench.core, full.bench.life("c"))) == 1


def test_the_youngest_unfinished_request_is_shed_after_the_grace_time_and_no_earlier(full: Shipped) -> None:
    full.bench.tick(9.9)
    assert [full.bench.state(name) for name in "abc"] == ["open", "open", "open"]
    full.bench.tick(0.2)
    assert [full.bench.state(name) for name in "abc"] == ["open", "open", "lost"]
    assert "budget" in full.bench.life("c").reason


def test_the_oldest_finishes_however_many_must_go(full: Shipped) -> None:
    seq = full.engine.seq - 1
    whole = full.seg(0, 4 * per_page(full), life="a")
    for _ in range(5):
        full.engine.seq = seq
        full.engine.patch(whole)
        full.bench.tick(10.1)
    full.engine.finish("a", len(whole.rows) + 1)
    assert np.array_equal(full.rows(full.served("a")), whole.rows)
    assert [full.bench.state(name) for name in "bc"] == ["lost", "lost"]


@pytest.mark.parametrize("how", ["stop", "aborted"])
def test_a_finished_unread_request_is_never_evicted_for_room(seed: int, how: Any) -> None:
    world = Shipped(seed, pages=2, grace_s=1.0)
    kept = world.seg(0, 2 * per_page(world), life="a", opens="a")
    world.engine.patch(kept)
    world.engine.finish("a", len(kept.rows) + 1, how)
    for _ in range(5):
        world.engine.seq = 2
        world.engine.patch(world.seg(0, 1, life="b", opens="b"))
        world.bench.tick(1.1)
    assert np.array_equal(world.rows(world.served("a", partial=True)), kept.rows)
    assert world.bench.state("b") == "lost"


def test_what_was_released_while_its_opening_waited_stays_released(full: Shipped) -> None:
    full.bench.release("c")
    full.bench.release("b")
    full.engine.seq -= 1
    full.engine.patch(full.seg(0, 1, life="c", opens="c"), full.seg(2, 1, life="a"))
    assert full.bench.pull("c").code == "released"


def test_a_stalled_engine_stays_alive_by_its_heartbeats_and_is_told_to_wait(seed: int) -> None:
    world = Shipped(seed, pages=1, liveness_s=5.0, grace_s=1e6)
    world.engine.patch(world.seg(0, 1, life="a", opens="a"))
    world.engine.finish("a", 2)
    world.engine.patch(world.seg(0, 1, life="b", opens="b"))
    for _ in range(3):
        world.bench.tick(4.0)
        assert [a.window_bytes for a in of(Ack, world.engine.heartbeat())] == [0]
    world.bench.release("a")
    assert [a.window_bytes for a in of(Ack, world.engine.say(Heartbeat(2)))] == [64 << 20]


def test_a_slot_and_its_pages_are_as_new_for_the_next_request(seed: int) -> None:
    world = Shipped(seed, pages=4)
    for i in range(20):
        seg = world.seg(0, 1 + i % 9, life=f"{i}", opens=f"x{i}", version=i)
        world.engine.patch(seg)
        for at in range(len(seg.rows), len(seg.rows) + 3):
            world.engine.patch(world.seg(at, 1, life=f"{i}"))
        world.engine.finish(f"{i}", len(seg.rows) + 4)
        answer = world.served(f"x{i}")
        assert np.array_equal(world.rows(answer)[: len(seg.rows)], seg.rows)
        assert answer.routes is not None
        assert answer.routes.missing == ()
        world.bench.release(f"x{i}")
    assert world.bench.core.arena.free_pages == 4


@pytest.mark.parametrize("n", range(1, 14))
def test_decode_across_page_borders(seed: int, n: int) -> None:
    world = Shipped(seed)
    segs = [world.seg(0, n, opens="x", life="1"), world.seg(0, 2, opens="y", life="2")]
    world.engine.patch(*segs)
    for at in range(12):
        step = [world.seg(n + at, 1, life="1"), world.seg(2 + at, 1, life="2")]
        segs += step
        world.engine.patch(*step)
    for life, name, length in (("1", "x", n + 12), ("2", "y", 14)):
        world.engine.finish(life, length + 1)
        expected = np.concatenate([seg.rows for seg in segs if seg.life == life])
        assert np.array_equal(world.rows(world.served(name)), expected)


# ------------------------------------------------------------------ positions beyond what the arena can ever hold


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.REPAIR])
def test_a_request_longer_than_the_whole_arena_is_lost_and_nobody_else(seed: int, kind: Kind) -> None:
    world = Shipped(seed, pages=4)
    mine = world.seg(0, 3, life="a", opens="a")
    world.engine.patch(mine, world.seg(0, 3, life="b", opens="b"))
    capacity = 4 * per_page(world)
    answers = world.engine.patch(world.seg(3, 1, life="a"), world.seg(capacity, 1, kind, life="b"))
    assert [a.window_bytes for a in of(Ack, answers)] == [64 << 20], "nobody waits for room that cannot be"
    assert world.bench.state("b") == "lost"
    assert "budget" in world.bench.life("b").reason
    assert len(held(world.bench.core, world.bench.life("a"))) == 4


def test_the_last_position_that_the_arena_can_hold_is_held(seed: int) -> None:
    world = Shipped(seed, pages=4)
    capacity = 4 * per_page(world)
    world.engine.patch(world.seg(capacity - 1, 1, opens="x"))
    assert set(held(world.bench.core, world.bench.life("x"))) == {capacity - 1}
    assert len(pages_of(world.bench.life("x"))) == 1


def test_a_decode_that_outgrows_the_arena_alone_is_lost(seed: int) -> None:
    world = Shipped(seed, pages=2)
    world.engine.patch(world.seg(0, 1, opens="x"))
    for at in range(1, 2 * per_page(world) + 1):
        assert world.bench.state("x") == "open"
        world.engine.patch(world.seg(at, 1))
    assert world.bench.state("x") == "lost"
    assert world.bench.core.arena.free_pages == 2


def test_far_positions_cost_no_memory(seed: int) -> None:
    """One page a row: a page table up to the highest position there is would be 32 MB a life."""
    wide = Geometry(num_layers=64, moe_layer_ids=tuple(range(64)), top_k=8, num_experts=300)
    world = Shipped(seed, geometry=wide, pages=64, page_bytes=wide.row_nbytes + 8)
    segs = [
        random_seg(world.rng, wide, f"{i}", limits.MAX_TOKENS - 1, 1, opens=f"x{i}", kind=Kind.CACHED) for i in range(4)
    ]
    assert _peak_of(lambda: world.engine.patch(*segs)) < 4 << 20


def test_counting_and_serving_a_long_request_of_one_row_takes_little_more_than_its_answer(seed: int) -> None:
    world = Shipped(seed, pages=64, page_bytes=64 << 10)
    n = 64 * per_page(world)
    world.engine.patch(world.seg(n - 1, 1, opens="x"))
    assert _peak_of(lambda: world.engine.finish("1", n + 1)) < 30 * n, "8 bytes of meta a position, and little else"
    answer = n * SMALL.num_layers * SMALL.top_k * 2
    assert _peak_of(lambda: world.served(partial=True)) < answer + 40 * n


def _peak_of(act: Callable[[], Any]) -> int:
    """Bytes allocated at once while `act` ran."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------ the arena itself


@pytest.mark.parametrize(("page_bytes", "pages"), [(60, 4), (64, 0)])
def test_pages_that_cannot_be_are_refused(page_bytes: int, pages: int) -> None:
    with pytest.raises(ValueError, match=f"page_bytes {page_bytes}"):
        Arena(np.zeros(page_bytes * pages, np.uint8), page_bytes)


def test_a_row_larger_than_a_page_is_refused_with_the_way_out() -> None:
    arena = Arena(np.zeros(PAGE * 4, np.uint8), PAGE)
    with pytest.raises(GeometryError, match="raise --page-bytes"):
        arena.layout(Geometry(64, tuple(range(64)), 8, 300))


def test_an_engine_whose_rows_do_not_fit_hears_it_at_hello(seed: int) -> None:
    world = Shipped(seed)
    big = Emitter(world.bench, "big", Geometry(64, tuple(range(64)), 8, 300))
    assert "does not fit a page" in big.hello()[0].message  # type: ignore[union-attr]


def test_what_is_over_is_not_watched_for_its_time_to_live(seed: int) -> None:
    world = Shipped(seed)
    for i in range(50):
        world.engine.patch(world.seg(0, 1, life=str(i), opens=f"x{i}"))
        world.engine.finish(str(i), 2)
        world.bench.tick()
        world.bench.release(f"x{i}")
    retention = world.bench.core.retention
    assert not retention._watched
    assert not retention._settled
