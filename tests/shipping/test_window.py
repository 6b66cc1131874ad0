"""The window against a plain list, over random histories; and what its promises are, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_side.shipping.window import Entry, Window

CAP = 100


class WindowHistory(RuleBasedStateMachine):
    """Every message by number; a window must hold those above `safe`, and send them in order, within `allow`."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(CAP)
        self.all: dict[int, Entry] = {}
        self.first = self.next = 0
        self.sent_to = 0
        self.allow = 0

    @rule(nbytes=st.sampled_from([0, 0, 1, 30, 70, 101]))
    def add(self, nbytes: int) -> None:
        held = sum(entry.nbytes for seq, entry in self.all.items() if seq >= self.first)
        assert self.window.room == CAP - held
        assert self.window.share == min(1.0, (CAP - held) / (CAP / 2))
        if nbytes <= self.window.room:
            frames = (f"{self.next}/{nbytes}",)
            self.window.add(frames, nbytes)
            self.all[self.next] = Entry(self.next, frames, nbytes)
            self.next += 1

    @rule(allow=st.sampled_from([0, 0, 10, 50, 100, 1000]))
    def be_told_a_window(self, allow: int) -> None:
        self.allow = self.window.allow = allow

    @rule(most=st.integers(1, 5))
    def send(self, most: int) -> None:
        for _ in range(most):
            entry = self.window.due()
            assert entry == self._expected_due()
            if entry is None:
                return
            self.window.sent(entry)
            self.sent_to += 1

    @precondition(lambda self: self.sent_to > self.first)
    @rule(data=st.data())
    def be_acked(self, data: st.DataObject) -> None:
        seq = data.draw(st.integers(max(0, self.first - 2), self.sent_to - 1))
        self.window.acked(seq)
        self.first = max(self.first, seq + 1)

    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        seq = data.draw(st.integers(self.first, self.next))
        assert self.window.go_to(seq)
        self.sent_to = seq

    @rule(beyond=st.integers(1, 3))
    def refuse_a_number_that_it_has_not(self, beyond: int) -> None:
        before = (self.window.send_seq, len(self.window), self.window.held_bytes)
        assert not self.window.go_to(self.next + beyond)
        assert not self.window.go_to(self.first - beyond)
        assert before == (self.window.send_seq, len(self.window), self.window.held_bytes)

    @precondition(lambda self: self.first > 0)
    @rule()
    def put_a_message_in_front(self) -> None:
        self.first -= 1
        self.window.put_first((f"reopened {self.first}",))
        self.all[self.first] = Entry(self.first, (f"reopened {self.first}",), 0)
        self.sent_to = self.first

    def _expected_due(self) -> Entry | None:
        if self.sent_to == self.next:
            return None
        entry = self.all[self.sent_to]
        under_way = sum(self.all[seq].nbytes for seq in range(self.first, self.sent_to))
        free = entry.nbytes == 0
        alone = self.allow > 0 and under_way == 0
        return entry if free or alone or (self.allow > 0 and under_way + entry.nbytes <= self.allow) else None

    @invariant()
    def numbers_and_bytes_agree(self) -> None:
        window = self.window
        assert (window.first_seq, window.send_seq, window.next_seq) == (self.first, self.sent_to, self.next)
        assert len(window) == self.next - self.first
        assert window.held_bytes == sum(self.all[seq].nbytes for seq in range(self.first, self.next))


TestWindowHistory = WindowHistory.TestCase
TestWindowHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def _full(*sizes: int, allow: int) -> Window:
    window = Window(10_000)
    window.allow = allow
    for i, size in enumerate(sizes):
        window.add((f"{i}",), size)
    return window


def _drain(window: Window) -> Iterator[int]:
    while (entry := window.due()) is not None:
        window.sent(entry)
        yield entry.seq


def test_nothing_is_sent_before_the_collector_gave_a_window_but_control_messages() -> None:
    assert list(_drain(_full(0, 0, 5, 0, allow=0))) == [0, 1]


def test_control_messages_are_free_but_never_overtake_rows() -> None:
    window = _full(60, 0, 60, 0, 0, allow=100)
    assert list(_drain(window)) == [0, 1]
    window.acked(0)
    assert list(_drain(window)) == [2, 3, 4]


def test_a_step_larger_than_the_whole_window_passes_alone() -> None:
    window = _full(500, 500, 1, allow=100)
    assert list(_drain(window)) == [0]
    window.acked(0)
    assert list(_drain(window)) == [1]
    window.acked(1)
    assert list(_drain(window)) == [2]


def test_what_was_sent_stands_unchanged_until_it_is_acked() -> None:
    frames = (b"header", memoryview(bytearray(b"rows")), memoryview(bytearray(b"tokens")))
    window = Window(100)
    window.allow = 100
    window.add(frames, 10)
    first = window.due()
    assert first is not None
    window.sent(first)
    assert window.go_to(0)
    again = window.due()
    assert again is first
    assert again.frames is frames
    window.acked(0)
    assert window.due() is None
    assert window.held_bytes == 0


@pytest.mark.parametrize("seq", [-1, 4])
def test_a_number_that_was_never_its_own_is_not_gone_to(seq: int) -> None:
    assert not _full(1, 1, 1, allow=10).go_to(seq)
