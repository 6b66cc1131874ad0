"""From good frames to frames that are almost good."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

Frames = list[bytes]

_EDGES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0xC0, 0xC1, 0xCC, 0xCF, 0xD3, 0xDC, 0xDD, 0xDE, 0xDF)
"""Bytes that mean much in msgpack: nil, unused, wide integers, long arrays and maps."""
_NUMBERS: Final = (-(2**31), -1, 0, 1, 2**31 - 1, 2**22, 65_536)


def _bit(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + bytes([frame[at] ^ (1 << chance.randrange(8))]) + frame[at + 1 :]


def _edge(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + bytes([chance.choice(_EDGES)]) + frame[at + 1 :]


def _number(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + chance.choice(_NUMBERS).to_bytes(4, "little", signed=True) + frame[at + 4 :]


def _cut(chance: random.Random, frame: bytes) -> bytes:
    return frame[: chance.randrange(len(frame))]


def _insert(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + chance.randbytes(chance.randint(1, 9)) + frame[at:]


def _remove(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[:at] + frame[at + chance.randint(1, 9) :]


def _repeat(chance: random.Random, frame: bytes) -> bytes:
    at = chance.randrange(len(frame))
    return frame[: at + 9] + frame[at:]


_OF_A_FRAME: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    *(_bit, _edge, _number, _cut, _insert, _remove, _repeat),
)


def mutated(chance: random.Random, frames: Frames, others: Frames) -> Frames:
    """One to four changes: within a frame, or of which frames there are. others: frames of another message."""
    found = list(frames)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(found))
        what = chance.random()
        if what < 0.85:
            if found[at]:
                found[at] = chance.choice(_OF_A_FRAME)(chance, found[at])
        elif what < 0.90:
            found.insert(at, chance.choice(others))
        elif what < 0.95 and len(found) > 1:
            del found[at]
        else:
            found[at] = chance.choice(others)
    return found
