"""Many worlds, over the machine's cores, and what came of them."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.sim.facts import Violation
from tests.sim.options import FAULTS, RULES
from tests.sim.world import simulate

_BATCH = 50


@dataclass(slots=True)
class Report:
    """worlds, requests, events, faults: totals of the worlds that held. broken: (seed, what it showed)."""

    worlds: int = 0
    requests: int = 0
    events: int = 0
    faults: int = 0
    acted: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Include another report."""
        self.worlds += other.worlds
        self.requests += other.requests
        self.events += other.events
        self.faults += other.faults
        self.acted.update(other.acted)
        self.broken += other.broken

    @property
    def never(self) -> list[str]:
        """Faults and rules that did not act once."""
        return [name for name in (*FAULTS, *RULES) if not self.acted[name]]

    def average(self, total: int) -> float:
        """Per world."""
        return total / max(1, self.worlds)


def run(seeds: Iterable[int]) -> Report:
    """These worlds, one after the other; a broken one does not end the run."""
    report = Report()
    for seed in seeds:
        try:
            with silence():
                outcome = simulate(seed)
        except Violation as violation:
            report.broken.append((seed, str(violation)))
        except Exception:
            report.broken.append((seed, traceback.format_exc()))
        else:
            report.worlds += 1
            report.requests += outcome.requests
            report.events += outcome.events
            report.faults += outcome.faults
            report.acted.update(outcome.acted)
    return report


def run_many(seeds: Iterable[int], jobs: int) -> Iterator[Report]:
    """The same over `jobs` processes, a report for each batch."""
    wanted = list(seeds)
    batches = [wanted[at : at + _BATCH] for at in range(0, len(wanted), _BATCH)]
    if jobs == 1:
        yield from map(run, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, batches)


@contextmanager
def silence() -> Iterator[None]:
    """The shippers of a storm have much to log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
