"""Frames to messages and back.

Frame 0 is the version byte and one msgpack message. A `RoutedExpertsPatch` has two more frames (rows, token ids), a
`Routes` one more (the array), everything else none. Decoding is typed: msgspec rejects what the union does not
name, and nothing is decoded before its size is known to be within `limits`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol import limits
from protocol.errors import ProtocolError
from protocol.messages import (
    CollectorToEngine,
    CollectorToTrainer,
    EngineMessage,
    RoutedExpertsPatch,
    Routes,
    TrainerMessage,
)

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything with the buffer protocol; a received zmq frame's `.buffer` included."""

Message: TypeAlias = EngineMessage | CollectorToEngine | TrainerMessage | CollectorToTrainer

_M = TypeVar("_M")
_VERSION_BYTE = bytes([limits.VERSION])
_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(EngineMessage)
_to_engine = msgspec.msgpack.Decoder(CollectorToEngine)
_from_trainer = msgspec.msgpack.Decoder(TrainerMessage)
_to_trainer = msgspec.msgpack.Decoder(CollectorToTrainer)
_ids = msgspec.msgpack.Decoder(list[str])


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _VERSION_BYTE + _encoder.encode(message)


def encode_ids(req_ids: Sequence[str]) -> bytes:
    """The id column: a msgpack array of strings."""
    return _encoder.encode(list(req_ids))


def decode_ids(column: Buffer) -> list[str]:
    """Inverse of `encode_ids`. Raises ProtocolError("columns")."""
    try:
        ids = _ids.decode(column)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("columns", f"the id column does not decode: {error}") from None
    if len(ids) > limits.MAX_SEGMENTS:
        raise ProtocolError("columns", f"{len(ids)} segments, at most {limits.MAX_SEGMENTS}")
    for name in ids:
        check_id(name)
    return ids


def check_id(name: str) -> str:
    """Return `name`, or raise ProtocolError("columns") when it is empty or longer than `MAX_ID_CHARS`."""
    if not 0 < len(name) <= limits.MAX_ID_CHARS:
        raise ProtocolError("columns", f"an id has 1 to {limits.MAX_ID_CHARS} characters, got {len(name)}")
    return name


def decode_from_engine(frames: Sequence[Buffer]) -> EngineMessage:
    """Header of a message from an engine; frames 1 and 2 of a patch are checked by `patch.open_patch`."""
    message: EngineMessage = _decode(_from_engine, frames)
    _expect_frames(message, frames, 3 if isinstance(message, RoutedExpertsPatch) else 1)
    return message


def decode_to_engine(frames: Sequence[Buffer]) -> CollectorToEngine:
    """A message from the collector to an engine."""
    message: CollectorToEngine = _decode(_to_engine, frames)
    _expect_frames(message, frames, 1)
    return message


def decode_from_trainer(frames: Sequence[Buffer]) -> TrainerMessage:
    """A message from a trainer."""
    message: TrainerMessage = _decode(_from_trainer, frames)
    _expect_frames(message, frames, 1)
    return message


def decode_to_trainer(frames: Sequence[Buffer]) -> CollectorToTrainer:
    """Header of an answer to a trainer; frame 1 of a `Routes` is its array."""
    message: CollectorToTrainer = _decode(_to_trainer, frames)
    _expect_frames(message, frames, 2 if isinstance(message, Routes) else 1)
    return message


def token_digest(token_ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Digest of token ids, as int32 little-endian: 16 bytes of BLAKE2b."""
    tokens = np.ascontiguousarray(token_ids, dtype="<i4")
    return hashlib.blake2b(tokens.data, digest_size=16).digest()


def _decode(decoder: msgspec.msgpack.Decoder[_M], frames: Sequence[Buffer]) -> _M:
    if not frames:
        raise ProtocolError("frames", "a message has at least one frame")
    header = memoryview(frames[0])
    if header.nbytes > limits.MAX_HEADER_BYTES:
        raise ProtocolError("oversized", f"header of {header.nbytes} bytes, at most {limits.MAX_HEADER_BYTES}")
    if header.nbytes == 0 or header[0] != limits.VERSION:
        found = header[0] if header.nbytes else "an empty frame"
        raise ProtocolError("version", f"expected protocol version {limits.VERSION}, found {found}: upgrade one side")
    try:
        return decoder.decode(header[1:])
    # RecursionError: hostile nesting is not a msgspec error. UnicodeDecodeError: neither is bad UTF-8.
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("header", f"header does not decode: {error}") from None


def _expect_frames(message: Message, frames: Sequence[Buffer], count: int) -> None:
    if len(frames) != count:
        raise ProtocolError("frames", f"{type(message).__name__} has {count} frames, found {len(frames)}")
