"""A window that is full: the youngest lose rows first, and what the slot store still proves comes after all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_side.shipping.stream import Lost
from protocol import codec
from protocol.messages import Ack, EngineMessage, Kind, RoutedExpertsPatch, RowsLost
from tests.shipping.landings import landing
from tests.shipping.line import ROOM, Line, kinds_of


def lives_of(message: EngineMessage) -> list[str]:
    assert isinstance(message, RoutedExpertsPatch | RowsLost)
    return list(codec.decode_ids(message.req_ids))


def batch(lives: str, at: int, **more: Any) -> Any:
    """One row of each life, stored in the slot 10 * life + position by commit `at` + 1."""
    parts = [(life, at, 1, Kind.FORWARD) for life in lives]
    slots = [10 * int(life) + at for life in lives]
    return landing(parts, step=at + 1, slots=slots, commits=[at + 1] * len(parts), origin=more.pop("origin", 1), **more)


def opening(lives: str) -> tuple[tuple[int, str], ...]:
    return tuple(enumerate(f"name {life}" for life in lives))


def test_a_window_that_fills_takes_ever_fewer_lives_the_oldest_first() -> None:
    line = Line(cap=8 * 20)
    line.put(batch("0213", 0, opens=opening("0213")), batch("2031", 1), batch("3120", 2), batch("3120", 3))
    line.put(*(batch("3120", at) for at in range(4, 12)))
    sent = line.welcome()
    kept = [set(lives_of(message)) for message in sent if isinstance(message, RoutedExpertsPatch)]
    dropped = [set(lives_of(message)) for message in sent if isinstance(message, RowsLost)]
    assert kept[:3] == [set("0123")] * 3, "all of them until it is half full"
    assert kept[3:] == [set("021"), set("02"), *[{"0"}] * 3], "then by age, which is the order they opened in"
    assert dropped == [{"3"}, set("13"), *[set("213")] * 3, *[set("0123")] * 4]
    assert [message.seq for message in sent] == list(range(len(sent)))  # type: ignore[union-attr]


def test_a_life_that_opens_in_a_step_with_no_room_for_it_opens_as_lost() -> None:
    line = Line(cap=8 * 4)
    line.put(batch("01", 0, opens=opening("01")), batch("0", 1), batch("023", 2, opens=((1, "late"), (2, "later"))))
    sent = line.welcome()
    assert kinds_of(sent) == [RoutedExpertsPatch, RoutedExpertsPatch, RowsLost, RoutedExpertsPatch]
    assert (lives_of(sent[2]), lives_of(sent[3])) == (["2", "3"], ["0"])
    assert sent[2].opens == ((0, "late"), (1, "later"))  # type: ignore[union-attr]


def recovering(lives: str = "01", *, lose: int = 3, rows: int = 16) -> tuple[Line, Any]:
    """A line whose window, of `rows` rows, was full for `lose` steps and is empty again, and what it asks for."""
    line = Line(cap=8 * rows)
    line.put(landing([("9", 0, rows, Kind.RECOMPUTE)], opens=((0, "long"),)), batch(lives, 0, opens=opening(lives)))
    line.put(*(batch(lives, at) for at in range(1, lose)))
    last = line.welcome()[-1]
    assert line.stream.stats().rows_lost == lose * len(lives)
    line.stream.wish()
    assert not line.stream.asks, "there is no room"
    line.stream.hear(Ack("s", last.seq, ROOM))  # type: ignore[union-attr]
    line.stream.wish()
    return line, line.stream.asks.popleft()


def read_back(ask: Any, commits: Sequence[int] | None = None, **more: Any) -> Any:
    parts = list(zip(ask.lives, ask.starts, ask.counts, [Kind.REPAIR] * len(ask.lives), strict=True))
    commits = ask.proof.tolist() if commits is None else commits
    slots = ask.asked[0].tolist()
    return landing(parts, slots=slots, commits=commits, proof=ask.proof.tolist(), origin=ask.origin, **more)


def test_dropped_rows_are_asked_for_once_there_is_room_and_shipped_as_repairs() -> None:
    line, ask = recovering(lose=1)
    assert (ask.lives, ask.starts, ask.counts) == (("0", "1"), (0, 0), (1, 1))
    assert ask.asked[0].tolist() == [0, 10]
    assert ask.proof.tolist() == [1, 1]
    line.stream.wish()
    assert not line.stream.asks, "one ask at a time"
    line.put(read_back(ask))
    (patch,) = line.receive()
    assert isinstance(patch, RoutedExpertsPatch)
    assert (lives_of(patch), patch.kinds, patch.bad_rows) == (["0", "1"], bytes([Kind.REPAIR] * 2), b"")
    assert line.stream.stats().rows_lost == line.stream.stats().rows_repaired == 2


def test_a_row_of_any_other_commit_is_no_repair() -> None:
    line, ask = recovering()
    first = ask.proof.tolist()
    line.put(read_back(ask, commits=[first[0], *(number + 1 for number in first[1:])]))
    (patch,) = line.receive()
    assert isinstance(patch, RoutedExpertsPatch)
    assert np.frombuffer(patch.bad_rows, "<i4").tolist() == list(range(1, len(first)))
    assert line.stream.stats().rows_repaired == 1


def test_a_forward_that_overtakes_a_lost_row_takes_it_back_also_while_it_is_read() -> None:
    line, ask = recovering("0")
    assert (ask.starts, ask.counts) == ((0,), (3,))
    line.put(batch("0", 1), read_back(ask))
    patches = line.receive()
    assert [np.frombuffer(p.starts, "<i4").tolist() for p in patches] == [[1], [0]]  # type: ignore[union-attr]
    assert patches[1].offsets == np.array([0, 1], "<i4").tobytes()  # type: ignore[union-attr]


def test_what_cannot_be_read_back_stays_lost_and_the_next_loss_is_asked_for() -> None:
    line, ask = recovering("0", lose=6)
    assert ask.counts == (4,), "no more than a quarter of the room at once"
    plan = read_back(ask).plan
    line.put(Lost(plan))
    assert line.receive() == [], "it was declared lost when it was dropped"
    line.stream.wish()
    assert line.stream.asks.popleft().starts == (4,)


def test_a_repair_that_finds_no_room_waits_for_the_next_time() -> None:
    line, ask = recovering(lose=1)
    line.put(landing([("9", 16, 16, Kind.RECOMPUTE)]), read_back(ask))
    assert kinds_of(line.receive()) == [RoutedExpertsPatch], "not declared lost again"
    line.stream.hear(Ack("s", 9, ROOM))
    line.stream.wish()
    assert line.stream.asks.popleft().proof.tolist() == ask.proof.tolist()
