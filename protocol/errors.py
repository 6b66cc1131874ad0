"""Typed errors shared by every side. Each names what was expected, what was found and the way out."""

from __future__ import annotations


class R3Error(Exception):
    """Base of every error this project raises on purpose."""


class GeometryError(R3Error):
    """A model's MoE geometry is impossible or beyond a limit."""


class ProtocolError(R3Error):
    """Bytes from a socket that are not a message of this protocol.

    `reason` is a short stable word (`version`, `frames`, `header`, `oversized`, `rows`, `columns`): peers
    are answered with it and metrics count by it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
