"""Trainers: they learn what was rolled out, pull it, sometimes wrongly, sometimes late, and release it or forget to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol import codec, codes
from protocol.messages import Problem, Pull, Release, Released, Routes
from tests.sim.checker import Checker
from tests.sim.collector_node import CollectorNode
from tests.sim.facts import Facts, LifeFact, Violation
from tests.sim.loop import Loop
from tests.sim.network import Frames, Link
from tests.sim.options import Chaos

_PATIENCE = 3
"""How often a calm trainer asks for what nobody knows."""


@dataclass(slots=True, eq=False)
class Job:
    """One request to fetch. outcome: the last word, "" while there is none. last: what was refused last. then: pulls to
    try once it is complete. looks_last: the outcome, after one more look by name alone."""

    fact: LifeFact
    sends_tokens: bool
    outcome: str = ""
    tries: int = 0
    last: str = ""
    looks_last: str = ""
    then: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Asked:
    pull: Pull
    job: Job
    purpose: str


class Trainer:
    """All trainers of a world, on one connection."""

    def __init__(
        self, loop: Loop, chaos: Chaos, facts: Facts, node: CollectorNode, checker: Checker, calm: Callable[[], bool]
    ) -> None:
        self._loop, self._chaos, self._facts = loop, chaos, facts
        self._node, self._checker, self._calm = node, checker, calm
        self._nonce = 0
        self._link: Link | None = None
        self._asked: dict[int, _Asked] = {}
        self._late: dict[int, _Asked] = {}
        self.jobs: list[Job] = []
        self.released: dict[str, float] = {}

    @property
    def done(self) -> bool:
        """Whether every job has its last word."""
        return not self._asked and all(job.outcome for job in self.jobs)

    def fetch(self, fact: LifeFact) -> None:
        """A request is over: fetch it, some time later."""
        rng = self._chaos.rng
        shared = self._chaos.options.reuse == "any"
        then = [what for what in ("trimmed", "longer", "wrong_tokens", "slice") if rng.random() < 0.15]
        job = Job(fact, shared or rng.random() < 0.5, then=then)
        self.jobs.append(job)
        # Somebody who knows but the name may look first: whatever it names must be right by itself.
        first = "peek" if shared and rng.random() < 0.6 else "fetch"
        self._loop.after(rng.choice([0.0, 0.1, 0.5, 2.0]), lambda: self._ask(job, first))

    # ------------------------------------------------------------------ asking

    def _ask(self, job: Job, purpose: str) -> None:
        rng, fact = self._chaos.rng, job.fact
        assert fact.num_tokens is not None
        more: dict[str, Any] = {}
        tokens = fact.num_tokens
        digest = codec.token_digest(fact.tokens[: tokens - 1]) if job.sends_tokens else None
        gives_up = fact.reason == "aborted" and self._chaos.options.reuse == "retry"
        if not gives_up and (fact.by_length or job.sends_tokens or rng.random() < 0.5):
            more = {"num_tokens": tokens, "token_digest": digest}
        if purpose == "peek":
            more = {}
        elif purpose == "trimmed":
            more = {"num_tokens": max(2, tokens - 1)}
        elif purpose == "longer":
            more = {"num_tokens": tokens + 1}
        elif purpose == "wrong_tokens":
            more = {"num_tokens": tokens, "token_digest": codec.token_digest([9] * (tokens - 1))}
        elif purpose == "slice" and tokens > 2:
            start = rng.randrange(tokens - 1)
            more["rows"] = (start, rng.randint(start, tokens - 1))
        more["axis"] = rng.choice(["all", "moe"])
        more["dtype"] = rng.choice(["int16", "int16", "int32"])
        more["partial"] = purpose == "partial" or (purpose == "fetch" and rng.random() < 0.3)
        self._nonce += 1
        nonce, timeout = self._nonce, 4.0 if purpose == "peek" else rng.choice([0.0, 1.0, 4.0])
        pull = Pull(nonce, fact.name, timeout_ms=int(timeout * 1000), **more)
        self._asked[nonce] = _Asked(pull, job, purpose)
        self._send(pull)
        self._loop.after(timeout + 4.5, lambda: self._unanswered(nonce))

    def _send(self, message: Pull | Release) -> None:
        if self._chaos.strikes("trainer_cut") and self._link is not None:
            self._link.cut()
        if self._link is None or not self._link.alive:
            self._link = self._node.connect(True, self._hear)
        if self._link is not None:
            self._link.send_up([codec.encode(message)])

    def _unanswered(self, nonce: int) -> None:
        asked = self._asked.pop(nonce, None)
        if asked is not None:
            self._late[nonce] = asked
            self._ask(asked.job, asked.purpose)

    # ------------------------------------------------------------------ hearing

    def _hear(self, frames: Frames) -> None:
        message = codec.decode_to_trainer(frames)
        if isinstance(message, Released):
            return
        assert isinstance(message, Routes | Problem)
        asked = self._asked.pop(message.nonce, None)
        late = asked is None
        if asked is None:
            asked = self._late.pop(message.nonce)
        if isinstance(message, Routes):
            served = self._node.served.pop(message.nonce)
            fact = self._checker.routes(asked.pull, message, frames[1], served)
            self._chaos.note(f"served_{message.status}")
            self._chaos.note("served_trimmed", message.trimmed)
            self._answered(asked, message, fact, late)
        elif not late:
            self._chaos.note(f"problem_{message.code}")
            self._refused(asked, message)

    def _answered(self, asked: _Asked, header: Routes, fact: LifeFact, late: bool) -> None:
        job, purpose = asked.job, asked.purpose
        if purpose in ("longer", "wrong_tokens") and header.status == "complete":
            raise Violation(f"{job.fact.name}: served complete although the trainer asked {purpose}")
        if late:
            return
        if purpose == "peek":
            self._looked(job)
            return
        told_apart = asked.pull.token_digest is not None and len(job.fact.tokens) > 1
        if purpose == "fetch" and fact is not job.fact and told_apart and header.status == "complete":
            raise Violation(f"{job.fact.name}: its tokens chose another life")
        if header.status == "complete" and job.then and fact is job.fact:
            self._ask(job, job.then.pop())
        else:
            self._settle(job, "incomplete" if purpose == "partial" and header.status == "complete" else header.status)

    def _refused(self, asked: _Asked, problem: Problem) -> None:
        job, code, purpose = asked.job, problem.code, asked.purpose
        job.tries += 1
        job.last = f"{code}: {problem.message}"
        delay = self._chaos.rng.uniform(0.1, 0.5)
        if purpose == "peek":
            self._looked(job)
        elif purpose in ("trimmed", "longer", "wrong_tokens", "slice"):
            gone = job.fact.harmed & {"collector wiped", "released", "name used again"}
            if code in (codes.NOT_READY, codes.INCOMPLETE, codes.UNKNOWN) and not gone:
                raise Violation(f"{job.fact.name}: complete before, now {code}")
            self._ask(job, job.then.pop()) if job.then else self._settle(job, "complete")
        elif code == codes.NOT_READY or (code == codes.UNKNOWN and not (self._calm() and job.tries > _PATIENCE)):
            self._loop.after(delay, lambda: self._ask(job, purpose))
        elif code in (codes.ABORTED, codes.INCOMPLETE) and purpose == "fetch":
            again = code == codes.INCOMPLETE and self._chaos.rng.random() < 0.5
            self._loop.after(delay, lambda: self._ask(job, "fetch" if again else "partial"))
        elif code == codes.AMBIGUOUS and not job.sends_tokens:
            job.sends_tokens = True
            self._ask(job, "fetch")
        elif code == codes.WRONG_TOKENS and self._chaos.options.reuse == "any":
            job.looks_last = code
            self._ask(job, "peek")
        else:
            self._settle(job, code)

    def _looked(self, job: Job) -> None:
        if job.looks_last:
            self._settle(job, job.looks_last)
        else:
            self._ask(job, "fetch")

    def _settle(self, job: Job, outcome: str) -> None:
        if job.outcome:
            return
        job.outcome = outcome
        if self._chaos.rng.random() < 0.7:
            for fact in self._facts.named[job.fact.name]:
                fact.harmed.add("released") if fact is not job.fact else fact.harmed.add("fetched, then released")
            self.released.setdefault(job.fact.name, self._loop.now)
            self._nonce += 1
            self._send(Release(self._nonce, (job.fact.name,)))
            self._chaos.note("release")
