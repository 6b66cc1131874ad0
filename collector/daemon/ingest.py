"""Frames from the engines' socket to events of the core, checked before the core sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from collector.core.events import Event, FromEngine, FromTrainer, PatchArrived, PatchRefused
from protocol import codec
from protocol.codec import Buffer
from protocol.errors import ProtocolError
from protocol.geometry import Geometry
from protocol.messages import HelloFirst, Problem, Refused, RoutedExpertsPatch
from protocol.patch import loss_of, open_patch


class Ingest:
    """Decodes. `malformed` counts what was not a message, by reason."""

    def __init__(self, geometry_of: Callable[[bytes], Geometry | None]) -> None:
        self._geometry_of = geometry_of
        self.malformed: Counter[str] = Counter()

    def from_engine(self, peer: bytes, frames: Sequence[Buffer]) -> Event | Refused | HelloFirst:
        """The event of a message, or the answer to one that is none."""
        try:
            message = codec.decode_from_engine(frames)
        except ProtocolError as error:
            self.malformed[error.reason] += 1
            return Refused(error.reason, str(error))
        if not isinstance(message, RoutedExpertsPatch):
            return FromEngine(peer, message)
        geometry = self._geometry_of(peer)
        if geometry is None:
            return HelloFirst()
        try:
            return PatchArrived(peer, message.seq, open_patch(message, frames[1], frames[2], geometry))
        except ProtocolError as error:
            self.malformed[error.reason] += 1
            return self._refused(peer, message, error)

    def from_trainer(self, peer: bytes, frames: Sequence[Buffer]) -> FromTrainer | Problem:
        """The event of a message, or the answer to one that is none (nonce 0: its own could not be read)."""
        try:
            return FromTrainer(peer, codec.decode_from_trainer(frames))
        except ProtocolError as error:
            self.malformed[error.reason] += 1
            return Problem(0, error.reason, str(error))

    def _refused(self, peer: bytes, message: RoutedExpertsPatch, error: ProtocolError) -> PatchRefused:
        try:
            loss = loss_of(message)
        except ProtocolError:
            loss = None
        return PatchRefused(peer, message.seq, loss, error.reason, str(error))
