"""Answers to trainers. A slow trainer waits in its own queue, which holds no rows: they are gathered at the send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from numpy.typing import NDArray

from collector.core.events import ServeRoutes, ToTrainer
from protocol import codec, limits
from protocol.messages import Problem


class Outbox:
    """Sends to a ROUTER without ever blocking. `dropped` counts answers whose trainer had left, or asked on and
    on and never read."""

    def __init__(self, socket: zmq.Socket[bytes], gather: Callable[[ServeRoutes], NDArray[Any] | Problem]) -> None:
        self._socket = socket
        self._gather = gather
        self._queues: dict[bytes, deque[ToTrainer | ServeRoutes]] = {}
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

    def flush(self) -> None:
        """Try again what waits."""
        for peer in list(self._queues):
            queue = self._queues[peer]
            while queue and self._try(queue[0]):
                queue.popleft()
            if not queue:
                del self._queues[peer]

    def _try(self, effect: ToTrainer | ServeRoutes) -> bool:
        """False when the trainer's pipe is full."""
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
        self._socket.send_multipart(self._parts(effect), zmq.NOBLOCK, copy=False)
        return True

    def _parts(self, effect: ToTrainer | ServeRoutes) -> list[Any]:
        if isinstance(effect, ToTrainer):
            return [codec.encode(effect.message)]
        payload = self._gather(effect)
        if isinstance(payload, Problem):
            return [codec.encode(payload)]
        return [codec.encode(effect.header), payload.reshape(-1).view("u1").data]
