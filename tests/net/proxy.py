"""A bad network between two sockets of one machine: slow, cut, or silently dead, by a seed."""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_CHUNK = 16 << 10


@dataclass
class _Flow:
    """Bytes on their way in one direction, each chunk with the time it may go on."""

    source: socket.socket
    target: socket.socket
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)


class Proxy:
    """Forwards every connection to `target`. latency: seconds each way. rate: bytes a second of all together, 0 for no
    limit. cut_after: bytes after which a connection is reset, drawn anew for each from this range. `freeze` stops
    forwarding without closing, `thaw` closes what was frozen and takes new connections; `resets` counts."""

    def __init__(
        self, target: str, seed: int, latency: float = 0.0, cut_after: tuple[int, int] | None = None, rate: float = 0.0
    ) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._chance = random.Random(seed)
        self._latency, self._cut_after, self._rate = latency, cut_after, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._flows: list[_Flow] = []
        self._left: dict[socket.socket, int] = {}
        self.resets = 0
        self._dead: list[_Flow] = []
        self._frozen = self._losing = self._over = False
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def lose(self) -> None:
        """What is connected now stays so for ever, and nothing arrives; new connections work."""
        self._losing = True

    def freeze(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        self._frozen = True

    def thaw(self) -> None:
        """The machine in between is back, and knows none of its old connections."""
        self._frozen = False

    def close(self) -> None:
        """Close everything."""
        self._over = True
        self._thread.join()

    def _run(self) -> None:
        was_frozen = False
        with self._listener:
            while not self._over:
                if self._frozen:
                    was_frozen = True
                    time.sleep(0.005)
                    continue
                if self._losing:
                    self._losing = False
                    self._dead += self._flows
                    self._flows = []
                if was_frozen:
                    was_frozen = False
                    for flow in list(self._flows):
                        self._reset(flow)
                self._turn()
            for flow in self._flows + self._dead:
                self._reset(flow)

    def _turn(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            for flow in self._flows:
                ready.register(flow.source, selectors.EVENT_READ, flow)
            for key, _ in ready.select(0.002):
                if key.data is None:
                    self._accept()
                elif key.data in self._flows:
                    self._read(key.data)
        for flow in list(self._flows):
            self._write(flow)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5.0)
        except OSError:
            near.close()
            return
        self._flows += [_Flow(near, far), _Flow(far, near)]
        if self._cut_after is not None:
            self._left[near] = self._left[far] = self._chance.randint(*self._cut_after)

    def _read(self, flow: _Flow) -> None:
        if self._rate:
            time.sleep(_CHUNK / self._rate)
        try:
            found = flow.source.recv(_CHUNK)
        except OSError:
            found = b""
        if not found:
            self._reset(flow)
            return
        if flow.source in self._left:
            self._left[flow.source] -= len(found)
            if self._left[flow.source] < 0:
                # In the middle of a frame, more often than not.
                found = found[: self._left[flow.source]]
                self.resets += 1
        flow.under_way.append((time.monotonic() + self._latency, found))

    def _write(self, flow: _Flow) -> None:
        while flow in self._flows and flow.under_way and flow.under_way[0][0] <= time.monotonic():
            try:
                flow.target.sendall(flow.under_way.popleft()[1])
            except OSError:
                self._reset(flow)
                return
        if flow in self._flows and self._left.get(flow.source, 0) < 0 and not flow.under_way:
            self._reset(flow)

    def _reset(self, flow: _Flow) -> None:
        for end in (flow.source, flow.target):
            self._left.pop(end, None)
            end.close()
        self._flows = [other for other in self._flows if other.source not in (flow.source, flow.target)]


@contextmanager
def through(target: str, seed: int, **how: Any) -> Iterator[Proxy]:
    """A proxy in front of `target` for the block; `how` as for `Proxy`."""
    proxy = Proxy(target, seed, **how)
    try:
        yield proxy
    finally:
        proxy.close()
