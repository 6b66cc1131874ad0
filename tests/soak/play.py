"""Engines that ship as fast as they may, trainers that pull and release, one that never reads; samples of memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collector.client import RouteClient
from protocol.geometry import Geometry
from protocol.messages import Pull, RequestFinished
from tests.harness.daemon import RunningDaemon, running_daemon
from tests.harness.patches import Seg, frames
from tests.process.raw import raw_engine, raw_peer

GEOMETRY = Geometry(num_layers=48, moe_layer_ids=tuple(range(48)), top_k=8, num_experts=128)
ROWS = 1_000
"""Rows of a request: 384 KB of int8 ids on the wire."""
BUDGET = 64 << 20
BOUND = int(1.15 * BUDGET) + 150_000_000
LEFT = 40 << 20
"""What names and counters of the past may take."""
_AT_ONCE = 40


@dataclass
class Soak:
    """Resident bytes: `floor` before anything came, one sample a second, `after` everything was released."""

    floor: int
    samples: list[int] = field(default_factory=list)
    after: int = 0
    requests: int = 0
    wrong: list[str] = field(default_factory=list)


def soak(folder: Path, seed: int, seconds: float) -> Soak:
    """Two engines, as many trainers, and a trainer that asks and never reads."""
    with running_daemon(folder, budget=str(BUDGET)) as daemon:
        found = Soak(daemon.rss_bytes())
        over = threading.Event()
        work = [(daemon, seed + n, over, found) for n in (0, 1)]
        loops = [threading.Thread(target=_watched_loop, args=each, name=f"loop-{each[1]}") for each in work]
        with _never_reads(daemon, seed):
            for loop in loops:
                loop.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(loop.is_alive() for loop in loops):
                found.samples.append(daemon.rss_bytes())
                over.wait(min(1.0, seconds / 10))
            over.set()
            for loop in loops:
                loop.join()
        with RouteClient(daemon.trainers) as client:
            client.release("unread")
        for _ in range(100):
            found.after = daemon.rss_bytes()
            if found.after < found.floor + LEFT:
                break
            threading.Event().wait(0.2)
    return found


def _watched_loop(daemon: RunningDaemon, seed: int, over: threading.Event, found: Soak) -> None:
    try:
        _loop(daemon, seed, over, found)
    except Exception as error:
        found.wrong.append(f"a loop ended: {error!r}")
        over.set()


def _loop(daemon: RunningDaemon, seed: int, over: threading.Event, found: Soak) -> None:
    rng = np.random.default_rng(seed)
    tokens = tuple(range(ROWS))
    with raw_engine(daemon.engines, GEOMETRY, f"engine-{seed}") as engine, RouteClient(daemon.trainers) as client:
        seq = itertools.count()
        for number in itertools.count():
            if over.is_set():
                break
            scores = rng.random((8, 48, 128))
            few = np.argsort(scores, axis=-1)[..., :8].astype(np.int16)
            rows = np.tile(few, (ROWS // 8, 1, 1))
            name = f"{seed}/{number}"
            engine.send(*frames(GEOMETRY, next(seq), [Seg(str(number), 0, rows, tokens, opens=name)]))
            engine.say(RequestFinished(last := next(seq), str(number), ROWS + 1, "stop"))
            engine.await_ack(last)
            if not np.array_equal(client.pull(name, token_ids=[*tokens, 0]).array, rows):
                found.wrong.append(f"other rows: {name}")
            found.requests += 1
            if number >= _AT_ONCE:
                client.release(f"{seed}/{number - _AT_ONCE}")
        client.release([f"{seed}/{left}" for left in range(max(0, number - _AT_ONCE), number)])


@contextmanager
def _never_reads(daemon: RunningDaemon, seed: int) -> Iterator[None]:
    rows = np.tile(np.arange(8, dtype=np.int16), (ROWS, 48, 1))
    with raw_engine(daemon.engines, GEOMETRY, "unread") as engine, raw_peer(daemon.trainers) as trainer:
        engine.send(*frames(GEOMETRY, 0, [Seg("1", 0, rows, tuple(range(ROWS)), opens="unread")]))
        engine.say(RequestFinished(1, "1", ROWS + 1, "stop"))
        engine.await_ack(1)
        for nonce in range(500):
            trainer.say(Pull(nonce, "unread", dtype="int32"))
        yield
