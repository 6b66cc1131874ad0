"""Answers to trainers. A slow trainer waits in its own queue, which holds no rows: they are gathered at the send, and
only so many are on their way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from numpy.typing import NDArray

from collector.core.events import ServeRoutes, ToTrainer
from collector.core.serving import nbytes_of
from protocol import codec, limits
from protocol.messages import Problem


class Outbox:
    """Sends to a ROUTER without ever blocking. `dropped` counts answers whose trainer had left, or asked on and
    on and never read."""

    def __init__(self, socket: zmq.Socket[bytes], gather: Callable[[ServeRoutes], NDArray[Any] | Problem]) -> None:
        self._socket = socket
        self._gather = gather
        self._queues: dict[bytes, deque[ToTrainer | ServeRoutes]] = {}
        self._unsent: list[tuple[bytes, int, zmq.MessageTracker]] = []
        """Answers whose rows ZeroMQ still holds: to whom, and how many bytes."""
        self.dropped = 0

    @property
    def blocked(self) -> bool:
        """Whether an answer waits for a trainer to read."""
        return bool(self._queues)

    def send(self, effect: ToTrainer | ServeRoutes) -> None:
        """Send now, or queue behind what already waits for that trainer."""
        queue = self._queues.get(effect.peer)
        if queue is not None and len(queue) >= limits.MAX_UNREAD_ANSWERS:
            self.dropped += 1
        elif queue is not None:
            queue.append(effect)
        elif not self._try(effect):
            self._queues[effect.peer] = deque([effect])

    @property
    def unsent_bytes(self) -> int:
        """Rows that ZeroMQ still holds."""
        self._unsent = [one for one in self._unsent if not one[2].done]
        return sum(size for _, size, _ in self._unsent)

    def flush(self) -> None:
        """Try again what waits. Whoever got an answer is behind the others next time."""
        for peer in list(self._queues):
            queue = self._queues.pop(peer)
            while queue and self._try(queue[0]):
                queue.popleft()
            if queue:
                self._queues[peer] = queue

    def _try(self, effect: ToTrainer | ServeRoutes) -> bool:
        """False when the trainer's pipe is full, or rows would be too many on their way."""
        size = nbytes_of(effect.header) if isinstance(effect, ServeRoutes) else 0
        if size and not self._has_room(effect.peer, size):
            return False
        try:
            # The peer's frame asks for room and, once taken, gets it for the whole message: rows are gathered only
            # then, not again at every try (35 % of a core beside one trainer that did not read 19 MB answers).
            self._socket.send(effect.peer, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped += 1
            return True
        tracker = self._socket.send_multipart(self._parts(effect), zmq.NOBLOCK, copy=False, track=True)
        if size and tracker is not None and not tracker.done:
            self._unsent.append((effect.peer, size, tracker))
        return True

    def _has_room(self, peer: bytes, size: int) -> bool:
        held = self.unsent_bytes
        of_one = sum(bytes_ for to, bytes_, _ in self._unsent if to == peer)
        all_fit = not held or held + size <= limits.MAX_UNSENT_BYTES
        return all_fit and (not of_one or of_one + size <= limits.MAX_UNSENT_OF_ONE)

    def _parts(self, effect: ToTrainer | ServeRoutes) -> list[Any]:
        if isinstance(effect, ToTrainer):
            return [codec.encode(effect.message)]
        payload = self._gather(effect)
        if isinstance(payload, Problem):
            return [codec.encode(payload)]
        return [codec.encode(effect.header), payload.reshape(-1).view("u1").data]
