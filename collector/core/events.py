"""What goes into the core and what comes out of it. Shells translate; the core never sees a socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from collector.core.life import Life
from protocol.messages import (
    CollectorToEngine,
    CollectorToTrainer,
    EngineMessage,
    Pull,
    Released,
    Routes,
    TrainerMessage,
)
from protocol.patch import Loss, Patch

# ---------------------------------------------------------------- events


@dataclass(slots=True, frozen=True)
class FromEngine:
    """A decoded message of the connection `peer`. Patches come as `PatchArrived`."""

    peer: bytes
    message: EngineMessage


@dataclass(slots=True, frozen=True)
class PatchArrived:
    """A patch that passed `protocol.patch.open_patch` for the geometry `Collector.geometry_of(peer)`."""

    peer: bytes
    seq: int
    patch: Patch


@dataclass(slots=True, frozen=True)
class PatchRefused:
    """A patch that failed its checks. It takes its number and acts as a loss (None: not even its columns read)."""

    peer: bytes
    seq: int
    loss: Loss | None
    code: str
    message: str


@dataclass(slots=True, frozen=True)
class FromTrainer:
    """A decoded message of the trainer connection `peer`."""

    peer: bytes
    message: TrainerMessage


@dataclass(slots=True, frozen=True)
class Logged:
    """Every record up to and including number `record` is safe: what it applied may be acknowledged."""

    record: int


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed: deadlines, liveness, retention."""


@dataclass(slots=True, frozen=True)
class Leave:
    """The daemon is about to end: nothing that waits will be answered by it."""


Event: TypeAlias = FromEngine | PatchArrived | PatchRefused | FromTrainer | Logged | Tick | Leave

# ---------------------------------------------------------------- effects


@dataclass(slots=True, frozen=True)
class ToEngine:
    """Send to an engine connection."""

    peer: bytes
    message: CollectorToEngine


@dataclass(slots=True, frozen=True)
class ToTrainer:
    """Send to a trainer connection."""

    peer: bytes
    message: CollectorToTrainer


@dataclass(slots=True, frozen=True)
class ServeRoutes:
    """Send rows to a trainer. The shell asks `Collector.gather` for the payload when the socket can take it, so that
    answers waiting for a slow trainer hold no memory."""

    peer: bytes
    pull: Pull
    header: Routes
    life: Life


Effect: TypeAlias = ToEngine | ToTrainer | ServeRoutes


def waits_for_record(effect: Effect) -> bool:
    """Whether a trainer may hear of this only once what led to it is on record: it acts on it, and never asks again."""
    return isinstance(effect, ServeRoutes) or (isinstance(effect, ToTrainer) and isinstance(effect.message, Released))
