"""What differs between the supported versions of transformers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestStatus

from engine_side.capture.hooks import find_routers, geometry_of, router_names, sizes_of
from engine_side.facts import EngineFacts, FusedPath
from engine_side.support import require

try:
    from transformers.generation.continuous_batching.requests import create_warmup_future_states
except ImportError:  # 5.17
    from transformers.generation.continuous_batching.utils import create_warmup_future_states

SUPPORTED = ("5.17", "5.24")

RANK_ZERO_SHIPS = True
"""Whether several tensor parallel ranks were shown, on this engine, to choose alike and to ship once."""

_LOCAL_IDS = "ep_router"
"""Rule of a parallel plan that renumbers what a router returns inside its forward, where no hook sees logical ids: that
of expert parallelism in 5.17. In 5.24 tokens find the ranks of their experts behind the router."""


class PagedSlots:
    """Slots of a full-attention group of a `PagedAttentionCache`: block id x page size + offset in the page."""

    def __init__(self, cache: Any) -> None:
        allocators = getattr(cache, "cache_allocators", None)
        found = list(allocators.values()) if allocators is not None else list(cache.group_cache_managers)
        # A sliding-window group reuses slots within a request: its slots do not name positions.
        full = [i for i, x in enumerate(found) if type(x).__name__ == "FullAttentionCacheAllocator"]
        require(EngineFacts(full_attention_layers=len(full)))
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


def buffer_pairs(io: Any) -> list[Any]:
    """The sets of input buffers that steps are prepared in, on the host's side: async batching has two."""
    return [pair.host_io for pair in io.io_pairs] if hasattr(io, "io_pairs") else [io]


def forget_graphs(io: Any) -> None:
    """Have the engine capture its graphs anew."""
    for each in [pair.device_io for pair in io.io_pairs] if hasattr(io, "io_pairs") else [io]:
        if each.graphs._storage:
            each.graphs = type(each.graphs)()


def made_up_requests(cache: Any, count: int, new: int, past: int) -> list[Any]:
    """`FutureRequestState`s of requests that nobody asked for, as the engine makes them to warm up: each holds blocks
    of `cache` for `past` tokens and runs `new`. Fewer than `count` where the cache has no room."""
    status = RequestStatus.DECODING if new == 1 and past else RequestStatus.PREFILLING
    found: list[Any] = create_warmup_future_states(count, status, new, past, cache)
    return found


def clear_pages(cache: Any, requests: Sequence[str]) -> None:
    """Zero the cached keys and values of `requests`: 5.17 leaves pages that nobody wrote as the allocator gave them."""
    for manager in getattr(cache, "group_cache_managers", ()):
        blocks = [block for request in requests for block in manager.block_table.get(request, ())]
        with torch.inference_mode():  # the only mode that may write to tensors of either mode
            for tensor in (*cache.key_cache, *cache.value_cache):
                tensor.view(-1, cache.block_size, *tensor.shape[1:])[blocks] = 0


def refuse_model(model: Any) -> None:
    """Refuse what a model and its config show. Raises CaptureRefused."""
    require(model_facts(model))


def refuse_engine(config: Any, ranks: int) -> None:
    """Refuse what a ContinuousBatchingConfig shows, and the tensor parallel ranks found. Raises CaptureRefused."""
    require(engine_facts(config, ranks))


def refuse_config(config: Any, batching: Any = None) -> None:
    """Refuse a model before its weights load: its layers are built without memory. Raises CaptureRefused."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    refuse_model(model)
    geometry_of(model, find_routers(model))
    if batching is not None:
        refuse_engine(batching, 1)


def model_facts(model: Any) -> EngineFacts:
    """What a model shows before any of its modules is touched."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"]
    num_experts, top_k = sizes_of(text)
    spread = getattr(model.config, "distributed_config", None)
    tensor, experts = _ranks(spread, "tp_size"), _ranks(spread, "ep_size")
    return EngineFacts(
        engine="transformers",
        version=transformers.__version__,
        supported_versions=SUPPORTED,
        pipeline_stages=_ranks(spread, "pp_size"),
        tensor_ranks=tensor,
        rank_zero_ships=RANK_ZERO_SHIPS,
        # Experts spread over more ranks than share a batch: attention is data parallel over the rest.
        attention_data_ranks=max(1, experts // tensor),
        physical_expert_ids=_LOCAL_IDS in (getattr(model, "tp_plan", None) or {}).values(),
        full_attention_layers=list(kinds).count("full_attention"),
        num_experts=num_experts,
        top_k=top_k,
        fused_paths=tuple(_kernels(model)),
    )


def engine_facts(config: Any, ranks: int) -> EngineFacts:
    """What a configuration of continuous batching shows, as passed or as resolved."""
    graphs, space = config.use_cuda_graph, config.cpu_offload_space
    return EngineFacts(
        tensor_ranks=ranks,
        rank_zero_ships=RANK_ZERO_SHIPS,
        # None lets the engine size it by itself.
        kv_offload=space is None or space > 0,
        prefix_caching=config.allow_block_sharing,
        cuda_graphs=graphs is None or (any(graphs) if isinstance(graphs, tuple) else graphs),
        compiled=config.varlen_compile_config is not None or config.decode_compile_config is not None,
        async_batching=bool(config.use_async_batching),
    )


def tensor_rank(model: Any) -> int:
    """This process's rank among those that a model's layers are spread over; 0 where they are not."""
    mesh = DistributedHelper.extract_tp_mesh(getattr(model, "_device_mesh", None))
    return 0 if mesh is None else int(mesh.get_local_rank())


def _ranks(spread: Any, name: str) -> int:
    return int(getattr(spread, name, None) or 1)


def _kernels(model: Any) -> Iterator[FusedPath]:
    """Kernels of the hub that `use_kernels=True` put in place of a module's forward. One around a router routes itself,
    and the engine can only turn off all of them together."""
    if not getattr(model, "use_kernels", False):
        return
    routing = {type(model.get_submodule(name.rpartition(".")[0])) for name in router_names(model)}
    for kind in {type(module) for module in model.modules()}:
        if (name := getattr(kind, "kernel_layer_name", None)) is not None:
            yield FusedPath(name=name, routes=kind in routing)
