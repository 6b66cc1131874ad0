"""A patch as numpy sees it: columns and rows checked once, at the boundary, then trusted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol import codec, limits
from protocol.errors import ProtocolError
from protocol.geometry import UNCAPTURED, Geometry
from protocol.messages import Kind, RoutedExpertsPatch, RowsLost


@dataclass(slots=True, frozen=True)
class Patch:
    """n segments over T rows.

    ids: the raw id column (`codec.decode_ids` opens it). starts, counts: int64[n]. offsets: int64[n+1].
    kinds: uint8[n]. tags: int64[n], weight version << 32 | kind << 56. rows: [T, moe_layers * top_k] of the wire dtype.
    token_ids: int64[T], as unsigned. bad: int64 indices of rows that are missing. plain: every segment is one `forward`
    row, all clean, none opens.
    """

    ids: bytes
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    tags: NDArray[np.int64]
    rows: NDArray[np.int16] | NDArray[np.uint8]
    token_ids: NDArray[np.int64]
    bad: NDArray[np.int64]
    opens: tuple[tuple[int, str], ...]
    plain: bool


@dataclass(slots=True, frozen=True)
class Loss:
    """Rows that will not come: the columns of a `RowsLost`, or of a patch that was refused."""

    ids: bytes
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    opens: tuple[tuple[int, str], ...]


VERSION_SHIFT: Final = 32
KIND_SHIFT: Final = 56
"""Where a row's tag has them; the token id is below."""

_FORWARD_BYTE = bytes([Kind.FORWARD])
_REMEMBERED: Final = 64
_REMEMBERED_BYTES: Final = 16 << 10
"""Offsets of 4,095 segments. Larger columns are not remembered: 64 of them could be a quarter of a gigabyte."""


def open_patch(header: RoutedExpertsPatch, rows: codec.Buffer, token_ids: codec.Buffer, geometry: Geometry) -> Patch:
    """Check a patch's columns and frames against its emitter's geometry.

    Raises ProtocolError("columns" | "rows" | "oversized"). Ids outside [0, num_experts) refuse the patch; "uncaptured"
    in any cell makes that row a bad one, whether or not the emitter said so.
    """
    once = len(header.offsets) > _REMEMBERED_BYTES
    offsets, counts = (_offsets.__wrapped__ if once else _offsets)(header.offsets)
    n, total = len(counts), int(offsets[-1])
    starts = _starts(header.starts, counts)
    kinds, tags = (_tags.__wrapped__ if once else _tags)(header.kinds, header.weight_versions, n)
    _check_opens(header.opens, n)
    cells, ids = _rows(rows, total, geometry)
    tokens = _column(token_ids, "<u4", total, "token_ids").astype(np.int64)
    bad = _bad_rows(header.bad_rows, cells, geometry)
    plain = total == n and not len(bad) and not header.opens and header.kinds == _FORWARD_BYTE * n
    return Patch(header.req_ids, starts, counts, offsets, kinds, tags, ids, tokens, bad, header.opens, plain)


# The columns below repeat step after step while a batch decodes. Remembering them by their bytes takes a patch of 256
# segments from 21 to 13 us. The arrays are shared between patches, and read-only.


@lru_cache(maxsize=_REMEMBERED)
def _offsets(raw: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets = _column(raw, "<i4", None, "offsets").astype(np.int64)
    n = len(offsets) - 1
    if n < 0 or n > limits.MAX_SEGMENTS:
        raise ProtocolError("columns", f"{n} segments, at most {limits.MAX_SEGMENTS}")
    counts = offsets[1:] - offsets[:-1]
    if offsets[0] != 0 or (n and int(counts.min()) < 1):
        raise ProtocolError("columns", "offsets must start at 0 and ascend strictly")
    offsets.flags.writeable = counts.flags.writeable = False
    return offsets, counts


@lru_cache(maxsize=_REMEMBERED)
def _tags(raw_kinds: bytes, raw_versions: bytes, n: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    kinds = _kinds(raw_kinds, n)
    tags = _column(raw_versions, "<i4", n, "weight_versions").astype(np.int64)
    if n and not 0 <= int(tags.min()) <= int(tags.max()) <= limits.MAX_WEIGHT_VERSION:
        raise ProtocolError("columns", f"weight versions must be in [0, {limits.MAX_WEIGHT_VERSION}]")
    tags <<= VERSION_SHIFT
    tags |= kinds.astype(np.int64) << KIND_SHIFT
    tags.flags.writeable = False
    return kinds, tags


def open_loss(header: RowsLost) -> Loss:
    """Check the columns of a `RowsLost`. Raises ProtocolError("columns")."""
    counts = _column(header.lengths, "<i4", None, "lengths").astype(np.int64)
    if len(counts) > limits.MAX_SEGMENTS or (len(counts) and int(counts.min()) < 1):
        raise ProtocolError("columns", "lengths must be positive, at most one per segment")
    starts = _starts(header.starts, counts)
    kinds = _kinds(header.kinds, len(counts))
    _check_opens(header.opens, len(counts))
    return Loss(header.req_ids, starts, counts, kinds, header.opens)


def loss_of(header: RoutedExpertsPatch) -> Loss:
    """What a refused patch would have carried. Raises ProtocolError when even its columns cannot be read."""
    offsets = _column(header.offsets, "<i4", None, "offsets").astype(np.int64)
    counts = offsets[1:] - offsets[:-1]
    if not len(offsets) or (len(counts) and int(counts.min()) < 1):
        raise ProtocolError("columns", "offsets must ascend strictly")
    kinds = _kinds(header.kinds, len(counts))
    _check_opens(header.opens, len(counts))
    return Loss(header.req_ids, _starts(header.starts, counts), counts, kinds, header.opens)


def _column(raw: codec.Buffer, dtype: str, n: int | None, name: str) -> NDArray[np.int32]:
    width = np.dtype(dtype).itemsize
    size = memoryview(raw).nbytes
    if size % width or (n is not None and size != n * width):
        expected = f"{n * width} bytes" if n is not None else f"a multiple of {width} bytes"
        raise ProtocolError("columns", f"{name}: expected {expected}, found {size}")
    return np.frombuffer(raw, dtype=dtype)


def _starts(raw: bytes, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    # As unsigned a negative position is a huge one: a single pass finds both.
    starts = _column(raw, "<u4", len(counts), "starts").astype(np.int64)
    if len(starts) and int((starts + counts).max()) > limits.MAX_TOKENS:
        raise ProtocolError("columns", f"positions must be in [0, {limits.MAX_TOKENS})")
    return starts


def _kinds(raw: bytes, n: int) -> NDArray[np.uint8]:
    kinds = np.frombuffer(raw, dtype=np.uint8)
    if len(kinds) != n or (n and not Kind.FORWARD <= int(kinds.min()) <= int(kinds.max()) <= Kind.REPAIR):
        raise ProtocolError("columns", f"kinds: expected {n} values in [1, 4]")
    return kinds


def _check_opens(opens: tuple[tuple[int, str], ...], n: int) -> None:
    for index, name in opens:
        if not 0 <= index < n:
            raise ProtocolError("columns", f"opens names segment {index} of {n}")
        codec.check_id(name)


def _rows(
    raw: codec.Buffer, total: int, geometry: Geometry
) -> tuple[NDArray[np.uint16] | NDArray[np.uint8], NDArray[np.int16] | NDArray[np.uint8]]:
    size, expected = memoryview(raw).nbytes, total * geometry.row_nbytes
    if size > limits.MAX_ROWS_BYTES:
        raise ProtocolError("oversized", f"rows of {size} bytes, at most {limits.MAX_ROWS_BYTES}")
    if size != expected:
        raise ProtocolError(
            "rows",
            f"expected {total} rows x {geometry.num_moe_layers} layers x top_k {geometry.top_k} as "
            f"{geometry.wire_dtype} = {expected} bytes, found {size}",
        )
    unsigned: str = "u1" if geometry.wire_dtype.itemsize == 1 else "<u2"
    cells = np.frombuffer(raw, dtype=unsigned).reshape(total, geometry.num_moe_layers * geometry.top_k)
    return cells, cells.view(geometry.wire_dtype)


def _bad_rows(raw: bytes, cells: NDArray[np.uint16] | NDArray[np.uint8], geometry: Geometry) -> NDArray[np.int64]:
    declared = _column(raw, "<i4", None, "bad_rows").astype(np.int64)
    if len(declared) and not 0 <= int(declared.min()) <= int(declared.max()) < len(cells):
        raise ProtocolError("columns", f"bad_rows must name rows in [0, {len(cells)})")
    # As unsigned cells "uncaptured" is the largest value, so one pass over the rows (6 us for 250 KB) proves that
    # every id is in range and captured; only a patch that fails it is looked at again.
    if not cells.size or int(cells.max()) < geometry.num_experts:
        return np.unique(declared) if len(declared) else declared
    uncaptured = cells == (UNCAPTURED & (0xFF if cells.dtype.itemsize == 1 else 0xFFFF))
    wrong = (cells >= geometry.num_experts) & ~uncaptured
    wrong[declared] = False
    if wrong.any():
        row, cell = np.argwhere(wrong)[0]
        layer = geometry.moe_layer_ids[int(cell) // geometry.top_k]
        raise ProtocolError("rows", f"row {row}, layer {layer}: expert {cells[row, cell]} of {geometry.num_experts}")
    return np.union1d(declared, np.flatnonzero(uncaptured.any(axis=1)))
