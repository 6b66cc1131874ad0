"""What was asked about accumulation: gaps, ends, late rows, memory, and the cost of a step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.geometry import Geometry
from protocol.messages import Kind
from tests.core.driver import Bench, Emitter, held, pages_of
from tests.core.shipped import Shipped
from tests.harness.patches import SMALL, Seg, frames, random_seg


@pytest.fixture
def world(seed: int) -> Shipped:
    return Shipped(seed)


def test_question_2_a_layer_that_no_hook_saw_is_missing_and_never_served(world: Shipped) -> None:
    """Nobody declared the row bad: a path that misses the hook does not know that it does."""
    seg = world.seg(0, 9, opens="x")
    seg.rows[4, 1] = -1
    world.engine.patch(seg)
    world.engine.finish("1", 10)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert (problem.code, problem.missing) == ("incomplete", ((4, 5),))
    array = world.rows(world.served(partial=True))
    assert (array[4] == -1).all(), "the layer that was seen is not served without the other"
    assert np.array_equal(np.delete(array, 4, 0), np.delete(seg.rows, 4, 0))


META_AND_SEAL = 16
"""Bytes beside a row in its cell."""


@pytest.mark.parametrize(
    ("geometry", "nbytes"),
    [
        (Geometry(61, tuple(range(3, 61)), 8, 256), 58 * 8 * 2),
        (Geometry(48, tuple(range(48)), 8, 128), 48 * 8),
        (Geometry(48, tuple(range(48)), 8, 255), 48 * 8),
        (Geometry(48, tuple(range(1, 48, 4)), 8, 128), 12 * 8),
    ],
)
def test_question_4_a_choice_takes_a_byte_or_two_and_a_dense_layer_nothing(
    seed: int, geometry: Geometry, nbytes: int
) -> None:
    """On the wire and in the arena; int32 over all layers would be 1,952 and 1,536 bytes a row."""
    seg = random_seg(np.random.default_rng(seed), geometry, "1", 0, 40, opens="x")
    assert len(frames(geometry, 0, [seg])[1]) == 40 * nbytes
    bench = Bench(pages=1, page_bytes=40 * (nbytes + META_AND_SEAL))
    engine = Emitter(bench, geometry=geometry)
    engine.hello()
    engine.patch(seg)
    engine.finish("1", 41)
    assert bench.state("x") == "complete", "a page of 40 rows holds 40"


def test_question_5_a_second_rank_that_ships_never_mixes_with_the_first(world: Shipped) -> None:
    """Same engine, same life, same name, other rows: two runs, each whole, and neither is guessed."""
    second = Emitter(world.bench, "rank-1")
    second.hello()
    ours, theirs = world.seg(0, 6, opens="x"), world.seg(0, 6, opens="x")
    world.engine.patch(ours)
    second.patch(theirs)
    for emitter in (world.engine, second):
        emitter.finish("1", 7)
    assert world.bench.pull("x").code == "ambiguous"
    for seg in (ours, theirs):
        assert np.array_equal(world.rows(world.served(num_tokens=7, tokens=seg.tokens)), seg.rows)


def test_question_7_the_step_behind_an_end_is_dropped_counted_and_not_logged(
    world: Shipped, caplog: pytest.LogCaptureFixture
) -> None:
    """With one more step in flight at every stop, a line for each would be a line for every request."""
    caplog.set_level(logging.DEBUG)
    n = 64
    segs = [world.seg(0, 5, life=f"{i}", opens=f"x{i}") for i in range(n)]
    world.engine.patch(*segs)
    for i in range(n):
        world.engine.finish(f"{i}", 6)
    world.engine.patch(*(world.seg(5, 1, life=f"{i}") for i in range(n)))
    assert world.bench.core.stats()["rows_dropped"] == n
    assert not caplog.records
    for i, seg in enumerate(segs):
        assert np.array_equal(world.rows(world.served(f"x{i}", num_tokens=6)), seg.rows)


def test_question_8_a_short_end_names_its_ranges_and_an_abort_serves_its_prefix(world: Shipped) -> None:
    stopped, aborted = world.seg(0, 5, opens="stopped"), world.seg(0, 5, life="2", opens="aborted")
    world.engine.patch(stopped, aborted)
    world.engine.finish("1", 9)
    world.engine.finish("2", 9, "aborted")
    problem = world.bench.pull("stopped").problem
    assert problem is not None
    assert (problem.code, problem.missing) == ("incomplete", ((5, 8),))
    assert world.bench.pull("aborted").code == "aborted", "never without being asked"
    answer = world.served("aborted", partial=True)
    assert answer.routes is not None
    assert answer.routes.status == "aborted"
    assert np.array_equal(world.rows(answer), aborted.rows), "short, and not filled up"


def test_question_12_a_geometry_is_a_value() -> None:
    """Asking for it, or checking it, changes nothing, and nobody can."""
    geometry = Geometry(6, (1, 2), 2, 8)
    before = msgspec.to_builtins(geometry)
    assert geometry.validate() is geometry
    assert (geometry.row_shape, geometry.row_nbytes, geometry.num_moe_layers) == ((2, 2), 4, 2)
    assert msgspec.to_builtins(geometry) == before
    assert hash(geometry) == hash(Geometry(6, (1, 2), 2, 8))
    with pytest.raises(AttributeError):
        geometry.num_layers = 7  # type: ignore[misc]


def _decode(rng: np.random.Generator, n: int, at: int) -> list[Seg]:
    return [random_seg(rng, SMALL, f"{i}", at, 1, opens=f"x{i}" if at == 0 else None) for i in range(n)]


def _calls_of_a_decode_step(seed: int, n: int) -> int:
    """Calls, of Python and of C, between the frames of a decode step of n requests and its rows in the arena."""
    rng = np.random.default_rng(seed)
    bench = Bench(pages=n, page_bytes=1 << 12)
    emitter = Emitter(bench)
    emitter.hello()
    for at in range(4):
        emitter.patch(*_decode(rng, n, at))
    event: Any = bench.ingest.from_engine(emitter.peer, frames(SMALL, emitter.seq, _decode(rng, n, 4)))
    calls = 0

    def count(_frame: object, what: str, _argument: object) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        bench.core.handle(event, bench.now)
    finally:
        sys.setprofile(before)
    assert all(len(held(bench.core, bench.life(f"x{i}"))) == 5 for i in range(0, n, 7))
    return calls


def test_question_14_a_decode_step_makes_no_python_call_per_request(seed: int) -> None:
    assert _calls_of_a_decode_step(seed, 8) == _calls_of_a_decode_step(seed, 512)


def test_question_14_growth_moves_no_row_that_is_held(world: Shipped) -> None:
    """A request grows by pages: what it holds stays where it is, and takes no more than its rows need."""
    pages: dict[int, int] = {}
    free = world.bench.core.arena.free_pages
    world.engine.patch(world.seg(0, 1, opens="x"))
    life = world.bench.life("x")
    for at in range(1, 500):
        world.engine.patch(world.seg(at, 1))
        now = pages_of(life)
        assert pages.items() <= now.items(), "a page moved"
        pages = now
    assert free - world.bench.core.arena.free_pages == len(pages) == 500 // 4


@pytest.mark.parametrize("moe", [(1, 2), (0,), (5,), (0, 2, 4)])
def test_open_full_layer_count_a_dense_suffix_is_served_as_uncaptured(seed: int, moe: Sequence[int]) -> None:
    world = Shipped(seed, Geometry(6, tuple(moe), 2, 8))
    seg = world.seg(0, 9, opens="x", kind=Kind.FORWARD)
    world.engine.patch(seg)
    world.engine.finish("1", 10)
    answer = world.served()
    assert answer.array is not None
    assert answer.array.shape == (9, 6, 2)
    dense = [layer for layer in range(6) if layer not in moe]
    assert (answer.array[:, dense] == -1).all()
    assert np.array_equal(answer.array[:, list(moe)], seg.rows)
