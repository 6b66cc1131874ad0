"""What differs between the supported versions of transformers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import transformers

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
            raise CaptureRefused(_SLIDING)
        self._allocator = full[0]
        self._name = next((k for k, v in (allocators or {}).items() if v is full[0]), None)
        if allocators is not None:
            self.page_size = int(self._allocator.tokens_per_page)
            blocks = (cache.num_sectors + 2) * self._allocator.blocks_per_sector
        else:
            self.page_size = int(self._allocator.block_size)
            blocks = cache.num_blocks + 2
        self.num_slots = int(blocks) * self.page_size

    def extend(self, slots: list[int], request_id: str, start: int, stop: int) -> None:
        """Append the slots of positions [start, stop) of a request that holds cache for them. Plain integers: a decode
        step of 256 takes 60 us this way, 1,500 us with an array a request."""
        table, size = self._allocator.block_table[request_id], self.page_size
        if stop - start == 1:
            slots.append(table[start // size] * size + start % size)
            return
        for page in range(start // size, (stop - 1) // size + 1):
            base = (table[page] - page) * size
            slots.extend(range(base + max(start, page * size), base + min(stop, (page + 1) * size)))

    def of_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Slots of whole blocks, in order."""
        return [slot for block in blocks for slot in range(block * self.page_size, (block + 1) * self.page_size)]

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


def refuse_model(config: Any) -> None:
    """Refuse a model none of whose layers attends to everything. Raises CaptureRefused. config: its text config."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    if "full_attention" not in kinds:
        raise CaptureRefused(_SLIDING)


def refuse_parallel(ranks: int) -> None:
    """Refuse an engine over several ranks: which of them ships, and that all agree, is not proven here. Raises
    CaptureRefused."""
    if ranks > 1:
        raise CaptureRefused(f"tensor parallelism over {ranks} ranks is not proven: run one rank a replica")


def refuse_unsupported(config: Any) -> None:
    """Refuse configurations of continuous batching whose routes would be incomplete. Raises CaptureRefused."""
    graphs = config.use_cuda_graph
    if graphs is None or (any(graphs) if isinstance(graphs, tuple) else graphs):
        import torch

        if graphs or torch.cuda.is_available():
            raise CaptureRefused("CUDA graphs replay without Python hooks: pass use_cuda_graph=False")
    if config.use_async_batching:
        raise CaptureRefused("async batching keeps two batches in flight: pass use_async_batching=False")
    # None lets the engine size it by itself.
    if config.cpu_offload_space is None or config.cpu_offload_space > 0:
        raise CaptureRefused("KV offload restores blocks without their routes: pass cpu_offload_space=0")
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise CaptureRefused("a compiled forward runs no Python hooks: leave the compile configs unset")


_SLIDING = (
    "no layer has full attention: a sliding window reuses slots within a request, so prefix hits could not be read back"
)
