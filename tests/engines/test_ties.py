"""What excuses a row that differs from a prefill excuses nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engines.ties import RESOLUTION, worst_shortfall
from tests.harness.tiny import prompts
from tests.harness.witness import prefill_routes

MOE_LAYERS = range(1, 7)


@pytest.fixture
def tokens(seed: int) -> list[int]:
    return prompts(1, seed)[0]


@pytest.fixture
def routes(witness: Any, tokens: list[int]) -> NDArray[np.int16]:
    return prefill_routes(witness, tokens)


def test_a_prefills_own_routes_fall_short_of_nothing(
    witness: Any, tokens: list[int], routes: NDArray[np.int16]
) -> None:
    assert worst_shortfall(witness, tokens, routes) <= 0
    assert worst_shortfall(witness, tokens, routes[:, :, ::-1].copy()) <= 0
    assert not any(module._forward_hooks for module in witness.modules())


@pytest.mark.parametrize("fault", ["another token", "another layer", "layers shifted", "one expert"])
def test_a_wrong_row_is_no_tie(witness: Any, tokens: list[int], routes: NDArray[np.int16], fault: str) -> None:
    wrong, at = routes.copy(), len(routes) // 2
    if fault == "another token":
        wrong[at] = routes[at + 1]
    elif fault == "another layer":
        wrong[at, 3] = routes[at, 4]
    elif fault == "layers shifted":
        wrong[:, 1:7] = np.roll(routes[:, 1:7], 1, axis=1)
    else:
        wrong[at, 3, 0] = np.setdiff1d(np.arange(32), routes[at, 3])[0]
    assert worst_shortfall(witness, tokens, wrong) > 100 * RESOLUTION


def test_a_tie_and_all_that_follows_from_it_is_excused(
    witness: Any, tokens: list[int], routes: NDArray[np.int16]
) -> None:
    """The narrowest choice of a prompt, decided the other way by a router whose weights moved by that little."""
    gap, row, layer, expert = min(_gaps(witness, tokens, MOE_LAYERS))
    other = routes.copy()
    gate = witness.get_decoder().layers[layer].mlp.gate
    ids = torch.tensor([tokens[:-1]], device=witness.device)

    def tip(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
        chosen = output[2].clone()
        chosen[row, _weakest(output, row)] = expert
        return output[0], output[1], chosen

    tipped = gate.register_forward_hook(tip)
    seen = [
        witness.get_decoder().layers[each].mlp.gate.register_forward_hook(_noting(other, each)) for each in MOE_LAYERS
    ]
    try:
        with torch.no_grad():
            witness(input_ids=ids, use_cache=False)
    finally:
        for handle in (tipped, *seen):
            handle.remove()
    assert set(other[row, layer].tolist()) != set(routes[row, layer].tolist())
    # What came after the tipped choice went its own way and is excused; the tipped choice falls short by its gap alone.
    assert worst_shortfall(witness, tokens, other) == pytest.approx(gap, rel=0.05, abs=2e-7)


def _gaps(model: Any, tokens: list[int], layers: range) -> list[tuple[float, int, int, int]]:
    """(gap between the 4th and 5th logit as a share of the largest, row, layer, the 5th expert) of every choice."""
    found: list[tuple[float, int, int, int]] = []

    def look(layer: int) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            best, ids = torch.nn.functional.linear(hidden, module.weight).sort(-1, descending=True)
            share = (best[:, 3] - best[:, 4]) / best.abs().amax(-1)
            found.extend((float(x), i, layer, int(ids[i, 4])) for i, x in enumerate(share))

        return hook

    handles = [model.get_decoder().layers[each].mlp.gate.register_forward_hook(look(each)) for each in layers]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens[:-1]], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _weakest(output: tuple[torch.Tensor, ...], row: int) -> int:
    return int(output[1][row].argmin())


def _noting(routes: NDArray[np.int16], layer: int) -> Any:
    def note(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        routes[:, layer] = output[2].cpu().numpy()

    return note
