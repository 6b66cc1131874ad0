"""Decode steps of a DeepSeek-R1's size, 61 layers x top-8 int16, as frames and as what the core hears of them."""

from __future__ import annotations

import numpy as np

from collector.core.events import PatchArrived
from protocol import codec
from protocol.geometry import Geometry
from protocol.messages import Kind, RoutedExpertsPatch
from protocol.patch import open_patch
from tests.bench.timing import BLOCK

GEOMETRY = Geometry(61, tuple(range(61)), 8, 256)
PEER = b"engine"


class Steps:
    """Decode steps of the same requests, one position further each; every BLOCK of them behind an opening step.
    apart: how far apart they may stand, so that pages turn at different steps; 1 for all of them at 0."""

    def __init__(self, requests: int, rng: np.random.Generator, apart: int = 64) -> None:
        self.names = [f"request-{i}" for i in range(requests)]
        self._buffers = [rng.integers(0, 256, (requests, 61 * 8)).astype(np.int16).tobytes() for _ in range(4)]
        self._starts = rng.integers(0, apart, requests).astype("<i4")
        self._tokens = rng.integers(0, 1000, requests).astype("<i4").tobytes()

    def opening(self, block: int) -> list[bytes]:
        """The step that opens the requests of a block."""
        return self.at(block * (BLOCK + 1), block, 0)

    def frames(self, i: int) -> list[bytes]:
        """Decode step `i`, counted over all blocks."""
        block, step = divmod(i, BLOCK)
        return self.at(block * (BLOCK + 1) + step + 1, block, step + 1)

    def at(self, seq: int, block: int, step: int) -> list[bytes]:
        """Message `seq`: a block's step, 0 opens its requests."""
        n = len(self.names)
        header = RoutedExpertsPatch(
            seq=seq,
            step=seq,
            req_ids=codec.encode_ids([f"{block}.{i}" for i in range(n)]),
            starts=(self._starts + step).astype("<i4").tobytes(),
            offsets=np.arange(n + 1, dtype="<i4").tobytes(),
            kinds=bytes([Kind.FORWARD]) * n,
            weight_versions=bytes(4 * n),
            opens=() if step else tuple(enumerate(self.names)),
        )
        return [codec.encode(header), self._buffers[seq % len(self._buffers)], self._tokens]


def arrived(frames: list[bytes]) -> PatchArrived:
    """A step as the daemon hands it to the core."""
    header = codec.decode_from_engine(frames)
    assert isinstance(header, RoutedExpertsPatch)
    return PatchArrived(PEER, header.seq, open_patch(header, frames[1], frames[2], GEOMETRY))
