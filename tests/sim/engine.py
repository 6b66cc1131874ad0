"""A tiny inference engine: it batches, speculates, preempts and shares prefixes as real ones do, step by step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from engine_side.export.planner import RoutePlanner, ScheduledBatch
from engine_side.shipping.losses import RepairAsk
from protocol.geometry import Geometry
from protocol.messages import Kind
from tests.sim.cache import UNPROVEN, Stored, slots_of
from tests.sim.facts import Facts, LifeFact, spell
from tests.sim.options import Chaos
from tests.sim.requests import Read, Request, Sample, Shipping, Work
from tests.sim.scheduler import Scheduler

_VOCABULARY = 3
_CHUNK = 2
_PROMPTS = ((0, 1, 2, 0, 1), (0, 1, 2, 0), (0, 1), (1,))


class Engine:
    """One engine process. `ended` is told of every request that is over."""

    def __init__(
        self,
        chaos: Chaos,
        facts: Facts,
        geometry: Geometry,
        incarnation: str,
        land: Callable[..., LandingStep],
        ship: Shipping,
        ended: Callable[[LifeFact], None],
    ) -> None:
        self._chaos = chaos
        self._options = chaos.options
        self._rng: random.Random = chaos.rng
        self._facts = facts
        self._geometry = geometry
        self._incarnation = incarnation
        self._land = land
        self._ship = ship
        self._ended = ended
        self._planner = RoutePlanner()
        self._scheduler = Scheduler(chaos)
        self._cache = self._scheduler.cache
        self._samples: deque[tuple[int, list[Sample], list[LandingStep | StepPlan]]] = deque()
        self._reads: list[Read] = []
        self._step = 0
        self._version = 0
        self.requests: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or a step's rows have not been handed over."""
        alive = any(q.state in ("waiting", "running") for q in self.requests)
        return alive or bool(self._reads) or any(samples or landings for _, samples, landings in self._samples)

    def submit(self, name: str, again: int) -> None:
        """A client's request under its own id `name`, used `again` times before: its first token tells it apart."""
        rng = self._rng
        prompt = [*rng.choice(_PROMPTS), *(rng.randrange(_VOCABULARY) for _ in range(rng.randrange(3)))]
        if again:
            prompt.insert(0, _VOCABULARY + again)
        by_length = rng.random() < self._options.by_length
        host = list(prompt)
        life = LifeFact(self._incarnation, str(len(self.requests) + 1), name, len(prompt), by_length, host)
        self.requests.append(Request(self._facts.open(life), len(prompt) + rng.randint(1, 7), host, list(prompt)))

    def step(self) -> None:
        """Schedule a batch, run it, ship its rows; take the samples of the step `depth` ago."""
        self._step += 1
        if self._rng.random() < 0.03:
            self._version += 1
            self._chaos.note("weight_update")
        self._disturb()
        hits = self._scheduler.admit(self.requests)
        work = self._scheduler.schedule()
        landings: list[LandingStep | StepPlan] = []
        if work:
            plan = self._plan(work)
            numbers, tokens, positions, slots, samples = self._forward(work)
            landings.append(self._landing(plan, numbers, tokens, positions, slots))
        else:
            samples = []
        for request, count in hits:
            if request.blocks:
                self._plan_reads(request, count)
        landings.extend(self._read_due())
        if work and self._ship.asks:
            landings.append(self._repair(self._ship.asks.popleft()))
        if not self._options.late_put:
            self._hand_over(landings)
            landings = []
        self._samples.append((self._step, samples, landings))
        while self._samples and self._samples[0][0] <= self._step - self._options.depth:
            _, samples, landings = self._samples.popleft()
            self._hand_over(landings)
            for sample in samples:
                self._accept(sample)

    def abort_all(self) -> None:
        """The process shuts down in good order: what is unfinished is aborted."""
        for request in self.requests:
            if request.state in ("waiting", "running"):
                self._end(request, "aborted")

    def _disturb(self) -> None:
        rng, running = self._rng, self._scheduler.running
        if running and rng.random() < self._options.preempts * self._chaos.on:
            self._scheduler.preempt(rng.choice(running))
        for q in running:
            if q.in_flight and self._chaos.strikes("run_again"):
                self._scheduler.run_again(q)
        alive = [q for q in self.requests if q.state in ("waiting", "running")]
        if alive and rng.random() < self._options.aborts * self._chaos.on:
            self._end(rng.choice(alive), "aborted")

    # ------------------------------------------------------------------ the forward

    def _plan(self, work: list[Work]) -> StepPlan:
        unknown = self._options.depth > 0 and self._options.drafts > 0
        starts = [-1 if unknown and len(w.request.host) - 1 <= w.start else w.start for w in work]
        opens = []
        for i, w in enumerate(work):
            if not w.request.opened:
                w.request.opened = True
                opens.append((i, w.request.fact.name))
            # Only a step that lands shows that its plan was wrong.
            lands = not {"copy_failed", "step_lost"} & self._options.faults.keys()
            if starts[i] >= 0 and lands and self._chaos.strikes("plan_contradicted"):
                starts[i] += 1
                w.request.fact.harmed.add("plan contradicted")
        lives, counts = [w.request.fact.life for w in work], [w.count for w in work]
        accepted = [len(w.request.host) for w in work]
        return self._planner.plan(ScheduledBatch(lives, starts, counts, accepted, opens), self._version)

    def _forward(self, work: list[Work]) -> tuple[list[int], list[int], list[int], list[int], list[Sample]]:
        rng = self._rng
        numbers: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        samples: list[Sample] = []
        for w in work:
            q, start = w.request, w.start
            drafts = [rng.randrange(_VOCABULARY) for _ in range(w.drafts)]
            run = (q.dev + drafts)[start : start + w.count]
            rows = [self._facts.row(token, self._version) for token in run]
            for i, slot in enumerate(slots_of(q.blocks, start + w.count)[start:]):
                self._cache.write(slot, Stored(rows[i], self._facts.rows[rows[i]], start + i, self._step))
                slots.append(slot)
            last = start + w.count - 1 - w.drafts
            new: list[int] = []
            q.computed = start + w.count
            if last == len(q.dev) - 1:
                taken = rng.randint(0, w.drafts)
                other = [t for t in range(_VOCABULARY) if taken == w.drafts or t != drafts[taken]]
                new = [*drafts[:taken], rng.choice(other)]
                q.dev += new
                q.computed -= w.drafts - taken
                for j in range(len(new)):
                    q.fact.ran[last + j] = rows[last - start + j]
                self._chaos.note("draft_rejected", w.drafts - taken)
            for p in range(start, last + (not new)):
                q.fact.fill(p, rows[p - start])
            q.in_flight += 1
            samples.append(Sample(q, q.epoch, last, new, rows[last - start :]))
            numbers += rows
            tokens += run
            positions += range(start, start + w.count)
        return numbers, tokens, positions, slots, samples

    def _landing(
        self, plan: StepPlan, numbers: list[int], tokens: list[int], positions: list[int], slots: list[int]
    ) -> LandingStep | StepPlan:
        if self._chaos.strikes("step_lost"):
            return plan
        status = np.zeros(len(numbers), np.uint8)
        segments = np.repeat(np.arange(len(plan.req_ids)), np.diff(plan.offsets))
        for i in range(len(numbers)):
            if self._chaos.strikes("bad_row"):
                status[i] = 1
                numbers[i] = self._facts.row(-1, self._version)
                self._facts.lives[self._incarnation, plan.req_ids[segments[i]]].harmed.add("bad row")
        rows = spell(numbers, self._geometry)
        return self._land(
            plan, rows, np.array(tokens, np.int32), np.array(positions, np.int32), status, None,
            stamps=self._step << 8 | status.astype(np.int32), commit_no=self._step, slots=np.array(slots, np.int32),
        )  # fmt: skip

    def _hand_over(self, landings: list[LandingStep | StepPlan]) -> None:
        for one in landings:
            if isinstance(one, StepPlan):
                self._ship.lost(one)
                continue
            fact = self._facts.lives[self._incarnation, one.plan.req_ids[0]]
            if one.plan.kinds[0] == Kind.CACHED and fact.num_tokens is not None:
                fact.harmed.add("prefix read after the end")
            self._ship.put(one)

    # ------------------------------------------------------------------ prefix hits

    def _plan_reads(self, q: Request, count: int) -> None:
        slots = slots_of(q.blocks, count)
        for p, slot in enumerate(slots):
            q.fact.fill(p, self._cache.at(slot).row)
        for first in range(0, count, _CHUNK):
            part = slice(first, min(first + _CHUNK, count))
            late = self._rng.choice([0, 0, 1, 2, 4, 8])
            self._reads.append(Read(self._step + late, self._step, q, first, slots[part], q.host[part]))

    def _read_due(self, of: Request | None = None) -> list[LandingStep | StepPlan]:
        """Chunks whose time has come, or all of one request."""
        due = [read for read in self._reads if (read.due <= self._step if of is None else read.request is of)]
        self._reads = [read for read in self._reads if read not in due]
        return [self._read(read) for read in due]

    def _read(self, read: Read) -> LandingStep:
        fact = read.request.fact
        positions = range(read.first, read.first + len(read.slots))
        plan = self._planner.cached(fact.life, read.first, len(read.slots), None)
        step = self._read_back(plan, np.array([read.slots, read.tokens, positions], np.int32), read.planned)
        if step.status.any():
            self._chaos.note("slot_unproven")
            fact.harmed.add("slot reused before it was read")
        return step

    def _repair(self, ask: RepairAsk) -> LandingStep | StepPlan:
        """Rows that the shipper had to drop, if their slots still hold what the step they were dropped from wrote."""
        plan = self._planner.repair(ask.lives, ask.starts, ask.counts)
        if self._chaos.strikes("step_lost"):
            return plan
        self._chaos.note("read_back")
        return self._read_back(plan, ask.asked, self._step, proof=ask.proof)

    def _read_back(self, plan: StepPlan, asked: NDArray[np.int32], planned: int, **more: Any) -> LandingStep:
        """As the slot store reads: -1 for a row that was written after step `planned`, or is not the one asked for."""
        found = [self._cache.at(slot) for slot in asked[0].tolist()]
        proven = [
            self._cache.proves(stored, token, p, planned)
            for stored, (token, p) in zip(found, asked[1:].T.tolist(), strict=True)
        ]
        rows = spell([stored.row if good else 0 for stored, good in zip(found, proven, strict=True)], self._geometry)
        status = np.array([0 if good else UNPROVEN for good in proven], np.uint8)
        versions = np.array([stored.fact.version for stored in found], np.int32)
        stamps = np.array([stored.step << 8 for stored in found], np.int32) * (status == 0) | status
        slots, tokens, positions = asked.copy()
        return self._land(
            plan, rows, tokens, positions, status, versions, stamps=stamps.astype(np.int32), slots=slots, **more
        )

    # ------------------------------------------------------------------ ends

    def _accept(self, sample: Sample) -> None:
        q = sample.request
        q.in_flight -= 1
        if q.state in ("finished", "aborted") or sample.epoch != q.epoch:
            return
        for j, token in enumerate(sample.tokens):
            if len(q.host) < q.target:
                q.host.append(token)
                q.fact.sampled[sample.last + j] = sample.rows[j]
        if len(q.host) >= q.target and sample.tokens:
            self._end(q, "finished")

    def _end(self, q: Request, state: str) -> None:
        q.state = state
        if self._rng.random() < 0.5 and not self._options.late_put:
            self._hand_over(self._read_due(q))
        if state == "aborted" and self._options.late_put and q.in_flight:
            # An end never overtakes the opening.
            for _, _, landings in self._samples:
                self._hand_over(landings)
                landings.clear()
        self._scheduler.leave(q)
        fact = q.fact
        fact.num_tokens = len(q.host)
        fact.reason = "aborted" if state == "aborted" else self._rng.choice(["stop", "length"])
        if not q.opened:
            q.opened = True
            fact.harmed.add("never ran")
            self._ship.lost(self._planner.cached(fact.life, 0, 1, fact.name))
        if state == "aborted":
            fact.length_told = self._rng.random() < 0.8
            self._chaos.note("abort_with_length" if fact.length_told else "abort_without_length")
            self._ship.finish(fact.life, len(q.host) if fact.length_told else None, fact.reason)
        elif not fact.by_length:
            self._ship.finish(fact.life, len(q.host), fact.reason)
        self._ended(fact)
