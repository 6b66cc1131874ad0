"""What was asked about models: what a router is, what asking for a geometry does, who is caught at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_side.capture.coverage import prove_coverage
from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of, hooked
from tests.harness.decoders import EXPERTS, HIDDEN, TOP_K, Decoder, PlainTopKRouter
from tests.harness.ways import Captured

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(layers=5, dense=[0, 4])


def _qwen() -> nn.Module:
    sizes = {"moe_intermediate_size": 8, "num_experts": 6, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes))


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def _said(captured: Captured, *tokens: int) -> dict[str, str]:
    """What the start-up proof says of each way that failed."""
    ways = [captured.way(f"{n}", n, lambda n=n: captured.model(torch.randn(n, HIDDEN))) for n in tokens]
    with pytest.raises(CaptureRefused) as refused:
        prove_coverage(captured.geometry, ways)
    return dict(line.strip().split(": ", 1) for line in str(refused.value).splitlines()[1:-1])


# ------------------------------------------------------------------ routers and geometry


@pytest.mark.parametrize("make", [_qwen, _mixtral, lambda: Decoder(layers=3)], ids=["qwen3-moe", "mixtral", "by-hand"])
def test_question_2_every_router_is_hooked_by_one_kind_of_hook(make: Callable[[], nn.Module]) -> None:
    """And nothing else is: not the block, not the experts, nothing at a kernel's call."""
    model = make()
    routers = find_routers(model)
    with hooked(routers, lambda index, ids: None):
        hooks = {module: list(module._forward_hooks.values()) for module in model.modules() if module._forward_hooks}
        assert set(hooks) == set(routers.values())
        assert [len(each) for each in hooks.values()] == [1] * len(routers)
        assert len({each.__code__ for (each,) in hooks.values()}) == 1
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["gate", "router", "TopKRouter"])
@pytest.mark.parametrize("make", [nn.Module, nn.Identity, lambda: nn.Linear(HIDDEN, EXPERTS), nn.ModuleList])
def test_open_module_detection_a_plain_module_is_no_router(
    decoder: Decoder, name: str, make: Callable[[], nn.Module]
) -> None:
    """Named like one, in a MoE layer and in a dense one; nor is the base class of all modules an expert layer."""
    for layer in (0, 1):
        decoder.layers[layer].add_module(name, make())
    routers = find_routers(decoder)
    assert list(routers) == [1, 2, 3]
    assert {type(router) for router in routers.values()} == {PlainTopKRouter}


def test_question_12_asking_for_the_geometry_marks_no_module(decoder: Decoder) -> None:
    def state() -> dict[str, Any]:
        return {name: {key: id(value) for key, value in vars(each).items()} for name, each in decoder.named_modules()}

    before = state(), dict(vars(decoder.config))
    first = geometry_of(decoder, find_routers(decoder))
    assert geometry_of(decoder, find_routers(decoder)) == first
    decoder.config.num_experts = 40_000
    with pytest.raises(CaptureRefused):
        geometry_of(decoder, find_routers(decoder))
    decoder.config.num_experts = EXPERTS + 1
    assert geometry_of(decoder, find_routers(decoder)).num_experts == EXPERTS + 1, "an answer was kept"
    decoder.config.num_experts = EXPERTS
    assert (state(), dict(vars(decoder.config))) == before


# ------------------------------------------------------------------ paths that report nothing


def test_open_bypassing_decoders_are_refused_and_their_layers_named(decoder: Decoder) -> None:
    """A block that calls its experts without its router: the model is as it should be, its forward is not."""
    for layer in (1, 3):
        decoder.layers[layer].mlp.forward = lambda hidden: torch.tanh(hidden)
    said = "layers 1, 3 did not report"
    assert _said(Captured(decoder), 1, 4) == {"1": said, "4": said}
    # Without a router at all it is refused as soon as it is seen.
    del decoder.layers[2].mlp.gate
    with pytest.raises(CaptureRefused, match=r"no_router: .*layers_without_a_router=\(2,\)") as refused:
        find_routers(decoder)
    assert refused.value.keys == ("no_router",)


class _Quantised(nn.Module):
    """A block whose experts choose for themselves, out of the router's weight; the router stays where it was."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.scale = float(block.gate.weight.detach().abs().max()) / 127

    def forward(self, hidden: Tensor) -> Tensor:
        packed = (self.gate.weight / self.scale).round().to(torch.int8)
        weights, ids = (hidden @ (packed * self.scale).T).softmax(-1).topk(TOP_K, dim=-1)
        return torch.tanh(hidden + (self.experts[0][ids] * weights[..., None]).sum(-2))


def test_open_iq2r_path_a_layer_that_a_quantised_path_hides_is_named_at_the_start(decoder: Decoder) -> None:
    decoder.layers[2].mlp = _Quantised(decoder.layers[2].mlp)
    captured = Captured(decoder)
    assert captured.geometry.moe_layer_ids == (1, 2, 3), "nothing in the model's structure shows it"
    said = "layer 2 did not report"
    assert _said(captured, 1, 4) == {"1": said, "4": said}


def test_open_v41_mono_a_fused_decode_that_reports_nothing_is_named_at_the_start(decoder: Decoder) -> None:
    """All layers in one kernel, for batches up to two tokens; a prefill goes layer by layer."""
    by_layer = decoder.forward

    def forward(hidden: Tensor) -> Tensor:
        if len(hidden) > 2:
            return by_layer(hidden)
        for layer in decoder.layers:
            if hasattr(layer.mlp, "gate"):
                weights, ids = (hidden @ layer.mlp.gate.weight.T).softmax(-1).topk(TOP_K, dim=-1)
                hidden = torch.tanh(hidden + (layer.mlp.experts[0][ids] * weights[..., None]).sum(-2))
            else:
                hidden = layer(hidden)
        return hidden

    one, many = torch.randn(2, HIDDEN), torch.randn(4, HIDDEN)
    expected = by_layer(one)
    decoder.forward = forward  # type: ignore[method-assign]
    torch.testing.assert_close(decoder(one), expected)  # only capture can tell
    captured = Captured(decoder)
    said = "layers 1-3 did not report"
    assert _said(captured, 1, 2, 4) == {"1": said, "2": said}
    prove_coverage(captured.geometry, [captured.way("prefill", 4, lambda: decoder(many))])


@pytest.mark.parametrize("late", [False, True], ids=["hooks-first", "compiled-first"])
def test_open_compilation_is_refused_or_captured_from_its_first_run(decoder: Decoder, late: bool) -> None:
    hidden = torch.randn(4, HIDDEN)
    expected = Captured(decoder).step(4, lambda: decoder(hidden)).columns()
    torch.compiler.reset()
    compiled = torch.compile(decoder, backend="aot_eager")
    captured = Captured(decoder)
    if late:
        with torch.inference_mode():
            compiled(hidden)
    way = captured.way("compiled", 4, lambda: compiled(hidden))
    try:
        prove_coverage(captured.geometry, [way])
    except CaptureRefused as refused:
        assert late
        assert "compiled: layers 1-3 did not report" in str(refused)
    else:
        found = captured.step(4, lambda: compiled(hidden)).columns()
        assert (found.rows == expected.rows).all()
        assert not found.status.any()
    torch.compiler.reset()
