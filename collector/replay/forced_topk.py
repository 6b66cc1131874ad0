"""The one place where a route takes effect: `torch.topk` inside a router."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collector.replay.errors import BatchMismatch
from collector.replay.plan import ReplayPlan

TOPK = (torch.topk, torch.Tensor.topk)


class ForcedTopk(TorchFunctionMode):  # type: ignore[misc]
    """Answers a router's final `topk` with the installed ids, and with the values found there.

    The values are gathered from the tensor that topk was called on, so that whatever the router does next (softmax,
    renormalising, scaling) runs on the trainer's own scores and gradients flow as natively. Columns stay in installed
    order. Final means two axes, the last of num_experts, and k = top_k: the group choices of a grouped router have
    other shapes. `answers` counts; a caller that finds other than one knows that the choice was not forced.
    """

    def __init__(self, plan: ReplayPlan, layer: int) -> None:
        super().__init__()
        self._plan = plan
        self._layer = layer
        self.answers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TOPK and self._is_final(*args, **(kwargs or {})):
            self.answers += 1
            return self._answer(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_final(self, input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, **rest: Any) -> bool:
        model = self._plan.model
        whole = input.ndim == 2 and input.shape[1] == model.num_experts and dim in (-1, 1)
        return whole and k == model.top_k and largest and rest.get("out") is None

    def _answer(self, input: torch.Tensor, k: int, *rest: Any, **named: Any) -> Any:
        wanted = self._plan.layout.num_rows
        if input.shape[0] != wanted:
            raise BatchMismatch("tokens in a router", layer=self._layer, expected=wanted, found=input.shape[0])
        ids = self._plan.ids(self._layer, input.device)
        if not self._plan.all_routed:
            own = torch.topk(input.detach(), k, *rest, **named).indices
            ids = torch.where(self._plan.routed(input.device)[:, None], ids, own)
        return torch.return_types.topk((input.gather(1, ids), ids))
