"""A restarted collector, out of the records that a bench kept and the bytes of its arena; compared with the first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collector.core import records
from collector.core.collector import Collector
from collector.core.life import Life, State
from collector.core.recovery import Recovery
from tests.core.driver import Bench, held


def restarted(bench: Bench, buffer: NDArray[np.uint8] | None = None) -> Collector:
    """What a new process would find, on a copy of the arena. Raises CorruptState."""
    recovery = Recovery()
    for payload in bench.records:
        recovery.add(records.decode_delta(memoryview(payload)))
    arena = bench.core.arena
    memory = arena._buffer.copy() if buffer is None else buffer
    config = bench.core.retention._config
    return recovery.collector(memory, bench.core.state_id, bench.now, 0.0, config, arena.page_bytes)


def differences(old: Collector, new: Collector) -> list[str]:
    """What the second does not know as the first did, in words; empty when nothing."""
    found = [f"lives {len(old.lives)} {len(new.lives)}"] if len(old.lives) != len(new.lives) else []
    for life in old.lives:
        again = new.lives.by_serial.get(life.serial)
        if again is None:
            found.append(f"{life.req_id} is gone")
        elif _of(old, life) != _of(new, again):
            found.append(f"{life.req_id}: {_of(old, life)} was found as {_of(new, again)}")
    for session in old.streams.sessions.values():
        known = new.streams.sessions[session.incarnation]
        before = (session.applied, session.alive, session.opening, session.geometry, session.engine_id)
        if before != (known.applied, known.alive, known.opening, known.geometry, known.engine_id):
            found.append(f"session {session.incarnation}: {before} was found otherwise")
    if list(old.retention.tombstones) != list(new.retention.tombstones):
        found.append("other tombstones")
    limbo = {page for _, pages in old.arena._limbo for page in pages}
    if set(old.arena._free) | limbo != set(new.arena._free):
        found.append("other pages are free")
    if old.lives.serial != new.lives.serial:
        found.append("serials begin again")
    return found


def _of(core: Collector, life: Life) -> tuple[object, ...]:
    state, num_tokens = life.state, life.num_tokens
    if state is State.INCOMPLETE and not life.ended:
        # Only a new barrier can settle it: see `collector.core.recovery`.
        state, num_tokens = State.OPEN, None
    rows = held(core, life)
    end = int(core.lives.end[life.slot]), int(core.lives.last_forward[life.slot])
    return life.name, life.req_id, life.session.incarnation, state, num_tokens, life.ended, life.reason, rows, end
