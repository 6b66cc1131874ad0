"""What was acknowledged survives `kill -9` of the collector, wherever it strikes; what is damaged is not served."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from collector.client import RouteClient
from collector.client.errors import ReleasedRequest
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.shipping.shipper import Shipper
from protocol.messages import Kind
from tests.harness.daemon import running_daemon, serve_and_fail, spawn_daemon
from tests.harness.patches import SMALL, random_rows
from tests.harness.shipper import running_shipper
from tests.harness.waiting import wait_until

MOE = list(SMALL.moe_layer_ids)
PLACES = ["applied:3", "torn:3", "recorded:3", "acknowledged:3", "drafted:1", "renamed:1", "drafted:2", "renamed:2"]
REQUESTS, TOKENS = 8, 60


class _Rollout:
    """Requests that decode in step; `rows` [requests, tokens - 1, layers, k] is the witness."""

    def __init__(self, seed: int, shipper: Shipper) -> None:
        rng = np.random.default_rng(seed)
        self.rows = np.stack([random_rows(rng, SMALL, TOKENS - 1) for _ in range(REQUESTS)])
        self.tokens = rng.integers(0, 1000, (REQUESTS, TOKENS)).astype(np.int32)
        self._shipper = shipper

    def step(self, at: int) -> None:
        """Every request's row of position `at`."""
        n = REQUESTS
        opens = tuple((i, f"request-{i}") for i in range(n)) if at == 0 else ()
        starts = np.full(n, at, np.int32)
        plan = StepPlan(
            at,
            tuple(map(str, range(n))),
            starts,
            np.arange(n + 1, dtype=np.int32),
            np.full(n, Kind.FORWARD, np.uint8),
            0,
            opens,
        )
        landed = (np.ascontiguousarray(self.rows[:, at]), self.tokens[:, at].copy(), starts, np.zeros(n, np.uint8))
        self._shipper.put(LandingStep(plan, *landed, None, lambda: None, lambda: None))

    def finish(self) -> None:
        for i in range(REQUESTS):
            self._shipper.finish(str(i), TOKENS, "stop")

    def check(self, trainers: str) -> None:
        with RouteClient(trainers, timeout=20.0) as client:
            for i in range(REQUESTS):
                routes = client.pull(f"request-{i}", token_ids=self.tokens[i].tolist())
                assert np.array_equal(routes.array[:, MOE], self.rows[i])


@contextmanager
def _shipping(folder: Path, seed: int) -> Iterator[tuple[Shipper, _Rollout]]:
    with running_shipper(f"ipc://{folder}/engines.sock", 20.0) as shipper:
        yield shipper, _Rollout(seed, shipper)


@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_nothing_is_lost_and_nothing_is_wrong(tmp_path: Path, seed: int, place: str) -> None:
    with _shipping(tmp_path, seed) as (shipper, rollout):
        dying = spawn_daemon(tmp_path, "--checkpoint-records", "3", failpoint=place)
        for at in range(TOKENS - 1):
            rollout.step(at)
            if at % 6 == 0:
                # In several bursts, so that every place is come to as often as it takes.
                wait_until(lambda at=at: shipper.stats().acked_seq >= at or dying.poll() is not None, "step after step")
        assert dying.wait(20) == -signal.SIGKILL, f"never came to {place}"
        before = shipper.stats().acked_seq
        rollout.finish()
        with running_daemon(tmp_path) as daemon:
            wait_until(lambda: shipper.stats().acked_seq == TOKENS - 2 + REQUESTS, "everything is acknowledged")
            assert before < TOKENS - 2 + REQUESTS, "it died with nothing left to do"
            assert shipper.stats().rows_lost == 0
            rollout.check(daemon.trainers)


def test_what_is_complete_needs_no_engine_any_more(tmp_path: Path, seed: int) -> None:
    with running_daemon(tmp_path) as first:
        with _shipping(tmp_path, seed) as (_, rollout):
            for at in range(TOKENS - 1):
                rollout.step(at)
            rollout.finish()
        first.kill()
    for _ in range(2):
        with running_daemon(tmp_path) as daemon:
            rollout.check(daemon.trainers)


def test_what_was_released_stays_released(tmp_path: Path, seed: int) -> None:
    with running_daemon(tmp_path) as first:
        with _shipping(tmp_path, seed) as (_, rollout):
            for at in range(TOKENS - 1):
                rollout.step(at)
            rollout.finish()
        with RouteClient(first.trainers, timeout=5.0) as client:
            assert client.release(f"request-{i}" for i in range(REQUESTS)) == REQUESTS
        first.kill()
    with running_daemon(tmp_path) as daemon, RouteClient(daemon.trainers, timeout=5.0) as client:
        with pytest.raises(ReleasedRequest):
            client.pull("request-0")
        assert client.stats()["arena_used_bytes"] == 0


def test_a_daemon_that_left_with_nothing_gives_its_memory_back_to_the_machine(tmp_path: Path) -> None:
    with running_daemon(tmp_path):
        assert (tmp_path / "state" / "arena").stat().st_blocks * 512 >= 64 << 20, "all of it from the start"
    assert not (tmp_path / "state" / "arena").exists()
    with running_daemon(tmp_path, budget="16MiB"):
        """And another budget is as good then."""


# ------------------------------------------------------------------ refused


@pytest.fixture
def left_behind(tmp_path: Path, seed: int) -> Path:
    """The state directory of a daemon that was killed while it held complete requests."""
    with running_daemon(tmp_path) as daemon:
        with _shipping(tmp_path, seed) as (_, rollout):
            for at in range(TOKENS - 1):
                rollout.step(at)
            rollout.finish()
        daemon.kill()
    return tmp_path / "state"


def _said(state: Path, *options: str) -> str:
    where = ["--engines", f"ipc://{state.parent}/engines.sock", "--trainers", f"ipc://{state.parent}/trainers.sock"]
    code, said = serve_and_fail(*where, "--state", str(state), "--budget", "64MiB", *options)
    assert code == 1
    return said.replace("\n", " ")


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 8]))


def test_a_damaged_log_is_refused_and_says_what_to_do(left_behind: Path, seed: int) -> None:
    (path,) = left_behind.glob("log-*")
    _flip(path, int(np.random.default_rng(seed).integers(path.stat().st_size)))
    said = _said(left_behind)
    assert "damaged" in said
    assert f"move {left_behind} away" in said
    assert "damaged" in _said(left_behind), "a second try finds the same"


def test_damaged_rows_are_refused(left_behind: Path) -> None:
    _flip(left_behind / "arena", 0)
    assert "not what was written" in _said(left_behind)


def test_an_arena_that_is_gone_or_cut_is_refused(left_behind: Path) -> None:
    os.truncate(left_behind / "arena", 4096)
    assert "the arena has 4096 bytes" in _said(left_behind)
    (left_behind / "arena").unlink()
    assert "the arena has 0 bytes" in _said(left_behind)


def test_a_smaller_budget_is_refused_and_a_larger_one_keeps_everything(left_behind: Path) -> None:
    assert "ask for 67108864" in _said(left_behind, "--budget", "32MiB")
    with (
        running_daemon(left_behind.parent, budget="96MiB") as daemon,
        RouteClient(daemon.trainers, timeout=5.0) as client,
    ):
        assert client.stats()["requests_complete"] == REQUESTS


def test_two_daemons_do_not_share_a_state(tmp_path: Path) -> None:
    with running_daemon(tmp_path):
        other = ["--engines", f"ipc://{tmp_path}/e.sock", "--trainers", f"ipc://{tmp_path}/t.sock"]
        code, said = serve_and_fail(*other, "--state", str(tmp_path / "state"), "--budget", "64MiB")
        assert code == 1
        assert "another collector keeps its state" in said.replace("\n", " ")


def test_a_pull_that_waits_outlives_the_collector(tmp_path: Path, seed: int) -> None:
    answers: list[int] = []
    with _shipping(tmp_path, seed) as (shipper, rollout):
        with running_daemon(tmp_path) as first:
            trainer = threading.Thread(target=lambda: answers.append(_pulled(first.trainers)), name="trainer")
            trainer.start()
            with RouteClient(first.trainers, timeout=5.0) as operator:
                wait_until(lambda: operator.stats()["pulls_waiting"] == 1, "a pull waits")
            first.kill()
        with running_daemon(tmp_path):
            for at in range(TOKENS - 1):
                rollout.step(at)
            rollout.finish()
            trainer.join()
            wait_until(lambda: shipper.stats().acked_seq == TOKENS - 2 + REQUESTS, "everything is acknowledged")
    assert answers == [TOKENS - 1]


def _pulled(trainers: str) -> int:
    with RouteClient(trainers, timeout=20.0) as client:
        return len(client.pull("request-0").array)
