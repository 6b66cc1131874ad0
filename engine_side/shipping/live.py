"""Which lives a wiped collector would have to be told about again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class LiveLives:
    """Lives whose opening was shipped and whose finish is not acknowledged."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[str, int]] = {}
        self._ages: dict[str, int] = {}
        self._count = 0
        self._finished: deque[tuple[int, str]] = deque()

    def opened(self, life: str, name: str, seq: int) -> None:
        """Message `seq` opens `life` under the client's id `name`."""
        self._opened[life] = (name, seq)
        self._count += 1
        self._ages[life] = self._count

    def ages(self, lives: Sequence[str]) -> NDArray[np.int64]:
        """A number for each of `lives`, the smaller the older, the same for the same life; those that never opened are
        younger than all others."""
        young: dict[str, int] = {}
        return np.array([self._ages.get(x) or young.setdefault(x, self._count + 1 + len(young)) for x in lives])

    def finished(self, life: str, seq: int) -> None:
        """Message `seq` finishes `life`."""
        self._finished.append((seq, life))

    def acked(self, seq: int) -> None:
        """Everything up to `seq` is acknowledged."""
        while self._finished and self._finished[0][0] <= seq:
            life = self._finished.popleft()[1]
            self._opened.pop(life, None)
            self._ages.pop(life, None)

    def opened_before(self, seq: int) -> list[tuple[str, str]]:
        """(life, name) of live lives whose opening is no longer in a window that begins at `seq`."""
        return [(life, name) for life, (name, at) in self._opened.items() if at < seq]
