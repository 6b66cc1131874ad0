"""What truly happened, written down by the simulated engines: which forward computed which row of which token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.geometry import UNCAPTURED, Geometry

NARROW = Geometry(num_layers=3, moe_layer_ids=(0, 2), top_k=2, num_experts=200)
WIDE = Geometry(num_layers=3, moe_layer_ids=(0, 2), top_k=2, num_experts=300)


class Violation(AssertionError):
    """The system broke a promise."""


@dataclass(slots=True, eq=False)
class LifeFact:
    """One life.

    tokens: those the host has accepted. num_tokens, reason: its end. length_told: the end says how many tokens.
    sampled: position -> the row whose logits gave the accepted token after it. ran: the same by the device's account.
    fills: position -> rows that re-ran it, or were read from a slot that truly held it. harmed: why it need not become
    complete. live_at_wipe: the last wiped collector must have been told of it again.
    """

    incarnation: str
    life: str
    name: str
    prompt: int
    by_length: bool
    tokens: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    reason: str = ""
    length_told: bool = True
    ended_at: float = 0.0
    live_at_wipe: bool = False
    sampled: dict[int, int] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    fills: dict[int, set[int]] = field(default_factory=dict)
    harmed: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, str]:
        """How the collector knows it."""
        return self.incarnation, self.life

    def fill(self, position: int, row: int) -> None:
        """`row` is a true row of an accepted token, though perhaps not the sampling-time one."""
        self.fills.setdefault(position, set()).add(row)


@dataclass(slots=True, frozen=True)
class RowFact:
    """One row of one forward. version: the weights'."""

    token: int
    version: int


class Facts:
    """Every row and life of a world. Row numbers start at 1 and are what the rows' cells spell."""

    def __init__(self) -> None:
        self.rows: list[RowFact] = [RowFact(-1, -1)]
        self.lives: dict[tuple[str, str], LifeFact] = {}
        self.named: dict[str, list[LifeFact]] = {}

    def row(self, token: int, version: int) -> int:
        """The number of a new row."""
        self.rows.append(RowFact(token, version))
        return len(self.rows) - 1

    def open(self, life: LifeFact) -> LifeFact:
        """Remember a life."""
        self.lives[life.key] = life
        self.named.setdefault(life.name, []).append(life)
        return life


def spell(numbers: list[int], geometry: Geometry) -> NDArray[np.int16]:
    """int16 [n, moe_layers, top_k]: row numbers as expert ids; -1 in every cell of number 0."""
    values = np.asarray(numbers, np.int64)[:, None]
    base, cells = geometry.num_experts, geometry.num_moe_layers * geometry.top_k
    digits = values // base ** np.arange(cells) % base
    digits[values[:, 0] == 0] = UNCAPTURED
    return digits.astype(np.int16).reshape(len(numbers), *geometry.row_shape)


def read(rows: NDArray[np.signedinteger], geometry: Geometry) -> list[int]:
    """Inverse of `spell`: 0 for a row of nothing but -1, -1 for a row with some."""
    cells = geometry.num_moe_layers * geometry.top_k
    flat = rows.reshape(-1, cells).astype(np.int64)
    values = (flat * geometry.num_experts ** np.arange(cells)).sum(axis=1)
    uncaptured = (flat == UNCAPTURED).sum(axis=1)
    values[uncaptured > 0] = -1
    values[uncaptured == cells] = 0
    return [int(x) for x in values]
