"""The daemon as an operator meets it: start, refuse, drain; and the first commands."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collector.client import RouteClient
from protocol import codes
from protocol.messages import Pull, RequestFinished, Stat
from tests.harness.daemon import running_daemon, serve_and_fail
from tests.harness.patches import SMALL, Seg, frames, random_rows
from tests.process.raw import raw_engine, raw_peer


def _cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "collector.cli", *words], capture_output=True, text=True, timeout=30)


def test_starts_clean_and_drains_on_sigterm(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        pass
    assert daemon.process.returncode == 0
    assert not (tmp_path / "engines.sock").exists()
    assert not (tmp_path / "trainers.sock").exists()


def test_drain_takes_what_an_engine_had_sent(tmp_path: Path, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), SMALL, 40)
    with running_daemon(tmp_path) as daemon, raw_engine(daemon.engines, SMALL, "late") as engine:
        for i in range(40):
            opens = "drained" if i == 0 else None
            engine.send(*frames(SMALL, i, [Seg("1", i, rows[i : i + 1], (i,), opens=opens)]))
        daemon.process.send_signal(signal.SIGTERM)
        engine.await_ack(39)


def test_a_pull_that_waits_is_told_that_the_daemon_leaves(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, raw_peer(daemon.trainers) as trainer:
        trainer.say(Pull(7, "never", timeout_ms=600_000))
        trainer.say(Stat(8))
        assert trainer.to_trainer().values["pulls_waiting"] == 1
        daemon.process.send_signal(signal.SIGTERM)
        answer = trainer.to_trainer()
        assert (answer.nonce, answer.code) == (7, codes.SHUTTING_DOWN)


def test_a_second_daemon_on_the_path_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        code, said = serve_and_fail("--engines", daemon.engines, "--trainers", f"ipc://{tmp_path}/other.sock")
        assert code == 1
        assert "another collector serves" in said
        assert "Traceback" not in said
        with RouteClient(daemon.trainers, timeout=5.0) as client:
            assert client.stats()["engines"] == 0


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trainers = f"tcp://127.0.0.1:{port}"
        code, said = serve_and_fail("--engines", f"ipc://{tmp_path}/e.sock", "--trainers", trainers)
    assert code == 1
    assert f"cannot bind {trainers}: it is taken" in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--trainers", "tcp://0.0.0.0:5999"], "reachable from other machines"),
        (["--trainers", "tcp://*:5999"], "reachable from other machines"),
        (["--engines", "udp://1"], "an endpoint is"),
        (["--engines", "ipc://relative/path"], "absolute"),
        (["--engines", "ipc:///" + "x" * 200], "at most 100 bytes"),
        (["--budget", "lots"], "is not a size"),
        (["--budget", "12"], "budget is too small"),
        (["--budget", "999999999GiB"], "cannot map"),
    ],
)
def test_what_cannot_be_served_says_why(tmp_path: Path, options: list[str], says: str) -> None:
    names = {"--engines": f"ipc://{tmp_path}/e.sock", "--trainers": f"ipc://{tmp_path}/t.sock", "--state": "memory"}
    names |= dict(zip(options[::2], options[1::2], strict=True))
    code, said = serve_and_fail(*(word for pair in names.items() for word in pair))
    assert code == 1
    assert says in said.replace("\n", " ")
    assert "Traceback" not in said


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o750, 0o701])
def test_a_directory_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    code, said = serve_and_fail("--engines", f"ipc://{shared}/e.sock", "--trainers", f"ipc://{tmp_path}/t.sock")
    assert code == 1
    assert "others can enter" in said.replace("\n", " ")


def test_sockets_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with running_daemon(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "engines.sock").stat().st_mode & 0o077 == 0


def test_a_killed_daemons_socket_is_taken_over(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as first:
        first.kill()
        assert (tmp_path / "engines.sock").exists()
        with running_daemon(tmp_path) as second, RouteClient(second.trainers, timeout=5.0) as client:
            assert client.stats()["requests_open"] == 0


def test_tcp_for_trainers(tmp_path: Path) -> None:
    with running_daemon(tmp_path, trainers="tcp://127.0.0.1:*") as daemon:
        assert daemon.trainers.startswith("tcp://127.0.0.1:")
        with RouteClient(daemon.trainers, timeout=5.0) as client:
            assert client.stats()["pulls_served"] == 0


def test_ls_and_show_tell_the_story(tmp_path: Path, seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), SMALL, 3)
    hostile = "a\x1b[31m[bold]name"
    with running_daemon(tmp_path) as daemon, raw_engine(daemon.engines, SMALL, "inc") as engine:
        engine.send(
            *frames(SMALL, 0, [Seg("1", 0, rows, (1, 2, 3), opens="done"), Seg("2", 0, rows, (1, 2, 3), opens=hostile)])
        )
        engine.say(RequestFinished(1, "1", 4, "stop"))
        engine.await_ack(1)
        listed = json.loads(_cli("ls", "--json", "-a", daemon.trainers).stdout)
        assert [(r["request_id"], r["state"], r["rows"]) for r in listed["requests"]] == [
            ("done", "complete", 3),
            (hostile, "open", 3),
        ]
        assert (
            json.loads(_cli("ls", "--json", "--state", "open", "-a", daemon.trainers).stdout)["requests"][0][
                "request_id"
            ]
            == hostile
        )
        story = json.loads(_cli("show", "done", "--json", "-a", daemon.trainers).stdout)["lives"][0]
        assert story["state"] == "complete"
        assert story["num_tokens"] == 4
        assert story["missing"] == []
        assert story["advice"]
        text = _cli("show", hostile, "-a", daemon.trainers).stdout
        assert "\x1b[31m" not in text
        assert "[bold]name" in text
        assert "done" in _cli("ls", "-a", daemon.trainers).stdout
        missing = _cli("show", "nobody", "-a", daemon.trainers)
        assert missing.returncode == 1
        assert "never opened" in missing.stderr


def test_commands_without_a_collector_say_so(tmp_path: Path) -> None:
    done = _cli("ls", "-a", f"ipc://{tmp_path}/nobody.sock")
    assert done.returncode == 1
    assert "is `r3-collector serve` running?" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
