"""The witness sees what the experts really got, and goes red on each way in which routes can be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.harness.tiny import END_OF_FILE, VOCABULARY, load_tiny, prompts
from tests.harness.witness import differing_rows, logprobs, prefill_routes
from tests.source_tree import ROOT, Source

MOE_LAYERS = range(1, 7)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_tiny()
    torch.set_num_threads(threads)


@pytest.fixture
def tokens(seed: int) -> list[int]:
    return prompts(1, seed)[0]


@pytest.fixture
def routes(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.int16]:
    return prefill_routes(model, tokens)


def test_routes_are_the_routers_best_experts_on_the_full_layer_axis(
    model: PreTrainedModel, tokens: list[int], routes: NDArray[np.int16]
) -> None:
    assert routes.dtype == np.int16
    assert routes.shape == (len(tokens) - 1, 8, 4)
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True, use_cache=False).router_logits
    assert len(logits) == len(MOE_LAYERS)
    by_hand = np.full_like(routes, -1)
    for layer, scores in zip(MOE_LAYERS, logits, strict=True):
        by_hand[:, layer] = scores.softmax(-1).topk(4).indices.numpy()
    assert differing_rows(routes, by_hand).tolist() == []
    assert (routes[:, [0, 7]] == -1).all()


def test_a_token_routes_the_same_whatever_follows_it(model: PreTrainedModel, seed: int) -> None:
    one, other = prompts(2, seed, families=1, shared=(64, 64))
    assert differing_rows(prefill_routes(model, one)[:64], prefill_routes(model, other)[:64]).tolist() == []


def test_column_order_makes_no_difference(routes: NDArray[np.int16]) -> None:
    assert differing_rows(routes, routes[:, :, ::-1]).tolist() == []


def test_layers_shifted_by_one_differ_in_every_row(routes: NDArray[np.int16]) -> None:
    found = differing_rows(routes, np.roll(routes, 1, axis=1))
    assert set(found[:, 0].tolist()) == set(range(len(routes)))


def test_two_layers_swapped_differ_in_just_these_layers(routes: NDArray[np.int16]) -> None:
    swapped = routes.copy()
    swapped[:, [2, 3]] = routes[:, [3, 2]]
    assert set(differing_rows(routes, swapped)[:, 1].tolist()) == {2, 3}


def test_rows_shifted_by_one_token_differ_in_every_layer_with_experts(routes: NDArray[np.int16]) -> None:
    found = differing_rows(routes[1:], routes[:-1])
    assert set(found[:, 1].tolist()) == set(MOE_LAYERS)


@pytest.mark.parametrize("replacement", ["another expert", "one twice", "uncaptured"])
def test_one_wrong_expert_is_found_where_it_is(routes: NDArray[np.int16], replacement: str) -> None:
    row, layer = len(routes) // 2, 4
    wrong = routes.copy()
    unused = np.setdiff1d(np.arange(32), routes[row, layer])[0]
    wrong[row, layer, 1] = {"another expert": unused, "one twice": routes[row, layer, 0], "uncaptured": -1}[replacement]
    assert differing_rows(routes, wrong).tolist() == [[row, layer]]


def test_routes_of_other_lengths_are_not_compared(routes: NDArray[np.int16]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        differing_rows(routes, routes[:-1])


def test_one_token_has_no_rows(model: PreTrainedModel) -> None:
    assert prefill_routes(model, [END_OF_FILE]).shape == (0, 8, 4)
    assert logprobs(model, [END_OF_FILE]).shape == (0,)


def test_logprobs_are_what_the_model_s_own_loss_averages(model: PreTrainedModel, tokens: list[int]) -> None:
    found = logprobs(model, tokens)
    assert found.dtype == np.float64
    assert found.shape == (len(tokens) - 1,)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
    assert -found.mean() == pytest.approx(float(loss), abs=1e-5)


def test_a_model_that_continuous_batching_owns_is_refused(tokens: list[int]) -> None:
    owned = load_tiny()
    owned.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match="another instance"):
        prefill_routes(owned, tokens)
    with pytest.raises(ValueError, match="another instance"):
        logprobs(owned, tokens)


def test_low_precision_is_no_witness(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        prefill_routes(load_tiny(torch.bfloat16), tokens)


def test_a_layer_that_runs_twice_is_noticed(model: PreTrainedModel, tokens: list[int]) -> None:
    block = model.model.layers[3].mlp
    again = block.register_forward_hook(lambda module, inputs, _: module.forward(inputs[0]))
    try:
        with pytest.raises(AssertionError, match="layer 3"):
            prefill_routes(model, tokens)
    finally:
        again.remove()


def test_the_witness_is_independent_of_what_it_witnesses() -> None:
    path = "tests/harness/witness.py"
    imported = Source(path, Path(ROOT, path).read_text()).imports()
    assert {each.root for each in imported}.isdisjoint({"protocol", "engine_side", "collector"})


def test_prompts_repeat_with_their_seed_and_share_prefixes(seed: int) -> None:
    found = prompts(12, seed, families=3, shared=(40, 80))
    assert found == prompts(12, seed, families=3, shared=(40, 80))
    assert found != prompts(12, seed + 1, families=3, shared=(40, 80))
    assert len({tuple(each) for each in found}) == 12
    for i, prompt in enumerate(found):
        assert prompt[:40] == found[i % 3][:40]
        assert all(0 <= token < VOCABULARY for token in prompt)
