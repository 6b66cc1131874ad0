"""A short run of each half; `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.inside import run_inside
from tests.fuzz.live import attack
from tests.harness.daemon import running_daemon


def test_frames_that_are_almost_right_raise_nothing_and_touch_nobody_else(seed: int) -> None:
    seen = run_inside(seed, 6_000)
    assert seen["malformed"] > 1_000
    assert seen["taken"] > 1_000


def test_a_daemon_that_hears_nonsense_serves_the_others(tmp_path: Path, seed: int) -> None:
    with running_daemon(tmp_path) as daemon:
        found = attack(daemon, seed, 4_000, seconds=0.3)
    assert found.malformed > 500
    assert found.growth < 50 << 20
