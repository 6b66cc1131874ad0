"""One collector process for the module, one engine model and one witness model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.tiny import load_tiny

DEVICE = os.environ.get("R3_DEVICE", "cpu")
"""Where engine and witness run; `cuda` on a machine that has it."""


@dataclass(frozen=True)
class Endpoints:
    engines: str
    trainers: str


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    folder: Path = tmp_path_factory.mktemp("r3")
    ends = Endpoints(f"ipc://{folder}/engines.sock", f"ipc://{folder}/trainers.sock")
    command = [sys.executable, "-m", "collector.cli", "serve", "--engines", ends.engines, "--trainers", ends.trainers]
    process = subprocess.Popen([*command, "--budget", "256MiB"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    yield ends
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


@pytest.fixture(scope="module")
def witness() -> Any:
    torch.set_num_threads(1)
    return load_tiny(torch.float32).to(DEVICE)


@pytest.fixture
def model(seed: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return load_tiny(torch.float32, attention="sdpa").to(DEVICE)
