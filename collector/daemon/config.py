"""What an operator may set, with defaults that work without a flag."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from collector.core.arena import PAGE_BYTES
from collector.core.config import CoreConfig
from collector.daemon.errors import StartError
from collector.daemon.failpoints import Failpoint
from collector.endpoints import engines_endpoint, trainers_endpoint

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Endpoints, row memory in bytes, and the core's own settings."""

    engines: str = field(default_factory=engines_endpoint)
    trainers: str = field(default_factory=trainers_endpoint)
    keys: Path | None = None
    """Folder of CURVE keys (`protocol.keys`): with it every peer proves who it is, and other machines may come in."""
    budget: int = 2 << 30
    page_bytes: int = PAGE_BYTES
    state: Path | None = None
    """Directory of what survives `kill -9`, None for nothing."""
    fsync: bool = False
    """Whether an acknowledgement also waits for the disk: then it survives a power loss."""
    checkpoint_records: int = 50_000
    """Records after which the log begins anew: with its 64 MiB, it bounds how long a start takes."""
    core: CoreConfig = field(default_factory=CoreConfig)
    failpoint: Failpoint = field(default_factory=Failpoint)


def default_state(engines: str, trainers: str, budget: int) -> Path:
    """A directory for the daemon of these endpoints: in /dev/shm, or in /var/tmp where that has no room for `budget`
    bytes. Where one of them is in use already, that one."""
    key = hashlib.blake2b(f"{engines} {trainers}".encode(), digest_size=6).hexdigest()
    places = [Path(base) / f"r3-collector-{os.getuid()}" / key for base in ("/dev/shm", "/var/tmp")]
    for place in places:
        if (place / "lock").exists():
            return place
    shared = places[0].parent.parent
    return places[0] if shared.is_dir() and shutil.disk_usage(shared).free > budget + (64 << 20) else places[1]


def parse_bytes(text: str) -> int:
    """Bytes of "2GiB", "512MB", "1048576". Raises StartError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?)B?\s*", text.upper())
    if not found or found[2] not in _UNITS:
        raise StartError(f"{text!r} is not a size: write it like 2GiB or 512MB")
    return int(float(found[1]) * _UNITS[found[2]])
