"""What a killed collector finds again: records, seals and pages with a rule off."""

from __future__ import annotations

from typing import Any

import numpy as np

import collector.core.journal as journal
from collector.core.arena import Arena
from collector.core.assembly import Assembly
from collector.core.life import Life
from collector.core.streams import Streams
from tests.sim.mutants.change import Change, Mutants


def _before_the_record() -> list[Change]:
    """What was applied is acknowledged before any record tells of it."""
    original = Streams._applied

    def applied(self: Streams, session: Any, seq: int) -> None:
        original(self, session, seq)
        session.pending[-1] = (0, seq)

    return [(Streams, "_applied", applied)]


def _limbo() -> list[Change]:
    """Pages are written again before the record that freed them."""
    return [(Arena, "give", lambda self, pages, _record: self._free.extend(pages))]


def _seals() -> list[Change]:
    """What was half written counts."""

    def intact(_: Any, _life: Life, start: int, stop: int) -> Any:
        return np.ones(stop - start, np.bool_)

    return [(Assembly, "intact", intact)]


def _found_waiting() -> list[Change]:
    """A restarted collector forgets what a waiting patch had opened."""
    return [(journal, "_opening", lambda _session: ())]


MUTANTS: Mutants = {
    "record before ack": _before_the_record,
    "freed pages wait for their record": _limbo,
    "cells are sealed": _seals,
    "found with what it opened": _found_waiting,
}
"""By the rule that is off."""
