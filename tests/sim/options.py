"""What a world is like, drawn from its seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

FAULTS = (
    "cut",
    "duplicate",
    "reorder",
    "delay",
    "partition",
    "backpressure",
    "answer_dropped",
    "refused_rows",
    "refused_columns",
    "engine_killed",
    "engine_left",
    "collector_wiped",
    "collector_killed",
    "killed_before_ack",
    "disk_full",
    "copy_failed",
    "step_lost",
    "run_again",
    "bad_row",
    "plan_contradicted",
    "overflow",
    "slow_trainer",
    "trainer_cut",
    "bit_flipped",
)
"""Every fault, by the name it is counted under. `overflow` happens by itself where the window is small."""

RULES = (
    "abort_with_length",
    "abort_without_length",
    "ask_again",
    "checkpoint",
    "chunked_prefill",
    "declared_fill_for_a_lost_sampling_row",
    "draft_rejected",
    "engine_declared_dead",
    "expired",
    "filled_later",
    "found_again",
    "go_back",
    "killed_in_a_message",
    "log_torn",
    "name_used_again",
    "preempt_discards_samples",
    "preempt_keeps_samples",
    "prefix_hit",
    "problem_aborted",
    "problem_ambiguous",
    "problem_failed",
    "problem_incomplete",
    "problem_length_mismatch",
    "problem_lost",
    "problem_not_ready",
    "problem_released",
    "problem_unknown",
    "problem_wrong_tokens",
    "read_back",
    "release",
    "released_before_sent",
    "reopened_after_wipe",
    "reopened_by_forward",
    "rows_lost_applied",
    "said_Ack",
    "said_Flush",
    "said_HelloFirst",
    "said_Refused",
    "said_Welcome",
    "served_aborted",
    "served_complete",
    "served_incomplete",
    "served_repair",
    "served_trimmed",
    "shed",
    "slot_unproven",
    "stalled",
    "unreadable_patch",
    "weight_update",
)
"""Every rule whose acting is counted: a run in which one never acted has proven nothing about it."""

_RATES = {
    "cut": 0.25,
    "duplicate": 0.08,
    "reorder": 0.03,
    "delay": 0.1,
    "partition": 0.1,
    "backpressure": 0.1,
    "answer_dropped": 0.08,
    "refused_rows": 0.02,
    "refused_columns": 0.01,
    "engine_killed": 0.06,
    "engine_left": 0.03,
    "collector_wiped": 0.05,
    "collector_killed": 0.1,
    "killed_before_ack": 0.01,
    "disk_full": 0.01,
    "copy_failed": 0.05,
    "step_lost": 0.05,
    "run_again": 0.05,
    "bad_row": 0.04,
    "plan_contradicted": 0.006,
    "slow_trainer": 0.3,
    "trainer_cut": 0.08,
}
"""Chance per message, row, step or second, whichever the fault is about."""


@dataclass(frozen=True, slots=True)
class Options:
    """One world. depth: steps in flight before their samples reach the host. drafts: most a verify step carries.
    keeps_samples: preemption waits for samples in flight, or discards them. late_put: rows are handed over when their
    sample arrives, not at the launch. blocks: of the KV cache. window_cap, window_bytes: bytes of rows. pages: of the
    arena, `page_rows` rows each. by_length: share of requests whose length only the trainer says. reuse: of a client's
    id, when what carried it was aborted or lost its engine, or at any time (then trainers send tokens). faults: rates
    of those this world has."""

    seed: int
    engines: int
    depth: int
    drafts: int
    keeps_samples: bool
    late_put: bool
    wide: bool
    blocks: int
    window_cap: int
    window_bytes: int
    pages: int
    page_rows: int
    ttl_s: float
    log_lag_s: float
    by_length: float
    reuse: str
    aborts: float
    preempts: float
    faults: dict[str, float]

    @property
    def kills(self) -> bool:
        """Whether the collector dies in this world and comes back with what it had."""
        return "collector_killed" in self.faults or "killed_before_ack" in self.faults

    @classmethod
    def draw(cls, seed: int) -> Options:
        """The options of `seed`."""
        r = random.Random(f"options {seed}")
        wide = r.random() < 0.3
        row = (8 if wide else 4) + 4
        some = [name for name in _RATES if r.random() < 0.4]
        # Drawn apart, so that older seeds still name their worlds.
        flips = {"bit_flipped": 0.3} if random.Random(f"bits {seed}").random() < 0.15 else {}
        return cls(
            seed=seed,
            engines=r.choice([1, 1, 2]),
            depth=r.choice([0, 1, 1, 2]),
            drafts=r.choice([0, 2, 3]),
            keeps_samples=r.random() < 0.5,
            late_put=r.random() < 0.4,
            wide=wide,
            blocks=r.choice([9, 9, 10, 14]),
            window_cap=row * r.choice([6, 8, 20, 60, 5000]),
            window_bytes=row * r.choice([4, 12, 5000]),
            pages=r.choice([6, 12, 24, 400, 400]),
            page_rows=r.choice([1, 3, 4, 8]),
            ttl_s=r.choice([4.0, 12.0, 12.0]),
            log_lag_s=r.choice([0.0, 0.0, 0.3]),
            by_length=r.choice([0.0, 0.4, 1.0]),
            reuse=r.choice(["never", "retry", "any"]),
            aborts=r.choice([0.0, 0.15]),
            preempts=r.choice([0.0, 0.1, 0.25, 0.4]),
            faults={name: _RATES[name] * r.choice([0.5, 1.0, 2.0, 4.0]) for name in some} | flips,
        )


class Chaos:
    """Decides, from the world's one generator, which fault strikes; counts what acted. Off in the liveness phase."""

    def __init__(self, options: Options, rng: random.Random) -> None:
        self.options = options
        self.rng = rng
        self.on = True
        self.acted: Counter[str] = Counter()
        self.tell: Callable[[str], None] | None = None
        """Where the story of a world goes, told event by event."""

    def strikes(self, fault: str, times: float = 1.0) -> bool:
        """Whether `fault` strikes at this opportunity (`times`: seconds or rows it covers)."""
        rate = self.options.faults.get(fault)
        if rate is None or not self.on or self.rng.random() >= rate * times:
            return False
        self.acted[fault] += 1
        if self.tell:
            self.tell(f"FAULT {fault}")
        return True

    def note(self, what: str, times: int = 1) -> None:
        """A rule acted."""
        if times:
            self.acted[what] += times
