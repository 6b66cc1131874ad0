"""Which modules are a model's routers, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of, hooked


def _config(**more: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 4],
        **more,
    )


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(_config()).eval()


def test_dense_first_and_last_layers_do_not_shift_the_axis(model: Any) -> None:
    routers = find_routers(model)
    assert list(routers) == [1, 2, 3]
    geometry = geometry_of(model, routers)
    assert (geometry.num_layers, geometry.moe_layer_ids) == (5, (1, 2, 3))
    assert (geometry.top_k, geometry.num_experts) == (2, 6)


def test_hooks_hand_over_what_the_router_chose_and_are_gone_afterwards(model: Any) -> None:
    kept: dict[int, torch.Tensor] = {}
    routers = find_routers(model)
    with hooked(routers, lambda index, ids: kept.__setitem__(index, ids)):
        model(torch.tensor([[1, 2, 3]]))
        assert sorted(kept) == [0, 1, 2]
        assert all(ids.shape == (3, 2) for ids in kept.values())
    assert all(not router._forward_hooks for router in routers.values())


def test_a_dense_model_is_refused() -> None:
    small = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    dense = Qwen3ForCausalLM(small)
    with pytest.raises(CaptureRefused, match="dense model"):
        geometry_of(dense, find_routers(dense))


def test_a_drafters_router_is_not_the_target_models(model: Any) -> None:
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([model.model.layers[1]])
    assert list(find_routers(model)) == [1, 2, 3]
    # A multi-token-prediction layer behind the decoder's own.
    extra = Qwen3MoeForCausalLM(_config())
    model.model.layers.append(extra.model.layers[2])
    assert list(find_routers(model)) == [1, 2, 3]


def test_two_routers_in_one_layer_are_refused(model: Any) -> None:
    other = Qwen3MoeForCausalLM(_config())
    model.model.layers[1].second = other.model.layers[1].mlp.gate
    with pytest.raises(CaptureRefused, match=r"two routers in a layer \(layers_with_two_routers=\(1,\)\)"):
        find_routers(model)


def test_a_router_shared_by_two_layers_is_refused(model: Any) -> None:
    model.model.layers[2].mlp.gate = model.model.layers[1].mlp.gate
    with pytest.raises(CaptureRefused, match=r"layers that share a router \(layers_sharing_a_router=\(1, 2\)\)"):
        find_routers(model)


def test_more_experts_than_int16_holds_are_refused(model: Any) -> None:
    model.config.num_experts = 40_000
    with pytest.raises(CaptureRefused, match="num_experts"):
        geometry_of(model, find_routers(model))
