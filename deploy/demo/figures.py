"""What the demo's processes tell each other, as JSON lines, and what is known of a run at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class Rollout(msgspec.Struct, tag="rollout"):
    """One request's in-band result, what an RL framework carries already: prompt and generated tokens, and the
    engine's log-probabilities (nats) of the generated ones."""

    request_id: str
    prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    cancelled: bool = False


class EngineReport(msgspec.Struct, tag="engine"):
    """Counts of the engine's process at its end."""

    counts: dict[str, int]
    seconds: float


class Progress(msgspec.Struct, tag="progress"):
    """The trainer is done with one request."""

    request_id: str


class TrainerReport(msgspec.Struct, tag="trainer"):
    """Counts of the trainer's process at its end, and `r3_verify` with replay off and on."""

    counts: dict[str, int]
    pull_seconds: float
    off: dict[str, Any]
    on: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One precision's figures. stats: the daemon's counters after it."""

    engine: EngineReport
    trainer: TrainerReport
    stats: dict[str, float]
