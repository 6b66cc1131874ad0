"""Capture's bytes, declared to the planner of the KV cache: fewer blocks, so that cache and rows fit what was allowed.

The engine settles the number of blocks from free memory while it makes the cache. Its own solver does so here too, told
that each cached token costs its row and each token of a batch its record; no other size of the cache changes. Every
tensor parallel rank declares, also those that hold no rows, so that block counts agree. A number of blocks that is
given stays as it is, and so does a cache that was there before capture.

Not declared: tables of addresses (under 1 MiB) and prefix rows on their way to the host (at most 32 MiB). They come out
of the share of the memory that the engine leaves free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from transformers.generation.continuous_batching import cache as engine
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

from engine_side.capture.records import RecordLayout
from engine_side.capture.slot_store import SlotStore

_TRASH: Final = 2
"""Blocks, or sectors, that the cache holds beside those it counts: slots of theirs are written too."""


@dataclass(frozen=True, slots=True)
class DeclaredBytes:
    """What capture costs on the device. slot: of every token that the cache holds. batch_token: of every token of the
    largest forward."""

    slot: int
    batch_token: int

    @classmethod
    def of(cls, layout: RecordLayout, compiled: bool) -> DeclaredBytes:
        """compiled: ids are copied out of compiled forwards (int32) before the commit."""
        geometry = layout.geometry
        staged = geometry.num_moe_layers * geometry.top_k * 4 if compiled else 0
        return cls(SlotStore.slot_bytes(layout), layout.stride + staged)

    def beside(self, block_tokens: int) -> int:
        """Bytes of slots that are no token's: the pad row, and those of blocks that are never allocated."""
        return (_TRASH * block_tokens + 1) * self.slot


class _DeclaringPlanner(PagedAttentionMemoryHandler):
    """The engine's solver with capture among the costs. Its two versions ask for them under different names."""

    def __init__(self, declared: DeclaredBytes, *args: Any, **kwargs: Any) -> None:
        self._declared = declared
        super().__init__(*args, **kwargs)

    def get_available_memory(self) -> int:
        available: int = super().get_available_memory()
        return available - self._beside

    @property
    def _beside(self) -> int:
        return self._declared.beside(self.tokens_per_sector if hasattr(self, "tokens_per_sector") else self.block_size)

    # 5.24: a cost per cached token and one per token of a batch.

    @property
    def bytes_per_cache_token(self) -> int:
        cost: int = super().bytes_per_cache_token
        return cost + self._declared.slot

    @property
    def bytes_per_batch_token(self) -> int:
        cost: int = super().bytes_per_batch_token
        return cost + self._declared.batch_token

    # 5.17: coefficients of a polynomial in both.

    def _equation_coefficients(self, peak_deltas: tuple[int, ...]) -> tuple[int, ...]:
        batch_token, cached, both, squared = super()._equation_coefficients(peak_deltas)
        return batch_token + self._declared.batch_token, cached + self._declared.slot, both, squared

    def _solve_for_peaks(self, max_batch_tokens: Any, num_blocks: Any, cache_fill_per_batch: Any) -> tuple[int, int]:
        solve = super()._solve_for_peaks
        if cache_fill_per_batch is None:
            found: tuple[int, int] = solve(max_batch_tokens, num_blocks, cache_fill_per_batch)
            return found
        # How many tokens a batch may have is settled before, and is what it would be without capture.
        declared, beside = self._declared, self._beside
        self._declared = DeclaredBytes(0, 0)
        self.available_memory += beside
        try:
            found = solve(max_batch_tokens, num_blocks, cache_fill_per_batch)
        finally:
            self._declared = declared
            self.available_memory -= beside
        return found


_LOCK = threading.Lock()
_DECLARING: dict[int, DeclaredBytes] = {}
"""By thread: caches of other models may be made meanwhile."""


def _planner(*args: Any, **kwargs: Any) -> Any:
    declared = _DECLARING.get(threading.get_ident())
    if declared is None:
        return PagedAttentionMemoryHandler(*args, **kwargs)
    return _DeclaringPlanner(declared, *args, **kwargs)


@contextmanager
def declaring(declared: DeclaredBytes, config: Any) -> Iterator[None]:
    """Within the block, a cache that this thread makes leaves room for capture. config: its ContinuousBatchingConfig,
    whose `num_blocks` wins."""
    if config.num_blocks is not None:
        yield
        return
    thread = threading.get_ident()
    with _LOCK:
        _DECLARING[thread] = declared
        engine.PagedAttentionMemoryHandler = _planner
    try:
        yield
    finally:
        with _LOCK:
            del _DECLARING[thread]
            if not _DECLARING:
                engine.PagedAttentionMemoryHandler = PagedAttentionMemoryHandler
