"""What outlives a simulated collector process: its row memory and the bytes of its log."""

from __future__ import annotations

import random

import numpy as np

from collector.core import records
from collector.core.collector import Collector
from collector.core.config import CoreConfig
from collector.core.records import Record
from collector.core.recovery import Recovery


class Disk:
    """One state. `full_until`: clock time before which nothing can be written."""

    def __init__(self, state_id: str, size: int) -> None:
        self.state_id = state_id
        # Whatever was in the memory must never show.
        self.memory = np.full(size, 0x11, np.uint8)
        self.full_until = float("-inf")
        self._log = bytearray()

    def append(self, record: Record) -> None:
        """Write a record."""
        self._log += records.framed(record.payload)

    def tear(self, record: Record, rng: random.Random) -> None:
        """Begin to write a record and die."""
        frame = records.framed(record.payload)
        self._log += frame[: rng.randrange(len(frame))]

    def replace(self, payload: bytes) -> None:
        """A new log that begins with a checkpoint, in place of the old one."""
        self._log = bytearray(records.framed(payload))

    def recovered(self, config: CoreConfig, page_bytes: int, now: float) -> Collector:
        """What a new process makes of it."""
        recovery = Recovery()
        for payload in records.read(memoryview(bytes(self._log))):
            recovery.add(records.decode_delta(payload))
        core = recovery.collector(self.memory, self.state_id, now, 0.0, config, page_bytes)
        # As the daemon does: behind a torn tail nothing may be appended.
        self.replace(core.checkpoint())
        return core


def half_written(before: np.ndarray, after: np.ndarray, rng: random.Random) -> np.ndarray:
    """Memory of a process that died while it wrote: each word may or may not have got there."""
    words = np.random.default_rng(rng.getrandbits(32)).random(len(before) // 8) < 0.5
    mixed: np.ndarray = np.where(np.repeat(words, 8), after, before)
    return mixed
