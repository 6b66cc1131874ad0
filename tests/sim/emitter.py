"""An engine process: a simulated engine, the real stream, and the shell's loop around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_side.export.landing import LandingStep
from engine_side.shipping.stream import Finish, Lost, Stream
from protocol import codec
from protocol.messages import Bye, Hello, Welcome
from tests.sim.engine import Engine
from tests.sim.facts import NARROW, WIDE, Facts, LifeFact, Violation
from tests.sim.loop import Loop
from tests.sim.network import Frames, Link
from tests.sim.options import Chaos
from tests.sim.requests import Shipping


@dataclass(slots=True, eq=False)
class Landing(LandingStep):
    """A step whose copy lands at `landed_at`, or fails then."""

    landed_at: float = 0.0
    broken: bool = False


class Emitter:
    """One incarnation. connect: a new link to the collector, None while there is no collector."""

    def __init__(
        self,
        loop: Loop,
        chaos: Chaos,
        facts: Facts,
        engine_id: str,
        incarnation: str,
        connect: Callable[[Callable[[Frames], None]], Link | None],
        ended: Callable[[LifeFact], None],
    ) -> None:
        self.engine_id, self.incarnation = engine_id, incarnation
        self.geometry = WIDE if chaos.options.wide else NARROW
        self.alive = True
        self.leaving: float | None = None
        self.unfreed = 0
        self.link: Link | None = None
        self._loop, self._chaos, self._connect = loop, chaos, connect
        self.stream = Stream(self.geometry, engine_id, incarnation, chaos.options.window_cap)
        ship = Shipping()
        ship.put = self.stream.queue.append
        ship.lost = lambda plan: self.stream.queue.append(Lost(plan))
        ship.asks = self.stream.asks
        ship.finish = lambda life, n, reason: self.stream.queue.append(Finish(life, n, reason))  # type: ignore[arg-type]
        self.engine = Engine(chaos, facts, self.geometry, incarnation, self._land, ship, ended)
        self._every(0.1, self._step)
        self._every(0.1, self._turn)

    def cut(self) -> None:
        """The connection breaks; the socket makes a new one by itself and tells nobody."""
        if self.link is not None:
            self.link.cut()
            self.link = None

    def kill(self) -> None:
        """The process is gone; what it had sent may still arrive."""
        self.alive = False

    def leave(self) -> None:
        """An orderly end: what runs is aborted, what is queued is shipped, then Bye."""
        self.leaving = self._loop.now + 5.0
        self.engine.abort_all()

    @property
    def idle(self) -> bool:
        """Whether everything was shipped and acknowledged."""
        return not self.engine.busy and self.stream.drained

    # ------------------------------------------------------------------ the process

    def _every(self, period: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if self.alive:
                action()
                self._loop.after(period * self._chaos.rng.uniform(0.7, 1.3), again)

        self._loop.after(self._chaos.rng.uniform(0, period), again)

    def _step(self) -> None:
        if self.engine.busy:
            self.engine.step()

    def _land(self, *columns: Any, **more: Any) -> LandingStep:
        broken = self._chaos.strikes("copy_failed")
        landed_at = self._loop.now + self._chaos.rng.uniform(0.0, 0.3)
        step = Landing(*columns, lambda: None, lambda: None, landed_at=landed_at, broken=broken, origin=self, **more)

        def wait() -> None:
            if self._loop.now < step.landed_at:
                raise Violation("a step was read before its copy landed")
            if broken:
                raise RuntimeError("the copy failed")

        def free() -> None:
            # The ring slot is another step's from now on.
            self.unfreed -= 1
            step.rows.fill(3)
            step.token_ids.fill(-3)
            for column in (step.slots, step.stamps):
                assert column is not None
                column.fill(-3)

        self.unfreed += 1
        step.wait, step.free = wait, free
        return step

    # ------------------------------------------------------------------ the shipper's thread

    def _turn(self) -> None:
        stream, now = self.stream, self._loop.now
        for _ in range(self._chaos.rng.randint(1, 8)):
            head = stream.queue[0] if stream.queue else None
            if isinstance(head, Landing) and head.landed_at > now:
                break
            lost = stream.stats().rows_lost
            taken = stream.take()
            if isinstance(head, Landing) and not head.broken and stream.stats().rows_lost > lost:
                self._chaos.note("overflow")
            if not taken:
                break
        stream.wish()
        while (entry := stream.due()) is not None and self._send(entry.frames):
            stream.sent(entry)
        message = stream.keep_alive(now)
        if message is not None and self._send([codec.encode(message)]) and isinstance(message, Hello):
            stream.greeted(now)
        if self.leaving is not None and (self.idle or now > self.leaving):
            if self.idle and stream.welcomed:
                self._send([codec.encode(Bye())])
            self.alive = False

    def _send(self, frames: Any) -> bool:
        if self.link is None or not self.link.alive:
            self.link = self._connect(self._hear)
        return self.link is not None and self.link.send_up(frames)

    def _hear(self, frames: Frames) -> None:
        if not self.alive:
            return
        message = codec.decode_to_engine(frames)
        try:
            self.stream.hear(message)
        except RuntimeError as error:
            raise Violation(f"the shipper of {self.incarnation} gave up: {error}") from error
        if isinstance(message, Welcome):
            self._chaos.note("go_back")
