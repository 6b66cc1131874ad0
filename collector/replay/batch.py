"""Does a forward get the batch that the layout describes?"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from collector.replay.errors import BatchMismatch
from collector.replay.layout import Layout


def check_batch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> None:
    """Hold the forward's arguments against the layout. What it does not get, or passes on unnamed, is not checked.

    Raises BatchMismatch: another shape of `input_ids` or `inputs_embeds`, or a two-axis `attention_mask` with other
    pads (a left-padded batch described as right-padded has the right shape and every route on the wrong token).
    """
    named = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    named = {**named, **kwargs}  # a wrapper's forward(*args, **kwargs) names nothing itself
    for name in ("input_ids", "inputs_embeds"):
        tensor = named.get(name)
        if tensor is not None and tuple(tensor.shape[:2]) != layout.shape:
            raise BatchMismatch(f"shape of {name}", expected=list(layout.shape), found=list(tensor.shape[:2]))
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        occupied = torch.from_numpy(layout.occupied())
        real = mask.detach().to("cpu") != 0
        if real.shape != occupied.shape or bool((real != occupied).any()):
            raise BatchMismatch(
                "the forward's attention_mask marks other tokens than the layout",
                expected=f"{occupied.sum(1).tolist()} tokens per sequence, in the layout's places",
                found=f"{real.sum(1).tolist()}",
            )
