"""Every row of the support table by its facts. Through an adapter's entry points: test_refusals."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from engine_side.capture.errors import CaptureRefused
from engine_side.facts import EngineFacts, FusedPath
from engine_side.support import ROWS, Action, Row, markdown, require
from tests.source_tree import ROOT

BY_KEY = {row.key: row for row in ROWS}
MONO = FusedPath(name="mono", routes=True, per_layer=True)
LONE = FusedPath(name="bs1", routes=True, per_layer=True, single_token=True)
ONLY = FusedPath(name="whole", routes=True)
# Could be turned off, and must not be: it chooses no experts.
INDEXER = FusedPath(name="indexer", routes=False, per_layer=True)

FACTS = {
    "engine_version": EngineFacts(engine="e", version="1.30.1", supported_versions=("1.3", "1.4")),
    "pipeline_parallel": EngineFacts(pipeline_stages=2),
    "decode_context_parallel": EngineFacts(decode_context_ranks=2),
    "prefill_context_parallel": EngineFacts(prefill_context_ranks=2),
    "tensor_parallel": EngineFacts(tensor_ranks=2, rank_zero_ships=True),
    "tensor_parallel_unproven": EngineFacts(tensor_ranks=2),
    "dp_attention": EngineFacts(attention_data_ranks=2),
    "dp_attention_sliced": EngineFacts(attention_data_ranks=2, rows_sliced_per_rank=True),
    "dummy_batches": EngineFacts(dummy_writes_real_slots=True),
    "physical_experts": EngineFacts(physical_expert_ids=True),
    "disaggregated": EngineFacts(pd_role="server"),
    "kv_transfer": EngineFacts(kv_transfer=True),
    "kv_offload": EngineFacts(kv_offload=True),
    "no_token_slots": EngineFacts(token_slots=False, prefix_caching=True),
    "batch_order": EngineFacts(token_slots=False),
    "sliding_window_only": EngineFacts(full_attention_layers=0),
    "dense": EngineFacts(moe_layers=0),
    "sizes_unknown": EngineFacts(sizes_known=False),
    "too_many_experts": EngineFacts(num_experts=32_768),
    "top_k": EngineFacts(top_k=0, num_experts=8),
    "two_routers": EngineFacts(layers_with_two_routers=(1,)),
    "shared_router": EngineFacts(layers_sharing_a_router=(1, 2)),
    "no_router": EngineFacts(layers_without_a_router=(1,)),
    "unreported_layers": EngineFacts(layers_unreported=(3,)),
    "fused_routing": EngineFacts(fused_paths=(MONO,)),
    "single_token_experts": EngineFacts(fused_paths=(LONE,)),
    "fused_routing_only": EngineFacts(fused_paths=(ONLY,)),
    "routes_nothing": EngineFacts(fused_paths=(INDEXER,)),
    "cuda_graphs": EngineFacts(cuda_graphs=True),
    "compiled": EngineFacts(compiled=True),
    "async_batching": EngineFacts(async_batching=True),
    "drafter": EngineFacts(drafter=True),
    "http_server": EngineFacts(http_server=True),
}
"""For each row, facts to which it and no other row applies."""

by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)


@by_row
def test_each_row_does_what_it_says(row: Row) -> None:
    facts = FACTS[row.key]
    assert [each.key for each in ROWS if each.applies(facts)] == [row.key]
    if row.action is Action.REFUSE:
        with pytest.raises(CaptureRefused) as refused:
            require(facts)
        assert refused.value.keys == (row.key,)
        for part in (row.key, row.topology, row.why, row.way_out, *_changed(facts)):
            assert part in str(refused.value)
    else:
        assert require(facts) == ((row,) if row.action is Action.FALL_BACK else ())


@by_row
def test_a_row_reads_the_facts_that_it_names(row: Row) -> None:
    class Recording:
        """Facts that note which of them were asked for."""

        def __init__(self) -> None:
            self.asked: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.asked.add(name)
            return getattr(FACTS[row.key], name)

    facts: Any = Recording()
    assert row.applies(facts)
    assert facts.asked <= set(row.reads)
    assert set(_changed(FACTS[row.key])) <= set(row.reads)


def test_no_row_is_without_facts() -> None:
    assert set(FACTS) == set(BY_KEY)


def test_keys_are_unique_and_every_fact_is_read_by_a_row() -> None:
    assert len(BY_KEY) == len(ROWS)
    assert {name for row in ROWS for name in row.reads} == {field.name for field in fields(EngineFacts)}


def test_facts_are_harmless_until_declared() -> None:
    assert [row.key for row in ROWS if row.applies(EngineFacts())] == []
    assert require(EngineFacts()) == ()


def test_every_refusal_is_named_at_once() -> None:
    with pytest.raises(CaptureRefused) as refused:
        require(EngineFacts(pipeline_stages=2, kv_offload=True, cuda_graphs=True, fused_paths=(MONO,)))
    assert refused.value.keys == ("pipeline_parallel", "kv_offload")
    assert "pipeline_stages=2" in str(refused.value)
    assert "kv_offload=True" in str(refused.value)


def test_only_paths_that_route_are_turned_off() -> None:
    facts = EngineFacts(fused_paths=(MONO, INDEXER, LONE))
    assert [row.key for row in require(facts)] == ["fused_routing", "single_token_experts"]
    assert facts.fused_paths_to_turn_off() == ("mono", "bs1")
    assert EngineFacts(fused_paths=(ONLY, INDEXER)).fused_paths_to_turn_off() == ()


@pytest.mark.parametrize(
    ("key", "lifted"),
    [
        ("engine_version", {"version": "1.4.9"}),
        ("engine_version", {"supported_versions": ()}),
        ("dp_attention", {"rows_sliced_per_rank": True}),
        ("tensor_parallel_unproven", {"rank_zero_ships": True}),
        ("kv_transfer", {"routes_move_with_blocks": True}),
        ("kv_offload", {"routes_move_with_blocks": True}),
        ("no_token_slots", {"prefix_caching": False}),
        ("sliding_window_only", {"full_attention_layers": 1}),
        ("dense", {"moe_layers": 1}),
        ("too_many_experts", {"num_experts": 32_767}),
        ("top_k", {"top_k": 8}),
        ("fused_routing_only", {"fused_paths": (MONO,)}),
    ],
)
def test_the_way_out_is_one(key: str, lifted: dict[str, Any]) -> None:
    require(replace(FACTS[key], **lifted))


@pytest.mark.parametrize("top_k", [-1, 9, 257])
def test_top_k_has_two_ends(top_k: int) -> None:
    with pytest.raises(CaptureRefused) as refused:
        require(EngineFacts(top_k=top_k, num_experts=8 if top_k < 257 else None))
    assert refused.value.keys == ("top_k",)


def test_the_readme_shows_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    between = text.partition("<!-- refusals -->\n")[2].partition("<!-- /refusals -->")[0]
    assert between == markdown(), "paste the output of `python -m engine_side.support` between the marks"


def _changed(facts: EngineFacts) -> list[str]:
    return [each.name for each in fields(EngineFacts) if getattr(facts, each.name) != each.default]
