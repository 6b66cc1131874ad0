"""Which topologies routes can be captured on: one table for the adapters, the README and the tests.

An adapter declares `EngineFacts` and calls `require` once it knows them: what a config shows, before weights load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from engine_side.capture.errors import CaptureRefused
from engine_side.facts import EngineFacts
from protocol.limits import MAX_EXPERTS, MAX_TOP_K


class Action(Enum):
    """What a row means for a run that it applies to."""

    REFUSE = "refused"
    FALL_BACK = "falls back"
    FINE = "fine"


@dataclass(frozen=True, slots=True)
class Row:
    """One topology. reads: the facts that `applies` looks at, shown in a refusal. way_out: an imperative, or, where
    nothing is refused, what happens. atom: where ROCm/ATOM pull request 2274 meets the same topology."""

    key: str
    action: Action
    topology: str
    why: str
    way_out: str
    reads: tuple[str, ...]
    applies: Callable[[EngineFacts], bool]
    atom: str | None = None


def require(facts: EngineFacts) -> tuple[Row, ...]:
    """Return the FALL_BACK rows that apply: turn off `facts.fused_paths_to_turn_off()`. Raises CaptureRefused, naming
    every refused topology and its way out."""
    applying = [row for row in ROWS if row.applies(facts)]
    if refused := [row for row in applying if row.action is Action.REFUSE]:
        raise CaptureRefused("; also ".join(_refusal(row, facts) for row in refused), tuple(row.key for row in refused))
    return tuple(row for row in applying if row.action is Action.FALL_BACK)


def markdown() -> str:
    """The table as the README shows it."""
    head = "| topology | | why | way out, or what happens | key |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {row.topology} | {row.action.value} | {row.why} | {row.way_out} | `{row.key}` |\n" for row in ROWS
    )


def _refusal(row: Row, facts: EngineFacts) -> str:
    """Only what differs from the default: that is what applies."""
    defaults = {field.name: field.default for field in fields(facts)}
    values = {name: getattr(facts, name) for name in row.reads}
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != defaults[name])
    return f"{row.key}: {row.topology} ({shown}): {row.why}; {row.way_out}"


def _version_unknown(facts: EngineFacts) -> bool:
    known = facts.supported_versions
    return bool(known) and ".".join(facts.version.split(".")[:2]) not in known


def _bad_top_k(facts: EngineFacts) -> bool:
    most = min(MAX_TOP_K, facts.num_experts or MAX_TOP_K)
    return facts.top_k is not None and not 1 <= facts.top_k <= most


_R, _B, _F = Action.REFUSE, Action.FALL_BACK, Action.FINE

# One row a paragraph, as a table reads.
# fmt: off
ROWS: tuple[Row, ...] = (
    Row("engine_version", _R, "engine version that the adapter does not know",
        "its internals may have moved, and hooks that miss look like hooks with nothing to say",
        "install a supported version", ("engine", "version", "supported_versions"), _version_unknown),
    Row("pipeline_parallel", _R, "pipeline parallel", "each stage sees its own layers only",
        "run one stage", ("pipeline_stages",), lambda f: f.pipeline_stages > 1,
        "PP != 1: Layers split across ranks"),
    Row("decode_context_parallel", _R, "decode context parallel", "each rank holds a shard of the positions",
        "set decode context parallel to 1", ("decode_context_ranks",), lambda f: f.decode_context_ranks > 1,
        "DCP or PCP != 1: Routes would be a rank-local shard"),
    Row("prefill_context_parallel", _R, "prefill context parallel", "each rank forwards a shard of the prompt",
        "set prefill context parallel to 1", ("prefill_context_ranks",), lambda f: f.prefill_context_ranks > 1,
        "DCP or PCP != 1: Routes would be a rank-local shard"),
    Row("tensor_parallel", _F, "tensor parallel whose ranks were shown to choose alike",
        "every rank sees the same tokens", "rank 0 captures, the others run no hook and hold no buffer",
        ("tensor_ranks", "rank_zero_ships"), lambda f: f.tensor_ranks > 1 and f.rank_zero_ships,
        "The capturer is now created on TP rank 0 only"),
    Row("tensor_parallel_unproven", _R, "tensor parallel on an engine where that was not shown",
        "two ranks could ship, or ship different choices", "run one rank a replica",
        ("tensor_ranks", "rank_zero_ships"), lambda f: f.tensor_ranks > 1 and not f.rank_zero_ships),
    Row("dp_attention", _R, "data parallel attention whose gathered rows are not sliced per rank",
        "a rank's rows would be padded or another rank's",
        "slice rows per rank, or run attention without data parallel",
        ("attention_data_ranks", "rows_sliced_per_rank"),
        lambda f: f.attention_data_ranks > 1 and not f.rows_sliced_per_rank,
        "Reject DP attention before exporting incomplete routes"),
    Row("dp_attention_sliced", _F, "data parallel attention with rows sliced per rank",
        "each rank keeps its own tokens' rows", "each rank is an emitter of its own",
        ("attention_data_ranks", "rows_sliced_per_rank"),
        lambda f: f.attention_data_ranks > 1 and f.rows_sliced_per_rank),
    Row("dummy_batches", _R, "dummy batches that write slots of real requests",
        "a dummy's routes would replace a request's", "give dummy tokens slot -1", ("dummy_writes_real_slots",),
        lambda f: f.dummy_writes_real_slots, "Dummy prefill capture can overwrite cached routes in slot 0"),
    Row("physical_experts", _R, "expert placement or expert parallel that shows physical or rank-local ids only",
        "a trainer needs logical ids",
        "capture before the placement map, or turn expert parallelism off",
        ("physical_expert_ids",),
        lambda f: f.physical_expert_ids, "_select_logical has the layer and returns logical ids before place_experts"),
    Row("disaggregated", _R, "disaggregated prefill and decode: producer, consumer or server",
        "neither side sees a whole request", "serve prefill and decode in one engine", ("pd_role",),
        lambda f: f.pd_role is not None, "RapidServe P/D: Decode never allocates KV or the capture buffer"),
    Row("kv_transfer", _R, "KV transfer between engines", "blocks arrive without their routes",
        "turn the KV connector off", ("kv_transfer", "routes_move_with_blocks"),
        lambda f: f.kv_transfer and not f.routes_move_with_blocks,
        "KV transfer / offload: Route rows are not moved with KV blocks"),
    Row("kv_offload", _R, "KV offload that restores blocks without their routes", "a restored prefix has no rows",
        "turn KV offload off (transformers: `cpu_offload_space=0`)", ("kv_offload", "routes_move_with_blocks"),
        lambda f: f.kv_offload and not f.routes_move_with_blocks,
        "KV transfer / offload: Route rows are not moved with KV blocks"),
    Row("no_token_slots", _R, "no token-to-slot mapping while prefix caching is on",
        "rows of a prefix hit cannot be read back", "turn prefix caching off", ("token_slots", "prefix_caching"),
        lambda f: not f.token_slots and f.prefix_caching,
        "Attention builder without supplies_token_slots (e.g. DeepSeek-V4 / V4.1)"),
    Row("batch_order", _F, "no token-to-slot mapping, prefix caching off", "nothing is ever read back",
        "rows leave in batch order and need no slot", ("token_slots", "prefix_caching"),
        lambda f: not f.token_slots and not f.prefix_caching,
        "Handle backends without slot_mapping during route capture"),
    Row("sliding_window_only", _R, "no layer with full attention: sliding windows alone",
        "a window reuses slots within a request, so slots do not name positions",
        "use a model with a full-attention layer", ("full_attention_layers",), lambda f: f.full_attention_layers == 0),
    Row("dense", _R, "dense model", "no MoE router, no routes", "run it without capture", ("moe_layers",),
        lambda f: f.moe_layers == 0, "No FusedMoE in the model: Dense models have no routes"),
    Row("sizes_unknown", _R, "config that does not say how many experts a layer or a token has",
        "ids could not be checked for range", "name them in the config", ("sizes_known",),
        lambda f: not f.sizes_known),
    Row("too_many_experts", _R, f"more than {MAX_EXPERTS:,} experts a layer", "routes are served as int16",
        "run it without capture", ("num_experts",),
        lambda f: f.num_experts is not None and f.num_experts > MAX_EXPERTS, "int16 holds every id and -1"),
    Row("top_k", _R, f"top_k of 0, above {MAX_TOP_K} or above the number of experts",
        "a row would have no valid choice", "correct the config", ("top_k", "num_experts"), _bad_top_k),
    Row("two_routers", _R, "two routers in a layer", "which of them routes is unknown",
        "keep one *TopKRouter a layer", ("layers_with_two_routers",), lambda f: bool(f.layers_with_two_routers)),
    Row("shared_router", _R, "layers that share a router", "its calls cannot be told apart",
        "give each layer a router of its own", ("layers_sharing_a_router",),
        lambda f: bool(f.layers_sharing_a_router)),
    Row("no_router", _R, "experts without a known router", "they route where no hook sees it",
        "give the layer a *TopKRouter module", ("layers_without_a_router",),
        lambda f: bool(f.layers_without_a_router), "Reject MoE decoders that bypass route capture hooks"),
    Row("unreported_layers", _R, "MoE layers that did not report in a start-up forward",
        "some path routes outside the hooks: fused, quantised or single-token", "turn that path off for these layers",
        ("layers_unreported",), lambda f: bool(f.layers_unreported), "Capture routed experts in the IQ2R MoE path"),
    Row("fused_routing", _B, "fused or monolithic decode that routes in its kernel, beside a per-layer path",
        "the kernel never shows what it chose", "the fused path is turned off, and it alone", ("fused_paths",),
        lambda f: any(p.routes and p.per_layer and not p.single_token for p in f.fused_paths),
        "Mono decode: MiniMax-M3, DeepSeek-V4.1, GLM-5.2, Kimi-K3, Qwen3.8 mono: Fused kernels route in-kernel and "
        "never write the buffer; the model falls back to the per-layer path"),
    Row("single_token_experts", _B, "single-token experts that route outside the router, beside a per-layer path",
        "batches of one token would have no rows", "they are turned off; one token takes the path of many",
        ("fused_paths",), lambda f: any(p.routes and p.per_layer and p.single_token for p in f.fused_paths),
        "Qwen4-Exp bs = 1 single-token experts: Routes outside FusedMoE; disabled under R3"),
    Row("fused_routing_only", _R, "a kernel that routes where the engine has no per-layer path to run instead",
        "nothing shows what it chose", "load the model without that kernel (transformers: `use_kernels=False`)",
        ("fused_paths",), lambda f: any(p.routes and not p.per_layer for p in f.fused_paths),
        "Capture routes in DeepSeek V4.1 mono decode"),
    Row("routes_nothing", _F, "fused kernels that route nothing, such as a DSA indexer", "they choose no experts",
        "left alone", ("fused_paths",), lambda f: any(not p.routes for p in f.fused_paths),
        "not the shared DSA indexer, which routes no experts"),
    Row("cuda_graphs", _F, "CUDA graphs", "the commit is part of the graph",
        "padding and dummy replays have slot -1 and export nothing", ("cuda_graphs",), lambda f: f.cuda_graphs,
        "The write happens on device, so CUDA-graph replay still records it"),
    Row("compiled", _F, "compiled forwards", "keeping is part of the compiled code",
        "hooks are in place before compilation", ("compiled",), lambda f: f.compiled,
        "Initialize routed-expert capture before level-3 compilation"),
    Row("async_batching", _F, "async batching", "each batch in flight has its own plan",
        "each step is attached exactly once", ("async_batching",), lambda f: f.async_batching,
        "Each batch is attached at most once"),
    Row("drafter", _F, "drafters and multi-token-prediction heads", "only the target model's routers are hooked",
        "rejected drafts are cut by the next forward", ("drafter",), lambda f: f.drafter,
        "Disable route capture during draft model execution"),
    Row("http_server", _F, "capture on an engine behind a server", "routes leave out of band, not in replies",
        "the server needs no change; trainers pull from the collector", ("http_server",), lambda f: f.http_server,
        "--enable-return-routed-experts is exposed on the server, where nothing reads routed_experts"),
)
# fmt: on

if __name__ == "__main__":
    print(markdown(), end="")
