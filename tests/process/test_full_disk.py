"""A log that cannot be written: nothing is acknowledged or served as final, the rest goes on, nothing is lost."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from collector.client import RouteClient
from protocol.messages import Pull, Release, Released, RequestFinished, Routes, Stat, Stats
from tests.harness.daemon import RunningDaemon, running_daemon, serve_and_fail
from tests.harness.patches import SMALL, Seg, frames, random_rows
from tests.harness.waiting import wait_until
from tests.process.raw import raw_engine, raw_peer


@contextmanager
def _full(daemon: RunningDaemon) -> Iterator[None]:
    """Every write of the daemon that would make a file longer fails, as on a full disk."""
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        if daemon.process.poll() is None:
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before)


def test_while_the_log_cannot_be_written_answers_that_count_on_it_wait(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng, SMALL, 20), tuple(range(20))
    with (
        running_daemon(tmp_path) as daemon,
        raw_engine(daemon.engines, SMALL, "engine") as engine,
        raw_peer(daemon.trainers) as trainer,
        RouteClient(daemon.trainers, timeout=5.0) as operator,
    ):
        engine.send(*frames(SMALL, 0, [Seg("1", 0, rows, tokens, opens="old")]))
        engine.say(RequestFinished(1, "1", 21, "stop"))
        engine.await_ack(1)
        with _full(daemon):
            engine.send(*frames(SMALL, 2, [Seg("2", 0, rows, tokens, opens="new")]))
            engine.say(RequestFinished(3, "2", 21, "stop"))
            wait_until(lambda: operator.stats()["requests_complete"] == 2.0, "the rows are here")
            trainer.say(Pull(5, "new"))
            trainer.say(Release(6, ("old",)))
            wait_until(lambda: operator.stats()["answers_held"] == 2.0, "two answers are held")
            trainer.say(Stat(7))
            answer = trainer.to_trainer()
            assert isinstance(answer, Stats), "what counts on no record is answered"
            assert answer.nonce == 7
        answers = {answer.nonce: answer for answer in (trainer.to_trainer(), trainer.to_trainer())}
        assert isinstance(answers[5], Routes)
        assert isinstance(answers[6], Released)
        engine.await_ack(3)
        daemon.kill()
    with running_daemon(tmp_path) as daemon, RouteClient(daemon.trainers, timeout=5.0) as client:
        routes = client.pull("new", token_ids=[*tokens, 0])
        assert np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], rows)


def test_killed_while_the_disk_was_full_it_comes_back_with_what_was_acknowledged(tmp_path: Path, seed: int) -> None:
    rows, tokens = random_rows(np.random.default_rng(seed), SMALL, 20), tuple(range(20))
    with (
        running_daemon(tmp_path) as daemon,
        raw_engine(daemon.engines, SMALL, "engine") as engine,
        RouteClient(daemon.trainers, timeout=5.0) as operator,
    ):
        engine.send(*frames(SMALL, 0, [Seg("1", 0, rows[:10], tokens[:10], opens="x")]))
        engine.await_ack(0)
        with _full(daemon):
            engine.send(*frames(SMALL, 1, [Seg("1", 10, rows[10:], tokens[10:])]))
            wait_until(lambda: operator.stats()["rows"] == 20.0, "the rows are here")
            daemon.kill()
    with running_daemon(tmp_path) as daemon, raw_engine(daemon.engines, SMALL, "engine", at=1) as engine:
        engine.send(*frames(SMALL, 1, [Seg("1", 10, rows[10:], tokens[10:])]))
        engine.say(RequestFinished(2, "1", 21, "stop"))
        engine.await_ack(2)
        with RouteClient(daemon.trainers, timeout=5.0) as client:
            routes = client.pull("x", token_ids=[*tokens, 0])
        assert np.array_equal(routes.array[:, list(SMALL.moe_layer_ids)], rows)


def test_a_file_system_without_room_for_the_budget_is_refused_at_the_start(tmp_path: Path) -> None:
    room = shutil.disk_usage(tmp_path).total
    where = ["--engines", f"ipc://{tmp_path}/e.sock", "--trainers", f"ipc://{tmp_path}/t.sock"]
    code, said = serve_and_fail(*where, "--state", f"{tmp_path}/state", "--budget", str(2 * room))
    assert code == 1
    assert "no room for" in said.replace("\n", " ")
    assert not (tmp_path / "state" / "arena").exists()
