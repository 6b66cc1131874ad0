"""A daemon image carries no torch: everything but the engine side, replay and Ray imports and serves without it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.base_install import base_distributions, prelude
from tests.source_tree import ROOT, sources

COMMAND = "from collector.cli.main import main; main()"
NEEDS_MORE = ("collector/replay/", "collector/ray/")


def modules() -> list[str]:
    """Every module of protocol and collector that the base install has to carry."""
    return [each.module for each in sources("protocol", "collector") if not each.path.startswith(NEEDS_MORE)]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", prelude() + code, *arguments]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python(code, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short private folder: a socket's path has at most about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="r3-") as path:
        yield Path(path)


@pytest.mark.parametrize("name", ["torch", "ray", "transformers", "hypothesis"])
def test_the_blocked_python_has_nothing_but_the_base_install(name: str) -> None:
    done = run(f"import {name}")
    assert done.returncode == 1
    assert f"{name} is not part of the base install" in done.stderr


def test_the_base_install_is_what_pyproject_says() -> None:
    assert {"numpy", "pyzmq", "msgspec", "typer", "rich"} <= base_distributions()
    assert not {"torch", "ray", "transformers", "prometheus-client", "pytest"} & base_distributions()


def test_every_module_imports_without_torch() -> None:
    assert {"protocol", "collector", "collector.cli.main", "collector.client", "collector.daemon"} <= {*modules()}
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(len(sys.argv) - 1)"
    done = run(code, *modules())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(modules()))


def test_importing_starts_no_thread_and_opens_no_socket() -> None:
    code = (
        "import importlib, socket, sys, threading\n"
        "import zmq\n"
        "def refuse(*_, **__): raise AssertionError('importing opened a socket')\n"
        "zmq.Context.socket = refuse\n"
        "socket.socket.bind = socket.socket.connect = refuse\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print([each.name for each in threading.enumerate()])"
    )
    done = run(code, *modules())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['MainThread']"


def test_the_daemon_serves_without_torch(directory: Path) -> None:
    trainers = f"ipc://{directory}/t.sock"
    serve = python(
        COMMAND,
        "serve",
        "--engines",
        f"ipc://{directory}/e.sock",
        "--trainers",
        trainers,
        "--budget",
        "64MiB",
        "--state",
        f"{directory}/state",
    )
    with subprocess.Popen(
        serve, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as daemon:
        try:
            assert daemon.stdout is not None
            ready = daemon.stdout.readline()
            if trainers not in ready:
                daemon.kill()
                pytest.fail(f"not ready: {ready}{daemon.communicate()[0]}")
            listed = run(COMMAND, "ls", "--json", "--address", trainers)
            assert listed.returncode == 0, listed.stderr
            assert json.loads(listed.stdout)["requests"] == []
            daemon.send_signal(signal.SIGTERM)
            rest, _ = daemon.communicate(timeout=30)
            assert daemon.returncode == 0, rest
        finally:
            daemon.kill()
