"""Replaying other experts uses those experts, with weights and gradients as computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collector.replay import replay_routes
from tests.replay.families import PROMISED
from tests.replay.reference import by_hand, logit_gradient
from tests.replay.rollout import (
    installed_ids,
    own_routes,
    packed,
    padded,
    random_routes,
    routers_of,
    run,
    sentences,
    used_ids,
)

LENGTHS = (8, 3, 6)
SHAPES = {
    "right": lambda sequences: padded(sequences, "right", 10),
    "left": lambda sequences: padded(sequences, "left", 10),
    "packed": packed,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", PROMISED)
def test_each_token_uses_the_row_of_its_own_request(
    family: str, shape: str, make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model(family)
    batch = SHAPES[shape](sentences(seed, LENGTHS))
    routes = random_routes(model, batch, seed)
    with used_ids(model) as native:
        native_logits, _ = run(model, batch, backward=False)
    with replay_routes(model, routes, **batch.layout), used_ids(model) as used:
        logits, _ = run(model, batch, backward=False)
    assert not torch.equal(logits, native_logits)
    first = min(used)
    for layer, ids in used.items():
        installed = installed_ids(batch, routes, layer)
        routed = installed[:, 0] >= 0
        assert routed.sum() == sum(LENGTHS) - len(LENGTHS)
        assert torch.equal(ids[routed], installed[routed])
        if layer == first:  # nothing before it was replayed, so the rest must be the native choice exactly
            assert torch.equal(ids[~routed], native[layer][~routed])


@pytest.mark.parametrize("family", PROMISED)
def test_logits_and_gradients_equal_the_family_written_by_hand(
    family: str, make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, LENGTHS), "right", 8)
    routes = random_routes(model, batch, seed)
    with replay_routes(model, routes, **batch.layout), used_ids(model) as used:
        logits, gradients = run(model, batch)
    _, native_gradients = run(model, batch)
    twin = by_hand(family, model, batch, routes, dict(used))
    hand_logits, hand_gradients = run(twin, batch)
    places = [place for each in batch.places for place in each]
    torch.testing.assert_close(logits.flatten(0, 1)[places], hand_logits.flatten(0, 1)[places], rtol=1e-4, atol=1e-4)
    assert gradients.keys() == hand_gradients.keys()
    for name, gradient in gradients.items():
        scale = float(hand_gradients[name].abs().max())
        torch.testing.assert_close(gradient, hand_gradients[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
    # Routers learn: their gradients are there, and they are not those of the native choice.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for router in routers_of(model).values():
        name = names[id(router.weight)]
        assert float(gradients[name].abs().max()) > 0
        assert not torch.allclose(gradients[name], native_gradients[name])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_router_gradients_equal_the_derivative_on_paper(
    family: str, make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (7, 7)), "right", 7)
    routes = random_routes(model, batch, seed)
    seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(output: tuple[torch.Tensor, ...], layer: int) -> None:
        output[0].retain_grad()
        output[1].retain_grad()
        seen[layer] = output

    handles = [
        router.register_forward_hook(lambda _m, _a, output, at=layer: keep(output, at))
        for layer, router in routers_of(model).items()
    ]
    with replay_routes(model, routes):
        run(model, batch)
    for handle in handles:
        handle.remove()
    assert tuple(sorted(seen)) == routes[0].moe_layer_ids
    for logits, weights, ids in seen.values():
        wanted = logit_gradient(logits.detach().double().numpy(), ids.numpy(), weights.grad.double().numpy())
        np.testing.assert_allclose(logits.grad.numpy(), wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())


def test_rows_declared_missing_go_by_the_native_router_and_are_counted(
    make_model: Callable[[str], Any], seed: int
) -> None:
    model = make_model("mixtral")
    batch = padded(sentences(seed, (8, 5)), "left", 8)
    routes = random_routes(model, batch, seed)
    routes[0].array[2:4] = -1
    routes[0].missing = ((2, 4),)
    routes[0].status = "incomplete"
    own = own_routes(model, batch)
    with replay_routes(model, routes, **batch.layout) as report, used_ids(model) as used:
        run(model, batch)
    assert (report.rows_missing, report.rows_replayed, report.rows_last, report.rows_padding) == (2, 9, 2, 3)
    assert report.rows_native == 7
    assert torch.equal(used[0][2:4], torch.from_numpy(own[0].array[2:4, 0].astype(np.int64)))
    assert torch.equal(used[0][4:7], torch.from_numpy(routes[0].array[4:7, 0].astype(np.int64)))


def test_several_forwards_of_one_batch_replay_in_one_block(make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model("olmoe")
    batch = padded(sentences(seed, (6, 6)), "right", 6)
    routes = random_routes(model, batch, seed)
    with replay_routes(model, routes) as report:
        with torch.no_grad():
            old, _ = run(model, batch, backward=False)
        new, _ = run(model, batch)
    assert torch.equal(old, new)
    assert (report.forwards, report.rows_replayed, report.recomputes) == (2, 20, 0)
    assert report.used == dict.fromkeys(routes[0].moe_layer_ids, 20)


def test_a_block_leaves_the_model_as_it_was(make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model("gpt_oss")
    batch = padded(sentences(seed, (6,)), "right", 6)
    logits, gradients = run(model, batch)
    with replay_routes(model, random_routes(model, batch, seed)):
        changed, _ = run(model, batch)
    again, gradients_again = run(model, batch)
    assert not torch.equal(changed, logits)
    assert torch.equal(again, logits)
    assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)
