"""Row memory: fixed pages under a byte budget, in one buffer that somebody else mapped.

A page holds R cells of one geometry. A cell is a row, padded to 8 bytes, and behind it one int64 of meta and a seal, so
that all scatters of a patch touch the same cache lines: with the meta in a column of its own a decode step of 256
requests took half as long again. Three fancy-index scatters write a whole patch, whatever its requests.

The seal is a checksum of the row, its meta, its life and its position. It is looked at whenever rows leave the arena,
and when a restarted daemon finds them again: a flipped bit, a torn write and a page of another life are all seen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GeometryError
from protocol.geometry import Geometry
from protocol.patch import KIND_SHIFT, VERSION_SHIFT

PAGE_BYTES: Final = 64 << 10
"""66 rows of 61x8 int16; a short request of a small model wastes at most this."""

_VERSION_MASK: Final = 0xFF_FFFF

# Odd and without pattern, so that no plausible change of one part of a cell undoes that of another.
_OF_META: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
OF_PLACE: Final = np.uint64(0xD6E8_FEB8_6659_FD93)
"""How much the place of a cell grows from one position to the next."""


def meta_tokens(meta: NDArray[np.int64]) -> NDArray[np.int32]:
    """Token ids (int32) of meta."""
    return meta.astype(np.uint32).view(np.int32)


def meta_versions(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Weight versions of meta."""
    return (meta >> VERSION_SHIFT) & _VERSION_MASK


def meta_kinds(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Kinds of meta, 0 where nothing is held."""
    return meta >> KIND_SHIFT


def places(salt: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64[n], where cells belong: a life's salt (one each, or one for all) and positions."""
    return (salt + positions.view(np.uint64)) * OF_PLACE


def seals(rows: NDArray[Any], meta: NDArray[np.int64], place: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64[n], what the third part of n cells must be. rows: [n, cells], C order."""
    size = rows.shape[1] * rows.itemsize
    # One pass over words as wide as rows divide into: 8 us for 256 rows of 61x8.
    words = rows.view(np.dtype(f"u{math.gcd(size, 8)}")) if len(rows) else rows
    out: NDArray[np.uint64] = np.add.reduce(words, axis=1, dtype=np.uint64)
    out += meta.view(np.uint64) * _OF_META
    out += place
    return out


class Layout:
    """The pages as cells of one row size. rows: [pages, R, moe_layers * top_k]. meta: int64[pages, R], token id (32
    bits), weight version (24), kind (8); 0 holds nothing. seal: uint64[pages, R]. Nothing clears cells at and past a
    life's end. Meta is written last, so that a cell that holds something is whole.

    row_at, meta_at, seal_at: the same cells by one index, the number of the 8-byte word they begin at (see `words`);
    row_at has an opaque dtype of a whole row. A decode step writes with these: numpy copies 256 rows in 9 us instead of
    12, their meta in 0.4 instead of 1.4, than with two indices and elements."""

    def __init__(self, buffer: NDArray[np.uint8], page_bytes: int, geometry: Geometry) -> None:
        size, item = geometry.row_nbytes, geometry.wire_dtype
        behind = -(-size // 8) * 8
        cell = behind + 16
        per_page = page_bytes // cell
        if per_page < 1:
            raise GeometryError(f"a row of {size} bytes does not fit a page of {page_bytes}: raise --page-bytes")
        pages = len(buffer) // page_bytes
        self.rows_per_page = per_page
        self.rows: NDArray[Any] = np.ndarray(
            (pages, per_page, size // item.itemsize), item, buffer.data, 0, (page_bytes, cell, item.itemsize)
        )
        self.meta: NDArray[np.int64] = np.ndarray((pages, per_page), np.int64, buffer.data, behind, (page_bytes, cell))
        self.seal: NDArray[np.uint64] = np.ndarray(
            (pages, per_page), np.uint64, buffer.data, behind + 8, (page_bytes, cell)
        )
        self.row_dtype = np.dtype((np.void, size))
        self.cell_words, self._page_words = cell // 8, page_bytes // 8
        # Every word but those too near the end of the buffer to begin a cell: the views overlap themselves.
        words = (len(buffer) - cell) // 8 + 1
        self.row_at: NDArray[np.void] = np.ndarray((words,), self.row_dtype, buffer.data, 0, (8,))
        self.meta_at: NDArray[np.int64] = np.ndarray((words,), np.int64, buffer.data, behind, (8,))
        self.seal_at: NDArray[np.uint64] = np.ndarray((words,), np.uint64, buffer.data, behind + 8, (8,))

    def words(self, page: NDArray[np.int64], cell: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where cells begin, for `row_at` and `meta_at`."""
        return page * self._page_words + cell * self.cell_words


class Arena:
    """Hands out pages of `buffer` (uint8, its length a multiple of `page_bytes`)."""

    def __init__(self, buffer: NDArray[np.uint8], page_bytes: int = PAGE_BYTES) -> None:
        if page_bytes % 8 or len(buffer) < page_bytes:
            raise ValueError(f"page_bytes {page_bytes} must be a multiple of 8 and fit the buffer ({len(buffer)})")
        self._buffer = buffer[: len(buffer) // page_bytes * page_bytes]
        self.page_bytes = page_bytes
        self.pages = len(self._buffer) // page_bytes
        # Popped from the end: the lowest pages are used first, so an idle daemon touches little memory.
        self._free = list(range(self.pages - 1, -1, -1))
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._limbo: deque[tuple[int, list[int]]] = deque()

    @property
    def free_pages(self) -> int:
        """Pages that may be taken now."""
        return len(self._free)

    @property
    def pages_in_limbo(self) -> int:
        """Pages that were given back and may be taken once the record that says so is safe."""
        return sum(len(pages) for _, pages in self._limbo)

    def layout(self, geometry: Geometry) -> Layout:
        """Cells for `geometry`'s rows. Raises GeometryError when one row is larger than a page."""
        cells = (geometry.row_nbytes, geometry.wire_dtype.itemsize)
        if cells not in self._layouts:
            self._layouts[cells] = Layout(self._buffer, self.page_bytes, geometry)
        return self._layouts[cells]

    def take(self, count: int) -> list[int]:
        """`count` pages, holding whatever they held. The caller has checked `free_pages`."""
        cut = len(self._free) - count
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        return pages

    def give(self, pages: list[int], record: int) -> None:
        """Return pages. Until `record` is safe a restart would find them in use: nothing else may be written there."""
        if pages:
            self._limbo.append((record, pages))

    def safe(self, record: int) -> bool:
        """Every record up to `record` is safe. True when pages came free."""
        came = False
        while self._limbo and self._limbo[0][0] <= record:
            self._free.extend(self._limbo.popleft()[1])
            came = True
        return came

    def restore(self, used: Iterable[int]) -> None:
        """All pages but `used` are free. Raises ValueError when a page is used twice or is none."""
        found = list(used)
        taken = set(found)
        if len(taken) != len(found) or (taken and not 0 <= min(taken) <= max(taken) < self.pages):
            raise ValueError(f"{len(found)} pages in use of {self.pages}, and some twice or out of range")
        self._free = [page for page in range(self.pages - 1, -1, -1) if page not in taken]
        self._limbo.clear()
