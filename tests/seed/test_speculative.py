"""Speculative decoding: a verify step runs the sampled position and k drafts behind it, of which m are accepted.

The engine here knows which rows belong to accepted tokens and keeps them in a dict by position; planner, packer and
core are the real ones and know nothing of it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.geometry import Geometry
from protocol.messages import Kind, Refused
from tests.core.driver import held
from tests.harness.patches import frames, random_seg
from tests.seed.chain import Chain, Run

PROMPT = 6


class Request:
    """tokens: what is accepted, prompt and generated. truth: the row of each position whose token was accepted."""

    def __init__(self, chain: Chain, name: str, prompt: int = PROMPT) -> None:
        self.chain = chain
        self.name = name
        self.life = f"life-{name}"
        self.tokens = chain.tokens(prompt)
        self.truth: dict[int, NDArray[np.int16]] = {}
        self._opened = False

    def run(self, drafts: int = 0, start: int | None = None, known: bool = True) -> Run:
        """What the next forward runs: from `start` (the sampled position) on, `drafts` tokens past what is accepted."""
        accepted = len(self.tokens)
        start = accepted - 1 if start is None else start
        opens = None if self._opened else self.name
        self._opened = True
        guess = self.chain.tokens(drafts)
        return Run(self.life, start, self.tokens[start:] + guess, accepted, opens, known)

    @property
    def reach(self) -> int:
        """Leading positions that have run."""
        return next(p for p in itertools.count() if p not in self.truth)

    def chunk(self, start: int, stop: int) -> Run:
        """A chunk of a prefill, or of a resume, that does not reach the sampled position."""
        run = self.run(0, start)
        return replace(run, tokens=run.tokens[: stop - start])

    def accept(self, run: Run, rows: NDArray[np.int16], m: int) -> None:
        """Take m of the drafts of a forward, and the token that was sampled behind them."""
        at = run.accepted - 1
        for p in range(run.start, min(at, run.start + len(run.tokens))):
            self.truth.setdefault(p, rows[p - run.start])
        if run.start + len(run.tokens) <= at:
            return
        for p in range(at, at + m + 1):
            self.truth[p] = rows[p - run.start]
        behind = at - run.start + 1
        self.tokens += list(run.tokens[behind : behind + m]) + self.chain.tokens(1)

    def step(self, drafts: int, m: int, **more: int | bool | None) -> None:
        """A forward of this request alone."""
        run = self.run(drafts, **more)  # type: ignore[arg-type]
        (rows,) = self.chain.forward(run)
        self.accept(run, rows, m)

    def check(self, num_tokens: int | None = None) -> None:
        """End it, and compare what a trainer gets with what was accepted."""
        n = num_tokens or len(self.tokens)
        self.chain.finish(self.life, n)
        expected = np.stack([self.truth[p] for p in range(n - 1)])
        assert np.array_equal(self.chain.served(self.name), expected)
        assert np.array_equal(self.chain.served(self.name, num_tokens=n, tokens=self.tokens[: n - 1]), expected)


@pytest.fixture
def chain(seed: int) -> Chain:
    return Chain(seed)


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_testplan_mtp_verify_serves_exactly_the_rows_of_accepted_tokens(seed: int, drafts: int) -> None:
    """Several requests in one batch: prefills in chunks, verify steps, plain decode, preemption, starts that only the
    device knows."""
    chance = random.Random(seed)
    chain = Chain(seed, pages=2_000)
    for _ in range(8):
        requests = [Request(chain, f"{chance.random()}", chance.randint(1, 9)) for _ in range(4)]
        for _ in range(12):
            batch = [request for request in requests if chance.random() < 0.8] or requests
            runs, taken = [], []
            for request in batch:
                last, reach = len(request.tokens) - 1, request.reach
                k = chance.randint(0, drafts)
                back = reach < last or chance.random() < 0.15
                start = chance.randint(0, min(reach, last)) if back else last
                if start < last and chance.random() < 0.4:
                    runs.append(request.chunk(start, chance.randint(start + 1, last)))
                else:
                    runs.append(request.run(k, start, known=start < last or chance.random() < 0.5))
                taken.append(chance.randint(0, k))
            for request, run, rows, m in zip(batch, runs, chain.forward(*runs), taken, strict=True):
                request.accept(run, rows, m)
        for request in requests:
            request.step(0, 0, start=min(request.reach, len(request.tokens) - 1))
            request.check()
            chain.bench.release(request.name)


def test_accumulation_13_rejected_drafts_vanish(chain: Chain) -> None:
    request = Request(chain, "x")
    request.step(0, 0, start=0)
    request.step(3, 1)
    life = chain.bench.life("x")
    assert len(held(chain.bench.core, life)) == PROMPT + 4, "of the drafts nobody knows yet which were accepted"
    request.step(0, 0)
    assert len(held(chain.bench.core, life)) == PROMPT + 3, "the next forward begins where the first was rejected"
    request.check()


@pytest.mark.parametrize("stop", range(1, 5))
def test_a_stop_inside_accepted_drafts_trims_what_was_accepted_behind_it(chain: Chain, stop: int) -> None:
    """A stop token among the accepted drafts: the engine verified, and shipped, past the end."""
    request = Request(chain, "x")
    request.step(0, 0, start=0)
    request.step(4, 4)
    request.check(PROMPT + 1 + stop)


def test_starts_unknown_to_the_host_are_where_the_device_ran_them(chain: Chain) -> None:
    """The host launches the next verify step before it knows how many drafts of the last one were accepted."""
    first, second = Request(chain, "x"), Request(chain, "y", 9)
    for request in (first, second):
        request.step(0, 0, start=0)
    for accepted in ((3, 0), (0, 3), (1, 2), (3, 3)):
        runs = [first.run(3, known=False), second.run(3, known=False)]
        for request, run, rows, m in zip((first, second), runs, chain.forward(*runs), accepted, strict=True):
            request.accept(run, rows, m)
    first.check()
    second.check()


def test_a_preempted_verify_keeps_its_sampling_time_rows(chain: Chain) -> None:
    request = Request(chain, "x")
    request.step(0, 0, start=0)
    request.step(3, 2)
    sampled = dict(request.truth)
    request.step(3, 1, start=0)
    assert all(request.truth[p] is row for p, row in sampled.items())
    request.check()
    provenance = chain.bench.pull("x").routes
    assert provenance is not None
    assert provenance.provenance == ((0, PROMPT - 1, Kind.RECOMPUTE), (PROMPT - 1, PROMPT + 5, Kind.FORWARD))


def test_a_lost_verify_step_leaves_a_hole_and_no_rejected_draft(chain: Chain) -> None:
    """Positions that an earlier verify step ran for drafts that were rejected must not stand in for lost rows."""
    request = Request(chain, "x")
    request.step(0, 0, start=0)
    request.step(4, 0)
    run = request.run(2)
    (rows,) = chain.forward(run, lost=True)
    request.accept(run, rows, 2)
    request.step(0, 0)
    chain.finish(request.life, len(request.tokens))
    problem = chain.bench.pull("x").problem
    assert problem is not None
    assert problem.missing == ((PROMPT + 1, PROMPT + 4),)


def test_open_draft_model_rows_of_a_drafters_layers_are_refused_whole(chain: Chain) -> None:
    """Should a drafter's router ever be hooked, its step has a layer too many: refused, and the rows are lost."""
    request = Request(chain, "x")
    request.step(0, 0, start=0)
    target = chain.geometry
    drafter = Geometry(target.num_layers, (*target.moe_layer_ids[:1], 2, 3), target.top_k, target.num_experts)
    drafts = random_seg(chain.rng, drafter, request.life, PROMPT, 3)
    (answer,) = (x for x in chain.engine.raw(frames(drafter, chain.engine.seq, [drafts])) if isinstance(x, Refused))
    chain.engine.seq += 1
    assert answer.code == "rows"
    life = chain.bench.life("x")
    assert sorted(held(chain.bench.core, life)) == list(range(PROMPT)), "nothing of it was written"
    request.step(0, 0)
    request.check()
