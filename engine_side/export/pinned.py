"""Pinned host memory for steps on their way from the device, reused, within a byte budget."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.records import Columns, RecordLayout

PINNED_BYTES: Final = 256 << 20
"""Steps on their way to the host at once, at most: eight of the largest prefix chunks, or a thousand decode steps of
256 requests of a 61x8 model."""

_SMALLEST: Final = 64 << 10


class PinnedFull(Exception):
    """Every pinned buffer is on its way: the step is lost rather than waited for."""


class Pinned:
    """One buffer. memory: uint8 [size]. landed: recorded behind the copy into it; None without CUDA.

    An engine's decode steps are nearly all of one size, so the views of the last one are kept: making them takes 10 us.
    """

    __slots__ = ("_columns", "_count", "_part", "array", "landed", "memory", "on_its_way")

    def __init__(self, size: int, pin: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        self.array: NDArray[np.uint8] = self.memory.numpy()
        self.landed = torch.cuda.Event() if pin else None
        self.on_its_way = True
        """Until it is given back: whoever does that has seen the copy land."""
        self._count = -1
        self._part: Tensor = self.memory
        self._columns: Columns | None = None

    def views(self, layout: RecordLayout, count: int) -> tuple[Tensor, Columns]:
        """`count` records in this buffer: uint8 [count, stride], and their columns."""
        if self._count != count or self._columns is None:
            self._part = self.memory[: count * layout.stride].view(count, layout.stride)
            self._columns = layout.split(self.array, count)
            self._count = count
        return self._part, self._columns


class PinnedPool:
    """Buffers in powers of two. `take` is the engine thread's, `give` the shipper's; neither waits for the other. All
    records in it have one layout."""

    def __init__(self, budget: int = PINNED_BYTES, pin: bool = True) -> None:
        self.budget = budget
        self.held_bytes = 0
        """Bytes allocated, whether free or on their way."""
        self._pin = pin
        self._free: dict[int, list[Pinned]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Pinned:
        """At least `nbytes`, of its own until it is given back. Raises PinnedFull when the budget is on its way."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if free := self._free.get(size):
                buffer = free.pop()
                buffer.on_its_way = True
                return buffer
            if self.held_bytes + size > self.budget:
                self._shrink()
            if self.held_bytes + size > self.budget:
                raise PinnedFull(
                    f"{self.held_bytes} bytes of steps are on their way to the host, {size} more asked for"
                )
            self.held_bytes += size
        return Pinned(size, self._pin)

    def give(self, buffer: Pinned) -> None:
        """Take a buffer back that nothing reads or writes any more."""
        with self._lock:
            buffer.on_its_way = False
            self._free.setdefault(len(buffer.array), []).append(buffer)

    def _shrink(self) -> None:
        """Let go of what is free: it has the wrong sizes."""
        self.held_bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()
