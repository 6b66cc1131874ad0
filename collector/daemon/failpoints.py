"""Places where a test may have the daemon killed: R3_FAILPOINT=name:n is `kill -9` at the n-th time it comes there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping


class Failpoint:
    """The one place of a daemon that kills it; with no name, none does."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._name, _, count = environ.get("R3_FAILPOINT", "").partition(":")
        self._left = int(count or 1)

    def reached(self, name: str, last_act: Callable[[], object] = lambda: None) -> None:
        """The daemon is at `name`. last_act: what it still does if it dies here."""
        if name != self._name:
            return
        self._left -= 1
        if not self._left:
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)
