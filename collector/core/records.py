"""What the metadata log holds: records of what changed, and how they lie in a file. Pure.

A record is a frame of length, checksum and payload. Replaying all of them in order, over the arena they speak of, gives
the state that the last one left.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from protocol.errors import R3Error
from protocol.geometry import Geometry

FORMAT: Final = 1
"""Counts up when older files can no longer be read."""

MAX_RECORD: Final = 1 << 30

_FRAME: Final = struct.Struct("<4sII")
_FRAME_CHECK: Final = struct.Struct("<I")
_LEAD: Final = _FRAME.size + _FRAME_CHECK.size
_MAGIC: Final = b"r3rc"


class CorruptState(R3Error):
    """The log or the arena is not what was written. Nothing of it is served."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything in a record."""


class NewSession(_Part, frozen=True, array_like=True):
    """An incarnation that said Hello. number: its short name in records."""

    number: int
    incarnation: str
    engine_id: str
    geometry: Geometry


class Applied(_Part, frozen=True, array_like=True):
    """How far a session is. opening: lives that its next message opened already."""

    session: int
    seq: int
    alive: bool
    opening: tuple[str, ...] = ()


class Opened(_Part, frozen=True, array_like=True):
    """A life began. Times are the core's clock."""

    serial: int
    session: int
    slot: int
    req_id: str
    name: str
    at: float


class Changed(_Part, frozen=True, array_like=True):
    """What became of a life."""

    serial: int
    state: str
    num_tokens: int | None
    ended: bool
    reason: str
    settled_at: float


class Delta(_Part, frozen=True, array_like=True):
    """Everything that changed since the record before, to be applied in the order of its fields.

    closed: serials. pages: int32[m, 3] slot, index, page. columns: int32[k, 3] slot, end, last_forward, as of now.
    released: names of what was closed. serial: the highest given so far.
    """

    sessions: tuple[NewSession, ...] = ()
    forgotten: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    opened: tuple[Opened, ...] = ()
    pages: bytes = b""
    columns: bytes = b""
    changed: tuple[Changed, ...] = ()
    applied: tuple[Applied, ...] = ()
    released: tuple[str, ...] = ()
    serial: int = 0


class Head(_Part, frozen=True, array_like=True):
    """First record of a file. now, wall: the core's clock and the calendar's, at the same moment. boot: of the machine.
    fsync: whether each record was on the disk before it was acknowledged."""

    format: int
    state_id: str
    page_bytes: int
    pages: int
    now: float
    wall: float
    boot: str
    fsync: bool


@dataclass(slots=True, frozen=True)
class Record:
    """A delta, encoded. What was applied under `number` is safe once the payload is."""

    number: int
    payload: bytes


_encoder = msgspec.msgpack.Encoder()
_delta = msgspec.msgpack.Decoder(Delta)
_head = msgspec.msgpack.Decoder(Head)


def encode(part: Delta | Head) -> bytes:
    """The payload of a record."""
    return _encoder.encode(part)


def framed(payload: bytes) -> bytes:
    """A payload as it lies in a file."""
    lead = _FRAME.pack(_MAGIC, len(payload), zlib.crc32(payload))
    return lead + _FRAME_CHECK.pack(zlib.crc32(lead)) + payload


def read(data: memoryview, after_power_loss: bool = False) -> Iterator[memoryview]:
    """Payloads of a file. A last record whose writing was cut off ends it: it was never acknowledged. Raises
    CorruptState for anything else. after_power_loss: the last one may also be there in its length only."""
    at = 0
    while len(data) - at >= _LEAD:
        lead = data[at : at + _FRAME.size]
        if _FRAME_CHECK.unpack_from(data, at + _FRAME.size)[0] != zlib.crc32(lead):
            if after_power_loss and not any(data[at:]):
                return
            raise CorruptState(f"no record begins at byte {at} of the log")
        magic, size, checksum = _FRAME.unpack(lead)
        if magic != _MAGIC or size > MAX_RECORD:
            raise CorruptState(f"the record at byte {at} of the log is of another kind")
        at += _LEAD
        body = data[at : at + size]
        if len(body) < size:
            return
        if zlib.crc32(body) != checksum:
            if after_power_loss and at + size == len(data):
                return
            raise CorruptState(f"the record at byte {at} of the log does not match its checksum")
        yield body
        at += size


def decode_delta(payload: memoryview) -> Delta:
    """Raises CorruptState."""
    found: Delta = _decoded(_delta, payload)
    return found


def decode_head(payload: memoryview) -> Head:
    """Raises CorruptState."""
    head: Head = _decoded(_head, payload)
    if head.format != FORMAT:
        raise CorruptState(f"the log has format {head.format}, this version reads {FORMAT}")
    return head


def _decoded(decoder: Any, payload: memoryview) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptState(f"a record of the log does not decode: {error}") from None
