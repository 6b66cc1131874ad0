"""What was asked about topologies: what the table refuses by name, what it leaves alone, what the README says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers, geometry_of
from engine_side.engines.transformers import compat
from engine_side.facts import EngineFacts, FusedPath
from engine_side.support import ROWS, Action, require
from tests.harness.decoders import Decoder
from tests.harness.tiny import CHECKPOINT
from tests.source_tree import ROOT


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
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2}
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    monkeypatch.setattr(model, "_use_kernels", True, raising=False)
    monkeypatch.setattr(type(model.model.norm), "kernel_layer_name", "RMSNorm", raising=False)
    assert compat.model_facts(model).fused_paths == (FusedPath(name="RMSNorm", routes=False),)
    compat.refuse_model(model)
    monkeypatch.setattr(type(model.model.layers[1].mlp), "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)
    with pytest.raises(CaptureRefused) as refused:
        compat.refuse_model(model)
    assert refused.value.keys == ("fused_routing_only",)
