"""Which modules are a model's routers, and which models are refused."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine_side.capture.coverage import uncaptured_mask
from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import _moe_layers, find_routers, geometry_of, hooked
from engine_side.capture.records import OUT_OF_RANGE
from protocol.geometry import Geometry
from tests.harness.decoders import EXPERTS, HIDDEN, TOP_K, Decoder, PlainTopKRouter
from tests.harness.ways import Captured


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


@pytest.fixture
def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(layers=5, dense=[0, 4])


def test_an_odd_named_drafter_with_layers_of_the_same_numbers_is_left_out(model: Any) -> None:
    """Layer 0 of the target is dense, and only the model's own word for its decoder tells the two apart."""
    model.assistant = nn.Module()
    model.assistant.layers = nn.ModuleList([Qwen3MoeForCausalLM(_config()).model.layers[layer] for layer in (1, 2)])
    routers = find_routers(model)
    assert list(routers) == [1, 2, 3]
    assert all(routers[layer] is model.model.layers[layer].mlp.gate for layer in routers)


def test_a_model_that_is_its_own_decoder(model: Any) -> None:
    assert model.model.get_decoder() is model.model
    assert list(find_routers(model.model)) == [1, 2, 3]


def test_layers_in_two_places_without_a_word_which_are_the_decoders_are_refused(decoder: Decoder) -> None:
    decoder.assistant = Decoder(layers=1)
    with pytest.raises(CaptureRefused, match=r"layers assistant\.layers\.\* and layers\.\*: which"):
        find_routers(decoder)


def test_drafters_and_layers_past_the_decoders_never_commit(decoder: Decoder, seed: int) -> None:
    decoder.mtp = Decoder(layers=3)
    decoder.layers[1].eagle_head = PlainTopKRouter()
    decoder.layers.append(Decoder(layers=1).layers[0])
    captured = Captured(decoder)
    assert captured.geometry.moe_layer_ids == (1, 2, 3)
    hidden = torch.randn(4, HIDDEN)
    alone = captured.step(4, lambda: decoder(hidden))
    drafted = captured.step(4, lambda: (decoder(hidden), decoder.mtp(hidden), decoder.layers[1].eagle_head(hidden)))
    assert alone.status.tolist() == [0] * 4
    assert torch.equal(alone.rows, drafted.rows)


def test_a_router_outside_the_decoders_layers_is_not_one(decoder: Decoder) -> None:
    decoder.adapter = PlainTopKRouter()
    assert list(find_routers(decoder)) == [1, 2, 3]
    only_outside = Decoder(layers=2, dense=[0, 1])
    only_outside.adapter = PlainTopKRouter()
    with pytest.raises(CaptureRefused, match="dense"):
        geometry_of(only_outside, find_routers(only_outside))


@pytest.mark.parametrize("placeholder", [nn.Module, nn.Identity, lambda: nn.ModuleList([])])
def test_an_empty_module_named_experts_is_no_moe(decoder: Decoder, placeholder: Any) -> None:
    decoder.layers[0].experts = placeholder()
    assert list(find_routers(decoder)) == [1, 2, 3]


class _Packed(nn.Module):
    """Experts whose weights live outside of torch's sight."""


@pytest.mark.parametrize("experts", [_Packed, lambda: nn.ModuleList([nn.Linear(2, 2)]), lambda: nn.Linear(2, 2)])
def test_anything_else_named_experts_needs_a_router(decoder: Decoder, experts: Any) -> None:
    decoder.layers[0].experts = experts()
    with pytest.raises(CaptureRefused, match=r"no_router: .*layers_without_a_router=\(0,\)"):
        find_routers(decoder)


def test_a_moe_layer_of_the_config_without_a_trace_of_one_is_refused(model: Any) -> None:
    model.model.layers[2].mlp = nn.Linear(16, 16)  # as a fused block looks that keeps its weights to itself
    with pytest.raises(CaptureRefused, match=r"no_router: .*layers_without_a_router=\(2,\)"):
        find_routers(model)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (_config(), {1, 2, 3}),
        (Qwen3MoeConfig(num_hidden_layers=6, decoder_sparse_step=2, num_experts=4), {1, 3, 5}),
        (Qwen3MoeConfig(num_hidden_layers=6, num_experts=0), set()),
        (DeepseekV3Config(num_hidden_layers=5, first_k_dense_replace=3), {3, 4}),
        (Glm4MoeConfig(num_hidden_layers=3, first_k_dense_replace=1), {1, 2}),
        (MixtralConfig(num_hidden_layers=3), set()),  # says nothing
        (SimpleNamespace(num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "hash_moe", "sparse"]), {1, 2}),
    ],
)
def test_which_layers_a_config_calls_moe(config: Any, layers: set[int]) -> None:
    assert _moe_layers(config) == layers


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok"])
def test_a_config_that_does_not_say_how_many_experts_is_refused(decoder: Decoder, name: str) -> None:
    setattr(decoder.config, name, None)
    for layer in (1, 2, 3):
        decoder.layers[layer].mlp.gate.top_k = None
    with pytest.raises(CaptureRefused, match="sizes_unknown: "):
        geometry_of(decoder, find_routers(decoder))


def test_one_router_under_two_names_is_one(decoder: Decoder) -> None:
    decoder.layers[2].router = decoder.layers[2].mlp.gate
    captured = Captured(decoder)
    assert captured.geometry.moe_layer_ids == (1, 2, 3)
    assert captured.step(3, lambda: decoder(torch.randn(3, HIDDEN))).status.tolist() == [0] * 3


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_ids_are_the_logical_ones_whatever_remaps_them(decoder: Decoder, before: bool, in_place: bool) -> None:
    """Expert load balancing: a hook turns logical experts into physical ones, of which there are more."""
    hidden, block = torch.randn(5, HIDDEN), decoder.layers[2].mlp
    physical = torch.tensor([4, 3, 5, 0, 2, 1])
    seen: list[torch.Tensor] = []

    def remap(_module: Any, _inputs: Any, output: Any) -> Any:
        logits, weights, ids = output
        if in_place:
            return logits, weights, ids.copy_(physical[ids])
        return logits, weights, physical[ids]

    def see(_module: Any, _inputs: Any, output: Any) -> None:
        seen.append(output[2].clone())

    captured = Captured(decoder)
    with ExitStack() as hooks:

        def add(*others: Any) -> None:
            for other in others:
                hooks.callback(block.gate.register_forward_hook(other).remove)

        def forward() -> None:
            if not before:
                add(see, remap)
            decoder(hidden)

        if before:
            add(see, remap)
        rows = captured.step(5, forward).rows[:, 1].long()
    assert torch.equal(rows, seen[0])
    assert torch.equal(block.used, physical[seen[0]])
    assert not torch.equal(rows, block.used)


def test_a_fused_shared_experts_column_behind_the_others_is_cut(decoder: Decoder) -> None:
    hidden, gate = torch.randn(4, HIDDEN), decoder.layers[2].mlp.gate
    captured = Captured(decoder)
    expected = captured.step(4, lambda: decoder.layers[2](hidden)).rows[:, 1]
    plain = gate.forward

    def with_shared_expert(hidden: torch.Tensor) -> Any:
        logits, weights, ids = plain(hidden)
        shared = torch.full_like(ids[:, :1], EXPERTS)
        return logits, torch.cat([weights, torch.ones_like(weights[:, :1])], -1), torch.cat([ids, shared], -1)

    gate.forward = with_shared_expert
    step = captured.step(4, lambda: decoder(hidden))
    assert decoder.layers[2].mlp.used.shape == (4, TOP_K + 1)
    assert step.status.tolist() == [0] * 4
    assert torch.equal(captured.step(4, lambda: decoder.layers[2](hidden)).rows[:, 1], expected)


@pytest.mark.parametrize("first", [EXPERTS, 0, 3])
def test_a_fused_shared_experts_column_in_front_is_never_a_route(decoder: Decoder, first: int) -> None:
    """Numbered behind the others or as one of them: what is cut then is a routed expert."""
    hidden, gate = torch.randn(4, HIDDEN), decoder.layers[2].mlp.gate
    plain = gate.forward

    def with_shared_expert(hidden: torch.Tensor) -> Any:
        logits, weights, ids = plain(hidden)
        ids = ids + (ids >= first).long()  # the others make room for its number
        return logits, weights, torch.cat([torch.full_like(ids[:, :1], first), ids], -1)

    gate.forward = with_shared_expert
    captured = Captured(decoder)
    captured.renew(Geometry(5, (1, 2, 3), TOP_K, EXPERTS + (first < EXPERTS)))
    step = captured.step(4, lambda: gate(hidden))
    assert ((step.status & OUT_OF_RANGE) != 0).all()
    assert uncaptured_mask(step.rows[:, 1]).all()


def test_a_top_k_that_is_too_small_does_not_cut_routes_off(decoder: Decoder) -> None:
    for layer in (1, 2, 3):
        decoder.layers[layer].mlp.gate.top_k = TOP_K - 1
    captured = Captured(decoder)
    assert captured.geometry.top_k == TOP_K - 1
    assert captured.step(4, lambda: decoder(torch.randn(4, HIDDEN))).status.tolist() == [OUT_OF_RANGE] * 4


def test_a_hook_never_raises_into_the_models_forward(decoder: Decoder) -> None:
    captured = Captured(decoder)
    gate = decoder.layers[2].mlp.gate
    for output in (torch.tensor(3), (1, 2, 3), (None, None, torch.tensor(3)), (None, None, torch.arange(4)), None, []):
        gate.forward = lambda _hidden, output=output: output
        step = captured.step(4, lambda: gate(torch.randn(4, HIDDEN)))
        assert uncaptured_mask(step.rows[:, 1]).all()
