"""The daemon: `startup`, `main_loop`, `shutdown`, on one thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

import zmq

from collector.core.events import Effect, Event, Leave, Logged, Tick, ToEngine, ToTrainer, waits_for_record
from collector.core.manners import Manners
from collector.daemon.config import DaemonConfig
from collector.daemon.endpoints import Bound
from collector.daemon.gate import ENGINES, TRAINERS, Gate
from collector.daemon.ingest import Ingest
from collector.daemon.outbox import Outbox
from collector.daemon.state import keeper_for
from protocol import codec, limits
from protocol.codec import Buffer
from protocol.keys import collector_keys
from protocol.messages import HelloFirst, Problem, Refused

log = logging.getLogger("r3.collector")

Decoded: TypeAlias = Event | Refused | HelloFirst | Problem
"""What `Ingest` makes of a message: an event of the core, or the answer to what is none."""

_ENGINE_BURST = 64
"""Messages taken from engines before trainers get a turn; also how many share one acknowledgement."""
_TRAINER_BURST = 16
_TICK_S = 0.1
_DRAIN_S = 5.0
_RELAX_S = 2.0
_QUIET_MS = 100
"""Nothing heard for this long means that what engines had sent has been taken."""
_MAX_PARTS = 5
"""The peer, and one more than the longest message has."""
_MAX_TRAINER_FRAME = 2 * limits.MAX_HEADER_BYTES
_MAX_ENGINE_FRAME = 2 * limits.MAX_ROWS_BYTES
"""Above these ZeroMQ closes the connection; between them and `limits` a peer gets a typed answer."""


class Daemon:
    """Serves one collector. `stop()` may be called from any thread or signal handler."""

    def __init__(self, config: DaemonConfig | None = None) -> None:
        self.config = config or DaemonConfig()
        self.engines_endpoint = ""
        self.trainers_endpoint = ""
        self._resources = ExitStack()
        self._stop_read, self._stop_write = os.pipe()
        self._stopping = False
        self._gate: Gate | None = None
        self._over = False
        self._next_tick = 0.0
        self._effects: list[Effect] = []
        self._held: list[Effect] = []
        """Answers that wait until the log can be written."""
        self._safe = 0
        self._held_rows_at: float | None = None
        self.on_ready: Callable[[], object] = lambda: None

    # ------------------------------------------------------------------ life cycle

    def run(self) -> None:
        """startup, main_loop, shutdown."""
        try:
            with self._resources:
                self.startup()
                self.on_ready()
                self.main_loop()
                self.shutdown()
        finally:
            self._over = True
            os.close(self._stop_read)
            os.close(self._stop_write)

    def startup(self) -> None:
        """Bind and allocate. Raises StartError."""
        config = self.config
        context = zmq.Context()
        self._resources.callback(context.term)
        if config.keys is not None:
            self._gate = Gate(context, collector_keys(config.keys))
            self._resources.callback(self._gate.close)
        self._engines = self._router(context, config.engines, _MAX_ENGINE_FRAME, 10_000, ENGINES)
        self._trainers = self._router(context, config.trainers, _MAX_TRAINER_FRAME, 8, TRAINERS)
        self.engines_endpoint = self._engines.endpoint
        self.trainers_endpoint = self._trainers.endpoint
        self._keeper = keeper_for(config)
        self._resources.callback(self._keeper.release)
        self.core = self._keeper.collector(time.monotonic())
        self._ingest = Ingest(self.core.geometry_of)
        self._manners = Manners()
        self.core.more_stats = self._stats
        self._outbox = Outbox(self._trainers.socket, lambda effect: self.core.gather(effect, time.monotonic()))
        self._poller = zmq.Poller()
        for source in (self._engines.socket, self._trainers.socket, self._stop_read):
            self._poller.register(source, zmq.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)
        log.info("serving engines at %s, trainers at %s", self.engines_endpoint, self.trainers_endpoint)

    def main_loop(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            self._turn(5 if self._outbox.blocked else int(_TICK_S * 1e3))

    def shutdown(self) -> None:
        """Take what engines had sent, acknowledge it, let trainers read their answers, close."""
        deadline = time.monotonic() + _DRAIN_S
        while self._turn(_QUIET_MS) and time.monotonic() < deadline:
            pass
        self._handle(Leave())
        self._commit()
        while self._outbox.blocked and time.monotonic() < deadline:
            self._turn(5)
        for socket in (self._engines.socket, self._trainers.socket):
            socket.linger = 1_000
        self._keeper.close(self.core)
        log.info("drained, bye")

    def stop(self) -> None:
        """Ask the loop to drain and end. Harmless when it has."""
        if not self._over:
            os.write(self._stop_write, b"x")

    # ------------------------------------------------------------------ one turn of the loop

    def _turn(self, timeout_ms: int) -> bool:
        """Wait for work, do a bounded amount of it. True when there was any."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._stop_read in ready:
            os.read(self._stop_read, 64)
            self._stopping = True
        worked = False
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        if self._engines.socket in ready:
            worked = self._take(self._engines.socket, _ENGINE_BURST, self._ingest.from_engine)
            self._commit()
        if self._trainers.socket in ready:
            worked = self._take(self._trainers.socket, _TRAINER_BURST, self._ingest.from_trainer) or worked
            self._commit()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._handle(Tick())
            self._commit()
            self._relax(now)
        if self._outbox.blocked:
            self._outbox.flush()
        return worked

    def _take(self, socket: zmq.Socket[bytes], burst: int, decode: Callable[[bytes, list[Buffer]], Decoded]) -> bool:
        """Handle at most `burst` messages of a socket. True when there was one."""
        now = time.monotonic()
        for taken in range(burst):
            try:
                frames = _receive(socket)
            except zmq.Again:
                return taken > 0
            peer = frames[0].bytes
            if not self._manners.hears(peer, now):
                continue
            malformed = self._ingest.malformed.total()
            found = decode(peer, [frame.buffer for frame in frames[1:]])
            if self._ingest.malformed.total() != malformed:
                self._manners.offended(peer, now)
            if isinstance(found, Refused | HelloFirst):
                self._effects.append(ToEngine(peer, found))
            elif isinstance(found, Problem):
                self._effects.append(ToTrainer(peer, found))
            else:
                self._handle(found)
        return True

    def _relax(self, now: float) -> None:
        arena = self.core.arena
        if arena.free_pages < arena.pages:
            self._held_rows_at = now
        elif self._held_rows_at is not None and now - self._held_rows_at > _RELAX_S:
            self._held_rows_at = None
            self._keeper.relax()

    def _handle(self, event: Event) -> None:
        self._effects += self.core.handle(event, time.monotonic())

    def _commit(self) -> None:
        """Make safe what events changed, then let others hear of it."""
        saved = self._keeper.retry()
        if saved:
            self._safe = self.core.record
            if (record := self.core.take_record()) is not None:
                saved = self._keeper.save(record)
                self._safe = record.number if saved else self._safe
        self._handle(Logged(self._safe))
        effects, self._effects = self._effects, []
        if saved and self._held:
            effects, self._held = self._held + effects, []
        for effect in effects:
            if isinstance(effect, ToEngine):
                self._send_engine(effect)
            elif saved or not waits_for_record(effect):
                self._outbox.send(effect)
            elif len(self._held) < limits.MAX_HELD_ANSWERS:
                self._held.append(effect)
            else:
                self._outbox.dropped += 1
        self.config.failpoint.reached("acknowledged")

    def _stats(self) -> dict[str, float]:
        denied = self._gate.denied if self._gate is not None else {}
        return {
            **{f"malformed_{reason}": float(count) for reason, count in self._ingest.malformed.items()},
            **{f"denied_{reason}": float(count) for reason, count in denied.items()},
            "messages_ignored": float(self._manners.ignored),
            "answers_unsent_bytes": float(self._outbox.unsent_bytes),
            "answers_held": float(len(self._held)),
            "answers_dropped": float(self._outbox.dropped),
        }

    def _send_engine(self, effect: ToEngine) -> None:
        try:
            self._engines.socket.send_multipart([effect.peer, codec.encode(effect.message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or not reading: its next message or heartbeat is answered again.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _router(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_frame: int, send_hwm: int, domain: bytes
    ) -> Bound:
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        socket.setsockopt(zmq.SNDHWM, send_hwm)
        try:
            if self._gate is not None:
                self._gate.guard(socket, domain)
            bound = Bound(socket, endpoint, keyed=self._gate is not None)
        except BaseException:
            socket.close()
            raise
        self._resources.callback(bound.close)
        return bound


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next message, peer first; of one with more parts than any message has, as many as show that. Raises
    zmq.Again."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(zmq.NOBLOCK, copy=False))
        if len(frames) > _MAX_PARTS:
            frames.pop(-2)
    return frames
