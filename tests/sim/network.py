"""A connection as TCP under ZeroMQ behaves: in order, delayed, cut without a word to either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from protocol import codec
from protocol.messages import RoutedExpertsPatch
from tests.sim.loop import Loop
from tests.sim.options import Chaos

Frames = list[bytes]

_HIGH_WATER = 16


class Link:
    """One connection of an emitter or a trainer to the collector. up, down: called with frames that arrive. repeats:
    whether a message may arrive twice."""

    def __init__(
        self,
        loop: Loop,
        chaos: Chaos,
        peer: bytes,
        up: Callable[[bytes, Frames], None],
        down: Callable[[Frames], None],
        repeats: bool,
    ) -> None:
        self.peer = peer
        self._repeats = repeats
        self.alive = True
        self._loop = loop
        self._chaos = chaos
        self._up = up
        self._down = down
        self._under_way = 0
        self._held_until = 0.0
        self._last = {True: 0.0, False: 0.0}

    def send_up(self, frames: Sequence[bytes]) -> bool:
        """Towards the collector. False when the pipe is full."""
        if not self.alive or self._under_way >= _HIGH_WATER or self._chaos.strikes("backpressure"):
            return False
        sent = _corrupted(self._chaos, [bytes(frame) for frame in frames])
        self._under_way += 1
        self._deliver(True, lambda: self._arrive(sent))
        if self._repeats and self._chaos.strikes("duplicate"):
            self._under_way += 1
            self._deliver(True, lambda: self._arrive(sent))
        return True

    def send_down(self, frames: Frames) -> None:
        """From the collector."""
        self._deliver(False, lambda: self._down(frames))

    def hold(self, seconds: float) -> None:
        """A partition: nothing arrives for so long, then all of it."""
        self._held_until = max(self._held_until, self._loop.now + seconds)

    def cut(self) -> None:
        """Everything under way is gone."""
        self.alive = False

    def _arrive(self, frames: Frames) -> None:
        self._under_way -= 1
        self._up(self.peer, frames)

    def _deliver(self, up: bool, action: Callable[[], None]) -> None:
        rng = self._chaos.rng
        moment = self._loop.now + rng.uniform(0.001, 0.02)
        if self._chaos.strikes("delay"):
            moment += rng.uniform(0.1, 0.8)
        if not (up and self._chaos.strikes("reorder")):
            moment = self._last[up] = max(moment, self._last[up], self._held_until)

        def arrive() -> None:
            if self.alive:
                action()

        self._loop.at(moment, arrive)


def _corrupted(chaos: Chaos, frames: Frames) -> Frames:
    """A patch as a broken emitter would send it: refused by its rows, or not even readable."""
    if len(frames) != 3:
        return frames
    if chaos.strikes("refused_rows"):
        rows = frames[1]
        broken = rows[:-1] if chaos.rng.random() < 0.5 else b"\xfe\xfe" + rows[2:]
        return [frames[0], broken, frames[2]]
    if chaos.strikes("refused_columns"):
        header = codec.decode_from_engine(frames)
        assert isinstance(header, RoutedExpertsPatch)
        values = {name: getattr(header, name) for name in header.__struct_fields__}
        offsets = np.frombuffer(header.offsets, "<i4")
        wrong = {"kinds": b"\x09" * len(header.kinds), "req_ids": b"\xc1", "offsets": offsets[::-1].tobytes()}
        name = chaos.rng.choice(sorted(wrong))
        return [codec.encode(RoutedExpertsPatch(**(values | {name: wrong[name]}))), *frames[1:]]
    return frames
