"""What differs between the supported versions of transformers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

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
        full = [i for i, x in enumerate(found) if type(x).__name__ == "FullAttentionCacheAllocator"]
        if not full:
            raise CaptureRefused(_SLIDING)
        self._group = full[0]
        self._allocator = allocator = found[full[0]]
        self._name = next((k for k, v in (allocators or {}).items() if v is allocator), None)
        if allocators is not None:
            self.page_size = int(allocator.tokens_per_page)
            blocks = (cache.num_sectors + 2) * allocator.blocks_per_sector
            # A block of this version holds the pages of all the group's layers.
            self._stride = int(allocator.block_physical_stride)
        else:
            self.page_size = self._stride = int(allocator.block_size)
            blocks = cache.num_blocks + 2
        self.num_slots = int(blocks) * self.page_size

    def of(self, request_id: str, start: int, stop: int) -> NDArray[np.int32]:
        """Slots of positions [start, stop) of a request that holds cache for them."""
        first, size = start // self.page_size, self.page_size
        blocks = np.asarray(self._allocator.block_table[request_id][first : (stop - 1) // size + 1], np.int32)
        slots = np.add.outer(blocks * size, np.arange(size)).astype(np.int32).reshape(-1)
        part: NDArray[np.int32] = slots[start - first * size : stop - first * size]
        return part

    def of_blocks(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Slots of whole blocks, in order."""
        return (np.asarray(blocks, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def on_device(self, inputs: Mapping[str, Any]) -> Tensor:
        """The slot that each token of a forward writes, out of the tensors that the forward itself uses: int, pads are
        negative or a slot that nobody owns. inputs: the model's keyword arguments."""
        table = inputs.get("block_table")
        if table is None:
            written = inputs["write_index"][self._group]
        else:
            # The decode path of flash attention: a row of pages for each request, one token each.
            at = inputs["position_ids"][0].to(torch.int64)
            pages = table[self._group].gather(1, (at // self.page_size)[:, None])[:, 0].to(torch.int64)
            written = torch.where(pages < 0, -1, pages * self.page_size + at % self.page_size)
        if self._stride == self.page_size:
            return written
        return torch.where(written < 0, -1, written // self._stride * self.page_size + written % self._stride)

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


def batches_launched(io: Any) -> Sequence[Any]:
    """The `FutureRequestState`s of the step launched last. Async batching has switched to its other pair by then."""
    if hasattr(io, "io_pairs"):
        io = io.io_pairs[1 - io.current_pair].host_io
    states: Sequence[Any] = io.requests_in_batch
    return states


def forget_graphs(io: Any) -> None:
    """Have the engine capture its graphs anew."""
    for each in [pair.device_io for pair in io.io_pairs] if hasattr(io, "io_pairs") else [io]:
        if each.graphs._storage:
            each.graphs = type(each.graphs)()


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
    # None lets the engine size it by itself.
    if config.cpu_offload_space is None or config.cpu_offload_space > 0:
        raise CaptureRefused("KV offload restores blocks without their routes: pass cpu_offload_space=0")


_SLIDING = (
    "no layer has full attention: a sliding window reuses slots within a request, so prefix hits could not be read back"
)
