"""How engines run requests and name their rows, and the planner and packer with a rule off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine_side.capture.records import COMMIT_MASK
from engine_side.export.planner import RoutePlanner
from engine_side.shipping.live import LiveLives
from engine_side.shipping.losses import Losses
from engine_side.shipping.pack import Packer
from engine_side.shipping.stream import Stream
from protocol.messages import Flush, Kind
from tests.sim.cache import Cache
from tests.sim.mutants.change import Change, Mutants, nothing


def _kind() -> list[Change]:
    """The sampled position of a resume is `recompute`, as if shipped once were shipped for good."""
    original, following = RoutePlanner.plan, {}

    def plan(self: RoutePlanner, batch: Any, weight_version: int) -> Any:
        accepted = list(batch.accepted)
        for i, life in enumerate(batch.lives):
            start, stop = batch.starts[i], batch.starts[i] + batch.counts[i]
            expected, resumed = following.get((id(self), life), (0, False))
            resumed = start >= 0 and (resumed or start < expected) and start < accepted[i] - 1
            if resumed and stop >= accepted[i]:
                accepted[i] += 1
            following[id(self), life] = (stop, resumed)
        return original(self, replace(batch, accepted=accepted), weight_version)

    return [(RoutePlanner, "plan", plan)]


def _flushed_behind() -> list[Change]:
    """`Flushed` overtakes what was launched before the question was read."""
    original = Stream.hear

    def hear(self: Stream, message: Any) -> None:
        original(self, message)
        if isinstance(message, Flush):
            self.queue.appendleft(self.queue.pop())

    return [(Stream, "hear", hear)]


def _device_starts() -> list[Change]:
    """Starts are the host's optimistic guess, not the device's."""
    original, following = Packer.step, {}

    def step(self: Packer, landing: Any) -> Any:
        plan, positions = landing.plan, landing.positions.copy()
        for i, life in enumerate(plan.req_ids):
            part = slice(int(plan.offsets[i]), int(plan.offsets[i + 1]))
            count = part.stop - part.start
            if plan.starts[i] < 0 and (id(self), life) in following:
                first = following[id(self), life]
                positions[part] = np.arange(first, first + count)
            if plan.kinds[i] != Kind.CACHED:
                following[id(self), life] = int(positions[part.start]) + count
        landing.positions = positions
        return original(self, landing)

    return [(Packer, "step", step)]


def _stamp() -> list[Change]:
    """A row read back is proven by its token."""
    return [(Cache, "proves", lambda _self, stored, token, _position, _step: stored.fact.token == token)]


def _rows_lost() -> list[Change]:
    """Nothing stands in the sequence in place of what was dropped."""
    original = Stream._declare_lost

    def declare_lost(self: Stream, plan: Any, starts: Any = None) -> None:
        if plan.opens:
            original(self, plan, starts)

    return [(Stream, "_declare_lost", declare_lost)]


def _ring() -> list[Change]:
    """The ring slot is given back before it was copied."""
    original = Packer.step

    def step(self: Packer, landing: Any) -> Any:
        landing.rows.fill(3)
        return original(self, landing)

    return [(Packer, "step", step)]


def _reopen() -> list[Change]:
    """A wiped collector is not told again of what is under way."""
    return [(LiveLives, "opened_before", lambda _self, _seq: [])]


def _repair_of_any_commit() -> list[Change]:
    """A row that is read back counts if its token and position are right, whoever computed it."""
    original = Stream._proven

    def proven(self: Stream, step: Any, _proof: Any) -> Any:
        return original(self, step, (step.stamps >> 8) & COMMIT_MASK)

    return [(Stream, "_proven", proven)]


MUTANTS: Mutants = {
    "kind": _kind,
    "barrier behind its rows": _flushed_behind,
    "device starts": _device_starts,
    "stamp": _stamp,
    "rows lost": _rows_lost,
    "ring slot copied first": _ring,
    "wiped is told again": _reopen,
    "forward takes losses back": lambda: [(Losses, "cut", nothing)],
    "repair is of its commit": _repair_of_any_commit,
}
"""By the rule that is off."""
