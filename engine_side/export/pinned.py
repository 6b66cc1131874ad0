"""Pinned host memory for steps on their way from the device, reused, within a byte budget."""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

PINNED_BYTES: Final = 256 << 20
"""Steps on their way to the host at once, at most: eight of the largest prefix chunks, or a thousand decode steps of
256 requests of a 61x8 model."""

_SMALLEST: Final = 64 << 10


class PinnedFull(Exception):
    """Every pinned buffer is on its way: the step is lost rather than waited for."""


class PinnedPool:
    """Buffers in powers of two. `take` is the engine thread's, `give` the shipper's; neither waits for the other."""

    def __init__(self, budget: int = PINNED_BYTES, pin: bool = True) -> None:
        self.budget = budget
        self.held_bytes = 0
        """Bytes allocated, whether free or on their way."""
        self._pin = pin
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """uint8 [>= nbytes] of its own until it is given back. Raises PinnedFull when the budget is on its way."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if free := self._free.get(size):
                return free.pop()
            if self.held_bytes + size > self.budget:
                self._shrink()
            if self.held_bytes + size > self.budget:
                raise PinnedFull(
                    f"{self.held_bytes} bytes of steps are on their way to the host, {size} more asked for"
                )
            self.held_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back that nothing reads or writes any more."""
        with self._lock:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def _shrink(self) -> None:
        """Let go of what is free: it has the wrong sizes."""
        self.held_bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()
