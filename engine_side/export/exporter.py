"""Committed rows to host memory: as they are on the CPU, through pinned buffers and a stream of its own on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.slot_store import StepRows, StoredRows
from engine_side.export.landing import LandingStep
from engine_side.export.pinned import PinnedPool
from engine_side.export.plan import StepPlan
from protocol.geometry import Geometry

CHUNK_BYTES: Final = 32 << 20
"""Prefix rows read back at once, at most: bounds the device memory a long prefix hit takes."""

_ALIGN: Final = 16

_COLUMN_BYTES: Final = 13
"""Token id, position, status and weight version of a row."""


def nothing() -> None:
    """Nothing to wait for, or to give back."""


class StepExporter:
    """Starts the copy of a step to the host. Never blocks the engine thread. `pool` is None on the CPU."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._device = device
        row_bytes = geometry.num_moe_layers * geometry.top_k * 2 + _COLUMN_BYTES
        self.rows_per_chunk = max(1, (CHUNK_BYTES - 5 * _ALIGN) // row_bytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = PinnedPool() if device.type == "cuda" else None

    def export(self, plan: StepPlan, rows: StepRows | StoredRows) -> LandingStep:
        """A landing step for `plan`; the copy starts behind what the current stream holds. Raises PinnedFull."""
        columns = [rows.rows, rows.token_ids, rows.positions, rows.status]
        if isinstance(rows, StoredRows):
            columns.append(rows.versions)
        if self._stream is None or self.pool is None:
            return _landing(plan, [column.numpy() for column in columns], nothing, nothing)
        return self._export_cuda(plan, columns, self._stream, self.pool)

    def _export_cuda(
        self, plan: StepPlan, columns: list[Tensor], stream: torch.cuda.Stream, pool: PinnedPool
    ) -> LandingStep:
        sizes = [column.numel() * column.element_size() for column in columns]
        buffer = pool.take(sum(-(-size // _ALIGN) * _ALIGN for size in sizes))
        stream.wait_stream(torch.cuda.current_stream(self._device))
        host: list[NDArray[np.generic]] = []
        at = 0
        with torch.cuda.stream(stream):
            for column, size in zip(columns, sizes, strict=True):
                target = buffer[at : at + size].view(column.dtype).view(column.shape)
                target.copy_(column, non_blocking=True)
                # The copy reads this memory after the compute stream has let go of it.
                column.record_stream(stream)
                host.append(target.numpy())
                at += -(-size // _ALIGN) * _ALIGN
            landed = torch.cuda.Event()
            landed.record(stream)
        return _landing(plan, host, landed.synchronize, lambda: pool.give(buffer))


def _landing(
    plan: StepPlan, columns: list[NDArray[np.generic]], wait: Callable[[], None], free: Callable[[], None]
) -> LandingStep:
    rows, tokens, positions, status, *versions = columns
    return LandingStep(plan, rows, tokens, positions, status, versions[0] if versions else None, wait, free)  # type: ignore[arg-type]
