"""Rows by KV slot: what prefix hits, forks and repairs read back."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_side.capture.backend import backend_of
from engine_side.capture.records import RecordLayout

STAMP_BYTES = 20
"""Of a slot, beside its ids: commit number and status (8), weight version and token id (8), position (4)."""


class SlotStore:
    """`num_slots` rows and one more, the pad row, where slot -1 lands; so padding never touches slot 0.

    Allocated and freed with the KV cache, on the one rank that captures. A row read back counts only if its commit
    number is at most the reader's and its token and position are the ones expected. The number is the proof; the token
    alone would pass another request's row. rows: uint8 [num_slots+1, row_bytes], all ones at first, which is
    "uncaptured" in either dtype. stamps: int64 [num_slots+1, 2]: commit number << 8 | status, version << 32 | token id;
    number 0 proves nothing. positions: int32 [num_slots+1].
    """

    def __init__(self, layout: RecordLayout, num_slots: int, device: torch.device) -> None:
        size = num_slots + 1
        self.layout = layout
        self.num_slots = num_slots
        self.rows = torch.full((size, layout.row_bytes), 0xFF, dtype=torch.uint8, device=device)
        self.stamps = torch.zeros((size, 2), dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int32, device=device)
        self._read = backend_of(device).read

    @staticmethod
    def slot_bytes(layout: RecordLayout) -> int:
        """Bytes a slot costs, every stamp included: what the planner of the KV cache is told, on every rank."""
        return layout.row_bytes + STAMP_BYTES

    @staticmethod
    def declared_bytes(layout: RecordLayout, num_slots: int) -> int:
        """Bytes of a store of `num_slots`, the pad row included: exactly what `nbytes` says of it."""
        return (num_slots + 1) * SlotStore.slot_bytes(layout)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, stamps, positions."""
        return self.rows, self.stamps, self.positions

    def read(self, asked: Tensor, max_commit: int, records: Tensor) -> None:
        """Rows of `asked`, int32 [3, N]: slots, token ids, positions, as the first N of `records` (uint8 [>= N,
        stride]), if they were written no later than commit `max_commit` as rows of that token at that position; others
        come back as -1 with the UNPROVEN bit."""
        self._read(asked, self.tensors, records, max_commit, self.layout)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Mirror a block copy of the KV cache: slots `source` to slots `target` (int64 [N])."""
        for column in self.tensors:
            column[target] = column[source]

    def stamp_uncaptured(self, slots: Tensor | slice) -> None:
        """Slots whose KV came from elsewhere, without its rows: nothing reads them as proven."""
        self.stamps[slots, 0] = 0
