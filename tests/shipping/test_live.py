"""Which lives must be told of again to a collector that forgot everything, against a list of what was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_side.shipping.live import LiveLives

EVENTS = st.lists(st.tuples(st.sampled_from(["open", "finish", "ack"]), st.integers(0, 9)), max_size=60)


@given(EVENTS, st.integers(0, 70))
def test_live_is_what_was_opened_below_the_window_and_not_finished_for_sure(
    events: list[tuple[str, int]], window_first: int
) -> None:
    live = LiveLives()
    opened: dict[str, int] = {}
    finished: dict[str, int] = {}
    acked = -1
    for seq, (event, number) in enumerate(events):
        life = f"life {number}"
        if event == "open" and life not in opened:
            live.opened(life, f"name {number}", seq)
            opened[life] = seq
        elif event == "finish" and life in opened:
            live.finished(life, seq)
            finished.setdefault(life, seq)
        elif event == "ack":
            acked = max(acked, seq - number)
            live.acked(acked)
    live.acked(acked)
    expected = [
        (life, life.replace("life", "name"))
        for life, at in opened.items()
        if at < window_first and finished.get(life, acked + 1) > acked
    ]
    assert live.opened_before(window_first) == expected


def test_a_life_whose_opening_still_stands_in_the_window_needs_no_telling() -> None:
    live = LiveLives()
    live.opened("1", "early", 3)
    live.opened("2", "late", 8)
    assert live.opened_before(5) == [("1", "early")]
    assert live.opened_before(9) == [("1", "early"), ("2", "late")]


def test_a_finish_counts_only_once_it_is_acknowledged() -> None:
    live = LiveLives()
    live.opened("1", "x", 0)
    live.finished("1", 4)
    live.acked(3)
    assert live.opened_before(9) == [("1", "x")]
    live.acked(4)
    assert live.opened_before(9) == []
