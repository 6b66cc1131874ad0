"""What a pull returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Range, Span

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Routes:
    """Routed experts of one request.

    array: int16 (or the dtype asked for) `[num_tokens-1, layers, top_k]`, C order, writable, owning its memory. Row i
    belongs to the forward that consumed token i; -1 at layers without a router and in `missing` rows. Columns stand in
    the order the router gave: compare rows as sets, never reorder them.

    layers: global layer id of each entry of axis 1. weight_spans, provenance: (start, stop, value) runs of rows that
    share a weight version, or a `protocol.messages.Kind`. status: "complete", "aborted" (a prefix) or "incomplete".
    """

    request_id: str
    status: str
    array: NDArray[np.int16] | NDArray[Any]
    num_tokens: int
    num_experts: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    layers: tuple[int, ...]
    weight_spans: tuple[Span, ...]
    provenance: tuple[Span, ...]
    missing: tuple[Range, ...]
    trimmed: bool = False
    row_start: int = 0
    engine_id: str = ""

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return int(self.array.shape[2])

    def torch(self) -> torch.Tensor:
        """The array as a CPU tensor that shares its memory. Needs torch."""
        import torch

        return torch.from_numpy(self.array)
