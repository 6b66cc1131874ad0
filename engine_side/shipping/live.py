"""Which lives a wiped collector would have to be told about again. Pure."""

from __future__ import annotations

from collections import deque


class LiveLives:
    """Lives whose opening was shipped and whose finish is not acknowledged."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[str, int]] = {}
        self._finished: deque[tuple[int, str]] = deque()

    def opened(self, life: str, name: str, seq: int) -> None:
        """Message `seq` opens `life` under the client's id `name`."""
        self._opened[life] = (name, seq)

    def finished(self, life: str, seq: int) -> None:
        """Message `seq` finishes `life`."""
        self._finished.append((seq, life))

    def acked(self, seq: int) -> None:
        """Everything up to `seq` is acknowledged."""
        while self._finished and self._finished[0][0] <= seq:
            self._opened.pop(self._finished.popleft()[1], None)

    def opened_before(self, seq: int) -> list[tuple[str, str]]:
        """(life, name) of live lives whose opening is no longer in a window that begins at `seq`."""
        return [(life, name) for life, (name, at) in self._opened.items() if at < seq]
