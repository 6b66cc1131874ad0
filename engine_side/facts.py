"""What an engine declares of a run, in words that every engine shares.

Each default is harmless, so an adapter states only what its engine has. What *lifts* a refusal (rows sliced per rank,
routes that move with their blocks, rank 0 that ships) has to be claimed: a topology declared without it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedPath:
    """A fused or monolithic kernel path. routes: it chooses experts. per_layer: the engine can run the same layers
    without it. single_token: it serves batches of one token only."""

    name: str
    routes: bool
    per_layer: bool = False
    single_token: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """One run's facts. None stands for what the adapter cannot say yet."""

    engine: str = ""
    version: str = ""
    supported_versions: tuple[str, ...] = ()  # "major.minor"; empty where the adapter checks no version

    pipeline_stages: int = 1
    decode_context_ranks: int = 1
    prefill_context_ranks: int = 1
    tensor_ranks: int = 1
    rank_zero_ships: bool = False  # all ranks choose alike; rank 0 ships, the others hook nothing
    attention_data_ranks: int = 1  # ranks whose attention splits the batch and whose experts are shared
    rows_sliced_per_rank: bool = False
    dummy_writes_real_slots: bool = False  # an idle rank's or a graph's dummy batch names slots that hold requests
    physical_expert_ids: bool = False  # hooks see ids behind an expert-placement map or local to a rank
    pd_role: str | None = None  # "prefill", "decode", "server"
    kv_transfer: bool = False
    kv_offload: bool = False
    routes_move_with_blocks: bool = False

    prefix_caching: bool = False
    token_slots: bool = True  # the engine says which KV slot each token of a step writes
    full_attention_layers: int | None = None

    moe_layers: int | None = None
    sizes_known: bool = True  # the config says how many experts a layer and a token have
    num_experts: int | None = None
    top_k: int | None = None
    layers_with_two_routers: tuple[int, ...] = ()
    layers_sharing_a_router: tuple[int, ...] = ()
    layers_without_a_router: tuple[int, ...] = ()
    layers_unreported: tuple[int, ...] = ()  # MoE layers that the start-up forwards ran and no hook saw
    fused_paths: tuple[FusedPath, ...] = ()

    cuda_graphs: bool = False
    compiled: bool = False
    async_batching: bool = False
    drafter: bool = False
    http_server: bool = False

    def fused_paths_to_turn_off(self) -> tuple[str, ...]:
        """Names of the paths that an adapter must turn off, and no others: the layers run one by one instead."""
        return tuple(path.name for path in self.fused_paths if path.routes and path.per_layer)
