"""Bare sockets that speak to a daemon as an engine or a trainer would, or as neither would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Ack, CollectorToEngine, Hello, Welcome

TIMEOUT_MS = 10_000


class RawPeer:
    """A DEALER. Answers come decoded."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, *frames: Any) -> None:
        self._socket.send_multipart(list(frames))

    def say(self, message: Any) -> None:
        self.send(codec.encode(message))

    def from_collector(self) -> CollectorToEngine:
        """The next answer on an engines' socket."""
        return codec.decode_to_engine(self._receive())

    def to_trainer(self) -> Any:
        """The next answer on a trainers' socket."""
        return codec.decode_to_trainer(self._receive())

    def await_ack(self, seq: int) -> None:
        """Read until `seq` is acknowledged."""
        while not (isinstance(answer := self.from_collector(), Ack) and answer.logged_seq >= seq):
            pass

    def _receive(self) -> Sequence[bytes]:
        assert self._socket.poll(TIMEOUT_MS), "no answer"
        return self._socket.recv_multipart()


@contextmanager
def raw_peer(endpoint: str) -> Iterator[RawPeer]:
    """A bare connection to `endpoint`."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    try:
        yield RawPeer(socket)
    finally:
        socket.close()
        context.term()


@contextmanager
def raw_engine(endpoint: str, geometry: Geometry, incarnation: str, at: int = 0) -> Iterator[RawPeer]:
    """A bare connection that has said Hello and was welcomed. at: the message that the collector wants next."""
    with raw_peer(endpoint) as peer:
        peer.say(Hello(f"engine-{incarnation}", incarnation, geometry, 0))
        welcome = peer.from_collector()
        assert isinstance(welcome, Welcome)
        assert at in (0, welcome.next_seq)
        yield peer
