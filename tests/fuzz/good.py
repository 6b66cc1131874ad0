"""Good frames, in turn where they are numbered: what a mutation must start from to get past the first check."""

from __future__ import annotations

import random

import numpy as np

from protocol import codec
from protocol.messages import (
    Ack,
    Bye,
    CollectorToEngine,
    Describe,
    Flushed,
    Heartbeat,
    Hello,
    Kind,
    List,
    Pull,
    Release,
    RequestFinished,
    Stat,
    Welcome,
)
from tests.fuzz.mutations import Frames
from tests.harness.patches import SMALL, frames, random_seg, rows_lost

LIVES = 6


class Good:
    """An attacker's honest half. `seq` is the next number that the collector expects of it."""

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        self.seq = 0
        self.chance = random.Random(seed)
        self._rng = np.random.default_rng(seed)

    def hello(self) -> Frames:
        return [codec.encode(Hello(self.name, self.name, SMALL, self.seq))]

    def hear(self, message: CollectorToEngine) -> None:
        """What the collector says of the numbers."""
        if isinstance(message, Ack):
            self.seq = message.logged_seq + 1
        elif isinstance(message, Welcome):
            self.seq = message.next_seq

    def of_engine(self) -> Frames:
        """A message that an engine might send now."""
        chance, life = self.chance, str(self.chance.randrange(LIVES))
        kind = chance.random()
        if kind < 0.6:
            segs = [
                random_seg(
                    self._rng,
                    SMALL,
                    str(chance.randrange(LIVES)),
                    chance.randrange(12),
                    chance.randint(1, 5),
                    kind=Kind(chance.choice(list(Kind))),
                    opens=f"{self.name} {chance.randrange(LIVES)}" if chance.random() < 0.5 else None,
                    bad=(0,) if chance.random() < 0.1 else (),
                )
                for _ in range(chance.randint(1, 4))
            ]
            return frames(SMALL, self.seq, segs)
        if kind < 0.7:
            return [codec.encode(rows_lost(self.seq, [random_seg(self._rng, SMALL, life, chance.randrange(12), 3)]))]
        if kind < 0.8:
            reason = chance.choice(("stop", "length", "aborted", "failed"))
            return [codec.encode(RequestFinished(self.seq, life, chance.choice((None, 4, 9)), reason))]  # type: ignore[arg-type]
        if kind < 0.9:
            return [codec.encode(Flushed(self.seq, life, chance.randint(1, 12)))]
        return chance.choice((self.hello(), [codec.encode(Heartbeat(self.seq))], [codec.encode(Bye())]))

    def of_trainer(self) -> Frames:
        """A message that a trainer might send now."""
        chance = self.chance
        name = f"{self.name} {chance.randrange(LIVES)}"
        rows = chance.choice((None, (0, 3), (2, 9)))
        pull = Pull(
            chance.randrange(1 << 30),
            name,
            chance.choice((None, 4, 7)),
            None,
            chance.choice((0, 0, 50)),
            rows,
            chance.choice((None, (1,), (0, 1, 2, 3))),
            chance.choice(("all", "moe")),
            chance.choice(("int16", "uint8", "int32")),
            chance.random() < 0.5,
        )
        return [
            codec.encode(chance.choice((pull, pull, pull, Describe(1, name), List(2), Stat(3), Release(4, (name,)))))
        ]
