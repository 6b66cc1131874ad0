"""Why a daemon does not start."""

from __future__ import annotations

from protocol.errors import R3Error


class StartError(R3Error):
    """The daemon cannot start; the message says what to change."""
