"""A few kills; `make chaos` is two hundred."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.__main__ import verdict
from tests.chaos.play import play


def test_a_collector_killed_under_load_loses_nothing(tmp_path: Path, seed: int) -> None:
    history = play(tmp_path, seed, 3)
    assert not verdict(history, 3)
    assert history.served > 20
