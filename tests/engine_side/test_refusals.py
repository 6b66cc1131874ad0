"""Every refusal that this engine can show, through the adapter's own entry points; nothing stays installed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, CompileConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from engine_side.capture import hooks
from engine_side.capture.errors import CaptureRefused
from engine_side.engines.transformers import capture_routes, check_config, compat
from engine_side.facts import EngineFacts
from engine_side.support import ROWS, Action, Row, require
from tests.engines.running import batching, generation
from tests.harness.tiny import CHECKPOINT, load_tiny

BY_KEY = {row.key: row for row in ROWS}


class _RoutesInside(nn.Module):
    """A block that routes by itself: experts, and no router that a hook could see."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def _dense(_model: Any, _patch: pytest.MonkeyPatch) -> Any:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, **sizes))


def _second_router(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].second = copy.deepcopy(model.model.layers[1].mlp.gate)


def _one_router_for_two(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.model.layers[2].mlp.gate = model.model.layers[1].mlp.gate


def _routes_inside(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.model.layers[3].mlp = _RoutesInside(model.model.layers[3].mlp.experts)


def _no_sizes(model: Any, _patch: pytest.MonkeyPatch) -> None:
    # One figure a layer, as some configs have it; past the check that this config makes of its own fields.
    own = vars(model.config)
    own.update({name: [32] * 8 for name in ("num_experts", "num_local_experts") if name in own})


def _kernel_that_routes(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "_use_kernels", True, raising=False)
    patch.setattr(type(model.model.layers[1].mlp), "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)


def _kernels_that_do_not(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "_use_kernels", True, raising=False)
    patch.setattr(type(model.model.norm), "kernel_layer_name", "RMSNorm", raising=False)


def _config(**values: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def prepare(model: Any, _patch: pytest.MonkeyPatch) -> None:
        for name, value in values.items():
            setattr(model.config, name, value)

    return prepare


def _spread(**sizes: int) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """As `from_pretrained(distributed_config=...)` leaves it on the config."""

    def prepare(model: Any, _patch: pytest.MonkeyPatch) -> None:
        if missing := set(sizes) - {field.name for field in fields(DistributedConfig)}:
            pytest.skip(f"this version of the engine has no {missing}")
        model.config.distributed_config = DistributedConfig(**sizes)

    return prepare


def _ranks_found(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The helper that a manager makes finds two ranks; one process has one, so it is told so."""
    from transformers.generation.continuous_batching import distributed

    make = distributed.DistributedHelper.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.tp_size = 2

    patch.setattr(distributed.DistributedHelper, "__init__", init)


def _ranks_found_unproven(model: Any, patch: pytest.MonkeyPatch) -> None:
    _ranks_found(model, patch)
    patch.setattr(compat, "RANK_ZERO_SHIPS", False)


def _spread_unproven(model: Any, patch: pytest.MonkeyPatch) -> None:
    _spread(tp_size=2)(model, patch)
    patch.setattr(compat, "RANK_ZERO_SHIPS", False)


def _routers_renumber(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The plan of expert parallelism in 5.17, which puts this around each router's forward."""
    patch.setattr(model, "_tp_plan", {**(model.tp_plan or {}), "model.layers.*.mlp.gate": "ep_router"}, raising=False)


def _version(_model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compat.transformers, "__version__", "5.30.1")


def _as_it_is(_model: Any, _patch: pytest.MonkeyPatch) -> None:
    pass


# (row, what to do to the model or the engine, settings of the batching)
SHOWN: list[tuple[str, Callable[[Any, pytest.MonkeyPatch], Any], dict[str, Any]]] = [
    ("engine_version", _version, {}),
    ("pipeline_parallel", _spread(pp_size=2), {}),
    ("tensor_parallel_unproven", _spread_unproven, {}),
    ("tensor_parallel_unproven", _ranks_found_unproven, {}),
    ("tensor_parallel", _spread(tp_size=2), {}),
    ("tensor_parallel", _ranks_found, {}),
    ("dp_attention", _spread(ep_size=2, fsdp_size=2), {}),
    ("physical_experts", _routers_renumber, {}),
    ("kv_offload", _as_it_is, {"cpu_offload_space": None}),
    ("kv_offload", _as_it_is, {"cpu_offload_space": 0.5}),
    ("sliding_window_only", _config(layer_types=["sliding_attention"] * 8), {}),
    ("sliding_window_only", _config(layer_types=None, sliding_window=128), {}),
    ("dense", _dense, {}),
    ("sizes_unknown", _no_sizes, {}),
    ("too_many_experts", _config(num_local_experts=40_000, num_experts=40_000), {}),
    ("top_k", _config(num_experts_per_tok=0), {}),
    ("two_routers", _second_router, {}),
    ("shared_router", _one_router_for_two, {}),
    ("no_router", _routes_inside, {}),
    ("fused_routing_only", _kernel_that_routes, {}),
    ("routes_nothing", _kernels_that_do_not, {}),
    ("compiled", _as_it_is, {"varlen_compile_config": CompileConfig()}),
    ("async_batching", _as_it_is, {"use_async_batching": True}),
]

NOT_SHOWN = {
    "decode_context_parallel": "the engine has none",
    "prefill_context_parallel": "the engine has none",
    "dp_attention_sliced": "nothing claims it for this engine",
    "dummy_batches": "dummy tokens go to a page of their own",
    "disaggregated": "the engine has none",
    "kv_transfer": "the engine has none",
    "no_token_slots": "the paged cache always names slots",
    "batch_order": "the paged cache always names slots",
    "unreported_layers": "routers are found in the model's structure, not by a forward",
    "fused_routing": "kernels of the hub can only be turned off together: fused_routing_only",
    "single_token_experts": "the engine has none",
    "cuda_graphs": "on a CPU the engine turns graphs off by itself",
    "drafter": "left out by the names of its modules: test_hooks",
    "http_server": "not for the model in hand to say",
}


def test_no_row_is_without_an_entry_point_or_a_reason() -> None:
    shown = {key for key, _, _ in SHOWN}
    assert shown | set(NOT_SHOWN) == set(BY_KEY)
    assert not shown & set(NOT_SHOWN)


@cache
def _tiny() -> Any:
    return load_tiny(torch.float32, attention="sdpa")


@pytest.mark.parametrize(("key", "prepare", "settings"), SHOWN, ids=[f"{i}-{row[0]}" for i, row in enumerate(SHOWN)])
def test_the_entry_points_show_the_row(
    key: str,
    prepare: Callable[[Any, pytest.MonkeyPatch], Any],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = copy.deepcopy(_tiny())
    model = prepare(model, monkeypatch) or model
    declared: list[EngineFacts] = []

    def noting(facts: EngineFacts) -> tuple[Row, ...]:
        declared.append(facts)
        return require(facts)

    monkeypatch.setattr(compat, "require", noting)
    monkeypatch.setattr(hooks, "require", noting)
    before = _state(model)

    def enter() -> None:
        block: AbstractContextManager[Any] = capture_routes(model, f"ipc://{tmp_path}/x.sock", drain_s=0.1)
        with block:
            # What the model shows is refused by then: only settings and ranks can be refused in the block.
            if BY_KEY[key].action is Action.REFUSE:
                assert settings or prepare is _ranks_found_unproven
            model.init_continuous_batching(
                generation_config=generation(), continuous_batching_config=batching(**settings)
            )

    if BY_KEY[key].action is Action.REFUSE:
        with pytest.raises(CaptureRefused) as refused:
            enter()
        assert refused.value.keys == (key,)
    else:
        enter()
        # A manager that is let through may change this; 5.17 does.
        model.config._attn_implementation = before[-1]
    assert any(BY_KEY[key].applies(facts) for facts in declared)
    assert _state(model) == before


def test_a_manager_that_was_there_before_is_refused_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = copy.deepcopy(_tiny())
    model._cached_continuous_batching_manager = model.init_continuous_batching(
        generation_config=generation(), continuous_batching_config=batching(cpu_offload_space=0.5)
    )
    monkeypatch.setattr("engine_side.engines.transformers.capture.hooked", _never)
    with pytest.raises(CaptureRefused) as refused, capture_routes(model, f"ipc://{tmp_path}/x.sock"):
        pass
    assert refused.value.keys == ("kv_offload",)


def _never(*_args: Any) -> Any:
    raise AssertionError("hooks were about to be installed")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("sliding_window_only", {"layer_types": ["sliding_attention"] * 8}),
        ("too_many_experts", {"num_experts": 40_000, "num_local_experts": 40_000}),
        ("top_k", {"num_experts_per_tok": 0}),
        ("dense", {"mlp_only_layers": list(range(8))}),
        ("pipeline_parallel", {"distributed_config": DistributedConfig(pp_size=2)}),
    ],
)
def test_what_a_config_shows_is_refused_before_weights_load(key: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True)
    check_config(config, batching())
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(CaptureRefused) as refused:
        check_config(config)
    assert refused.value.keys == (key,)


def test_all_that_a_config_shows_is_named_at_once() -> None:
    config = AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True)
    config.layer_types, config.num_local_experts = ["sliding_attention"] * 8, 40_000
    with pytest.raises(CaptureRefused) as refused:
        check_config(config)
    assert refused.value.keys == ("sliding_window_only", "too_many_experts")


def test_settings_are_refused_before_weights_load_too() -> None:
    with pytest.raises(CaptureRefused, match="cpu_offload_space=0") as refused:
        check_config(AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True), batching(cpu_offload_space=None))
    assert refused.value.keys == ("kv_offload",)


@pytest.mark.parametrize("graphs", [True, None, (False, True)])
def test_graphs_are_declared_as_a_gpu_leaves_them(graphs: Any) -> None:
    config = batching()
    assert not compat.engine_facts(config, 1).cuda_graphs
    config.use_cuda_graph = graphs
    assert compat.engine_facts(config, 1).cuda_graphs


def _state(model: nn.Module) -> tuple[Any, ...]:
    hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return set(vars(model)), hooked, threading.active_count(), model.config._attn_implementation
