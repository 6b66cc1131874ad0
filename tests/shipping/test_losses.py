"""What was dropped, against a plain dictionary over random histories; and the rules of reading back, one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_side.shipping.losses import Losses, RepairAsk
from protocol.messages import Kind
from tests.shipping.landings import landing

STORE = object()


def lost(parts: Sequence[tuple[str, int, int]], slots: Sequence[int], commit: int, **more: Any) -> Any:
    total = sum(count for _, _, count in parts)
    kinds = [(life, start, count, Kind.FORWARD) for life, start, count in parts]
    return landing(kinds, slots=slots, commits=[commit] * total, step=commit, origin=more.pop("origin", STORE), **more)


def cut(losses: Losses, life: str, start: int, kind: Kind = Kind.FORWARD) -> None:
    losses.cut([life], np.array([start], np.int32), np.array([kind], np.uint8))


def places(ask: RepairAsk | None) -> list[tuple[str, int]]:
    assert ask is not None
    spans = zip(ask.lives, ask.starts, ask.counts, strict=True)
    return [(life, position) for life, start, count in spans for position in range(start, start + count)]


def test_any_history_asks_for_exactly_what_is_lost_and_not_taken_back(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        losses = Losses()
        held: dict[tuple[str, int], tuple[int, int, int]] = {}
        under_way: dict[tuple[str, int], tuple[int, int, int]] = {}
        order: list[tuple[str, int]] = []
        at = dict.fromkeys("abcd", 0)
        for commit in range(1, 60):
            if chance.random() < 0.6:
                parts = []
                for life in chance.sample("abcd", chance.randint(1, 4)):
                    back = chance.choice([0, 0, 0, 1, 3])
                    start, count = max(0, at[life] - back), chance.randint(1, 4)
                    parts.append((life, start, count))
                    at[life] = start + count
                    cut(losses, life, start)
                    held = {k: v for k, v in held.items() if k[0] != life or k[1] < start}
                    under_way = {k: v for k, v in under_way.items() if k[0] != life or k[1] < start}
                total = sum(count for _, _, count in parts)
                slots = [chance.randrange(1000) for _ in range(total)]
                bad = [i for i in range(total) if chance.random() < 0.1]
                step = lost(parts, slots, commit, bad=bad)
                losses.add(step)
                run = [(life, p) for life, start, count in parts for p in range(start, start + count)]
                for i, place in enumerate(run):
                    if i not in bad:
                        held[place] = (slots[i], int(step.token_ids[i]), commit)
            elif not losses.asked:
                ask = losses.ask(most := chance.randint(1, 12))
                assert (ask is None) == (not held)
                if ask is None:
                    continue
                order = places(ask)
                assert len(order) == min(most, len(held))
                oldest = max(held[place][2] for place in order)
                under_way = {place: held.pop(place) for place in order}
                assert all(commit >= oldest for _, _, commit in held.values()), "the oldest losses first"
                slots_asked, tokens, positions = ask.asked.tolist()
                assert positions == [position for _, position in order]
                assert list(zip(slots_asked, tokens, ask.proof, strict=True)) == [under_way[x] for x in order]
            else:
                wanted = losses.answered()
                assert [place for place, good in zip(order, wanted, strict=True) if good] == list(
                    filter(under_way.__contains__, order)
                )
                under_way = {}
            assert losses.rows == len(held)


def test_only_a_forward_takes_losses_back() -> None:
    losses = Losses()
    losses.add(lost([("a", 0, 4)], [5, 6, 7, 8], 1))
    for kind in (Kind.RECOMPUTE, Kind.CACHED, Kind.REPAIR):
        cut(losses, "a", 0, kind)
    cut(losses, "b", 0)
    cut(losses, "a", 4)
    assert losses.rows == 4
    cut(losses, "a", 1)
    assert places(losses.ask(9)) == [("a", 0)]


def test_a_new_store_ends_what_was_lost_of_the_old_one_also_what_is_under_way() -> None:
    losses = Losses()
    losses.add(lost([("a", 0, 3)], [5, 6, 7], 1))
    assert losses.ask(2) is not None
    losses.add(lost([("a", 3, 1)], [5], 1, origin=object()))
    assert losses.ask(9) is None, "one at a time"
    assert losses.answered().tolist() == [False, False]
    assert places(losses.ask(9)) == [("a", 3)]


def test_rows_without_a_slot_and_rows_beyond_the_bound_are_not_remembered() -> None:
    losses = Losses(max_rows=3)
    losses.add(landing([("a", 0, 2, Kind.FORWARD)]))
    assert not losses
    losses.add(lost([("a", 0, 2)], [5, 6], 1))
    losses.add(lost([("a", 2, 2)], [7, 8], 2))
    assert losses.rows == 2
    assert places(losses.ask(9)) == [("a", 0), ("a", 1)]
    assert losses
    losses.answered()
    assert not losses
