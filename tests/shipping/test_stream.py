"""The shipper's decisions, without a socket: what is numbered, what is said, what happens when the collector is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_side.shipping.stream import HEARTBEAT_S, Barrier, Finish, Lost
from protocol import codec
from protocol.messages import (
    Ack,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Kind,
    Refused,
    RequestFinished,
    RoutedExpertsPatch,
    RowsLost,
)
from protocol.patch import open_loss
from tests.core.driver import Bench, Emitter
from tests.harness.patches import SMALL
from tests.shipping.landings import decode, landing
from tests.shipping.line import ROOM, Line, kinds_of


def test_nothing_is_sent_before_welcome_and_everything_after_it_in_order() -> None:
    line = Line()
    line.put(decode("1", 0, opens=((0, "x"),)), decode("1", 1), Finish("1", 3, "stop"))
    assert line.receive() == []
    assert line.hello() == Hello("engine", "incarnation", SMALL, 0, "")
    sent = line.welcome()
    assert kinds_of(sent) == [RoutedExpertsPatch, RoutedExpertsPatch, RequestFinished]
    assert [message.seq for message in sent] == [0, 1, 2]  # type: ignore[union-attr]
    assert not line.stream.drained
    line.stream.hear(Ack("s", 2, ROOM))
    assert line.stream.drained
    assert line.stream.stats().acked_seq == 2


def test_a_gap_goes_back_and_resends_the_same_bytes() -> None:
    line = Line()
    line.put(*(decode("1", i) for i in range(4)))
    sent = line.welcome()
    line.stream.hear(Ack("s", 0, ROOM))
    assert line.welcome(2) == sent[2:]
    assert line.stream.unacknowledged == 3, "what was applied is not safe yet"
    line.stream.hear(Ack("s", 1, ROOM))
    assert line.stream.unacknowledged == 2


def test_hello_first_stops_sending_and_says_hello_with_what_is_still_held() -> None:
    line = Line()
    line.put(decode("1", 0), decode("1", 1))
    line.welcome()
    line.stream.hear(Ack("s", 0, ROOM))
    line.stream.hear(HelloFirst())
    line.put(decode("1", 2))
    assert line.receive() == []
    assert not line.stream.stats().connected
    hello = line.hello()
    assert (hello.first_seq, hello.state_id) == (1, "s")
    assert [message.seq for message in line.welcome(1)] == [1, 2]  # type: ignore[union-attr]


def test_hello_is_repeated_only_after_a_while_and_heartbeats_say_what_was_sent() -> None:
    line = Line()
    line.hello()
    assert line.stream.keep_alive(line.now + HEARTBEAT_S * 0.9) is None
    assert isinstance(line.stream.keep_alive(line.now + HEARTBEAT_S * 1.1), Hello)
    line.put(decode("1", 0))
    line.welcome()
    now = line.now + HEARTBEAT_S * 2
    assert line.stream.keep_alive(now) == Heartbeat(1)
    assert line.stream.keep_alive(now + HEARTBEAT_S * 0.9) is None
    assert line.stream.keep_alive(now + HEARTBEAT_S * 1.1) == Heartbeat(1)


def test_an_unsent_hello_is_tried_again_at_once() -> None:
    line = Line()
    assert isinstance(line.stream.keep_alive(line.now), Hello)
    assert isinstance(line.stream.keep_alive(line.now), Hello)


def test_a_flush_is_answered_behind_everything_launched_before_it_was_read() -> None:
    line = Line()
    line.welcome()
    line.put(decode("1", 0), decode("1", 1))
    line.stream.hear(Flush("1", 3))
    line.put(decode("1", 2))
    sent = line.receive()
    assert kinds_of(sent) == [RoutedExpertsPatch, RoutedExpertsPatch, Flushed, RoutedExpertsPatch]
    assert sent[2] == Flushed(2, "1", 3)


def test_a_flush_is_answered_behind_a_declared_loss_too() -> None:
    line = Line(cap=1)
    line.welcome()
    line.put(decode("1", 0))
    line.stream.hear(Flush("1", 2))
    assert kinds_of(line.receive()) == [RowsLost, Flushed]


def test_beyond_the_cap_a_loss_with_the_devices_starts_stands_in_place_of_the_step() -> None:
    line = Line(cap=8)  # one row of 4 bytes and its token
    line.welcome()
    line.put(decode("1", 0), landing([("1", 5, 1, Kind.FORWARD)], step=2, planned=[-1], opens=((0, "x"),)))
    sent = line.receive()
    assert kinds_of(sent) == [RoutedExpertsPatch, RowsLost]
    assert isinstance(sent[1], RowsLost)
    loss = open_loss(sent[1])
    assert loss.starts.tolist() == [5]
    assert loss.opens == ((0, "x"),)
    assert line.stream.stats().rows_lost == 1
    line.stream.hear(Ack("s", 1, ROOM))
    line.put(decode("1", 6))
    assert kinds_of(line.receive()) == [RoutedExpertsPatch], "an acknowledgement makes room"


def _broken() -> None:
    raise RuntimeError("the copy failed")


def test_a_step_that_does_not_land_is_declared_lost_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    line = Line()
    line.welcome()
    line.put(decode("1", 0, wait=_broken), decode("1", 1))
    assert kinds_of(line.receive()) == [RowsLost, RoutedExpertsPatch]
    assert line.stream.stats().errors == 1
    assert "could not be read back" in caplog.text


@pytest.mark.parametrize("case", ["shipped", "too much", "broken", "rows", "token_ids", "positions", "status"])
def test_every_ring_slot_is_given_back_exactly_once_after_it_was_read(case: str) -> None:
    order: list[str] = []
    wait: Callable[[], None] = _broken if case == "broken" else lambda: order.append("wait")
    step = decode("1", 0, wait=wait, free=lambda: order.append("free"))
    if (column := getattr(step, case, None)) is not None:
        setattr(step, case, np.repeat(column, 2, axis=0))
    line = Line(cap=1 if case == "too much" else ROOM)
    line.welcome()
    line.put(step)
    assert kinds_of(line.receive()) == [RoutedExpertsPatch if case == "shipped" else RowsLost]
    assert order == ([] if case == "broken" else ["wait"]) + ["free"]


def test_a_life_whose_plan_the_device_contradicts_is_failed_behind_its_rows() -> None:
    line = Line()
    line.welcome()
    line.put(landing([("a", 4, 1, Kind.FORWARD), ("b", 9, 1, Kind.FORWARD)], planned=[4, 8]))
    patch, failed = line.receive()
    assert isinstance(patch, RoutedExpertsPatch)
    assert isinstance(failed, RequestFinished)
    assert (failed.req_id, failed.reason, failed.num_tokens) == ("b", "failed", None)
    assert "planned at 8, the device ran it at 9" in failed.detail


def test_an_ack_of_another_state_acknowledges_nothing() -> None:
    line = Line()
    line.put(decode("1", 0))
    line.welcome()
    line.stream.hear(Ack("another", 0, 0))
    assert line.stream.unacknowledged == 1
    line.put(decode("1", 1))
    assert kinds_of(line.receive()) == [RoutedExpertsPatch], "nor does its window count"


def test_an_ack_with_no_window_stops_rows_and_lets_control_messages_pass() -> None:
    line = Line()
    line.welcome()
    line.stream.hear(Ack("s", -1, 0))
    line.put(Finish("0", 1, "stop"), decode("1", 0), Finish("1", 2, "stop"))
    assert kinds_of(line.receive()) == [RequestFinished]
    line.stream.hear(Ack("s", 0, ROOM))
    assert kinds_of(line.receive()) == [RoutedExpertsPatch, RequestFinished]


def test_a_refusal_is_counted_and_nothing_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    line = Line()
    line.put(decode("1", 0))
    line.welcome()
    line.stream.hear(Refused("rows", "expert 9 of 8", 0))
    assert line.receive() == []
    assert line.stream.stats().errors == 1
    assert "expert 9 of 8" in caplog.text


@pytest.mark.parametrize("next_seq", [0, 7])
def test_a_number_that_is_gone_or_was_never_given_is_an_error(next_seq: int) -> None:
    line = Line()
    line.put(decode("1", 0), decode("1", 1))
    line.welcome()
    line.stream.hear(Ack("s", 0, ROOM))
    with pytest.raises(RuntimeError, match=f"asks for message {next_seq}"):
        line.welcome(next_seq)


# ------------------------------------------------------------------ a collector that lost its state


class Wiped:
    """The stream against two real cores, the second of which knows nothing."""

    def __init__(self) -> None:
        self.line = Line()
        self.first, self.second = Bench(state_id="first"), Bench(state_id="second")

    def connect(self, bench: Bench) -> None:
        hello = self.line.hello()
        self.line.now += 10
        self._deliver(bench, codec.encode(hello))
        self.exchange(bench)

    def exchange(self, bench: Bench) -> None:
        """Until nothing moves."""
        while True:
            while self.line.stream.take():
                pass
            entry = self.line.stream.due()
            if entry is None:
                return
            self.line.stream.sent(entry)
            self._deliver(bench, *entry.frames)

    def _deliver(self, bench: Bench, *frames: Any) -> None:
        emitter = Emitter(bench)
        for message in emitter.raw(frames):
            self.line.stream.hear(message)


def test_live_requests_reopen_as_lost_and_new_ones_are_served() -> None:
    world = Wiped()
    world.connect(world.first)
    world.line.put(decode("1", 0, opens=((0, "torn"),)), decode("2", 0, opens=((0, "done"),)), Finish("2", 2, "stop"))
    world.exchange(world.first)
    assert (world.first.state("torn"), world.first.state("done")) == ("open", "complete")
    world.line.stream.hear(HelloFirst())
    world.connect(world.second)
    assert world.second.state("torn") == "open"
    assert world.second.pull("done").code == "unknown", "it was acknowledged: whoever lost it must say so"
    world.line.put(decode("1", 1), Finish("1", 3, "stop"), decode("3", 0, opens=((0, "new"),)), Finish("3", 2, "stop"))
    world.exchange(world.second)
    answer = world.second.pull("torn")
    assert answer.code == "incomplete"
    assert answer.problem is not None
    assert answer.problem.missing == ((0, 1),)
    assert world.second.pull("new").routes is not None


def test_a_hello_that_was_repeated_before_its_answer_still_reopens_live_requests() -> None:
    world = Wiped()
    world.connect(world.first)
    world.line.put(decode("1", 0, opens=((0, "torn"),)))
    world.exchange(world.first)
    world.line.stream.hear(HelloFirst())
    emitter = Emitter(world.second)
    hello = codec.encode(world.line.hello())
    answers = emitter.raw([hello]) + emitter.raw([hello])
    for answer in answers:
        world.line.stream.hear(answer)
    world.exchange(world.second)
    assert world.second.state("torn") == "open"
    assert world.line.stream.drained


def test_a_collector_wiped_twice_in_a_row_is_told_again() -> None:
    world = Wiped()
    world.connect(world.first)
    world.line.put(decode("1", 0, opens=((0, "torn"),)))
    world.exchange(world.first)
    world.line.stream.hear(HelloFirst())
    hello = codec.encode(world.line.hello())
    world.line.now += 10
    for answer in Emitter(world.second).raw([hello]):
        world.line.stream.hear(answer)
    third = Bench(state_id="third")
    world.line.stream.hear(HelloFirst())
    world.connect(third)
    assert third.state("torn") == "open"
    assert world.line.stream.drained


def test_what_the_engine_declares_lost_stands_in_its_place() -> None:
    line = Line()
    line.welcome()
    line.put(Lost(decode("1", 4).plan), Barrier("1", 5), Finish("1", 5, "length"))
    assert kinds_of(line.receive()) == [RowsLost, Flushed, RequestFinished]
