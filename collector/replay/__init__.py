"""Replay of pulled routes in a trainer's forward, with the proof that it acted.

`replay_routes` needs torch and is loaded on first use; `r3_verify` and the errors need numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collector.replay.errors import ReplayError
from collector.replay.metrics import R3Metrics, r3_verify

if TYPE_CHECKING:
    from collector.replay.context import replay_routes
    from collector.replay.report import ReplayReport

__all__ = ["R3Metrics", "ReplayError", "ReplayReport", "r3_verify", "replay_routes"]


def __getattr__(name: str) -> Any:
    if name == "replay_routes":
        from collector.replay.context import replay_routes

        return replay_routes
    if name == "ReplayReport":
        from collector.replay.report import ReplayReport

        return ReplayReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
