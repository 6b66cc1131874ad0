"""Kills: when, how often, and what was under way."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collector.client import RouteClient
from collector.client.errors import CollectorUnreachable
from tests.chaos.trainer import Trainer
from tests.harness.daemon import RunningDaemon, running_daemon

ENGINES = 4
BUDGET = "256MiB"
_READY_S = 30.0


@dataclass
class History:
    """What happened. kills: patches that the killed daemon had applied, each time."""

    kills: list[int] = field(default_factory=list)
    requests: int = 0
    served: int = 0
    unanswered: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    engines: list[dict[str, Any]] = field(default_factory=list)


class _Engine:
    """An engine process, and a thread that reads what it says."""

    def __init__(self, collector: str, name: str, seed: int, trainer: Trainer) -> None:
        command = [sys.executable, "-m", "tests.chaos.engine", collector, name, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._trainer = trainer
        self.last: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._read, name=name)
        self._thread.start()

    def stop_asking(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def join(self) -> dict[str, Any]:
        self._thread.join()
        assert self._process.wait(30) == 0
        return self.last

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                if "done" in said:
                    self._trainer.todo.put(said["done"])
                else:
                    self.last = said


def play(folder: Path, seed: int, kills: int) -> History:
    """Start engines, kill the collector `kills` times under their traffic, then let everybody finish."""
    chance, history = random.Random(seed), History()
    trainer = Trainer(f"ipc://{folder}/trainers.sock", seed)
    with ExitStack() as engines:
        running: list[_Engine] = []
        for number in range(ENGINES):
            engine = _Engine(f"ipc://{folder}/engines.sock", f"engine-{number}", seed, trainer)
            engines.callback(engine.kill)
            running.append(engine)
        for _ in range(kills):
            with running_daemon(
                folder, "--checkpoint-records", str(chance.choice((5, 50, 5_000))), budget=BUDGET
            ) as daemon:
                history.kills.append(_busy(daemon))
                time.sleep(chance.random() * 0.25)
                daemon.kill()
        with running_daemon(folder, budget=BUDGET) as daemon:
            _busy(daemon)
            for engine in running:
                engine.stop_asking()
            history.engines = [engine.join() for engine in running]
            trainer.finish()
    history.requests = sum(engine["requests"] for engine in history.engines)
    history.served, history.unanswered, history.wrong = trainer.served, trainer.unanswered, trainer.wrong
    return history


def _busy(daemon: RunningDaemon) -> int:
    """Wait until it has applied patches; how many."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with RouteClient(daemon.trainers, timeout=0.5) as client:
            try:
                if (patches := int(client.stats()["patches"])) > 0:
                    return patches
            except CollectorUnreachable:
                pass
    raise AssertionError(f"no traffic within {_READY_S:g} s")
