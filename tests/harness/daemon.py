"""A real collector daemon in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVE = [sys.executable, "-m", "collector.cli", "serve"]


@dataclass(frozen=True)
class RunningDaemon:
    """Endpoints and process of a daemon that said it is ready."""

    engines: str
    trainers: str
    process: subprocess.Popen[str]

    def rss_bytes(self) -> int:
        """Resident memory now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the daemon is gone")

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(20)


def spawn_daemon(
    folder: Path,
    *options: str,
    budget: str = "64MiB",
    trainers: str = "",
    state: str = "",
    failpoint: str = "",
) -> subprocess.Popen[str]:
    """Start `serve` on ipc paths in `folder`, its state there too unless `state` says otherwise. failpoint: `name:n`,
    where it dies at the n-th time."""
    engines, asked = f"ipc://{folder}/engines.sock", trainers or f"ipc://{folder}/trainers.sock"
    where = ["--engines", engines, "--trainers", asked, "--state", state or f"{folder}/state"]
    command = [*SERVE, *where, "--budget", budget, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"R3_FAILPOINT": failpoint})


@contextmanager
def running_daemon(folder: Path, *options: str, **more: str) -> Iterator[RunningDaemon]:
    """`spawn_daemon`, and wait for its ready line; at the end SIGTERM must drain it to exit code 0, unless the test
    killed it."""
    process = spawn_daemon(folder, *options, **more)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert "ready" in ready, ready
        found = dict(word.split("=", 1) for word in ready.split()[2:])
        yield RunningDaemon(found["engines"], found["trainers"], process)
    finally:
        killed = process.poll() is not None
        if not killed:
            process.send_signal(signal.SIGTERM)
        code = process.wait(20)
        process.stdout.close()
    assert killed or code == 0


def serve_and_fail(*options: str) -> tuple[int, str]:
    """Run `serve` where it must refuse: exit code and what it said on stderr."""
    done = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stderr
