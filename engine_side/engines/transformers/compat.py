"""What differs between the supported versions of transformers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from engine_side.capture.errors import CaptureRefused

SUPPORTED = ("5.17", "5.24")


def require_supported() -> None:
    """Raise CaptureRefused unless this version's internals are the ones known here."""
    found = transformers.__version__
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise CaptureRefused(
            f"transformers {found} is installed; capture knows the continuous batching of {' and '.join(SUPPORTED)}: "
            "install one of these"
        )


class PagedSlots:
    """Slots of a full-attention group of a `PagedAttentionCache`: block id x page size + offset in the page."""

    def __init__(self, cache: Any) -> None:
        allocators = getattr(cache, "cache_allocators", None)
        found = list(allocators.values()) if allocators is not None else list(cache.group_cache_managers)
        # A sliding-window group reuses slots within a request: its slots do not name positions.
        full = [x for x in found if type(x).__name__ == "FullAttentionCacheAllocator"]
        if not full:
            raise CaptureRefused(
                "the cache has no full-attention group: a sliding window reuses slots within a request, so prefix hits "
                "could not be read back"
            )
        self._allocator = full[0]
        self._name = next((k for k, v in (allocators or {}).items() if v is full[0]), None)
        if allocators is not None:
            self.page_size = int(self._allocator.tokens_per_page)
            blocks = (cache.num_sectors + 2) * self._allocator.blocks_per_sector
        else:
            self.page_size = int(self._allocator.block_size)
            blocks = cache.num_blocks + 2
        self.num_slots = int(blocks) * self.page_size

    def of(self, request_id: str, start: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop-start]: slots of positions [start, stop) of a request that holds cache for them."""
        table = np.asarray(self._allocator.block_table[request_id], np.int64)
        positions = np.arange(start, stop)
        return table[positions // self.page_size] * self.page_size + positions % self.page_size

    def of_blocks(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Slots of whole blocks, in order."""
        base = np.asarray(blocks, np.int64)[:, None] * self.page_size
        return (base + np.arange(self.page_size)).reshape(-1)

    def wrap_copies(self, cache: Any, mirror: Callable[[Sequence[int], Sequence[int]], None]) -> tuple[str, Any]:
        """(method name, wrapper) of the block copy that forks use; `mirror(source, target)` gets block ids."""
        if hasattr(cache, "perform_cache_copy"):
            original = cache.perform_cache_copy

            def perform_cache_copy(copies: dict[str, tuple[list[int], list[int]]]) -> None:
                original(copies)
                source, target = copies.get(self._name or "", ([], []))
                mirror(source, target)

            return "perform_cache_copy", perform_cache_copy
        copy_cache = cache.copy_cache

        def copy_cache_and_rows(source: list[int], target: list[int]) -> None:
            copy_cache(source, target)
            mirror(source, target)

        return "copy_cache", copy_cache_and_rows


def refuse_unsupported(config: Any) -> None:
    """Refuse configurations of continuous batching whose routes would be incomplete. Raises CaptureRefused."""
    graphs = config.use_cuda_graph
    if graphs is None or (any(graphs) if isinstance(graphs, tuple) else graphs):
        import torch

        if graphs or torch.cuda.is_available():
            raise CaptureRefused("CUDA graphs replay without Python hooks: pass use_cuda_graph=False")
    if config.use_async_batching:
        raise CaptureRefused("async batching keeps two batches in flight: pass use_async_batching=False")
    if (config.cpu_offload_space or 0) > 0:
        raise CaptureRefused("KV offload restores blocks without their routes: pass cpu_offload_space=0")
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise CaptureRefused("a compiled forward runs no Python hooks: leave the compile configs unset")
