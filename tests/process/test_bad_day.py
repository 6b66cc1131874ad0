"""The bad day: a collector that is not there yet, or gone, or new; an engine that dies; a trainer that never reads."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from collector.client import RouteClient
from collector.client.errors import NotReady, PullError, RequestIncomplete, RequestLost, UnknownRequest
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.shipper import Shipper
from protocol import codec
from protocol.messages import Kind, Pull, RequestFinished
from tests.harness.daemon import running_daemon
from tests.harness.patches import SMALL, Seg, frames, random_rows
from tests.harness.waiting import wait_until
from tests.process.raw import raw_engine

MOE = list(SMALL.moe_layer_ids)


def _step(step: int, life: str, start: int, rows: np.ndarray, opens: str | None) -> LandingStep:
    n = len(rows)
    at = np.arange(start, start + n, dtype=np.int32)
    plan = StepPlan(
        step,
        (life,),
        at[:1],
        np.array([0, n], np.int32),
        np.array([Kind.FORWARD], np.uint8),
        0,
        ((0, opens),) if opens else (),
    )
    return LandingStep(plan, rows, at.copy(), at, np.zeros(n, np.uint8), None, lambda: None, lambda: None)


def test_collector_comes_later_than_the_engine(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_side.shipping.shipper._SILENT_S", 1.5)
    rows = random_rows(np.random.default_rng(seed), SMALL, 50)
    shipper = Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "early")
    with caplog.at_level(logging.WARNING):
        shipper.start()
        longest = 0.0
        for i in range(50):
            started = time.perf_counter()
            shipper.put(_step(i, "1", i, rows[i : i + 1], "early" if i == 0 else None))
            longest = max(longest, time.perf_counter() - started)
        shipper.finish("1", 51, "stop")
        wait_until(lambda: "no collector answers" in caplog.text, "the shipper says that nobody is there")
        wait_until(lambda: shipper.stats().next_seq == 51, "everything stands in the window")
        assert longest < 0.5
        with running_daemon(tmp_path) as daemon:
            with RouteClient(daemon.trainers, timeout=20.0) as client:
                routes = client.pull("early")
            assert np.array_equal(routes.array[:, MOE], rows)
            assert shipper.close(10.0)
    assert caplog.text.count("no collector answers") == 1
    assert shipper.stats().rows_lost == 0


_ENGINE = """
import sys, numpy as np, zmq
from protocol import codec
from protocol.messages import Hello, RequestFinished
from tests.harness.patches import SMALL, Seg, frames
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(codec.encode(Hello("doomed", "doomed-1", SMALL, 0)))
socket.recv()
rows = np.tile(np.arange(2, dtype=np.int16), (4, 2, 1))
segs = [Seg("1", 0, rows, (1, 2, 3, 4), opens="half"), Seg("2", 0, rows, (1, 2, 3, 4), opens="whole")]
socket.send_multipart(frames(SMALL, 0, segs))
socket.send(codec.encode(RequestFinished(1, "2", 5, "stop")))
while codec.decode_to_engine([socket.recv()]).logged_seq < 1:
    pass
print("shipped", flush=True)
sys.stdin.read()
"""


def test_a_dead_engines_requests_are_marked_and_not_hung(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--liveness", "1") as daemon:
        engine = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, daemon.engines], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        assert engine.stdin is not None
        assert engine.stdout.readline() == "shipped\n"
        engine.kill()
        engine.wait(10)
        engine.stdout.close()
        engine.stdin.close()
        with RouteClient(daemon.trainers, timeout=20.0) as client:
            started = time.monotonic()
            with pytest.raises(RequestLost, match="silent"):
                client.pull("half")
            assert time.monotonic() - started < 10
            assert len(client.pull("whole").array) == 4


def test_a_collector_that_lost_its_state_never_serves_half_a_request(tmp_path: Path, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), SMALL, 20)
    shipper = Shipper(f"ipc://{tmp_path}/engines.sock", SMALL, "survivor")
    shipper.start()
    with running_daemon(tmp_path, state="memory") as first:
        shipper.put(_step(0, "1", 0, rows[:10], "torn"))
        wait_until(lambda: shipper.stats().acked_seq == 0, "the first half is acknowledged")
        first.kill()
    with running_daemon(tmp_path, state="memory") as second:
        shipper.put(_step(1, "1", 10, rows[10:], None))
        shipper.finish("1", 21, "stop")
        shipper.put(_step(2, "2", 0, rows, "fresh"))
        shipper.finish("2", 21, "stop")
        with RouteClient(second.trainers, timeout=20.0) as client:
            assert np.array_equal(client.pull("fresh").array[:, MOE], rows)
            with pytest.raises(RequestIncomplete) as caught:
                client.pull("torn")
            assert caught.value.missing == ((0, 10),)
        assert shipper.close(10.0)


def test_a_trainer_that_never_reads_does_not_sit_before_ingest(tmp_path: Path, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), SMALL, 4000)
    with running_daemon(tmp_path) as daemon, raw_engine(daemon.engines, SMALL, "busy") as engine:
        engine.send(*frames(SMALL, 0, [Seg("1", 0, rows, tuple(range(4000)), opens="wanted")]))
        engine.say(RequestFinished(1, "1", 4001, "stop"))
        engine.await_ack(1)
        before = daemon.rss_bytes()
        context = zmq.Context()
        lazy = context.socket(zmq.DEALER)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.connect(daemon.trainers)
        for nonce in range(2000):
            lazy.send(codec.encode(Pull(nonce, "wanted")))
        for i in range(2, 202):
            engine.send(*frames(SMALL, i, [Seg("2", i, rows[:1], (i,), opens="other" if i == 2 else None)]))
        engine.await_ack(201)
        with RouteClient(daemon.trainers, timeout=10.0) as client:
            assert np.array_equal(client.pull("wanted").array[:, MOE], rows)
        # 2,000 answers of 128 KB would be 256 MB.
        assert daemon.rss_bytes() - before < 64 << 20
        lazy.close()
        context.term()


def test_pulls_hear_their_own_error(tmp_path: Path, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), SMALL, 6)
    with running_daemon(tmp_path) as daemon, raw_engine(daemon.engines, SMALL, "e") as engine:
        engine.send(*frames(SMALL, 0, [Seg("1", 0, rows, tuple(range(6)), opens="running")]))
        engine.await_ack(0)
        with RouteClient(daemon.trainers, timeout=0.2) as client:
            with pytest.raises(UnknownRequest, match="nobody"):
                client.pull("nobody")
            with pytest.raises(NotReady, match="running"):
                client.pull("running")
            with pytest.raises(PullError):
                client.pull_many(["running", "nobody"])
