"""Row memory: fixed pages under a byte budget, in one buffer that somebody else mapped.

A page holds R cells of one geometry. A cell is a row, padded to 8 bytes, and behind it one int64 of meta, so that both
scatters of a patch touch the same cache lines: with the meta in a column of its own a decode step of 256 requests took
half as long again. Two fancy-index scatters write a whole patch, whatever its requests.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GeometryError
from protocol.geometry import Geometry
from protocol.patch import KIND_SHIFT, VERSION_SHIFT

PAGE_BYTES: Final = 64 << 10
"""66 rows of 61x8 int16; a short request of a small model wastes at most this."""

_VERSION_MASK: Final = 0xFF_FFFF


def meta_tokens(meta: NDArray[np.int64]) -> NDArray[np.int32]:
    """Token ids (int32) of meta."""
    return meta.astype(np.uint32).view(np.int32)


def meta_versions(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Weight versions of meta."""
    return (meta >> VERSION_SHIFT) & _VERSION_MASK


def meta_kinds(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Kinds of meta, 0 where nothing is held."""
    return meta >> KIND_SHIFT


class Layout:
    """The pages as cells of one row size. rows: [pages, R, moe_layers * top_k]. meta: int64[pages, R], token id (32
    bits), weight version (24), kind (8); 0 holds nothing. Nothing clears cells at and past a life's end.

    row_at, meta_at: the same cells by one index, the number of the 8-byte word they begin at (see `words`); row_at has
    an opaque dtype of a whole row. A decode step writes with these: numpy copies 256 rows in 9 us instead of 12, their
    meta in 0.4 instead of 1.4, than with two indices and elements."""

    def __init__(self, buffer: NDArray[np.uint8], page_bytes: int, geometry: Geometry) -> None:
        size, item = geometry.row_nbytes, geometry.wire_dtype
        behind = -(-size // 8) * 8
        cell = behind + 8
        per_page = page_bytes // cell
        if per_page < 1:
            raise GeometryError(f"a row of {size} bytes does not fit a page of {page_bytes}: raise --page-bytes")
        pages = len(buffer) // page_bytes
        self.rows_per_page = per_page
        self.rows: NDArray[Any] = np.ndarray(
            (pages, per_page, size // item.itemsize), item, buffer.data, 0, (page_bytes, cell, item.itemsize)
        )
        self.meta: NDArray[np.int64] = np.ndarray((pages, per_page), np.int64, buffer.data, behind, (page_bytes, cell))
        self.row_dtype = np.dtype((np.void, size))
        self.cell_words, self._page_words = cell // 8, page_bytes // 8
        # Every word but those too near the end of the buffer to begin a cell: the views overlap themselves.
        words = (len(buffer) - cell) // 8 + 1
        self.row_at: NDArray[np.void] = np.ndarray((words,), self.row_dtype, buffer.data, 0, (8,))
        self.meta_at: NDArray[np.int64] = np.ndarray((words,), np.int64, buffer.data, behind, (8,))

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

    @property
    def free_pages(self) -> int:
        return len(self._free)

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

    def give(self, pages: list[int]) -> None:
        """Return pages."""
        self._free.extend(pages)
