"""Waiting for what another thread or process does: a condition and a deadline, never a guess at how long it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], what: str, timeout: float = 20.0, every: float = 0.005) -> _T:
    """The first true value of `condition`, asked every `every` seconds. Raises AssertionError after `timeout`."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}; last seen {value!r}")
        pause.wait(every)
    return value
