"""Mutated frames through the real codec, core and gather, in this process: nothing raises, no invariant breaks, and
what an honest engine ships beside them comes out as it went in."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from collector.core.events import Effect, Event, FromTrainer, ServeRoutes
from protocol.messages import Release
from tests.core.driver import Bench, Emitter, check_invariants, held
from tests.fuzz.good import Good
from tests.fuzz.mutations import mutated
from tests.harness.patches import SMALL, Seg, random_seg

_LOOK_EVERY = 500
_MUTATED = 0.7


class _Quiet(Bench):
    """Keeps no records, checks now and then, and gathers what it would serve."""

    def handle(self, event: Event) -> list[Effect]:
        effects = super().handle(event)
        for effect in effects:
            if isinstance(effect, ServeRoutes):
                self.core.gather(effect, self.now)
        return effects

    def check(self) -> None:
        """Too many events for that."""

    def save(self) -> None:
        self.core.take_record()


def run_inside(seed: int, count: int) -> Counter[str]:
    """Feed `count` messages; what they were taken for. Raises what a message made the core raise."""
    chance = random.Random(seed)
    bench = _Quiet(pages=4_000, ttl_s=50.0)
    honest, rng = Emitter(bench, "honest"), np.random.default_rng(seed)
    honest.hello()
    shipped: list[Seg] = []
    attacker = Good(seed, "attacker")
    seen: Counter[str] = Counter()
    for number in range(count):
        if number % _LOOK_EVERY == 0:
            shipped.append(
                random_seg(rng, SMALL, "1", 2 * (len(shipped) % 500), 2, opens="honest" if not shipped else None)
            )
            honest.patch(shipped[-1])
            bench.handle(FromTrainer(b"t", Release(0, tuple(f"attacker {i}" for i in range(6)))))
            bench.tick(0.1)
            check_invariants(bench.core)
        session = bench.core.streams.sessions.get("attacker")
        attacker.seq = session.next_seq if session is not None else 0
        try:
            seen[_one(bench, attacker, chance)] += 1
        except BaseException as error:
            error.add_note(f"message {number} of run_inside({seed}, …)")
            raise
    life = bench.core.lives.named("honest")[0]
    last = shipped[-(len(shipped) % 500 or 500) :]
    rows = held(bench.core, life)
    for seg in last:
        for at in range(len(seg.rows)):
            assert rows[seg.start + at][0] == tuple(seg.rows[at].reshape(-1).tolist())
    return seen


def _one(bench: Bench, attacker: Good, chance: random.Random) -> str:
    engine = chance.random() < 0.7
    frames = attacker.of_engine() if engine else attacker.of_trainer()
    if chance.random() < _MUTATED:
        frames = mutated(chance, frames, attacker.of_engine())
    before = bench.ingest.malformed.total()
    if engine:
        if bench.core.geometry_of(b"attacker") is None:
            bench.from_engine(b"attacker", attacker.hello())
        bench.from_engine(b"attacker", frames)
    else:
        found = bench.ingest.from_trainer(b"attacker", frames)
        if isinstance(found, FromTrainer):
            bench.handle(found)
    return "malformed" if bench.ingest.malformed.total() != before else "taken"
