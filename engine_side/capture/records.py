"""The memory of a committed row: ids of all layers, then a trailer, so that one copy moves a whole step.

A record is `row_bytes` of expert ids `[moe_layers, top_k]` (int16, -1 = uncaptured, or uint8, 255 = uncaptured),
padding up to 16 bytes, and a trailer of four int32: token id, position, stamp, and the KV slot of a row as it was
committed (-1: it is stored nowhere) or the weight version of a row that was read back. A stamp is the number of the
commit, modulo 2**24, shifted left by 8, plus the row's status. The number is what tells a row of this step from one
that an earlier step left in the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.geometry import Geometry

UNCAPTURED_LAYER: Final = 1
DUPLICATE_EXPERT: Final = 2
OUT_OF_RANGE: Final = 4
UNPROVEN: Final = 8
"""Status bits of a row. UNPROVEN: read back, and not proven to be the row asked for."""

TRAILER_BYTES: Final = 16
COMMIT_MASK: Final = (1 << 24) - 1

_ALIGN: Final = 16


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Offsets of a record. narrow: ids are uint8 (num_experts at most 255), else int16."""

    geometry: Geometry
    narrow: bool

    @classmethod
    def of(cls, geometry: Geometry, narrow: bool | None = None) -> RecordLayout:
        """narrow None: the narrowest that holds every id and "uncaptured". Raises ValueError where uint8 cannot."""
        fits = geometry.wire_dtype.itemsize == 1
        if narrow and not fits:
            raise ValueError(f"{geometry.num_experts} experts and 'uncaptured' do not fit into a uint8")
        return cls(geometry, fits if narrow is None else narrow)

    @property
    def itemsize(self) -> int:
        return 1 if self.narrow else 2

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16]:
        return np.dtype(np.uint8) if self.narrow else np.dtype(np.int16)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's ids."""
        return self.geometry.num_moe_layers * self.geometry.top_k * self.itemsize

    @property
    def trailer_at(self) -> int:
        return -(-self.row_bytes // _ALIGN) * _ALIGN

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return self.trailer_at + TRAILER_BYTES

    def split(self, memory: NDArray[np.uint8], count: int) -> Columns:
        """Views of `count` records that lie in `memory`, uint8 [>= count * stride]."""
        layers, top_k = self.geometry.row_shape
        stride, trailer = self.stride, self.trailer_at
        steps = (stride, top_k * self.itemsize, self.itemsize)
        return Columns(
            np.ndarray((count, layers, top_k), self.dtype, memory, 0, steps),
            np.ndarray(count, np.int32, memory, trailer, stride),
            np.ndarray(count, np.int32, memory, trailer + 4, stride),
            np.ndarray(count, np.uint8, memory, trailer + 8, stride),
            np.ndarray(count, np.int32, memory, trailer + 8, stride),
            np.ndarray(count, np.int32, memory, trailer + 12, stride),
            np.ndarray(count, np.int32, memory, trailer + 12, stride),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Views of n records. rows: int16 or uint8 [n, moe_layers, top_k]; token_ids, positions, stamps: int32 [n]; status:
    uint8 [n], 0 is clean. slots (of rows as committed) and versions (of rows read back), int32 [n], share memory."""

    rows: NDArray[np.int16] | NDArray[np.uint8]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    status: NDArray[np.uint8]
    stamps: NDArray[np.int32]
    slots: NDArray[np.int32]
    versions: NDArray[np.int32]
