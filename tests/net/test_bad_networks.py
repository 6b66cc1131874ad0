"""Between engine, collector and trainer the network is slow, cut in the middle of frames, or dead without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from collector.client import RouteClient
from engine_side.shipping.shipper import Shipper
from protocol.messages import Kind
from tests.harness.daemon import RunningDaemon, running_daemon
from tests.harness.patches import SMALL
from tests.harness.shipper import running_shipper
from tests.harness.waiting import wait_until
from tests.net.proxy import through
from tests.shipping.landings import landing

STEPS, REQUESTS, ROWS = 120, 8, 32
MOE = list(SMALL.moe_layer_ids)
NETWORKS = {
    "slow": {"latency": 0.03},
    "cut again and again": {"cut_after": (3_000, 40_000)},
    "slow and cut": {"latency": 0.01, "cut_after": (20_000, 90_000)},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    options = ("--engines", "tcp://127.0.0.1:0", "--trainers", "tcp://127.0.0.1:0", "--liveness", "60")
    with running_daemon(tmp_path, *options) as running:
        yield running


class _Rollout:
    """Requests that go on in steps; what they shipped, as it was."""

    def __init__(self, shipper: Shipper, seed: int) -> None:
        self._shipper = shipper
        self._rng = np.random.default_rng(seed)
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []

    def step(self) -> None:
        at = len(self._rows) * ROWS
        parts = [(str(i), at, ROWS, Kind.FORWARD) for i in range(REQUESTS)]
        opens = tuple((i, f"request-{i}") for i in range(REQUESTS)) if at == 0 else ()
        step = landing(parts, opens=opens, rng=self._rng)
        self._rows.append(step.rows.reshape(REQUESTS, ROWS, *SMALL.row_shape))
        self._tokens.append(step.token_ids.reshape(REQUESTS, ROWS))
        self._shipper.put(step)

    def finish(self) -> None:
        for i in range(REQUESTS):
            self._shipper.finish(str(i), len(self._rows) * ROWS + 1, "stop")

    def check(self, client: RouteClient) -> None:
        rows, tokens = np.concatenate(self._rows, axis=1), np.concatenate(self._tokens, axis=1)
        for i in range(REQUESTS):
            routes = client.pull(f"request-{i}", token_ids=[*tokens[i].tolist(), 0])
            assert routes.status == "complete"
            assert np.array_equal(routes.array[:, MOE], rows[i])


@contextmanager
def _shipping(endpoint: str, seed: int) -> Iterator[tuple[Shipper, _Rollout]]:
    with running_shipper(endpoint) as shipper:
        yield shipper, _Rollout(shipper, seed)


@pytest.mark.parametrize("network", NETWORKS)
def test_rows_come_through_a_bad_network_whole(daemon: RunningDaemon, seed: int, network: str) -> None:
    with (
        through(daemon.engines, seed, **NETWORKS[network]) as proxy,
        _shipping(proxy.endpoint, seed) as (shipper, rollout),
    ):
        for at in range(STEPS):
            rollout.step()
            if at % 8 == 7:
                wait_until(lambda at=at: shipper.stats().acked_seq >= at - 8, "it gets through", 60.0)
        rollout.finish()
        wait_until(lambda: shipper.stats().acked_seq == STEPS + REQUESTS - 1, "all of it is acknowledged", 60.0)
        assert shipper.stats().rows_lost == 0
        assert proxy.resets > 1 or "cut" not in network
        with RouteClient(daemon.trainers) as client:
            rollout.check(client)
            assert client.stats()["rows_dropped"] == 0


def test_a_trainer_reads_through_a_bad_network(daemon: RunningDaemon, seed: int) -> None:
    with _shipping(daemon.engines, seed) as (_, rollout):
        for _ in range(20):
            rollout.step()
        rollout.finish()
    with (
        through(daemon.trainers, seed, latency=0.005, cut_after=(15_000, 60_000)) as proxy,
        RouteClient(proxy.endpoint, timeout=60.0) as client,
    ):
        for _ in range(5):
            rollout.check(client)
        assert proxy.resets > 1


def test_a_connection_that_died_without_a_word_is_made_again(daemon: RunningDaemon, seed: int) -> None:
    with through(daemon.engines, seed) as proxy, _shipping(proxy.endpoint, seed) as (shipper, rollout):
        rollout.step()
        wait_until(lambda: shipper.stats().acked_seq == 0, "it gets through")
        proxy.freeze()
        for _ in range(10):
            rollout.step()
        proxy.thaw()
        rollout.finish()
        wait_until(lambda: shipper.stats().acked_seq == 10 + REQUESTS, "all of it is acknowledged", 60.0)
        with RouteClient(daemon.trainers) as client:
            rollout.check(client)


def test_a_connection_that_is_lost_for_ever_without_a_word_is_made_again(daemon: RunningDaemon, seed: int) -> None:
    with (
        through(daemon.engines, seed) as feeds,
        through(daemon.trainers, seed) as reads,
        _shipping(feeds.endpoint, seed) as (shipper, rollout),
        RouteClient(reads.endpoint, timeout=30.0) as client,
    ):
        rollout.step()
        wait_until(lambda: shipper.stats().acked_seq == 0, "it gets through")
        assert client.stats()["rows"] == REQUESTS * ROWS
        feeds.lose()
        reads.lose()
        rollout.step()
        rollout.finish()
        rollout.check(client)
