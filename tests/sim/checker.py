"""The independent judge: is what a trainer was served what truly happened?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol.messages import Kind, Pull, Routes
from tests.sim.collector_node import Served
from tests.sim.facts import Facts, LifeFact, Violation, read
from tests.sim.options import Chaos
from tests.sim.reference import Key


class Checker:
    """Knows the facts, and remembers every complete array: it must never change."""

    def __init__(self, facts: Facts, chaos: Chaos) -> None:
        self._facts = facts
        self._chaos = chaos
        self._complete: dict[tuple[str, Key], dict[int, int]] = {}

    def routes(self, pull: Pull, header: Routes, payload: bytes, served: Served) -> LifeFact:
        """Judge an answer; the life it served. Raises Violation."""
        fact = self._facts.lives[served.key]
        if fact.name != pull.request_id or header.request_id != pull.request_id:
            raise Violation(f"asked for {pull.request_id}, served {fact.name}")
        rows = self._rows(header, payload)
        start, stop = header.row_start, header.row_start + len(rows)
        kinds, versions = _column(header.provenance, start, stop), _column(header.weight_spans, start, stop)
        absent = {p for a, b in header.missing for p in range(a, b)}
        self._length(pull, header, fact, stop)
        for i, row in enumerate(rows):
            p = start + i
            where = f"{fact.name}/{fact.key} row {p} of {header.status}"
            cell = served.cells.get(p)
            if (row == 0) != (p in absent) or (row == 0) != (kinds[i] == 0):
                raise Violation(f"{where}: {'absent' if row == 0 else 'present'}, the header says otherwise")
            if row == 0:
                if cell is not None:
                    raise Violation(f"{where}: absent, but it had arrived")
                continue
            # A barrier for another's length proves nothing of this life's drafts.
            if header.status != "incomplete" or header.num_tokens == fact.num_tokens:
                self._row(fact, p, row, kinds[i], where)
            if self._facts.rows[row].version != versions[i]:
                raise Violation(f"{where}: version {versions[i]}, computed by {self._facts.rows[row].version}")
            if cell is None and served.ahead:
                continue
            if cell is None or (cell.row, cell.kind) != (row, kinds[i]):
                raise Violation(f"{where}: row {row} of kind {kinds[i]} served, what counts is {cell}")
        if header.status == "complete" and absent:
            raise Violation(f"{fact.name}: complete without rows {sorted(absent)}")
        self._tokens(pull, header, fact, absent)
        self._final(header, served, dict(enumerate(rows, start)))
        return fact

    def _rows(self, header: Routes, payload: bytes) -> list[int]:
        geometry = header.geometry
        array: NDArray[np.signedinteger] = np.frombuffer(payload, header.dtype).reshape(header.shape)
        captured = [i for i, layer in enumerate(header.layers) if layer in geometry.moe_layer_ids]
        if [header.layers[i] for i in captured] != list(geometry.moe_layer_ids):
            raise Violation(f"layers {header.layers} served")
        dense = [i for i in range(len(header.layers)) if i not in captured]
        if (array[:, dense] != -1).any():
            raise Violation("a layer without a router shows experts")
        rows = read(array[:, captured], geometry)
        if any(not 0 <= row < len(self._facts.rows) for row in rows):
            raise Violation(f"{header.request_id}: cells that no forward wrote")
        return rows

    def _length(self, pull: Pull, header: Routes, fact: LifeFact, stop: int) -> None:
        if stop > header.num_tokens - 1:
            raise Violation(f"{fact.name}: {stop} rows of {header.num_tokens} tokens")
        if pull.num_tokens is not None and header.num_tokens > pull.num_tokens:
            raise Violation(f"{fact.name}: {pull.num_tokens} tokens asked, {header.num_tokens} served")
        limit = len(fact.tokens)
        # Where two runs share a name, the length of one may settle the other.
        aborted = fact.reason == "aborted" and "name used again" not in fact.harmed
        if header.status == "complete" and (aborted or header.num_tokens > limit):
            raise Violation(f"{fact.name}: complete at {header.num_tokens} tokens, {limit} accepted, {fact.reason}")
        # One token has no rows, so its digest is anybody's.
        settled = header.status == "complete" and pull.num_tokens is None and header.num_tokens > 1
        if settled and header.num_tokens != fact.num_tokens:
            raise Violation(f"{fact.name}: settled at {header.num_tokens} tokens, another's; its own are {limit}")
        if header.status == "aborted" and fact.length_told and header.num_tokens > limit:
            raise Violation(f"{fact.name}: aborted at {limit} tokens, {header.num_tokens} served")

    def _row(self, fact: LifeFact, p: int, row: int, kind: int, where: str) -> None:
        if kind == Kind.FORWARD:
            true = row == fact.sampled.get(p) or (fact.reason == "aborted" and row == fact.ran.get(p))
        else:
            true = row in fact.fills.get(p, ())
            if kind == Kind.REPAIR:
                self._chaos.note("served_repair")
                true |= row == fact.sampled.get(p) or (fact.reason == "aborted" and row == fact.ran.get(p))
            if true and p in fact.sampled and p >= fact.prompt - 1:
                self._chaos.note("declared_fill_for_a_lost_sampling_row")
        if not true:
            raise Violation(f"{where}: row {row} as kind {kind}; sampled {fact.sampled.get(p)}, {fact.fills.get(p)}")

    def _tokens(self, pull: Pull, header: Routes, fact: LifeFact, absent: set[int]) -> None:
        whole = header.row_start == 0 and header.shape[0] == header.num_tokens - 1
        other = header.status == "incomplete" and header.num_tokens != fact.num_tokens
        if other or (header.status != "complete" and not whole):
            return
        known: Sequence[int] = fact.tokens[: header.num_tokens - 1]
        if len(known) == header.num_tokens - 1:
            digest = codec.token_digest([0 if p in absent else token for p, token in enumerate(known)])
            if header.token_digest != digest:
                raise Violation(f"{fact.name}: the digest is of other tokens")
        exact = header.status == "complete" and header.num_tokens == pull.num_tokens
        if exact and pull.token_digest is not None and pull.token_digest != header.token_digest:
            raise Violation(f"{fact.name}: served to a trainer that has other tokens")

    def _final(self, header: Routes, served: Served, rows: dict[int, int]) -> None:
        if header.status != "complete":
            return
        before = self._complete.setdefault((served.state_id, served.key), {})
        for p, row in rows.items():
            if before.setdefault(p, row) != row:
                raise Violation(f"{header.request_id}: complete row {p} was {before[p]} and is now {row}")


def _column(spans: Sequence[tuple[int, int, int]], start: int, stop: int) -> list[int]:
    """The value of each row, 0 outside every span."""
    values = [0] * (stop - start)
    for a, b, value in spans:
        values[a - start : b - start] = [value] * (b - a)
    return values
