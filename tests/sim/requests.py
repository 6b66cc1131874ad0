"""What a simulated engine keeps of its requests, and what it hands to its shipper."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.losses import RepairAsk
from tests.sim.facts import LifeFact


@dataclass(slots=True, eq=False)
class Request:
    """host: tokens the host has accepted. dev: tokens the device has. computed: positions in the cache. epoch: counts
    preemptions that discard samples in flight."""

    fact: LifeFact
    target: int
    host: list[int]
    dev: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "waiting"
    epoch: int = 0
    in_flight: int = 0
    opened: bool = False


@dataclass(slots=True)
class Work:
    """One request's part of a forward: `count` tokens from `start`, the last `drafts` of them drafts."""

    request: Request
    start: int
    count: int
    drafts: int


@dataclass(slots=True)
class Sample:
    """What a forward sampled: tokens accepted behind position `last`, and the rows from `last` on."""

    request: Request
    epoch: int
    last: int
    tokens: list[int]
    rows: list[int]


@dataclass(slots=True)
class Read:
    """A chunk of a prefix hit that is still to be read from the slots."""

    due: int
    planned: int
    request: Request
    first: int
    slots: list[int]
    tokens: list[int]


class Shipping:
    """What an engine needs of a shipper. asks: dropped rows to read back."""

    asks: deque[RepairAsk]
    put: Callable[[LandingStep], None]
    lost: Callable[[StepPlan], None]
    finish: Callable[[str, int | None, str], None]
