"""One file of the metadata log, appended to, and its successor, which appears whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from collector.core import records
from collector.daemon.failpoints import Failpoint

_NAME = re.compile(r"log-(\d{10})")


class LogFile:
    """size: bytes that are whole records. records: how many were appended since it began."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        self.records = 0

    @classmethod
    def create(cls, folder: Path, number: int, payloads: Sequence[bytes], fsync: bool, failpoint: Failpoint) -> LogFile:
        """File `number`, beginning with these records; the others go. Raises OSError, and the others stay."""
        path, draft = folder / f"log-{number:010}", folder / "log.draft"
        data = b"".join(map(records.framed, payloads))
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, data)
            if fsync:
                os.fsync(fd)
            failpoint.reached("drafted")
            draft.rename(path)
            if fsync:
                _sync_folder(folder)
        except BaseException:
            os.close(fd)
            raise
        failpoint.reached("renamed")
        for other in _files(folder):
            if other != path:
                other.unlink(missing_ok=True)
        return cls(fd, len(data))

    def append(self, frame: bytes) -> None:
        """Add a record, or raise OSError and leave the file as it was."""
        try:
            _write(self._fd, frame)
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(frame)
        self.records += 1

    def sync(self) -> None:
        """Wait until the disk has it."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)


def latest(folder: Path) -> tuple[int, bytes] | None:
    """(number, contents) of the newest file, None when there is none."""
    found = _files(folder)
    if not found:
        return None
    match = _NAME.fullmatch(found[-1].name)
    assert match is not None
    return int(match[1]), found[-1].read_bytes()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
