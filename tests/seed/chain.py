"""Batches of a scheduler through the real planner, packer and core; and a stream that talks to a core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.export.planner import RoutePlanner, ScheduledBatch
from engine_side.shipping.pack import Packer, check
from engine_side.shipping.stream import Item, Stream
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import CollectorToEngine, EngineMessage, FinishReason, Hello
from tests.core.driver import Bench, Emitter
from tests.harness.patches import SMALL, random_rows

ROOM = 1 << 20


@dataclass(frozen=True)
class Run:
    """One request in a forward: the tokens it runs from `start` on. accepted: tokens it had when the step was planned.
    opens: the client's id, the first time. known: whether the host knows `start`."""

    life: str
    start: int
    tokens: Sequence[int]
    accepted: int
    opens: str | None = None
    known: bool = True


def batch_of(runs: Sequence[Run]) -> ScheduledBatch:
    """What the engine's host says of a forward."""
    return ScheduledBatch(
        [run.life for run in runs],
        [run.start if run.known else -1 for run in runs],
        [len(run.tokens) for run in runs],
        [run.accepted for run in runs],
        [(i, run.opens) for i, run in enumerate(runs) if run.opens is not None],
    )


def landed(plan: StepPlan, positions: Sequence[int], tokens: Sequence[int], rows: NDArray[np.int16]) -> LandingStep:
    """A step whose copy has landed, as the device ran it."""
    total = int(plan.offsets[-1])
    return LandingStep(
        plan=plan,
        rows=rows,
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        status=np.zeros(total, np.uint8),
        row_versions=None,
        wait=lambda: None,
        free=lambda: None,
    )


class Chain:
    """One engine and one collector, without a socket between them. Rows are random, all different."""

    def __init__(self, seed: int, geometry: Geometry = SMALL, **config: Any) -> None:
        self.geometry = geometry
        self.bench = Bench(**config)
        self.engine = Emitter(self.bench, geometry=geometry)
        self.engine.hello()
        self.planner = RoutePlanner()
        self.packer = Packer(geometry)
        self.rng = np.random.default_rng(seed)

    def tokens(self, n: int) -> list[int]:
        """n token ids."""
        return [int(x) for x in self.rng.integers(0, 2**31, n)]

    def rows(self, n: int) -> NDArray[np.int16]:
        """int16 [n, moe_layers, top_k]."""
        return random_rows(self.rng, self.geometry, n)

    def forward(self, *runs: Run, lost: bool = False) -> list[NDArray[np.int16]]:
        """Run a step and ship it, or declare it lost. The rows of each run."""
        plan = self.planner.plan(batch_of(runs), 0)
        each = [self.rows(len(run.tokens)) for run in runs]
        if lost:
            self.engine.raw([self.packer.lost(plan, self._number())])
            return each
        positions = [run.start + k for run in runs for k in range(len(run.tokens))]
        self.ship(landed(plan, positions, [x for run in runs for x in run.tokens], np.concatenate(each)))
        return each

    def cached(self, plan: StepPlan, tokens: Sequence[int], rows: NDArray[np.int16]) -> None:
        """Ship rows that were read back from the slot store."""
        spans = zip(plan.starts.tolist(), np.diff(plan.offsets).tolist(), strict=True)
        self.ship(landed(plan, [start + k for start, n in spans for k in range(n)], tokens, rows))

    def ship(self, step: LandingStep) -> list[CollectorToEngine]:
        """Pack a step and hand it to the collector. Nothing on the device may contradict the plan."""
        assert not check(step)
        packed = self.packer.step(step)
        return self.engine.raw(packed.frames(self._number()))

    def finish(self, life: str, num_tokens: int | None, reason: FinishReason = "stop") -> None:
        self.engine.finish(life, num_tokens, reason)

    def served(self, name: str, **more: Any) -> NDArray[Any]:
        """The array of a complete request, captured layers only."""
        answer = self.bench.pull(name, **more)
        assert answer.array is not None, answer.problem
        assert answer.routes is not None
        assert answer.routes.status == "complete"
        return answer.array[:, list(self.geometry.moe_layer_ids)]

    def _number(self) -> int:
        self.engine.seq += 1
        return self.engine.seq - 1


class Connected:
    """A stream and a core that hear each other; `sent` keeps every message with its frames."""

    def __init__(self, bench: Bench, name: str = "engine", geometry: Geometry = SMALL, cap: int = ROOM) -> None:
        self.bench = bench
        self.stream = Stream(geometry, name, f"{name}-incarnation", cap)
        self.sent: list[tuple[EngineMessage, tuple[Any, ...]]] = []
        self._peer = name.encode()
        hello = self.stream.keep_alive(10.0)
        assert isinstance(hello, Hello)
        self.stream.greeted(10.0)
        self._deliver(codec.encode(hello))

    def put(self, *items: Item) -> None:
        """As the engine thread does: nothing but an append."""
        self.stream.queue.extend(items)

    def exchange(self) -> list[EngineMessage]:
        """Until nothing moves. What was sent."""
        before = len(self.sent)
        while self.stream.take() or self._send():
            pass
        return [message for message, _ in self.sent[before:]]

    def _send(self) -> bool:
        entry = self.stream.due()
        if entry is None:
            return False
        self.stream.sent(entry)
        self.sent.append((codec.decode_from_engine(entry.frames), entry.frames))
        self._deliver(*entry.frames)
        return True

    def _deliver(self, *frames: Any) -> None:
        emitter = Emitter(self.bench)
        emitter.peer = self._peer
        for message in emitter.raw(frames):
            self.stream.hear(message)
