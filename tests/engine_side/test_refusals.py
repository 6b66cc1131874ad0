"""What cannot be captured whole is refused by name, before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers
from engine_side.engines.transformers.compat import refuse_model, refuse_parallel, refuse_unsupported


class _RoutesInside(nn.Module):
    """A block that routes by itself: experts, and no router that a hook could see."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def test_experts_without_a_router_are_refused_and_their_layers_named() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    assert list(find_routers(model)) == [0, 1, 2, 3]
    for layer in (1, 2):
        model.model.layers[layer].mlp = _RoutesInside(model.model.layers[layer].mlp.experts)
    with pytest.raises(CaptureRefused, match=r"layers \[1, 2\] have experts but no \*TopKRouter: Qwen3MoeForCausalLM"):
        find_routers(model)


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(layer_types=["sliding_attention"] * 4),
        SimpleNamespace(layer_types=None, sliding_window=128),
        SimpleNamespace(sliding_window=128),
    ],
)
def test_a_model_of_sliding_windows_alone_is_refused(config: Any) -> None:
    with pytest.raises(CaptureRefused, match="no layer has full attention"):
        refuse_model(config)


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=128),
        SimpleNamespace(sliding_window=None),
        SimpleNamespace(),
    ],
)
def test_a_model_with_a_full_attention_layer_is_not(config: Any) -> None:
    refuse_model(config)


def test_several_ranks_are_refused() -> None:
    refuse_parallel(1)
    with pytest.raises(CaptureRefused, match="over 2 ranks"):
        refuse_parallel(2)


def _settings(**more: Any) -> SimpleNamespace:
    plain = {
        "use_cuda_graph": (False, False),
        "use_async_batching": False,
        "cpu_offload_space": 0.0,
        "varlen_compile_config": None,
        "decode_compile_config": None,
    }
    return SimpleNamespace(**(plain | more))


@pytest.mark.parametrize("space", [None, 0.5])
def test_kv_offload_is_refused_also_where_the_engine_sizes_it(space: float | None) -> None:
    refuse_unsupported(_settings())
    with pytest.raises(CaptureRefused, match="cpu_offload_space=0"):
        refuse_unsupported(_settings(cpu_offload_space=space))
