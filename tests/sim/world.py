"""A whole world from one seed: engines, a collector, trainers, faults; then calm, and the reckoning."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from collector.core.life import State
from tests.sim.checker import Checker
from tests.sim.collector_node import CollectorNode
from tests.sim.emitter import Emitter
from tests.sim.facts import Facts, LifeFact, Violation
from tests.sim.loop import Loop
from tests.sim.network import Link
from tests.sim.options import FAULTS, Chaos, Options
from tests.sim.trainer import Trainer
from tests.sim.watch import LIVENESS_S

STORM_S = 9.0
CALM_S = 200.0
_PULSE_S = 0.25


@dataclass(slots=True, frozen=True)
class Outcome:
    """acted: counts of faults and rules. digest: of everything that was counted, to compare replays."""

    seed: int
    requests: int
    events: int
    faults: int
    acted: dict[str, int]
    digest: str


class World:
    """`run` raises Violation, with the seed, where a promise is broken."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(f"world {options.seed}")
        self.loop = Loop(1000.0)
        self.chaos = Chaos(options, self.rng)
        self.facts = Facts()
        self.node = CollectorNode(self.loop, self.chaos, self.facts)
        self.checker = Checker(self.facts, self.chaos)
        self.trainer = Trainer(self.loop, self.chaos, self.facts, self.node, self.checker, self._calm)
        self.emitters: list[Emitter] = []
        self._incarnations = 0
        self._names = 0
        for i in range(options.engines):
            self._spawn(f"engine{i}")
        self.loop.every(_PULSE_S, self._pulse)

    def run(self) -> Outcome:
        """Storm, then calm: everything settles."""
        self.loop.run_until(self.loop.now + STORM_S)
        self.chaos.on, self.node.calm_at = False, self.loop.now
        if not self.loop.run_until(self.loop.now + CALM_S, self._settled):
            raise Violation(f"no rest after {CALM_S:g} s of calm: {self._unsettled()}")
        self.loop.run_until(self.loop.now + LIVENESS_S + 2.0)
        self._reckon()
        # In the end nothing is kept: what nobody released has outlived its time, open or not.
        self.loop.run_until(self.loop.now + 2 * self.options.ttl_s + 1.0)
        if len(self.node.core.lives) or self.node.core.arena.free_pages != self.node.core.arena.pages:
            raise Violation(f"kept for good: {[(life.name, life.req_id) for life in self.node.core.lives]}")
        acted = dict(sorted(self.chaos.acted.items()))
        faults = sum(acted.get(name, 0) for name in FAULTS)
        told = f"{acted} {self.loop.events} {self.loop.now} {[job.outcome for job in self.trainer.jobs]}"
        digest = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
        return Outcome(self.options.seed, len(self.facts.lives), self.loop.events, faults, acted, digest)

    # ------------------------------------------------------------------ storm

    def _spawn(self, engine_id: str) -> None:
        self._incarnations += 1
        self.emitters.append(
            Emitter(
                self.loop,
                self.chaos,
                self.facts,
                engine_id,
                f"{engine_id}-{self._incarnations}",
                lambda down: self.node.connect(False, down),
                self._ended,
            )
        )

    def _ended(self, fact: LifeFact) -> None:
        fact.ended_at = self.loop.now
        self.trainer.fetch(fact)

    def _pulse(self) -> None:
        if not self.chaos.on:
            return
        for emitter in [e for e in self.emitters if e.alive and e.leaving is None]:
            link = emitter.link
            if self.chaos.strikes("cut", _PULSE_S):
                emitter.cut()
            elif self.chaos.strikes("engine_killed", _PULSE_S):
                self._kill(emitter)
            elif self.chaos.strikes("engine_left", _PULSE_S):
                self._leave(emitter)
            elif link is not None and self.chaos.strikes("partition", _PULSE_S):
                self._partition(link)
        if self.node.up and self.chaos.strikes("collector_wiped", _PULSE_S):
            live = {(e.incarnation, life) for e in self.emitters for life in e.stream.live._opened}
            for fact in self.facts.lives.values():
                fact.live_at_wipe = fact.key in live
            self.node.wipe(self.rng.uniform(0.1, 1.5))
        elif self.node.up and self.chaos.strikes("collector_killed", _PULSE_S):
            self.node.kill()
        if self.rng.random() < 0.35 and len(self.facts.lives) < 7:
            self._submit()

    def _kill(self, emitter: Emitter) -> None:
        emitter.kill()
        self._harm(emitter, "engine killed")
        if self.rng.random() < 0.5:
            emitter.cut()
        self.loop.after(self.rng.uniform(0.2, 2.0), lambda: self._spawn(emitter.engine_id))

    def _leave(self, emitter: Emitter) -> None:
        self._harm(emitter, "engine left")
        emitter.leave()
        self.loop.after(self.rng.uniform(0.2, 2.0), lambda: self._spawn(emitter.engine_id))

    def _partition(self, link: Link) -> None:
        link.hold(self.rng.choice([0.5, 2.0, LIVENESS_S + 2.0]))

    def _harm(self, emitter: Emitter, why: str) -> None:
        for fact in self.facts.lives.values():
            if fact.incarnation == emitter.incarnation:
                fact.harmed.add(why)

    def _submit(self) -> None:
        emitters = [e for e in self.emitters if e.alive and e.leaving is None]
        if not emitters:
            return
        again = None
        if self.options.reuse != "never" and self.rng.random() < 0.3:
            known = list(self.facts.lives.values())
            over = [fact for fact in known if all(map(_may_be_retried, self.facts.named[fact.name]))]
            running = [fact for fact in known if not fact.reason] if self.options.reuse == "any" else []
            again = self.rng.choice([*over, *over, *running]) if over or running else None
        self._names += 1
        name = again.name if again else f"request{self._names}"
        self.rng.choice(emitters).engine.submit(name, len(self.facts.named.get(name, ())))
        same = self.facts.named[name]
        if len(same) > 1:
            self.chaos.note("name_used_again")
            for one in same:
                one.harmed.add("name used again")

    # ------------------------------------------------------------------ calm

    def _calm(self) -> bool:
        return not self.chaos.on and all(e.idle for e in self.emitters if e.alive)

    def _settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        if not self.node.up:
            return "the collector is down"
        for emitter in self.emitters:
            if emitter.alive and not emitter.idle:
                stream = emitter.stream
                return (
                    f"{emitter.incarnation}: busy {emitter.engine.busy}, {len(stream.queue)} queued, {stream.stats()}"
                )
        waiting = [
            (job.fact.name, job.fact.key, job.tries, job.last, job.fact.by_length, job.fact.harmed)
            for job in self.trainer.jobs
            if not job.outcome
        ]
        return f"jobs without an answer: {waiting}" if not self.trainer.done else ""

    def _reckon(self) -> None:
        for emitter in self.emitters:
            if emitter.alive and emitter.unfreed:
                raise Violation(f"{emitter.incarnation}: {emitter.unfreed} ring slots never given back")
        for job in self.trainer.jobs:
            self._expect(job.fact, job.outcome)
        for life in self.node.core.lives:
            fact = self.facts.lives[life.session.incarnation, life.req_id]
            # Of a length that only a trainer knows, with no trainer left to say it, time is the only end.
            if life.state is State.OPEN and (not fact.by_length or not fact.harmed):
                raise Violation(f"{fact.name}/{fact.key} is still open: {list(life.events)}")
        for session in self.node.core.streams.sessions.values():
            if session.stalled_at is not None:
                raise Violation(f"{session.incarnation} is still stalled")

    def _expect(self, fact: LifeFact, outcome: str) -> None:
        emitter = next(e for e in self.emitters if e.incarnation == fact.incarnation)
        reopens = fact.live_at_wipe and emitter.alive and "unreadable patch" not in fact.harmed
        if outcome == "unknown" and reopens:
            raise Violation(f"{fact.name}/{fact.key} was under way when the collector was wiped; it was not reopened")
        harmed = fact.harmed - {"fetched, then released"}
        expired = outcome == "released" and self.loop.now - fact.ended_at > self.options.ttl_s
        if harmed or expired:
            return
        expected = ("aborted",) if fact.reason == "aborted" else ("complete",)
        if outcome not in expected:
            raise Violation(f"{fact.name}/{fact.key} came to no harm and is {outcome}, not {expected[0]}")


def _may_be_retried(fact: LifeFact) -> bool:
    return fact.reason == "aborted" or ("engine killed" in fact.harmed and not fact.reason)


def simulate(seed: int, tell: Callable[[str], None] | None = None) -> Outcome:
    """One world, its story told to `tell`. Raises Violation."""
    world = World(Options.draw(seed))
    if tell is not None:
        world.chaos.tell = lambda line: tell(f"{world.loop.now:9.3f} {line}")
    return world.run()
