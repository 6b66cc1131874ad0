"""Comparing log-probabilities and catching errors needs no torch; replaying loads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import collector, collector.client
from collector.replay import ReplayError, r3_verify
import collector.replay.checks, collector.replay.errors, collector.replay.layout, collector.replay.metrics
assert "torch" not in sys.modules
from collector.replay import ReplayReport, replay_routes
assert "torch" in sys.modules and callable(replay_routes)
assert "transformers" not in sys.modules
"""


def test_torch_is_loaded_by_replay_routes_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import collector.replay

    with pytest.raises(AttributeError):
        _ = collector.replay.nothing
