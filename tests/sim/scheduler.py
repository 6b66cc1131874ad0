"""Who runs next in a simulated engine, and with how many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.cache import BLOCK, Cache
from tests.sim.options import Chaos
from tests.sim.requests import Request, Work

_RUNNING = 4


class Scheduler:
    """Admits with prefix hits, prefills in chunks, decodes with drafts, preempts the last when blocks run out."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        self._options = chaos.options
        self._rng = chaos.rng
        self.cache = Cache(chaos.options.blocks)
        self.running: list[Request] = []

    def admit(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """Let waiting requests run: those with a prefix hit, and how many positions it covers."""
        hits = []
        for q in requests:
            waits = q.state == "waiting" and (not q.in_flight or not self._options.keeps_samples)
            if not waits or len(self.running) >= _RUNNING or self._rng.random() > 0.7:
                continue
            q.dev = list(q.host)
            q.blocks = self.cache.hit(q.host)
            q.computed, q.state = len(q.blocks) * BLOCK, "running"
            self.running.append(q)
            if q.blocks:
                hits.append((q, q.computed))
                self._chaos.note("prefix_hit")
        return hits

    def schedule(self) -> list[Work]:
        """The next forward."""
        todo: list[Work] = []
        for q in list(self.running):
            if q not in self.running or (work := self._next(q)) is None:
                continue
            end = work.start + work.count
            while not self.cache.extend(q.blocks, end):
                victim = self.running[-1]
                self.preempt(victim)
                todo = [other for other in todo if other.request is not victim]
                if victim is q:
                    break
            if q in self.running:
                self.cache.publish(q.host, q.blocks, end)
                todo.append(work)
        return todo

    def preempt(self, q: Request) -> None:
        """Take its blocks. Samples in flight are waited for, or thrown away."""
        self.leave(q)
        q.computed, q.state = 0, "waiting"
        if not self._options.keeps_samples:
            q.epoch += 1
            q.dev = list(q.host)
        self._chaos.note("preempt_keeps_samples" if self._options.keeps_samples else "preempt_discards_samples")

    def run_again(self, q: Request) -> None:
        """A forward failed on the host after it ran on the device: its sample is thrown away, and it runs again."""
        q.epoch += 1
        q.dev = list(q.host)
        q.computed = min(q.computed, len(q.host) - 1)

    def leave(self, q: Request) -> None:
        """It runs no more; its blocks can be hit until they are reused."""
        if q in self.running:
            self.running.remove(q)
        self.cache.release(q.blocks)

    def _next(self, q: Request) -> Work | None:
        rng, start = self._rng, q.computed
        if start < len(q.host) - 1:
            count = min(rng.choice([1, 2, 4, 9]), len(q.host) - start)
            self._chaos.note("chunked_prefill", count < len(q.host) - start)
            return Work(q, start, count, 0)
        if len(q.dev) - 1 == start and q.in_flight <= self._options.depth:
            drafts = rng.randint(0, self._options.drafts) if len(q.dev) > q.fact.prompt else 0
            return Work(q, start, 1 + drafts, drafts)
        return None
