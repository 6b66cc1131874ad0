"""Each family's router written out by hand for given ids: an independent witness of what replay must compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.replay.rollout import Batch, Pulled, installed_ids, routers_of


def _chosen(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([values[row, ids[row]] for row in range(len(ids))])


def _softmax_renormalised(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    logits = hidden @ router.weight.T
    weights = _chosen(logits.softmax(-1), ids)
    return logits, weights / weights.sum(-1, keepdim=True)


def _softmax(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    logits = hidden @ router.weight.T
    return logits, _chosen(logits.softmax(-1), ids)


def _sigmoid_scaled(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    logits = hidden @ router.weight.T
    weights = _chosen(logits.sigmoid(), ids)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


def _softmax_over_chosen(router: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
    logits = hidden @ router.weight.T + router.bias
    return logits, _chosen(logits, ids).softmax(-1)


FORMULAS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "qwen3_moe": _softmax_renormalised,
    "olmoe": _softmax,
    "mixtral": _softmax_renormalised,
    "deepseek_v3": _sigmoid_scaled,
    "gpt_oss": _softmax_over_chosen,
}


def by_hand(family: str, model: Any, batch: Batch, routes: list[Pulled], native: dict[int, torch.Tensor]) -> Any:
    """A copy of the model whose routers are the formula above over the installed ids.

    native: layer to ids for the rows without a route; only their own tokens see them.
    """
    twin = copy.deepcopy(model)
    for layer, router in routers_of(twin).items():
        ids = installed_ids(batch, routes, layer)
        ids = torch.where(ids < 0, native[layer], ids)

        def forward(hidden: torch.Tensor, router: Any = router, ids: torch.Tensor = ids) -> Any:
            return *FORMULAS[family](router, hidden.reshape(-1, hidden.shape[-1]), ids), ids

        router.forward = forward
    return twin


def logit_gradient(
    logits: NDArray[np.float64], ids: NDArray[np.int64], upstream: NDArray[np.float64]
) -> NDArray[np.float64]:
    """dL/dlogits of a renormalised softmax router, on paper.

    Renormalising p_i over the chosen cancels the full softmax's denominator, so w is a softmax over the chosen logits:
    dL/dlogit_j = w_j (g_j - sum_i g_i w_i) for the chosen j, and 0 for the others. g: dL/dw, `[rows, top_k]`.
    """
    gradient = np.zeros_like(logits)
    for row in range(len(logits)):
        powers = np.exp(logits[row, ids[row]] - logits[row, ids[row]].max())
        w = powers / powers.sum()
        gradient[row, ids[row]] = w * (upstream[row] - (upstream[row] * w).sum())
    return gradient
