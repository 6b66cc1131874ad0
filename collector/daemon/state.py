"""Where a daemon keeps what it acknowledged: row memory, and a log of what the rows mean.

In a directory, both survive `kill -9` of the daemon: the kernel keeps the pages of a mapped file, and what was written
to another. With fsync they survive the machine, too. In memory, they survive nothing.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from collector.core import records
from collector.core.collector import Collector
from collector.core.config import CoreConfig
from collector.core.records import CorruptState, Head, Record
from collector.core.recovery import Recovery
from collector.daemon.config import DaemonConfig
from collector.daemon.endpoints import private_directory
from collector.daemon.errors import StartError
from collector.daemon.logfile import LogFile, latest

log = logging.getLogger("r3.collector")

CHECKPOINT_BYTES = 64 << 20
"""A log that grew by this is replaced by one record of how things are."""


class Keeper(Protocol):
    """Row memory and the safety of records."""

    def collector(self, now: float) -> Collector:
        """The collector that was there before, or a new one."""

    def save(self, record: Record) -> bool:
        """Make a record safe. False when it cannot be now; it is tried again with the next one."""

    def retry(self) -> bool:
        """Try again what could not be saved. True when nothing is left."""

    def relax(self) -> None:
        """Nothing is held, and was not for a while: row memory that was touched goes back to the machine."""

    def close(self, core: Collector) -> None:
        """The daemon ends in good order."""

    def release(self) -> None:
        """Give files and lock back. Harmless twice."""


class InMemory:
    """Survives nothing."""

    def __init__(self, budget: int, page_bytes: int, config: CoreConfig) -> None:
        self._config, self._page_bytes = config, page_bytes
        try:
            memory = mmap.mmap(-1, budget, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StartError(f"cannot map {budget} bytes of row memory: {error}") from None
        self._memory, self._buffer = memory, _huge(memory)

    def collector(self, now: float) -> Collector:
        return Collector(self._buffer, uuid.uuid4().hex, self._config, self._page_bytes)

    def save(self, record: Record) -> bool:
        return True

    def retry(self) -> bool:
        return True

    def relax(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self, core: Collector) -> None:
        """Nothing is kept."""

    def release(self) -> None:
        """The memory goes with its last reader."""


class OnDisk:
    """`folder` holds `arena`, `log-N` and `lock`. Raises StartError when another daemon uses it."""

    def __init__(self, folder: Path, config: DaemonConfig) -> None:
        self._folder, self._fsync, self._every = folder, config.fsync, config.checkpoint_records
        self._config, self._page_bytes = config.core, config.page_bytes
        self._failpoint = config.failpoint
        self._pages = config.budget // config.page_bytes
        self._number = 0
        self._unsaved = b""
        self._complained = False
        self._core: Collector
        self._files = ExitStack()
        private_directory(folder)
        try:
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot use {folder} for state: {error.strerror}") from None
        self._files.callback(os.close, self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise StartError(f"another collector keeps its state in {folder}: stop it, or choose another") from None

    # ------------------------------------------------------------------ start

    def collector(self, now: float) -> Collector:
        """Raises StartError for what cannot be trusted: nothing of it is served."""
        began = time.monotonic()
        try:
            core = self._recovered(now)
        except OSError as error:
            raise StartError(f"cannot read the state in {self._folder}: {error}") from None
        except CorruptState as error:
            way_out = f"move {self._folder} away to start empty: what it holds is then lost, and said to be"
            raise StartError(f"the state in {self._folder} is damaged: {error}; {way_out}") from None
        if len(core.lives):
            log.warning("found %d requests again in %.2f s", len(core.lives), time.monotonic() - began)
        self._core = core
        self._begin(core, now)
        self._files.callback(lambda: self._log.close())
        return core

    def _recovered(self, now: float) -> Collector:
        found = latest(self._folder)
        if found is None:
            return Collector(self._map(keep=False), uuid.uuid4().hex, self._config, self._page_bytes)
        self._number, data = found
        first = next(records.read(memoryview(data)), None)
        if first is None:
            raise CorruptState("the log has no beginning")
        head = records.decode_head(first)
        rebooted = head.boot != _boot()
        _, *payloads = records.read(memoryview(data), after_power_loss=rebooted and head.fsync)
        recovery = Recovery()
        for payload in payloads:
            recovery.add(records.decode_delta(payload))
        if recovery.owns_pages:
            self._require(head)
        # The core's clock begins anew with the machine.
        shift = (head.wall - head.now) - (time.time() - now) if rebooted else 0.0
        buffer = self._map(keep=recovery.owns_pages)
        return recovery.collector(buffer, head.state_id, now, shift, self._config, self._page_bytes)

    def _require(self, head: Head) -> None:
        if head.boot != _boot() and not head.fsync:
            raise CorruptState("the machine was restarted, and it was not kept with --fsync")
        if head.page_bytes != self._page_bytes or head.pages > self._pages:
            old, new = head.pages * head.page_bytes, self._pages * self._page_bytes
            raise StartError(f"{self._folder} holds {old} bytes of row memory, --budget asks for {new}: ask for {old}")
        path = self._folder / "arena"
        size = path.stat().st_size if path.exists() else 0
        if size < head.pages * head.page_bytes:
            raise CorruptState(f"the arena has {size} bytes, the log speaks of {head.pages * head.page_bytes}")

    def _map(self, keep: bool) -> NDArray[np.uint8]:
        path, size = self._folder / "arena", self._pages * self._page_bytes
        if not keep:
            path.unlink(missing_ok=True)
        try:
            self._arena = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files.callback(os.close, self._arena)
            # In full and now: a file system that is full later must not kill the daemon at a write to its memory.
            os.posix_fallocate(self._arena, 0, size)
            self._memory = mmap.mmap(self._arena, size)
            return _huge(self._memory)
        except (OSError, ValueError, OverflowError) as error:
            if not keep:
                path.unlink(missing_ok=True)
            raise StartError(f"no room for {size} bytes of row memory in {self._folder}: {error}") from None

    # ------------------------------------------------------------------ records

    def save(self, record: Record) -> bool:
        self._unsaved = records.framed(record.payload)
        if not self.retry():
            return False
        self._failpoint.reached("recorded")
        if self._log.size > self._due_bytes or self._log.records > self._due_records:
            # Nothing is left to take now: what a checkpoint tells must not be told again.
            self._checkpoint()
        return True

    def retry(self) -> bool:
        frame = self._unsaved
        if not frame:
            return True
        self._failpoint.reached("applied")
        self._failpoint.reached("torn", lambda: self._log.append(frame[: len(frame) // 2]))
        try:
            if self._fsync:
                os.fdatasync(self._arena)
            self._log.append(frame)
            if self._fsync:
                self._log.sync()
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.error("cannot write the log in %s: %s; nothing is acknowledged until it can", self._folder, error)
            return False
        if self._complained:
            self._complained = False
            log.warning("the log in %s can be written again", self._folder)
        self._unsaved = b""
        return True

    def _checkpoint(self) -> None:
        old = self._log
        try:
            self._begin(self._core, time.monotonic())
        except StartError as error:
            log.error("%s; the old one goes on", error)
            self._due_bytes += CHECKPOINT_BYTES
            self._due_records += self._every
        else:
            old.close()

    def _begin(self, core: Collector, now: float) -> None:
        """A new file that says how things are, in place of the ones before."""
        head = Head(
            records.FORMAT, core.state_id, self._page_bytes, self._pages, now, time.time(), _boot(), self._fsync
        )
        number = self._number + 1
        try:
            payloads = [records.encode(head), core.checkpoint()]
            fresh = LogFile.create(self._folder, number, payloads, self._fsync, self._failpoint)
        except OSError as error:
            raise StartError(f"cannot write a log in {self._folder}: {error.strerror}") from None
        self._number, self._log = number, fresh
        self._due_bytes, self._due_records = fresh.size + CHECKPOINT_BYTES, self._every

    def relax(self) -> None:
        # The file keeps its room: it was promised.
        self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self, core: Collector) -> None:
        """Once nothing is held, the memory goes back to the machine; the log keeps what was released."""
        if not self._unsaved and not core.arena.pages_in_limbo and core.arena.free_pages == core.arena.pages:
            (self._folder / "arena").unlink(missing_ok=True)

    def release(self) -> None:
        self._files.close()


def keeper_for(config: DaemonConfig) -> Keeper:
    """Raises StartError."""
    if config.budget < config.page_bytes:
        raise StartError(f"the budget is too small: {config.budget} bytes, one page has {config.page_bytes}")
    if config.state is None:
        return InMemory(config.budget, config.page_bytes, config.core)
    return OnDisk(config.state, config)


def _huge(memory: mmap.mmap) -> NDArray[np.uint8]:
    # A step's rows go to as many places as it has requests: small pages would miss the TLB at each.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("no huge pages for row memory here")
    return np.frombuffer(memory, np.uint8)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
