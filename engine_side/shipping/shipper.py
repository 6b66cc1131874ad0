"""The thread between an engine and its collector. The engine thread only appends to a queue."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Final, Literal

import zmq

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.errors import checked
from engine_side.shipping.stream import Finish, Lost, ShipperStats, Stream
from protocol import codec
from protocol.errors import ProtocolError
from protocol.geometry import Geometry
from protocol.keys import peer_keys
from protocol.messages import Bye, FinishReason, Heartbeat, Hello

__all__ = ["Shipper", "ShipperStats"]

log = logging.getLogger("r3.shipper")

_SILENT_S = 5.0
_HEARTBEAT_MS = 2_000
"""A connection that says nothing for three of these is made again: its other end may be gone without a word."""
_BUSY_S = 1.0
_NAP_S = 0.004
_PATIENCE_S = 0.05
_WRITE: Final = ctypes.PyDLL(None).write
"""write(2), with the interpreter lock held."""
_BURST = 64
MAX_WAIT_S: Final = 600.0
"""An engine that is held longer than this is as good as dead."""


class Shipper:
    """Ships steps to the collector at `collector`, in order, exactly once, and resends what a new connection lost.

    engine_id: a stable name of this emitter, for people. window_cap_bytes: rows held while the collector is away or
    slow. From half of it on, the youngest requests' rows are declared lost in sequence, and asked for again once there
    is room. on_full "wait": during such an outage `put` holds the engine first, for `wait_s` seconds in all. keys: an
    engine's key folder, as `r3-collector keygen` made it, for a collector that serves with keys.

    Raises BadEndpoint, BadKeys, ValueError.
    """

    def __init__(
        self,
        collector: str,
        geometry: Geometry,
        engine_id: str,
        *,
        window_cap_bytes: int = 256 << 20,
        on_full: Literal["drop", "wait"] = "drop",
        wait_s: float = 30.0,
        keys: Path | str | None = None,
    ) -> None:
        if on_full not in ("drop", "wait"):
            raise ValueError(f"on_full must be 'drop' or 'wait', got {on_full!r}")
        if not 0.0 <= wait_s <= MAX_WAIT_S:
            raise ValueError(f"wait_s must be in [0, {MAX_WAIT_S:g}] seconds, got {wait_s}")
        self.collector = checked(collector)
        self._keys = peer_keys(keys, "engine") if keys is not None else None
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self._stream = Stream(geometry, engine_id, self.incarnation, window_cap_bytes)
        self._queue = self._stream.queue
        self.asks = self._stream.asks
        """Dropped rows that the engine's thread should read back from its slot store: see `Stream.asks`."""
        self._wake_read = self._wake_write = -1
        self.quiet = False
        """Set while the engine's thread is at work in Python, between two forwards: a step that was put then is left
        alone for a while, because what this thread does costs that one its time."""
        self._sleeping = False
        self._wait_s = self._patience = wait_s if on_full == "wait" else 0.0
        self._crowded = False
        self._roomy = threading.Event()
        self._over = False
        self._closing: float | None = None
        self._heard_at = self._connected_at = 0.0
        self._said_away = False
        self._socket: zmq.Socket[bytes]
        self._thread = threading.Thread(target=self._run, name="r3-shipper", daemon=True)

    # ------------------------------------------------------------------ the engine thread

    def start(self) -> None:
        """Start the thread. Returns at once; a collector that is not there yet is waited for in the background."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread.start()

    def put(self, step: LandingStep) -> None:
        """Hand a step over. Never blocks (but see `on_full`), never raises for a dead collector, or
        behind `close`."""
        if self._over:
            step.free()
            return
        if self._crowded and self._patience > 0.0:
            self._wait_for_room()
        self._queue.append(step)
        if self._sleeping:
            self._wake()

    def lost(self, plan: StepPlan) -> None:
        """Declare that the rows of a step will not come."""
        self._enqueue(Lost(plan))

    def finish(self, life_id: str, num_tokens: int | None, reason: FinishReason, detail: str = "") -> None:
        """End a life, behind the rows already put. num_tokens: prompt and generated tokens."""
        self._enqueue(Finish(life_id, num_tokens, reason, detail))

    def close(self, timeout: float = 10.0) -> bool:
        """Ship what is queued, say goodbye, end the thread. False when `timeout` seconds did not suffice: then what the
        collector had not acknowledged is gone, and it reports those requests as lost."""
        if self._closing is None:
            self._closing = time.monotonic() + timeout
            started = self._thread.ident is not None
            if started:
                self._wake()
                self._thread.join(timeout + 5.0)
            self._over = True
            if started and not self._thread.is_alive():
                os.close(self._wake_read)
                os.close(self._wake_write)
        if not self._stream.drained:
            log.error("closed with %d messages that the collector never acknowledged", self._stream.unacknowledged)
        return self._stream.drained

    def stats(self) -> ShipperStats:
        """A copy of the counters."""
        return self._stream.stats()

    def _enqueue(self, item: Lost | Finish) -> None:
        if not self._over:
            self._queue.append(item)
            if self._sleeping:
                self._wake()

    def _wait_for_room(self) -> None:
        began = time.monotonic()
        self.quiet = False
        self._roomy.wait(self._patience)
        self._patience -= time.monotonic() - began

    def _wake(self) -> None:
        # Not os.write: that lets go of the interpreter lock, and the thread it wakes takes it, for as long as it packs
        # a step (60 us were seen). Its result does not matter: a full pipe already wakes the thread.
        _WRITE(self._wake_write, b"x", 1)

    # ------------------------------------------------------------------ the shipper's thread

    def _run(self) -> None:
        context = zmq.Context()
        self._socket = self._dealer(context)
        try:
            self._socket.connect(self.collector)
            self._heard_at = self._connected_at = time.monotonic()
            self._loop()
        except Exception:
            self._stream.failed()
            log.exception("the shipper stopped: routes of this engine are no longer collected")
        finally:
            self._socket.close()
            context.term()
            # Also when the thread failed: an engine goes on putting, and nothing may pile up behind it.
            self._over = True
            self._crowded = False
            self._roomy.set()
            self._free_queue()

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.linger = 500
        socket.setsockopt(zmq.SNDHWM, _BURST)
        # Nothing waits in a pipe for a collector that is not there: the window is what waits.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        if self._keys is not None:
            socket.curve_publickey = zmq.curve_public(self._keys.secret)
            socket.curve_secretkey = self._keys.secret
            socket.curve_serverkey = self._keys.collector
        return socket

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        busy_until = 0.0
        while True:
            took = 0
            while took < _BURST and self._stream.take():
                took += 1
            self._stream.wish()
            if self._wait_s:
                self._tell_room(self._stream.crowded)
            blocked = not self._send()
            now = time.monotonic()
            self._keep_alive(now)
            if self._closing is not None and self._closed(now):
                return
            if took:
                busy_until = now + _BUSY_S
            if now < busy_until:
                self._nap(busy_until, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
                continue
            poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
            self._sleeping = True
            # Looked at after the flag is up: an engine that appended before it saw the flag is not missed.
            ready = dict(poller.poll(0 if self._queue else 100 if self._stream.welcomed else 10))
            self._sleeping = False
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._socket in ready:
                self._receive()

    def _tell_room(self, crowded: bool) -> None:
        """An outage, as far as waiting goes, lasts until the window takes everybody's rows again."""
        if crowded and not self._crowded:
            self._roomy.clear()
            self._crowded = True
        elif self._crowded and not crowded:
            self._patience, self._crowded = self._wait_s, False
            self._roomy.set()

    def _nap(self, until: float, events: int) -> None:
        """While steps keep coming: until there is one to take, or the socket has one of `events`. Nobody wakes this
        thread, which would cost the engine's thread 50 us, or its core where all are busy; and it leaves a step alone
        while the engine is at work in Python."""
        found_at = 0.0
        while self._closing is None:
            now = time.monotonic()
            if self._queue:
                found_at = found_at or now
                if not self.quiet or now - found_at > _PATIENCE_S:
                    return
            elif now > until:
                return
            found = self._socket.getsockopt(zmq.EVENTS)
            if isinstance(found, int) and found & events:
                self._receive()
                return
            time.sleep(_NAP_S)

    def _closed(self, now: float) -> bool:
        assert self._closing is not None
        if self._stream.drained:
            if self._stream.welcomed:
                self._say(Bye())
            return True
        return now > self._closing

    # ------------------------------------------------------------------ the socket

    def _send(self) -> bool:
        """Send what may be sent. False when the socket takes no more."""
        while (entry := self._stream.due()) is not None:
            try:
                self._socket.send_multipart(entry.frames, zmq.NOBLOCK, copy=not entry.nbytes)
            except zmq.Again:
                return False
            self._stream.sent(entry)
        return True

    def _say(self, message: Hello | Heartbeat | Bye) -> bool:
        """False when there is no connection, or its pipe is full."""
        try:
            self._socket.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _keep_alive(self, now: float) -> None:
        message = self._stream.keep_alive(now)
        if message is not None and self._say(message) and isinstance(message, Hello):
            self._stream.greeted(now)
        if now - self._heard_at > _SILENT_S and not self._said_away:
            self._said_away = True
            door = "may not let this engine's key in" if self._keys else "may serve with keys"
            log.warning("no collector answers at %s (or it %s): rows are kept until it does", self.collector, door)
        if self._keys is not None and now - max(self._heard_at, self._connected_at) > _SILENT_S:
            # ZeroMQ never tries again where a key was turned away; whoever serves there may let it in by now.
            self._connected_at = now
            self._socket.disconnect(self.collector)
            self._socket.connect(self.collector)

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
            self._stream.hear(message)

    def _free_queue(self) -> None:
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, LandingStep):
                item.free()
