"""A few seconds; `make soak` is ten minutes."""

from __future__ import annotations

from pathlib import Path

from tests.soak.__main__ import verdict
from tests.soak.play import soak


def test_memory_stays_within_its_bound_and_comes_back(tmp_path: Path, seed: int) -> None:
    found = soak(tmp_path, seed, 4.0)
    assert not verdict(found)
    assert found.requests > 20
