"""What was asked about models and topologies: what a router is, who is caught at the start, what the table says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_side.capture.coverage import prove_coverage
from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of, hooked
from engine_side.engines.transformers import compat
from engine_side.facts import EngineFacts, FusedPath
from engine_side.support import ROWS, Action, require
from tests.harness.decoders import EXPERTS, HIDDEN, TOP_K, Decoder, PlainTopKRouter
from tests.harness.tiny import CHECKPOINT
from tests.harness.ways import Captured
from tests.source_tree import ROOT

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


# ------------------------------------------------------------------ the table


def test_open_no_slot_mapping_is_refused_by_name() -> None:
    with pytest.raises(CaptureRefused, match=r"no_token_slots: .*turn prefix caching off") as refused:
        require(EngineFacts(token_slots=False, prefix_caching=True))
    assert refused.value.keys == ("no_token_slots",)
    assert require(EngineFacts(token_slots=False)) == ()


def _config() -> Any:
    return AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True)


def _engine_model(config: Any) -> Any:
    """What the checks of an engine's model look at, without weights."""
    return SimpleNamespace(config=config, use_kernels=False)


def test_open_dp_attention_is_refused_by_name() -> None:
    config = _config()
    config.distributed_config = SimpleNamespace(tp_size=1, ep_size=2, pp_size=1)
    with pytest.raises(CaptureRefused, match=r"attention_data_ranks=2.*slice rows per rank") as refused:
        compat.refuse_model(_engine_model(config))
    assert refused.value.keys == ("dp_attention",)
    require(EngineFacts(attention_data_ranks=2, rows_sliced_per_rank=True))


FIELDS = sorted({*_config().to_dict(), "num_local_experts", "layer_types", "sliding_window", "distributed_config"})


@pytest.mark.parametrize("absent", FIELDS)
def test_open_v4_mono_attribute_a_configuration_without_the_field_never_crashes_a_check(absent: str) -> None:
    """Whatever a model's configuration leaves out, each check says so by name or lets it run."""
    config = SimpleNamespace(**{name: value for name, value in _config().to_dict().items() if name != absent})
    config.get_text_config = lambda: config
    model: Any = Decoder(layers=8, dense=[0, 7])
    model.config, model.use_kernels = config, False
    for check in (compat.refuse_model, lambda each: geometry_of(each, find_routers(each))):
        try:
            check(model)
        except CaptureRefused as refused:
            assert refused.keys == ("sizes_unknown",) or absent in str(refused)


def test_open_qwen4_docs_the_readme_says_what_the_table_says() -> None:
    shown = (ROOT / "README.md").read_text().partition("<!-- refusals -->")[2].partition("<!-- /refusals -->")[0]
    lines = [line.split(" | ") for line in shown.strip().splitlines()[2:]]
    said = {line[-1].strip(" |`"): (line[0].lstrip("| "), line[1], line[3]) for line in lines}
    assert said == {row.key: (row.topology, row.action.value, row.way_out) for row in ROWS}


def test_question_13_a_kernel_that_routes_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = FusedPath(name="indexer", routes=False, per_layer=True)
    mono = FusedPath(name="mono", routes=True, per_layer=True)
    assert require(EngineFacts(fused_paths=(indexer,))) == ()
    assert [row.action for row in require(EngineFacts(fused_paths=(indexer, mono)))] == [Action.FALL_BACK]
    assert EngineFacts(fused_paths=(indexer, mono)).fused_paths_to_turn_off() == ("mono",)
    # The same of the engine's own kernels, as they are found in a model.
    model: Any = copy.deepcopy(_qwen())
    monkeypatch.setattr(model, "_use_kernels", True, raising=False)
    monkeypatch.setattr(type(model.model.norm), "kernel_layer_name", "RMSNorm", raising=False)
    assert compat.model_facts(model).fused_paths == (FusedPath(name="RMSNorm", routes=False),)
    compat.refuse_model(model)
    monkeypatch.setattr(type(model.model.layers[1].mlp), "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)
    with pytest.raises(CaptureRefused) as refused:
        compat.refuse_model(model)
    assert refused.value.keys == ("fused_routing_only",)
