"""The thread between an engine and its collector. The engine thread only appends to a queue."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import zmq
from numpy.typing import NDArray

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.live import LiveLives
from engine_side.shipping.pack import Packer
from engine_side.shipping.window import Window
from protocol import codec
from protocol.errors import ProtocolError
from protocol.geometry import Geometry
from protocol.messages import (
    Ack,
    Bye,
    FinishReason,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    HelloFirst,
    Refused,
    RequestFinished,
    Welcome,
)

log = logging.getLogger("r3.shipper")

_HEARTBEAT_S = 1.0
_SILENT_S = 5.0
_BURST = 64


@dataclass(slots=True, frozen=True)
class _Finish:
    life: str
    num_tokens: int | None
    reason: FinishReason
    detail: str


@dataclass(slots=True, frozen=True)
class _Lost:
    plan: StepPlan


@dataclass(slots=True, frozen=True)
class _Barrier:
    life: str
    num_tokens: int


_Item: TypeAlias = LandingStep | _Finish | _Lost | _Barrier


@dataclass(slots=True)
class ShipperStats:
    """Counters since start. bytes: row memory shipped. acked_seq: -1 before the first acknowledgement."""

    patches: int = 0
    rows: int = 0
    bytes: int = 0
    rows_lost: int = 0
    errors: int = 0
    acked_seq: int = -1
    next_seq: int = 0
    connected: bool = False
    held_bytes: int = 0


class Shipper:
    """Ships steps to the collector at `collector`, in order, exactly once, and resends what a new connection lost.

    engine_id: a stable name of this emitter, for people. window_cap_bytes: rows held while the collector is away or
    slow; beyond it whole steps are declared lost in sequence, and the engine never waits.
    """

    def __init__(
        self,
        collector: str,
        geometry: Geometry,
        engine_id: str,
        *,
        window_cap_bytes: int = 256 << 20,
    ) -> None:
        self.collector = collector
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self._geometry = geometry.validate()
        self._packer = Packer(geometry)
        self._window = Window(window_cap_bytes)
        self._live = LiveLives()
        self._queue: deque[_Item] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._sleeping = False
        self._closing: float | None = None
        self._stats = ShipperStats()
        self._state_id = ""
        self._welcomed = False
        self._hello_at = 0.0
        self._heard_at = 0.0
        self._beat_at = 0.0
        self._said_away = False
        self._socket: zmq.Socket[bytes]
        self._thread = threading.Thread(target=self._run, name="r3-shipper", daemon=True)

    # ------------------------------------------------------------------ the engine thread

    def start(self) -> None:
        """Start the thread. Returns at once; a collector that is not there yet is waited for in the background."""
        self._thread.start()

    def put(self, step: LandingStep) -> None:
        """Hand a step over. Never blocks, never raises for a dead collector."""
        self._queue.append(step)
        if self._sleeping:
            self._wake()

    def lost(self, plan: StepPlan) -> None:
        """Declare that the rows of a step will not come."""
        self._queue.append(_Lost(plan))
        self._wake()

    def finish(self, life_id: str, num_tokens: int | None, reason: FinishReason, detail: str = "") -> None:
        """End a life, behind the rows already put. num_tokens: prompt and generated tokens."""
        self._queue.append(_Finish(life_id, num_tokens, reason, detail))
        if self._sleeping:
            self._wake()

    def close(self, timeout: float = 10.0) -> bool:
        """Ship what is queued, say goodbye, end the thread. False when `timeout` seconds did not suffice: then what the
        collector had not acknowledged is gone, and it reports those requests as lost."""
        if not self._thread.is_alive():
            return len(self._window) == 0
        self._closing = time.monotonic() + timeout
        self._wake()
        self._thread.join(timeout + 5.0)
        drained = not self._queue and len(self._window) == 0
        if not drained:
            log.error("closed with %d messages that the collector never acknowledged", len(self._window))
        return drained

    def stats(self) -> ShipperStats:
        """A copy of the counters."""
        return replace(
            self._stats,
            connected=self._welcomed,
            next_seq=self._window.next_seq,
            held_bytes=self._window.held_bytes,
        )

    def _wake(self) -> None:
        # A full pipe already wakes the thread.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # ------------------------------------------------------------------ the shipper's thread

    def _run(self) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.setsockopt(zmq.SNDHWM, _BURST)
        # Nothing waits in a pipe for a collector that is not there: the window is what waits.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self._socket.connect(self.collector)
            self._heard_at = time.monotonic()
            self._loop()
        except Exception:
            self._stats.errors += 1
            log.exception("the shipper stopped: routes of this engine are no longer collected")
        finally:
            self._socket.close()
            context.term()
            self._free_queue()
            os.close(self._wake_read)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            for _ in range(_BURST):
                if not self._queue:
                    break
                self._take(self._queue.popleft())
            blocked = not self._send()
            now = time.monotonic()
            self._keep_alive(now)
            if self._closing is not None and self._closed(now):
                return
            poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
            self._sleeping = True
            # Looked at after the flag is up: an engine that appended before it saw the flag is not missed.
            ready = dict(poller.poll(0 if self._queue else 100 if self._welcomed else 10))
            self._sleeping = False
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._socket in ready:
                self._receive()

    def _closed(self, now: float) -> bool:
        assert self._closing is not None
        if not self._queue and len(self._window) == 0:
            if self._welcomed:
                self._say(Bye())
            return True
        return now > self._closing

    def _take(self, item: _Item) -> None:
        window = self._window
        if isinstance(item, LandingStep):
            try:
                self._take_step(item)
            finally:
                item.free()
        elif isinstance(item, _Lost):
            self._declare_lost(item.plan)
        elif isinstance(item, _Barrier):
            window.add((codec.encode(Flushed(window.next_seq, item.life, item.num_tokens)),), 0)
        else:
            self._live.finished(item.life, window.next_seq)
            done = RequestFinished(window.next_seq, item.life, item.num_tokens, item.reason, item.detail)
            window.add((codec.encode(done),), 0)

    def _take_step(self, step: LandingStep) -> None:
        try:
            step.wait()
            packed = self._packer.step(step)
        except Exception:
            self._stats.errors += 1
            log.exception("step %d could not be read back: its rows are lost", step.plan.step)
            self._declare_lost(step.plan)
            return
        if not self._window.fits(packed.nbytes):
            self._declare_lost(step.plan, packed.starts)
            return
        self._note_opens(step.plan)
        self._window.add(packed.frames(self._window.next_seq), packed.nbytes)
        self._stats.patches += 1
        self._stats.rows += len(packed.rows)
        self._stats.bytes += packed.nbytes
        for life, why in packed.failed:
            self._stats.errors += 1
            log.error("life %s: %s", life, why)
            self._take(_Finish(life, None, "failed", why))

    def _declare_lost(self, plan: StepPlan, starts: NDArray[np.int32] | None = None) -> None:
        if not self._stats.rows_lost:
            log.warning("rows of step %d are lost; further losses are only counted", plan.step)
        self._stats.rows_lost += int(plan.offsets[-1])
        self._note_opens(plan)
        self._window.add((self._packer.lost(plan, self._window.next_seq, starts),), 0)

    def _note_opens(self, plan: StepPlan) -> None:
        for index, name in plan.opens:
            self._live.opened(plan.req_ids[index], name, self._window.next_seq)

    # ------------------------------------------------------------------ the socket

    def _send(self) -> bool:
        """Send what may be sent. False when the socket takes no more."""
        if not self._welcomed:
            return True
        while (entry := self._window.due()) is not None:
            try:
                self._socket.send_multipart(entry.frames, zmq.NOBLOCK, copy=not entry.nbytes)
            except zmq.Again:
                return False
            self._window.sent(entry)
        return True

    def _say(self, message: Hello | Heartbeat | Bye) -> bool:
        """False when there is no connection, or its pipe is full."""
        try:
            self._socket.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _keep_alive(self, now: float) -> None:
        if not self._welcomed and now - self._hello_at > _HEARTBEAT_S:
            self._hello(now)
        elif self._welcomed and now - self._beat_at > _HEARTBEAT_S:
            self._beat_at = now
            self._say(Heartbeat(self._window.send_seq))
        if now - self._heard_at > _SILENT_S and not self._said_away:
            self._said_away = True
            log.warning("no collector answers at %s: rows are kept until it does", self.collector)

    def _hello(self, now: float) -> None:
        first = self._window.first_seq
        if self._say(Hello(self.engine_id, self.incarnation, self._geometry, first, self._state_id)):
            self._hello_at = now

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = codec.decode_to_engine(frames)
            except ProtocolError as error:
                log.error("the collector sent something else: %s", error)
                continue
            self._heard_at = time.monotonic()
            if self._said_away:
                self._said_away = False
                log.warning("the collector at %s is back", self.collector)
            self._hear(message)

    def _hear(self, message: Welcome | Ack | HelloFirst | Flush | Refused) -> None:
        if isinstance(message, Ack):
            if message.state_id == self._state_id:
                self._window.allow = message.window_bytes
                self._acked(message.logged_seq)
        elif isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, HelloFirst):
            self._welcomed = False
        elif isinstance(message, Flush):
            # Behind everything launched until now: the engine thread appends to the same queue.
            self._queue.append(_Barrier(message.req_id, message.num_tokens))
        else:
            self._stats.errors += 1
            log.error("the collector refused message %s: %s: %s", message.seq, message.code, message.message)

    def _welcome(self, message: Welcome) -> None:
        window = self._window
        if self._state_id not in ("", message.state_id) and message.next_seq == window.first_seq - 1:
            log.warning("the collector at %s lost its state: live requests reopen as lost", self.collector)
            lives = self._live.opened_before(window.first_seq)
            window.put_first((self._packer.reopened(lives, window.first_seq - 1),))
        self._state_id = message.state_id
        self._live.acked(message.next_seq - 1)
        if not window.go_to(message.next_seq):
            raise RuntimeError(f"the collector asks for message {message.next_seq}, not in the window")
        window.allow = message.window_bytes
        self._welcomed = True

    def _acked(self, seq: int) -> None:
        self._stats.acked_seq = max(self._stats.acked_seq, seq)
        self._window.acked(seq)
        self._live.acked(seq)

    def _free_queue(self) -> None:
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, LandingStep):
                item.free()
