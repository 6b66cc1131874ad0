"""Places where a test may have the daemon killed: R3_FAILPOINT=name:n is `kill -9` at the n-th time it comes there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_name, _, _count = os.environ.get("R3_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def reached(name: str, last_act: Callable[[], object] = lambda: None) -> None:
    """The daemon is at `name`. last_act: what it still does if it dies here."""
    global _left
    if name != _name:
        return
    _left -= 1
    if not _left:
        last_act()
        os.kill(os.getpid(), signal.SIGKILL)
