"""Answers to a trainer that does not read: they wait, cost nothing while they do, and are bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq

from collector.core.collector import Collector
from collector.core.events import ServeRoutes, ToTrainer
from collector.daemon.outbox import Outbox
from protocol import codec, limits
from protocol.messages import Problem, Pull, Released, Routes
from tests.core.driver import Bench, Emitter
from tests.harness.patches import SMALL, random_seg
from tests.harness.waiting import wait_until

ROWS = 40_000
"""An answer of 640 KB: a few of them fill every buffer between two sockets."""


@dataclass
class Desk:
    """An outbox, the trainer at its other end, and a complete request to serve."""

    outbox: Outbox
    trainer: zmq.Socket[bytes]
    peer: bytes
    bench: Bench
    gathered: Counter[int] = field(default_factory=Counter)

    def serve(self, nonce: int) -> None:
        for effect in self.bench.ask(Pull(nonce, "x"), self.peer):
            assert isinstance(effect, ServeRoutes)
            self.outbox.send(effect)

    def read(self) -> Any:
        """The next answer, while the outbox goes on trying."""

        def ready() -> bool:
            self.outbox.flush()
            return bool(self.trainer.poll(0))

        wait_until(ready, "an answer")
        return codec.decode_to_trainer(self.trainer.recv_multipart())


@pytest.fixture(scope="module")
def served() -> Bench:
    bench = Bench(pages=64, page_bytes=64 << 10)
    emitter = Emitter(bench)
    emitter.hello()
    emitter.patch(random_seg(np.random.default_rng(0), SMALL, "1", 0, ROWS, opens="x"))
    emitter.finish("1", ROWS + 1)
    return bench


@pytest.fixture
def desk(served: Bench) -> Iterator[Desk]:
    context = zmq.Context()
    router, trainer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 1)
    router.setsockopt(zmq.SNDBUF, 8192)
    trainer.setsockopt(zmq.RCVHWM, 1)
    trainer.setsockopt(zmq.RCVBUF, 8192)
    for socket in (router, trainer):
        socket.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    trainer.connect(f"tcp://127.0.0.1:{port}")
    trainer.send(b"here")
    peer = router.recv_multipart()[0]
    gathered: Counter[int] = Counter()

    def gather(effect: ServeRoutes) -> Any:
        gathered[effect.pull.nonce] += 1
        return Collector.gather(served.core, effect, 0.0)

    yield Desk(Outbox(router, gather), trainer, peer, served, gathered)
    router.close()
    trainer.close()
    context.term()


def _fill(desk: Desk) -> int:
    """Serve until answers wait; the last nonce."""
    nonce = 0
    while not desk.outbox.blocked:
        nonce += 1
        assert nonce < 1000, "nothing ever waits"
        desk.serve(nonce)
    return nonce


def test_answers_wait_in_order_and_each_is_gathered_once_however_often_it_was_tried(desk: Desk) -> None:
    # The transport still takes a few behind the first that waits; not so many.
    last = _fill(desk) + 40
    for nonce in range(last - 39, last + 1):
        desk.serve(nonce)
    for _ in range(200):
        desk.outbox.flush()
    assert desk.gathered[last] == 0, "an answer that waits holds no rows"
    for nonce in range(1, last + 1):
        answer = desk.read()
        assert isinstance(answer, Routes)
        assert answer.nonce == nonce
    assert not desk.outbox.blocked
    assert set(desk.gathered.values()) == {1}
    assert desk.outbox.dropped == 0


def test_what_was_released_while_it_waited_is_answered_as_such(desk: Desk) -> None:
    last = _fill(desk)
    forgotten = Bench(pages=64, page_bytes=64 << 10)
    emitter = Emitter(forgotten, "again")
    emitter.hello()
    emitter.patch(random_seg(np.random.default_rng(1), SMALL, "1", 0, 3, opens="gone"))
    emitter.finish("1", 4)
    (effect,) = forgotten.ask(Pull(last + 1, "gone"), desk.peer)
    assert isinstance(effect, ServeRoutes)
    forgotten.release("gone")
    desk.outbox.send(effect)
    answers = [desk.read() for _ in range(last + 1)]
    assert isinstance(answers[-1], Problem)
    assert (answers[-1].nonce, answers[-1].code) == (last + 1, "released")


def test_answers_that_nobody_reads_are_bounded_and_counted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_ANSWERS", 5)
    last = _fill(desk)
    for i in range(20):
        desk.outbox.send(ToTrainer(desk.peer, Released(1000 + i, 0, 0)))
    assert desk.outbox.dropped == 16
    nonces = [desk.read().nonce for _ in range(last + 4)]
    assert nonces == [*range(1, last + 1), 1000, 1001, 1002, 1003]
    assert not desk.outbox.blocked


def test_a_trainer_that_left_is_no_reason_to_wait(desk: Desk) -> None:
    desk.outbox.send(ToTrainer(b"nobody", Released(1, 0, 0)))
    assert desk.outbox.dropped == 1
    assert not desk.outbox.blocked


def test_rows_on_their_way_are_bounded_and_one_trainer_does_not_hold_them_all(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ROWS * 4 * 2 * 2
    monkeypatch.setattr(limits, "MAX_UNSENT_OF_ONE", 2 * answer)
    for nonce in range(1, 31):
        desk.serve(nonce)
    assert desk.outbox.blocked
    assert desk.outbox.unsent_bytes <= 2 * answer
    assert sum(desk.gathered.values()) < 30
    for nonce in range(1, 31):
        assert desk.read().nonce == nonce
    wait_until(lambda: desk.outbox.unsent_bytes == 0, "nothing is on its way")


def test_an_answer_larger_than_the_bound_goes_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNSENT_OF_ONE", 1)
    monkeypatch.setattr(limits, "MAX_UNSENT_BYTES", 1)
    desk.serve(1)
    desk.serve(2)
    assert desk.read().nonce == 1
    assert desk.read().nonce == 2
