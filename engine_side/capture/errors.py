"""Why routes of a model or an engine cannot be captured."""

from __future__ import annotations

from protocol.errors import R3Error


class CaptureError(R3Error):
    """A commit whose inputs contradict each other; the step is lost, the engine goes on."""


class EngineRunning(CaptureError):
    """Memory that a running engine uses cannot be let go: stop it first."""


class CaptureRefused(R3Error):
    """A model, engine version or configuration whose routes could be incomplete or wrong.

    keys: the rows of `engine_side.support.ROWS` that refuse; empty where the reason is none of them.
    """

    def __init__(self, message: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys
