"""Mutated frames at a daemon's real sockets, beside an engine that goes on with its work."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import numpy as np
import zmq

from collector.client import RouteClient
from protocol import codec
from protocol.messages import RequestFinished
from tests.fuzz.good import Good
from tests.fuzz.mutations import mutated
from tests.harness.daemon import RunningDaemon
from tests.harness.patches import SMALL, frames, random_seg
from tests.process.raw import RawPeer, raw_engine

_OF_ONE_CONNECTION = 90
"""Then it is closed: whoever sends nonsense only is slowed on one connection, not on the next."""
_STEP_S = 0.01
_ROWS = 64


@dataclass(frozen=True)
class Attack:
    """What a run saw. Rates are steps a second of the honest engine; growth is bytes of resident memory."""

    sent: int
    alone: float
    beside: float
    growth: int
    malformed: int
    ignored: int


def attack(daemon: RunningDaemon, seed: int, count: int, seconds: float = 2.0) -> Attack:
    """`count` messages, and an honest request before, while and after, that must come out as it went in."""
    with raw_engine(daemon.engines, SMALL, "honest") as peer:
        engine = _Honest(peer, seed)
        alone = engine.work(threading.Event(), seconds)
        before = daemon.rss_bytes()
        over = threading.Event()
        sender = threading.Thread(target=_send, args=(daemon, seed, count, over), name="fuzz")
        sender.start()
        beside = engine.work(over, None)
        sender.join()
        engine.prove(daemon)
    assert daemon.process.poll() is None, "the daemon ended"
    with RouteClient(daemon.trainers) as client:
        stats = client.stats()
    malformed = sum(int(value) for name, value in stats.items() if name.startswith("malformed_"))
    growth = daemon.rss_bytes() - before
    return Attack(count, alone, beside, growth, malformed, int(stats["messages_ignored"]))


class _Honest:
    """An engine of one endless request, a step every 10 ms, acknowledged before the next."""

    def __init__(self, peer: RawPeer, seed: int) -> None:
        self._peer, self._rng = peer, np.random.default_rng(seed)
        self._seq = 0
        self._last = random_seg(self._rng, SMALL, "1", 0, _ROWS, opens="honest")

    def work(self, over: threading.Event, seconds: float | None) -> float:
        """Steps a second until `over`, or for `seconds`."""
        began, steps = time.monotonic(), 0
        while not over.is_set() and (seconds is None or time.monotonic() - began < seconds):
            self._peer.send(*frames(SMALL, self._seq, [self._last]))
            self._peer.await_ack(self._seq)
            self._seq, steps = self._seq + 1, steps + 1
            self._last = random_seg(self._rng, SMALL, "1", 0, _ROWS)
            over.wait(max(0.0, began + steps * _STEP_S - time.monotonic()))
        return steps / (time.monotonic() - began)

    def prove(self, daemon: RunningDaemon) -> None:
        self._peer.send(*frames(SMALL, self._seq, [self._last]))
        self._peer.send(codec.encode(RequestFinished(self._seq + 1, "1", _ROWS + 1, "stop")))
        self._peer.await_ack(self._seq + 1)
        with RouteClient(daemon.trainers) as client:
            routes = client.pull("honest", token_ids=[*self._last.tokens, 0])
        assert np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], self._last.rows)


def _send(daemon: RunningDaemon, seed: int, count: int, over: threading.Event) -> None:
    context = zmq.Context()
    try:
        for first in range(0, count, _OF_ONE_CONNECTION):
            _connection(context, daemon, seed + first, min(_OF_ONE_CONNECTION, count - first))
    finally:
        context.destroy(linger=0)
        over.set()


def _connection(context: zmq.Context[zmq.Socket[bytes]], daemon: RunningDaemon, seed: int, count: int) -> None:
    chance, good = random.Random(seed), Good(seed, f"attacker {seed % 7}")
    engine = chance.random() < 0.7
    socket = context.socket(zmq.DEALER)
    socket.linger = 2_000
    socket.connect(daemon.engines if engine else daemon.trainers)
    if engine:
        socket.send_multipart(good.hello())
    for _ in range(count):
        found = good.of_engine() if engine else good.of_trainer()
        socket.send_multipart(mutated(chance, found, good.of_engine()) if chance.random() < 0.8 else found)
        while socket.poll(0):
            answer = socket.recv_multipart()
            if engine:
                good.hear(codec.decode_to_engine(answer))
    socket.close()
