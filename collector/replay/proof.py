"""Proof that a router used what was installed: read from what it returned, not from what it was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from collector.replay.errors import LostWeight, RouterOutputUnknown, UsedOtherExperts
from collector.replay.lineage import tensors_in
from collector.replay.plan import ReplayPlan


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """ids: integers `[flat rows, top_k]`. weights: floats of that shape, one per id, if the router returns such."""

    ids: torch.Tensor
    weights: torch.Tensor | None


def read_output(output: Any, plan: ReplayPlan, layer: int) -> RouterOutput:
    """Tell ids and weights from a router's output by shape and dtype, whatever their order."""
    wanted = (plan.layout.num_rows, plan.model.top_k)
    fitting = [each for each in tensors_in(output) if tuple(each.shape) == wanted]
    ids = [each for each in fitting if not each.is_floating_point()]
    weights = [each for each in fitting if each.is_floating_point()]
    if len(ids) != 1:
        raise RouterOutputUnknown(
            "a router's output", layer=layer, expected=f"one integer tensor {list(wanted)}", found=f"{len(ids)} of them"
        )
    # Weights of a dense [rows, num_experts] shape are not read; with top_k == num_experts the logits fit as well.
    return RouterOutput(ids[0], weights[0].detach() if len(weights) == 1 else None)


def check(outputs: Mapping[int, RouterOutput], plan: ReplayPlan) -> None:
    """Per layer: the ids of each row with a route are the installed ones, as a set, and each has a weight.

    Raises UsedOtherExperts or LostWeight. One read from the device for all layers together, unless one is suspect.
    """
    suspects = {layer: _suspect(output, plan, layer) for layer, output in outputs.items()}
    here = torch.device("cpu")
    if not bool(torch.stack([each.to(here, non_blocking=True) for each in suspects.values()]).any()):
        return
    for layer, output in outputs.items():
        _check_ids(output, plan, layer)
        _check_weights(output, plan, layer)


def _suspect(output: RouterOutput, plan: ReplayPlan, layer: int) -> torch.Tensor:
    """bool scalar on the router's device: some row needs a closer look."""
    rows = (output.ids != plan.ids(layer, output.ids.device)).any(1)
    if output.weights is not None:
        rows |= _lost(output.weights).to(rows.device)
    return (rows & plan.routed(rows.device)).any()


def _lost(weights: torch.Tensor) -> torch.Tensor:
    """bool `[flat rows]`: some expert has no weight. In float16 a small softmax underflows to an honest zero."""
    lost = ~weights.isfinite()
    return (lost if weights.dtype == torch.float16 else lost | (weights == 0)).any(1)


def _check_ids(output: RouterOutput, plan: ReplayPlan, layer: int) -> None:
    installed = plan.ids(layer, output.ids.device)
    # A router may order its columns, its weights along with them.
    differ = (output.ids.sort(1).values != installed.sort(1).values).any(1) & plan.routed(output.ids.device)
    rows = differ.nonzero().flatten().tolist()
    if rows:
        name, row = plan.whose(rows[0])
        raise UsedOtherExperts(
            f"the router returned other experts than installed in {len(rows)} of {plan.rows_replayed} rows",
            request_id=name,
            row=row,
            layer=layer,
            expected=installed[rows[0]].tolist(),
            found=output.ids[rows[0]].tolist(),
        )


def _check_weights(output: RouterOutput, plan: ReplayPlan, layer: int) -> None:
    """A router that masks scores before its topk (groups) gives an expert outside its own choice no weight at all."""
    if output.weights is None:
        return
    lost = _lost(output.weights) & plan.routed(output.weights.device)
    rows = lost.nonzero().flatten().tolist()
    if rows:
        name, row = plan.whose(rows[0])
        raise LostWeight(
            f"replayed experts lost their weight in {len(rows)} of {plan.rows_replayed} rows",
            request_id=name,
            row=row,
            layer=layer,
            expected="finite weights other than 0",
            found=output.weights[rows[0]].tolist(),
            way_out="such a router takes its weights from scores that it masked before its topk: not supported",
        )
