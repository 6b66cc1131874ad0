"""Everything about the core that an operator may set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Times in seconds, sizes in bytes."""

    window_bytes: int = 64 << 20
    """How much an engine may have unacknowledged."""
    liveness_s: float = 30.0
    """An emitter that says nothing for this long is dead, and its unfinished requests are lost."""
    ttl_s: float = 3600.0
    """A request that settled, or for which nothing came any more, is forgotten after this if nobody releases it."""
    grace_s: float = 10.0
    """How long a full arena waits for a release before the youngest unfinished request is shed."""
    incomplete_wait_s: float = 2.0
    """How long a pull waits for repairs of an incomplete request, within its own deadline."""
    tombstones: int = 100_000
    """Released ids that are remembered, so that a late pull hears `released` and not `unknown`."""
    max_sessions: int = 4_096
    max_lives: int = 1_000_000
