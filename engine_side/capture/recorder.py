"""Capture by reference, commit once.

A router hook only keeps a reference to the layer's `topk_ids`; the commit at the end of the forward turns all layers
into rows. Holding the references until then is what keeps their memory from being reused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_side.capture.errors import CaptureError
from engine_side.capture.slot_store import SlotStore, StepRows
from protocol.geometry import UNCAPTURED, Geometry

UNCAPTURED_LAYER = 1
DUPLICATE_EXPERT = 2
OUT_OF_RANGE = 4


class RouteRecorder:
    """Rows of one model. `weight_version` is stamped on what is committed from now on."""

    def __init__(self, geometry: Geometry, store: SlotStore | None = None) -> None:
        self.geometry = geometry
        self.store = store
        self.weight_version = 0
        self.commits = 0
        self._kept: list[Tensor | None] = [None] * geometry.num_moe_layers
        self._calls = [0] * geometry.num_moe_layers

    def keep(self, moe_index: int, topk_ids: Tensor) -> None:
        """Remember what the router of captured layer `moe_index` chose: integer [T, >= top_k], logical expert ids."""
        self._kept[moe_index] = topk_ids
        self._calls[moe_index] += 1

    def drop(self) -> None:
        """Forget what was kept: a forward that is not committed."""
        self._kept = [None] * len(self._kept)
        self._calls = [0] * len(self._calls)

    def commit(self, slots: Tensor, positions: Tensor, input_ids: Tensor, num_tokens: int) -> StepRows:
        """Rows of the first `num_tokens` tokens of the forward, in batch order, stored under their KV slots too.

        slots: int64 [>= num_tokens], -1 = pad. positions, input_ids: integer [>= num_tokens], the tensors that the
        forward used. A layer that did not report is -1, and so is an id out of range. Raises CaptureError when inputs
        or a layer disagree in length, or a router ran more than once.
        """
        try:
            return self._commit(slots, positions, input_ids, num_tokens)
        finally:
            self.drop()

    def _commit(self, slots: Tensor, positions: Tensor, input_ids: Tensor, num_tokens: int) -> StepRows:
        geometry = self.geometry
        for name, tensor in (("slots", slots), ("positions", positions), ("input_ids", input_ids)):
            if len(tensor) < num_tokens:
                raise CaptureError(f"the step has {num_tokens} tokens, {name} only {len(tensor)}")
        shape = (num_tokens, *geometry.row_shape)
        ids = torch.full(shape, UNCAPTURED, dtype=torch.int32, device=slots.device)
        for index, kept in enumerate(self._kept):
            if kept is None:
                continue
            layer = geometry.moe_layer_ids[index]
            if self._calls[index] > 1:
                raise CaptureError(f"layer {layer}: its router ran {self._calls[index]} times in one forward")
            if kept.ndim != 2 or kept.shape[0] < num_tokens:
                raise CaptureError(f"layer {layer}: routes of shape {tuple(kept.shape)} for {num_tokens} tokens")
            width = min(geometry.top_k, kept.shape[1])
            ids[:, index, :width] = kept[:num_tokens, :width]
        step = self._checked(ids, positions[:num_tokens], input_ids[:num_tokens])
        if self.store is not None:
            self.store.write(slots[:num_tokens], step, self.weight_version)
        return step

    def _checked(self, ids: Tensor, positions: Tensor, input_ids: Tensor) -> StepRows:
        self.commits += 1
        missing = (ids == UNCAPTURED).flatten(1).any(1)
        wrong = (ids < UNCAPTURED) | (ids >= self.geometry.num_experts)
        ordered = ids.sort(dim=-1).values
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).flatten(1).any(1)
        status = missing * UNCAPTURED_LAYER + twice * DUPLICATE_EXPERT + wrong.flatten(1).any(1) * OUT_OF_RANGE
        # Copies: the engine rewrites its static input tensors while a step is still on its way to the host.
        return StepRows(
            rows=ids.masked_fill(wrong, UNCAPTURED).to(torch.int16),
            token_ids=input_ids.to(torch.int32, copy=True),
            positions=positions.to(torch.int32, copy=True),
            status=status.to(torch.uint8),
            commit_no=self.commits,
        )
