"""Replaying what the model would choose anyway changes nothing, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collector.client.routes import Routes
from collector.replay import replay_routes
from tests.replay.families import FREE, PROMISED
from tests.replay.rollout import own_routes, packed, padded, run, same_gradients, sentences

LENGTHS = (9, 5, 2)
SHAPES = {
    "right": lambda sequences: padded(sequences, "right", 11),
    "left": lambda sequences: padded(sequences, "left", 11),
    "packed": packed,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [*PROMISED, *FREE])
def test_own_ids_give_bit_equal_logits_and_gradients(
    family: str, shape: str, make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model(family)
    batch = SHAPES[shape](sentences(seed, LENGTHS))
    routes = own_routes(model, batch)
    logits, gradients = run(model, batch)
    with replay_routes(model, routes, **batch.layout) as report:
        replayed_logits, replayed_gradients = run(model, batch)
    assert torch.equal(replayed_logits, logits)
    assert same_gradients(replayed_gradients, gradients)
    assert report.forwards == 1
    assert report.rows_replayed == sum(length - 1 for length in LENGTHS)
    assert report.rows_last == len(LENGTHS)
    assert report.rows_padding == batch.inputs["input_ids"].numel() - sum(LENGTHS)
    assert set(report.share.values()) == {1.0}
    assert tuple(report.share) == routes[0].moe_layer_ids


@pytest.mark.parametrize("family", PROMISED)
def test_own_ids_under_autocast_are_bit_equal_too(family: str, make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, LENGTHS), "right", 9)
    with torch.autocast("cpu", torch.bfloat16):
        routes = own_routes(model, batch)
        logits, gradients = run(model, batch)
        with replay_routes(model, routes, **batch.layout):
            replayed_logits, replayed_gradients = run(model, batch)
    assert torch.equal(replayed_logits, logits)
    assert same_gradients(replayed_gradients, gradients)


@pytest.mark.parametrize("axis", ["all", "moe"])
def test_a_pulls_answer_replays_with_either_layer_axis(axis: str, make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model("deepseek_v3")
    batch = padded(sentences(seed, (7,)), "right", 7)
    own = own_routes(model, batch)[0]
    layers = tuple(range(model.config.num_hidden_layers)) if axis == "all" else own.moe_layer_ids
    pulled = Routes(
        request_id="a",
        status="complete",
        array=own.array[:, list(layers)],
        num_tokens=7,
        num_experts=own.num_experts,
        num_layers=model.config.num_hidden_layers,
        moe_layer_ids=own.moe_layer_ids,
        layers=layers,
        weight_spans=((0, 6, 1),),
        provenance=((0, 6, 1),),
        missing=(),
    )
    logits, gradients = run(model, batch)
    with replay_routes(model, pulled):
        replayed_logits, replayed_gradients = run(model, batch)
    assert torch.equal(replayed_logits, logits)
    assert same_gradients(replayed_gradients, gradients)


def test_router_logits_and_the_auxiliary_loss_are_as_without_replay(
    make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model("qwen3_moe").eval()
    batch = padded(sentences(seed, (6, 6)), "right", 6)
    routes = own_routes(model, batch)
    with torch.no_grad():
        with replay_routes(model, routes):  # the library sets its own lasting hooks on first use: after ours
            inside = model(**batch.inputs, output_router_logits=True)
        outside = model(**batch.inputs, output_router_logits=True)
    assert torch.equal(inside.aux_loss, outside.aux_loss)
    assert all(map(torch.equal, inside.router_logits, outside.router_logits))
