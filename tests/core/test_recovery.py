"""A collector found again: from every moment of random worlds, from every cut of its log, and from damaged memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.core import records
from collector.core.life import State
from collector.core.records import CorruptState
from protocol.messages import Kind
from tests.core.restart import differences, restarted
from tests.core.shipped import Shipped
from tests.core.worlds import World

WORLDS, EVENTS = 6, 150


def play(seed: int) -> None:
    """One world, restarted after each of its events; its log is replaced by a checkpoint now and then."""
    # With room for everything: the model of these worlds has no records that rooms wait for.
    here, chance = World(seed, pages=600), random.Random(f"restarts {seed}")
    for _ in range(EVENTS):
        actions = [here.trainer, here.trainer, here.time]
        for engine in here.engines:
            actions += [lambda e=engine: here.generate(e)] * 3 + [lambda e=engine: here.network(e)] * 4
        here.chance.choice(actions)()
        here.bench.logged = chance.random() < 0.4
        if not here.bench.logged:
            # Several events share a record, and it is taken when none of them has been acknowledged.
            continue
        here.bench.tick()
        if chance.random() < 0.05:
            here.bench.records = [here.bench.core.checkpoint()]
        again = restarted(here.bench)
        assert not differences(here.bench.core, again)


def test_whenever_it_ends_what_it_knew_is_found_again(seed: int) -> None:
    for world in range(seed, seed + WORLDS):
        try:
            play(world)
        except BaseException as error:
            error.add_note(f"play({world})")
            raise


def test_what_is_in_no_record_never_happened_and_leaves_no_trace(seed: int) -> None:
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 4, opens="x"))
    before = restarted(world.bench)
    world.bench.logged = False
    world.engine.patch(world.seg(2, 3))
    world.engine.finish("1", 6)
    again = restarted(world.bench)
    (life,) = again.lives.named("x")
    assert life.state is State.OPEN
    assert life.session.applied == before.streams.sessions[world.engine.incarnation].applied
    meta = again.assembly.meta(life, 0, 4)
    assert (meta[:2] != 0).all(), "rows in front of what was overwritten stand"


def test_pages_are_not_written_again_before_the_record_that_freed_them(seed: int) -> None:
    world = Shipped(seed, pages=1)
    world.engine.patch(world.seg(0, 4, opens="x"))
    world.engine.finish("1", 5)
    world.bench.logged = False
    world.bench.release("x")
    world.engine.patch(world.seg(0, 4, opens="y", life="2"))
    assert world.bench.life("y").session.stalled_at is not None, "the only page is x's until its release is on record"
    (life,) = restarted(world.bench).lives.named("x")
    assert life.state is State.COMPLETE
    world.bench.logged = True
    world.bench.tick()
    assert world.bench.life("y").session.stalled_at is None


def test_a_released_life_that_a_waiting_patch_opened_stays_released(seed: int) -> None:
    world = Shipped(seed, pages=1)
    world.engine.patch(world.seg(0, 4, opens="x"))
    world.engine.patch(world.seg(0, 1, opens="y", life="2"))
    world.bench.release("y")
    again = restarted(world.bench)
    (session,) = again.streams.sessions.values()
    assert session.opening == {"2"}


def test_an_old_barrier_does_not_settle_what_a_forward_may_have_changed_since(seed: int) -> None:
    """Rows of two timelines lie in the arena then; what tells of the second one went with the process."""
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 2, opens="x"), world.seg(3, 3))
    world.bench.pull("x", 7, timeout_ms=9_000)
    world.engine.flushed("1", 7)
    assert world.bench.state("x") == "incomplete"
    world.bench.logged = False
    world.engine.patch(world.seg(4, 1))
    again = restarted(world.bench)
    (life,) = again.lives.named("x")
    assert (life.state, life.num_tokens) == (State.OPEN, None)


@pytest.mark.parametrize("state", ["complete", "aborted"])
def test_a_flipped_bit_of_what_may_not_change_refuses_the_start(seed: int, state: str) -> None:
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 9, opens="x"))
    world.engine.finish("1", 10, "stop" if state == "complete" else "aborted")
    assert world.bench.state("x") == state
    memory = world.bench.core.arena._buffer
    used = world.bench.life("x").pages
    rng = np.random.default_rng(seed)
    seen = 0
    for _ in range(200):
        copy = memory.copy()
        page = int(rng.choice(used)) * world.bench.core.arena.page_bytes
        copy[page + int(rng.integers(world.bench.core.arena.page_bytes))] ^= 1 << int(rng.integers(8))
        try:
            again = restarted(world.bench, copy)
        except CorruptState as error:
            assert "x" in str(error)
            seen += 1
        else:
            assert not differences(world.bench.core, again), "a bit that belongs to no row"
    assert seen > 100


def test_a_flipped_bit_in_a_running_collector_fails_that_request_alone(seed: int) -> None:
    world = Shipped(seed)
    for name, life in (("x", "1"), ("y", "2")):
        world.engine.patch(world.seg(0, 9, opens=name, life=life))
        world.engine.finish(life, 10)
    page = world.bench.life("x").pages[1]
    world.bench.core.arena._buffer[page * world.bench.core.arena.page_bytes] ^= 4
    assert world.bench.pull("x").code == "failed"
    assert world.bench.pull("x").code == "failed", "and it stays so"
    assert world.bench.pull("y").routes is not None
    assert "not what was written" in world.bench.life("x").reason


def test_torn_rows_of_a_running_request_are_holes_that_its_engine_fills(seed: int) -> None:
    world = Shipped(seed)
    world.engine.patch(world.seg(0, 9, opens="x"))
    copy = world.bench.core.arena._buffer.copy()
    copy[world.bench.life("x").pages[0] * world.bench.core.arena.page_bytes] ^= 1
    again = restarted(world.bench, copy)
    (life,) = again.lives.named("x")
    assert again.assembly.missing(life, 9) == ((0, 1),)


def test_a_page_of_another_life_is_no_page_of_this(seed: int) -> None:
    """Even whole cells with right sums do not pass: a seal knows whose and where it is."""
    world = Shipped(seed)
    for name, life in (("x", "1"), ("y", "2")):
        world.engine.patch(world.seg(0, 9, opens=name, life=life))
        world.engine.finish(life, 10)
    x, y = world.bench.life("x"), world.bench.life("y")
    memory = world.bench.core.arena._buffer.reshape(-1, world.bench.core.arena.page_bytes)
    memory[x.pages[0]] = memory[y.pages[0]]
    assert world.bench.pull("x").code == "failed"
    memory[y.pages[0]] = memory[y.pages[1]]
    assert world.bench.pull("y").code == "failed"


# ------------------------------------------------------------------ the log's own bytes


def _log(world: Shipped) -> bytes:
    for at in range(5):
        world.engine.patch(world.seg(at, 1, Kind.FORWARD, opens="x" if not at else None))
    return b"".join(map(records.framed, world.bench.records))


def test_a_log_cut_anywhere_is_its_whole_records(seed: int) -> None:
    world = Shipped(seed)
    data = _log(world)
    bounds = np.cumsum([0, *(len(records.framed(x)) for x in world.bench.records)])
    for cut in range(len(data) + 1):
        found = list(records.read(memoryview(data)[:cut]))
        assert len(found) == int(np.searchsorted(bounds, cut, side="right")) - 1
        assert [bytes(x) for x in found] == world.bench.records[: len(found)]


def test_a_log_with_any_byte_changed_is_refused(seed: int) -> None:
    data = bytearray(_log(Shipped(seed)))
    rng = np.random.default_rng(seed)
    for at in range(len(data)):
        spoiled = bytearray(data)
        spoiled[at] ^= int(rng.integers(1, 256))
        with pytest.raises(CorruptState):
            list(records.read(memoryview(spoiled)))


def test_after_a_power_loss_a_last_record_of_zeros_or_noise_was_never_acknowledged(seed: int) -> None:
    world = Shipped(seed)
    data = bytearray(_log(world))
    last = len(records.framed(world.bench.records[-1]))
    for rest in (bytes(last), bytes(data[-last : -last + 16]) + bytes(last - 16)):
        torn = memoryview(bytes(data[:-last]) + rest)
        with pytest.raises(CorruptState):
            list(records.read(torn))
        assert len(list(records.read(torn, after_power_loss=True))) == len(world.bench.records) - 1
