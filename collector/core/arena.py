"""Row memory: fixed pages under a byte budget, in one buffer that somebody else mapped.

A page holds R cells of one geometry as two columns: the rows themselves, then one int64 of meta a row. Every row
costs its wire bytes plus 8, and a whole patch is written by two fancy-index scatters, whatever its requests.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import GeometryError
from protocol.geometry import Geometry

PAGE_BYTES: Final = 32 << 10
"""33 rows of the largest common model (61x8 int16); a short request of a small model wastes at most this."""

_VERSION_SHIFT: Final = 32
_KIND_SHIFT: Final = 56
_TOKEN_MASK: Final = 0xFFFF_FFFF
_VERSION_MASK: Final = 0xFF_FFFF


def pack_meta(token_ids: NDArray[np.int64], versions: NDArray[np.int64], kinds: NDArray[np.uint8]) -> NDArray[np.int64]:
    """int64 meta of rows: token id (32 bits), weight version (24), kind (8). 0 means: holds nothing."""
    tag: NDArray[np.int64] = versions << _VERSION_SHIFT
    tag |= kinds.astype(np.int64) << _KIND_SHIFT
    tag |= token_ids & _TOKEN_MASK
    return tag


def meta_tokens(meta: NDArray[np.int64]) -> NDArray[np.int32]:
    """Token ids (int32) of meta."""
    return meta.astype(np.uint32).view(np.int32)


def meta_versions(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Weight versions of meta."""
    return (meta >> _VERSION_SHIFT) & _VERSION_MASK


def meta_kinds(meta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Kinds of meta, 0 where nothing is held."""
    return meta >> _KIND_SHIFT


class Layout:
    """The pages as cells of one row size. rows: void[pages, R]; meta: int64[pages, R]."""

    def __init__(self, buffer: NDArray[np.uint8], page_bytes: int, row_nbytes: int) -> None:
        per_page = (page_bytes - 8) // (row_nbytes + 8)
        if per_page < 1:
            raise GeometryError(f"a row of {row_nbytes} bytes does not fit a page of {page_bytes}: raise --page-bytes")
        pages = len(buffer) // page_bytes
        self.rows_per_page = per_page
        self.row_nbytes = row_nbytes
        meta_at = -(-per_page * row_nbytes // 8) * 8
        self.rows: NDArray[np.void] = np.ndarray(
            (pages, per_page), np.dtype((np.void, row_nbytes)), buffer.data, 0, (page_bytes, row_nbytes)
        )
        self.meta: NDArray[np.int64] = np.ndarray((pages, per_page), np.int64, buffer.data, meta_at, (page_bytes, 8))


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
        self._layouts: dict[int, Layout] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def layout(self, geometry: Geometry) -> Layout:
        """Cells for `geometry`'s rows. Raises GeometryError when one row is larger than a page."""
        size = geometry.row_nbytes
        if size not in self._layouts:
            self._layouts[size] = Layout(self._buffer, self.page_bytes, size)
        return self._layouts[size]

    def take(self, count: int, layout: Layout) -> list[int]:
        """`count` pages that hold nothing. The caller has checked `free_pages`."""
        cut = len(self._free) - count
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        layout.meta[pages] = 0
        return pages

    def give(self, pages: list[int]) -> None:
        """Return pages."""
        self._free.extend(pages)
