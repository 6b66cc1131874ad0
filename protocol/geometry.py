"""The shape of a model's routing: which layers route, how many experts each token gets."""

from __future__ import annotations

import itertools
from typing import Final

import msgspec
import numpy as np

from protocol import limits
from protocol.errors import GeometryError

UNCAPTURED: Final = -1
"""A missing expert id. Never 0, because 0 is an expert."""

WIRE_UNCAPTURED_U8: Final = 255
"""How `UNCAPTURED` travels in a uint8 row: int16 -1 cast to uint8 is 255, so the cast is the encoding."""


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """What one emitter captures.

    num_layers: every decoder layer, also those without a router.
    moe_layer_ids: global ids of the captured layers, strictly ascending.
    top_k: experts per token and layer. num_experts: routed experts per layer (logical, shared ones excluded).
    """

    num_layers: int
    moe_layer_ids: tuple[int, ...]
    top_k: int
    num_experts: int

    def validate(self) -> Geometry:
        """Return self, or raise GeometryError naming the field, the bound and the value."""
        _within("num_layers", self.num_layers, 1, limits.MAX_LAYERS)
        _within("num_experts", self.num_experts, 1, limits.MAX_EXPERTS)
        _within("top_k", self.top_k, 1, min(self.num_experts, limits.MAX_TOP_K))
        ids = self.moe_layer_ids
        if not ids:
            raise GeometryError("moe_layer_ids is empty: a dense model has no routes to collect")
        if any(b <= a for a, b in itertools.pairwise(ids)):
            raise GeometryError(f"moe_layer_ids must ascend strictly, got {list(ids)}")
        _within("moe_layer_ids[0]", ids[0], 0, self.num_layers - 1)
        _within("moe_layer_ids[-1]", ids[-1], 0, self.num_layers - 1)
        return self

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def row_shape(self) -> tuple[int, int]:
        """Shape of one captured row: `[moe_layers, top_k]`."""
        return (len(self.moe_layer_ids), self.top_k)

    @property
    def wire_dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16]:
        """Narrowest dtype that holds every expert id and "uncaptured"."""
        return np.dtype(np.uint8) if self.num_experts <= WIRE_UNCAPTURED_U8 else np.dtype("<i2")

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row on the wire and in the arena."""
        return len(self.moe_layer_ids) * self.top_k * self.wire_dtype.itemsize


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise GeometryError(f"{name} must be in [{low}, {high}], got {value}")
