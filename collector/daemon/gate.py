"""Who may come in: every CURVE handshake of the daemon's sockets asks here (ZAP, ZeroMQ RFC 27), on its own thread."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

import zmq
from zmq.utils import z85

from collector.daemon.errors import StartError
from protocol.keys import CollectorKeys

log = logging.getLogger("r3.collector")

ENGINES: Final = b"engines"
TRAINERS: Final = b"trainers"
_BURST = 64
_ENDPOINT = "inproc://zeromq.zap.01"


class Gate:
    """Answers handshakes by role. `denied` counts those turned away, by reason."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CollectorKeys) -> None:
        self._secret = keys.secret
        self._allowed = {ENGINES: _raw(keys.engines), TRAINERS: _raw(keys.trainers)}
        self.denied: Counter[str] = Counter()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes], domain: bytes) -> None:
        """Make a socket speak CURVE and ask this gate; before it is bound. Raises StartError."""
        try:
            socket.curve_secretkey = self._secret
            socket.curve_publickey = zmq.curve_public(self._secret)
            socket.curve_server = True
        except zmq.ZMQError as error:
            raise StartError(f"this ZeroMQ has no CURVE: {error}") from None
        socket.zap_domain = domain

    def answer(self) -> None:
        """Answer handshakes that wait, a bounded number of them."""
        for _ in range(_BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            why = self._refusal(frames)
            if why:
                self.denied[why] += 1
                log.warning("turned away a peer at the %s' socket: %s", frames[2].decode(errors="replace"), why)
            status = [b"400", why.encode()] if why else [b"200", b"OK"]
            self.socket.send_multipart([b"1.0", frames[1], *status, b"", b""])

    def close(self) -> None:
        """Handshakes under way fail."""
        self.socket.close()

    def _refusal(self, frames: list[bytes]) -> str:
        """Why a peer may not come in, "" when it may."""
        domain, mechanism = frames[2], frames[5]
        if mechanism != b"CURVE" or len(frames) != 7:
            return "no_key"
        if frames[6] in self._allowed.get(domain, ()):
            return ""
        return "wrong_role" if any(frames[6] in keys for keys in self._allowed.values()) else "unknown_key"


def _raw(keys: frozenset[bytes]) -> frozenset[bytes]:
    return frozenset(z85.decode(key) for key in keys)
