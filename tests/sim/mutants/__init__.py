"""The system with one rule off: every one must be caught. They replace pieces of the real core, planner and shipper;
those of the slot store's rule replace it in the simulated cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.sim.mutants import assembling, delivering, restarting, sampling
from tests.sim.mutants.change import Mutants

MUTANTS: Mutants = sampling.MUTANTS | assembling.MUTANTS | delivering.MUTANTS | restarting.MUTANTS
"""By the rule that is off."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The system without rule `name`."""
    changes = [(owner, attribute, getattr(owner, attribute), new) for owner, attribute, new in MUTANTS[name]()]
    for owner, attribute, _, new in changes:
        setattr(owner, attribute, new)
    try:
        yield
    finally:
        for owner, attribute, old, _ in reversed(changes):
            setattr(owner, attribute, old)
