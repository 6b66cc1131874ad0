"""Rule 1: every message of an incarnation once, in order; who is alive; what a stranger hears."""

from __future__ import annotations

from typing import Any

import pytest

from collector.core.events import Logged
from protocol import limits
from protocol.geometry import Geometry
from protocol.messages import (
    Ack,
    Bye,
    CollectorToEngine,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Refused,
    RequestFinished,
    Welcome,
)
from tests.core.driver import Bench, Emitter, engine_messages, held
from tests.core.test_rules import Shipped
from tests.harness.patches import SMALL, WIDE, frames


@pytest.fixture
def world(seed: int) -> Shipped:
    return Shipped(seed)


def of(kind: type, messages: list[CollectorToEngine]) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


# ------------------------------------------------------------------ order


def test_a_repeated_message_is_acked_and_not_applied(world: Shipped) -> None:
    parts = frames(SMALL, 0, [world.seg(0, 6, opens="x")])
    world.engine.raw(parts)
    world.engine.raw(frames(SMALL, 1, [world.seg(3, 1)]))
    (ack,) = world.engine.raw(parts)
    assert isinstance(ack, Ack)
    assert ack.logged_seq == 1
    assert len(held(world.bench.core, world.bench.life("x"))) == 4


def test_a_gap_is_answered_once_and_nothing_behind_it_is_applied(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    missed = frames(SMALL, 1, [world.seg(1, 1)])
    for seq in (2, 3, 4):
        answers = world.engine.raw(frames(SMALL, seq, [world.seg(seq, 1)]))
        assert [m.next_seq for m in of(Welcome, answers)] == ([1] if seq == 2 else [])
    assert set(held(world.bench.core, world.bench.life("x"))) == {0}
    world.engine.raw(missed)
    assert set(held(world.bench.core, world.bench.life("x"))) == {0, 1}
    assert of(Welcome, world.engine.raw(frames(SMALL, 4, [world.seg(4, 1)])))[0].next_seq == 2, "a new gap"


def test_a_finish_out_of_turn_settles_nothing(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    assert of(Welcome, world.engine.say(RequestFinished(5, "1", 4, "stop")))[0].next_seq == 1
    assert world.bench.state("x") == "open"


def test_a_heartbeat_finds_what_got_lost_at_the_end(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.engine.raw(frames(SMALL, 4, [world.seg(4, 1)]))
    for _ in range(2):
        assert of(Welcome, world.engine.say(Heartbeat(5)))[0].next_seq == 1, "told again, whatever was told before"


def test_every_heartbeat_is_answered_so_that_silence_means_a_dead_collector(world: Shipped) -> None:
    assert of(Ack, world.engine.say(Heartbeat(0)))[0].logged_seq == -1
    world.engine.patch(world.seg(0, 1, opens="x"))
    for _ in range(2):
        assert of(Ack, world.engine.say(Heartbeat(1)))[0].logged_seq == 0


def test_only_what_is_logged_is_acked(world: Shipped) -> None:
    world.bench.logged = False
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.bench.save()
    record = world.bench.core.record
    world.engine.patch(world.seg(1, 1))
    assert world.bench.core.record == record, "the second is in no record yet"
    acks = [e.message for e in world.bench.handle(Logged(record))]  # type: ignore[union-attr]
    assert [(a.logged_seq, a.window_bytes) for a in acks] == [(0, 64 << 20)]  # type: ignore[union-attr]
    world.bench.save()
    acks = [e.message for e in world.bench.handle(Logged(world.bench.core.record))]  # type: ignore[union-attr]
    assert [a.logged_seq for a in acks] == [1]  # type: ignore[union-attr]
    assert world.bench.handle(Logged(world.bench.core.record)) == []


def test_one_ack_for_many_messages(world: Shipped) -> None:
    world.bench.logged = False
    for at in range(20):
        world.engine.patch(world.seg(at, 1, opens="x" if at == 0 else None))
    world.bench.save()
    assert len(world.bench.handle(Logged(world.bench.core.record))) == 1


# ------------------------------------------------------------------ hello


@pytest.mark.parametrize("message", [Flushed(0, "1", 4), RequestFinished(0, "1", 4, "stop"), Heartbeat(0), Bye()])
def test_who_did_not_say_hello_is_asked_to(message: Any) -> None:
    assert Emitter(Bench()).say(message) == [HelloFirst()]


def test_rows_before_hello_are_not_applied(world: Shipped) -> None:
    stranger = Emitter(world.bench, "stranger")
    assert stranger.patch(world.seg(0, 3, opens="x")) == [HelloFirst()]
    assert world.bench.pull("x").code == "unknown"


@pytest.mark.parametrize(
    "hello",
    [
        Hello("e", "", SMALL, 0),
        Hello("", "i", SMALL, 0),
        Hello("e" * 513, "i", SMALL, 0),
        Hello("e", "i" * 513, SMALL, 0),
        Hello("e", "i", SMALL, -1),
        Hello("e", "i", SMALL, limits.MAX_SEQ + 1),
        Hello("e", "i", SMALL, 2**64 - 1),
        Hello("e", "i", Geometry(4, (), 2, 8), 0),
        Hello("e", "i", Geometry(4, (1, 9), 2, 8), 0),
        Hello("e", "i", Geometry(100, tuple(range(100)), 2, 8), 0),
    ],
)
def test_an_impossible_hello_is_refused_and_the_next_one_is_not(hello: Hello) -> None:
    bench = Bench()
    emitter = Emitter(bench)
    assert [m.code for m in of(Refused, emitter.say(hello))] == ["hello"]
    assert of(Welcome, emitter.hello())


def test_the_highest_number_there_may_be_still_counts_on(world: Shipped) -> None:
    other = Emitter(world.bench, "other")
    other.hello(limits.MAX_SEQ)
    other.seq = limits.MAX_SEQ
    other.patch(world.seg(0, 2, opens="x"))
    assert of(Ack, other.finish("1", 3))[0].logged_seq == limits.MAX_SEQ + 1
    assert world.bench.state("x") == "complete"
    assert of(Welcome, other.say(Heartbeat(limits.MAX_SEQ + 9)))


def test_an_incarnation_cannot_change_its_geometry(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    other = Emitter(world.bench, "engine", WIDE)
    assert [m.code for m in of(Refused, other.hello(peer=b"new"))] == ["geometry"]
    world.engine.patch(world.seg(1, 1))
    assert len(held(world.bench.core, world.bench.life("x"))) == 2


def test_a_new_connection_goes_on_where_the_old_one_stopped(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    world.engine.patch(world.seg(1, 1))
    assert of(Welcome, world.engine.hello(0, "state", peer=b"again"))[0].next_seq == 2
    world.engine.patch(world.seg(2, 1))
    assert len(held(world.bench.core, world.bench.life("x"))) == 3
    old = Emitter(world.bench)
    assert old.heartbeat() == [HelloFirst()], "the old connection is nobody"


def test_a_connection_that_says_hello_as_somebody_else_leaves_its_first_name_alone(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 1, opens="x"))
    other = Emitter(world.bench, "other")
    assert of(Welcome, other.hello(peer=world.engine.peer))
    other.patch(world.seg(0, 2, opens="y"))
    assert len(held(world.bench.core, world.bench.life("y"))) == 2
    assert len(held(world.bench.core, world.bench.life("x"))) == 1
    world.engine.hello(peer=b"back")
    world.engine.patch(world.seg(1, 1))
    assert len(held(world.bench.core, world.bench.life("x"))) == 2
    other.patch(world.seg(2, 1))
    assert len(held(world.bench.core, world.bench.life("y"))) == 3


def test_a_question_that_went_with_the_old_connection_is_asked_again(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    asked = world.bench.pull("x", 4, timeout_ms=60_000)
    assert of(Flush, engine_messages(asked.effects)) == [Flush("1", 4)]
    assert of(Flush, world.engine.hello(0, "state", peer=b"again")) == [Flush("1", 4)]
    world.engine.flushed("1", 4)
    assert world.bench.state("x") == "complete"
    assert of(Flush, world.engine.hello(0, "state", peer=b"third")) == []


def test_a_shipper_that_knew_another_state_puts_one_message_in_front(world: Shipped) -> None:
    other = Emitter(world.bench, "other")
    for _ in range(2):  # the first answer may not have come through before it asked again
        assert of(Welcome, other.hello(7, "elsewhere"))[0].next_seq == 6
    other.seq = 6
    other.lost(world.seg(0, 1, opens="x"))
    other.patch(world.seg(1, 2))
    other.finish("1", 4)
    problem = world.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((0, 1),)


def test_a_state_older_than_what_it_acknowledged_loses_what_is_between(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"))
    assert of(Welcome, world.engine.hello(5, "state", peer=b"again"))[0].next_seq == 5
    assert world.bench.state("x") == "lost"


def test_sessions_are_bounded_and_dead_ones_make_room(seed: int) -> None:
    world = Shipped(seed, max_sessions=2)
    second, third = Emitter(world.bench, "second"), Emitter(world.bench, "third")
    second.hello()
    assert [m.code for m in of(Refused, third.hello())] == ["sessions"]
    second.bye()
    assert of(Welcome, third.hello())


def test_lives_are_bounded_and_the_rest_is_dropped(seed: int) -> None:
    world = Shipped(seed, max_lives=2)
    world.engine.patch(*(world.seg(0, 1, life=f"{i}", opens=f"x{i}") for i in range(3)))
    assert [world.bench.pull(f"x{i}").code for i in range(3)] == ["not_ready", "not_ready", "unknown"]
    world.bench.release("x0")
    world.engine.patch(world.seg(0, 1, life="9", opens="x9"))
    assert world.bench.pull("x9").code == "not_ready"


# ------------------------------------------------------------------ who is alive


def test_a_silent_engine_loses_its_unfinished_requests_and_their_pulls_are_answered(seed: int) -> None:
    world = Shipped(seed, liveness_s=5.0)
    world.engine.patch(world.seg(0, 3, opens="x"), world.seg(0, 3, life="2", opens="y"))
    world.engine.finish("2", 4)
    assert world.bench.pull("x", timeout_ms=60_000).waits
    world.bench.tick(4.0)
    world.engine.heartbeat()
    world.bench.tick(4.0)
    assert world.bench.state("x") == "open", "a heartbeat is a sign of life"
    effects = world.bench.tick(1.5)
    assert [e.message.code for e in effects] == ["lost"]  # type: ignore[union-attr]
    assert world.bench.pull("y").routes is not None
    assert world.bench.core.arena.free_pages == world.bench.core.arena.pages - 1


@pytest.mark.parametrize("sign", ["patch", "repeat", "gap", "flushed"])
def test_any_message_is_a_sign_of_life(seed: int, sign: str) -> None:
    world = Shipped(seed, liveness_s=5.0)
    parts = frames(SMALL, 0, [world.seg(0, 3, opens="x")])
    world.engine.raw(parts)
    world.bench.tick(4.0)
    world.engine.seq = 1
    {
        "patch": lambda: world.engine.patch(world.seg(3, 1)),
        "repeat": lambda: world.engine.raw(parts),
        "gap": lambda: world.engine.raw(frames(SMALL, 9, [world.seg(9, 1)])),
        "flushed": lambda: world.engine.flushed("1", 4),
    }[sign]()
    world.bench.tick(4.0)
    assert world.bench.state("x") == "open"


def test_goodbye_loses_what_was_unfinished(world: Shipped) -> None:
    world.engine.patch(world.seg(0, 3, opens="x"), world.seg(0, 3, life="2", opens="y"))
    world.engine.finish("2", 4)
    world.engine.bye()
    assert (world.bench.state("x"), world.bench.state("y")) == ("lost", "complete")
    assert world.engine.heartbeat() == [HelloFirst()]


def test_an_engine_that_comes_back_goes_on_with_new_requests(seed: int) -> None:
    world = Shipped(seed, liveness_s=5.0)
    world.engine.patch(world.seg(0, 3, opens="x"))
    world.bench.tick(6.0)
    assert world.engine.patch(world.seg(3, 1)) == [HelloFirst()]
    assert of(Welcome, world.engine.hello(0, "state", peer=b"again"))[0].next_seq == 1
    world.engine.seq = 1
    world.engine.patch(world.seg(3, 1), world.seg(0, 2, life="2", opens="y"))
    world.engine.finish("2", 3)
    assert (world.bench.state("x"), world.bench.state("y")) == ("lost", "complete")
