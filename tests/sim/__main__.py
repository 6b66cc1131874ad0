"""`python -m tests.sim SEEDS [--start N] [--seed N] [--mutants] [--jobs N]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.facts import Violation
from tests.sim.mutants import MUTANTS, mutated
from tests.sim.options import FAULTS, RULES, Options
from tests.sim.runner import Report, run, run_many, silence
from tests.sim.world import simulate

_SHOWN = 20


def main() -> int:
    """0 when every world held, and every mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=2000, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one world, told event by event")
    parser.add_argument("--mutants", action="store_true", help="each rule off in turn")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    args = parser.parse_args()
    if args.seed is not None:
        return tell(args.seed)
    seeds = range(args.start, args.start + args.seeds)
    return hunt(seeds, args.jobs) if args.mutants else survey(seeds, args.jobs)


def tell(seed: int) -> int:
    """Replay one world."""
    print(f"seed {seed}: {Options.draw(seed)}")
    try:
        with silence():
            outcome = simulate(seed, print)
    except Violation as violation:
        print(f"VIOLATION {violation}")
        return 1
    print(f"{outcome.requests} requests, {outcome.events} events, {outcome.faults} faults, digest {outcome.digest}")
    return 0


def survey(seeds: range, jobs: int) -> int:
    """All worlds, and how often everything acted."""
    print(f"seeds {seeds.start} to {seeds.stop - 1}, options drawn from each (--seed N prints and replays one)")
    began, total = time.monotonic(), Report()
    for report in run_many(seeds, jobs):
        total.add(report)
        for seed, why in report.broken:
            print(f"VIOLATION seed {seed}: {why}", flush=True)
    for title, names in (("faults", FAULTS), ("rules", RULES)):
        print(f"{title}: " + ", ".join(f"{name} {total.acted[name]}" for name in names))
    averages = [total.average(x) for x in (total.requests, total.events, total.faults)]
    print("a world has {:.1f} requests, {:.0f} events, {:.1f} faults".format(*averages))
    print(f"{total.worlds + len(total.broken)} worlds in {time.monotonic() - began:.0f} s: {len(total.broken)} broken")
    if total.never:
        print(f"never acted: {', '.join(total.never)}")
    thin = averages[0] < 3 or averages[1] < 200 or averages[2] < 3
    return 1 if total.broken or total.never or thin else 0


def hunt(seeds: range, jobs: int) -> int:
    """Every mutant, until the first world that shows it."""
    missed = 0
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(catch, MUTANTS, [seeds] * len(MUTANTS))
        for name, (seed, tried, why) in zip(MUTANTS, found, strict=True):
            missed += seed is None
            caught = "NOT CAUGHT" if seed is None else f"seed {seed}"
            print(f"without: {name:30} {caught:12} after {tried:5} worlds  {why[:150]}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants caught")
    return 1 if missed else 0


def catch(name: str, seeds: range) -> tuple[int | None, int, str]:
    """(the first seed that shows the mutant, worlds tried, what it shows)."""
    with mutated(name):
        for tried, seed in enumerate(seeds, 1):
            if broken := run([seed]).broken:
                return seed, tried, broken[0][1].strip().splitlines()[-1]
    return None, len(seeds), ""


if __name__ == "__main__":
    sys.exit(main())
