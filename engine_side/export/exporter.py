"""Committed rows to host memory: as they are on the CPU, through a ring of pinned buffers on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_side.capture.slot_store import StepRows, StoredRows
from engine_side.export.landing import LandingStep
from engine_side.export.plan import StepPlan
from protocol.geometry import Geometry

CHUNK_BYTES = 32 << 20
"""Prefix rows read back at once, at most: bounds the device memory a long prefix hit takes."""

_RING = 8
"""Steps on their way to the host at once."""


def nothing() -> None:
    """Nothing to wait for, or to give back."""


class RingFull(Exception):
    """Every pinned buffer is on its way: the step is lost rather than waited for."""


class StepExporter:
    """Starts the copy of a step to the host. Never blocks the engine thread."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._device = device
        self.rows_per_chunk = max(1, CHUNK_BYTES // (geometry.num_moe_layers * geometry.top_k * 2))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ring: deque[list[Tensor]] = deque([] for _ in range(_RING))
        self._lock = threading.Lock()

    def export(self, plan: StepPlan, rows: StepRows | StoredRows) -> LandingStep:
        """A landing step for `plan`. Raises RingFull."""
        columns = [rows.rows, rows.token_ids, rows.positions, rows.status]
        if isinstance(rows, StoredRows):
            columns.append(rows.versions)
        if self._stream is None:
            return _landing(plan, [column.numpy() for column in columns], nothing, nothing)
        return self._export_cuda(plan, columns)

    def _export_cuda(self, plan: StepPlan, columns: list[Tensor]) -> LandingStep:
        with self._lock:
            if not self._ring:
                raise RingFull(f"{_RING} steps are on their way to the host already")
            buffers = self._ring.popleft()
        sizes = [column.numel() * column.element_size() for column in columns]
        while len(buffers) < len(columns):
            buffers.append(torch.empty(0, dtype=torch.uint8, pin_memory=True))
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host: list[NDArray[np.generic]] = []
        with torch.cuda.stream(self._stream):
            for i, (column, size) in enumerate(zip(columns, sizes, strict=True)):
                if buffers[i].numel() < size:
                    buffers[i] = torch.empty(max(size, 2 * buffers[i].numel()), dtype=torch.uint8, pin_memory=True)
                target = buffers[i][:size].view(column.dtype).view(column.shape)
                target.copy_(column, non_blocking=True)
                # The copy reads this memory after the compute stream has let go of it.
                column.record_stream(self._stream)
                host.append(target.numpy())
            landed = torch.cuda.Event()
            landed.record(self._stream)

        def free() -> None:
            with self._lock:
                self._ring.append(buffers)

        return _landing(plan, host, landed.synchronize, free)


def _landing(
    plan: StepPlan, columns: list[NDArray[np.generic]], wait: Callable[[], None], free: Callable[[], None]
) -> LandingStep:
    rows, tokens, positions, status, *versions = columns
    return LandingStep(plan, rows, tokens, positions, status, versions[0] if versions else None, wait, free)  # type: ignore[arg-type]
