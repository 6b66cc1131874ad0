"""Whether routes that differ from a prefill were choices that float32 cannot decide.

Two forwards of the same tokens in differently shaped batches round differently, by about one unit in the last place of
a router's logit. Where the k-th and the next expert are closer than that, either is right, and everything behind the
one taken may follow it. So the routes in question are forced through the witness: given all of them before it, each
must be a best choice of its router up to `RESOLUTION`. A row of another token, position or layer misses that by far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

RESOLUTION: Final = 1e-6
"""Of the largest logit of the row: 8 units in the last place. Ties that were met fell short by 1.4e-7, rows moved to
another token or layer by 2.8e-2 and more, which is also the median gap between the k-th expert and the next."""


def worst_shortfall(model: Any, token_ids: Sequence[int], routes: NDArray[np.int16]) -> float:
    """How far the worst of `routes` ([num_tokens-1, num_layers, top_k], -1 at layers without a router) falls short of
    being its router's best choice, as a share of the row's largest logit; 0 if each is. model: the float32 witness,
    whose routers are softmax over all experts, renormalised over the chosen."""
    worst: list[float] = [0.0]
    ids = torch.tensor([list(token_ids[:-1])], device=model.device)
    with torch.no_grad(), _forced(model, torch.from_numpy(routes.astype(np.int64)).to(model.device), worst):
        model(input_ids=ids, use_cache=False)
    return max(worst)


@contextmanager
def _forced(model: Any, routes: Tensor, worst: list[float]) -> Iterator[None]:
    handles = []
    try:
        for layer, block in enumerate(model.get_decoder().layers):
            for name, module in block.named_modules():
                if name.rpartition(".")[2] == "gate":
                    handles.append(module.register_forward_hook(_forcing(routes[:, layer], worst)))
        assert handles, "no router to force"
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forcing(chosen: Tensor, worst: list[float]) -> Any:
    def force(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        logits = torch.nn.functional.linear(hidden, module.weight)
        rest = logits.scatter(-1, chosen, -torch.inf).amax(-1)
        shortfall = (rest - logits.gather(-1, chosen).amin(-1)) / logits.abs().amax(-1)
        worst.append(float(shortfall.amax()))
        weights = logits.softmax(-1).gather(-1, chosen)
        return output[0], (weights / weights.sum(-1, keepdim=True)).to(output[1].dtype), chosen

    return force
