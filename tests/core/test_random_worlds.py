"""Random worlds against the dictionaries of `model.py`: every row of every life equal after every event."""

from __future__ import annotations

from collections import Counter

from tests.core.worlds import World

WORLDS, EVENTS = 24, 300
EVERY_SET_OF_WORLDS_HAS = {
    *("routes", "aborted", "ambiguous", "incomplete", "length_mismatch", "lost", "failed", "not_ready", "unknown"),
    *("barrier", "gap", "repeat", "reconnect", "refused", "release", "stall", "shed"),
}
"""Answers to pulls, then events. Each happens more than once a world on average."""


def play(world: int) -> Counter[str]:
    """One world from its seed to its quiet end; what was seen on the way."""
    here = World(world)
    for _ in range(EVENTS):
        actions = [here.trainer] * 4 + [here.time]
        for engine in here.engines:
            actions += [lambda e=engine: here.generate(e)] * 3 + [lambda e=engine: here.network(e)] * 4
        here.chance.choice(actions)()
        here.check()
    for engine in here.engines:
        while not engine.model.stalled and engine.model.applied + 1 < len(engine.log):
            here.heartbeat(engine)
            here.deliver(engine, engine.model.applied + 1)
            here.check()
    return here.seen


def test_random_worlds_hold_exactly_the_rows_of_the_model(seed: int) -> None:
    seen: Counter[str] = Counter()
    for world in range(seed, seed + WORLDS):
        try:
            seen += play(world)
        except BaseException as error:
            error.add_note(f"play({world})")
            raise
    assert not EVERY_SET_OF_WORLDS_HAS - set(seen), "these worlds were too tame to prove anything"
