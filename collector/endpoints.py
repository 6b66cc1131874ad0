"""Where the collector lives by default: sockets in a directory that only its user can enter."""

from __future__ import annotations

import os
from pathlib import Path


def runtime_dir() -> Path:
    """$XDG_RUNTIME_DIR/r3-collector, or /tmp/r3-collector-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "r3-collector" if base else Path(f"/tmp/r3-collector-{os.getuid()}")


def engines_endpoint() -> str:
    """Default endpoint that engines ship to."""
    return f"ipc://{runtime_dir()}/engines.sock"


def trainers_endpoint() -> str:
    """Default endpoint that trainers and the CLI ask."""
    return f"ipc://{runtime_dir()}/trainers.sock"
