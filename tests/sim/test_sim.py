"""A sample of worlds on every run of the tests; `make sim` and `make sim-mutants` are the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.__main__ import catch
from tests.sim.runner import run, silence
from tests.sim.world import simulate

WORLDS = 100
FAILED_BEFORE = [
    int(line.split()[0])
    for line in Path(__file__).with_name("failing_seeds.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_nothing_wrong_is_served_and_everything_settles() -> None:
    report = run(range(WORLDS))
    assert not report.broken, f"replay with `python -m tests.sim --seed N`: {report.broken}"
    assert report.average(report.requests) >= 3
    assert report.average(report.events) >= 200
    assert report.average(report.faults) >= 3


def test_worlds_that_showed_a_bug_once_hold() -> None:
    assert FAILED_BEFORE
    report = run(FAILED_BEFORE)
    assert not report.broken, f"replay with `python -m tests.sim --seed N`: {report.broken}"


@pytest.mark.parametrize("world", FAILED_BEFORE[:2])
def test_a_seed_replays_to_the_same_end(world: int) -> None:
    story: list[str] = []
    with silence():
        assert simulate(world, story.append).digest == simulate(world).digest
    assert len(story) > 100


@pytest.mark.parametrize("rule", ["kind", "barrier", "bad rows are missing", "released stays released"])
def test_a_rule_that_is_off_is_noticed(rule: str) -> None:
    seed, _, why = catch(rule, range(WORLDS))
    assert seed is not None
    assert why
