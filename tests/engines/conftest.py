"""One collector process for the module, one engine model and one witness model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness.daemon import RunningDaemon, running_daemon
from tests.harness.tiny import load_tiny

DEVICE = os.environ.get("R3_DEVICE", "cpu")
"""Where engine and witness run; `cuda` on a machine that has it."""


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path_factory.mktemp("r3"), budget="256MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def witness() -> Any:
    torch.set_num_threads(1)
    return load_tiny(torch.float32).to(DEVICE)


@pytest.fixture
def model(seed: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return load_tiny(torch.float32, attention="sdpa").to(DEVICE)
