"""Rows by KV slot: what prefix hits, forks and repairs read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.geometry import UNCAPTURED, Geometry

UNPROVEN = 8
"""Status bit of a row read back that cannot be proven to be the one asked for."""


@dataclass(slots=True, frozen=True, eq=False)
class StepRows:
    """T committed rows. rows: int16 [T, moe_layers, top_k]; token_ids, positions: int32 [T]; status: uint8 [T], 0 is
    clean; commit_no: number of the commit that wrote them."""

    rows: Tensor
    token_ids: Tensor
    positions: Tensor
    status: Tensor
    commit_no: int


@dataclass(slots=True, frozen=True, eq=False)
class StoredRows:
    """N rows read back: as StepRows, with the weight version (int32 [N]) each was written under."""

    rows: Tensor
    token_ids: Tensor
    positions: Tensor
    status: Tensor
    versions: Tensor


class SlotStore:
    """`num_slots` rows and one more, the pad row, where slot -1 lands; so padding never touches slot 0.

    A row read back counts only if its commit number is at most the reader's and its token and position are the ones
    expected. The number is the proof; the token alone would pass another request's row.
    """

    def __init__(self, geometry: Geometry, num_slots: int, device: torch.device) -> None:
        size = num_slots + 1
        self.num_slots = num_slots
        self.rows = torch.full((size, *geometry.row_shape), UNCAPTURED, dtype=torch.int16, device=device)
        self.token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int32, device=device)
        self.versions = torch.zeros(size, dtype=torch.int32, device=device)
        self.status = torch.zeros(size, dtype=torch.uint8, device=device)
        self.commit_nos = torch.zeros(size, dtype=torch.int64, device=device)

    def write(self, slots: Tensor, step: StepRows, weight_version: int) -> None:
        """Store a commit. slots: int64 [T], -1 = pad."""
        at = torch.where(slots < 0, self.num_slots, slots)
        self.rows[at] = step.rows
        self.token_ids[at] = step.token_ids
        self.positions[at] = step.positions
        self.status[at] = step.status
        self.versions[at] = weight_version
        self.commit_nos[at] = step.commit_no

    def read(self, slots: Tensor, token_ids: Tensor, positions: Tensor, max_commit: int) -> StoredRows:
        """Rows of `slots` (int64 [N]) if they are those of `token_ids` at `positions` (int32 [N]) written no later than
        commit `max_commit`; others come back as -1 with the UNPROVEN bit."""
        number = self.commit_nos[slots]
        # The pad row holds whatever was padded last: nothing is read from it.
        proven = (slots >= 0) & (slots < self.num_slots) & (number > 0) & (number <= max_commit)
        proven &= (self.token_ids[slots] == token_ids) & (self.positions[slots] == positions)
        rows = torch.where(proven[:, None, None], self.rows[slots], UNCAPTURED)
        status = torch.where(proven, self.status[slots], UNPROVEN).to(torch.uint8)
        return StoredRows(rows, token_ids, positions, status, self.versions[slots])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Mirror a block copy of the KV cache: slots `source` to slots `target` (int64 [N])."""
        for column in (self.rows, self.token_ids, self.positions, self.versions, self.status, self.commit_nos):
            column[target] = column[source]

    def stamp_uncaptured(self, slots: Tensor | slice) -> None:
        """Slots whose KV came from elsewhere, without its rows: nothing reads them as proven."""
        self.commit_nos[slots] = 0
