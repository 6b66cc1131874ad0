"""`replay_routes`: the trainer's door."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from collector.replay.block import ReplayBlock
from collector.replay.checks import RoutesLike
from collector.replay.layout import describe_batch
from collector.replay.plan import ReplayPlan
from collector.replay.report import ReplayReport
from collector.replay.routers import find_routers, geometry_of, refuse_compiled


@contextmanager
def replay_routes(
    model: torch.nn.Module,
    routes: RoutesLike | Sequence[RoutesLike],
    *,
    attention_mask: Any = None,
    lengths: Any = None,
    padding_side: Literal["left", "right"] = "right",
    cu_seqlens: Any = None,
    width: int | None = None,
    routers: Mapping[int, torch.nn.Module] | None = None,
) -> Iterator[ReplayReport]:
    """Within the block, every forward of `model` routes its tokens as the rollout did.

    model: a Hugging Face MoE model, or what wraps it: the module that is called. routes: one per sequence of the
    batch, in its order; row i belongs to the forward that consumes token i. The batch is described by one of
    `attention_mask` (0/1 `[batch, width]`, padded on either side), `lengths` with `padding_side` and `width`, or
    `cu_seqlens` with `width` (packed, `[1, width]`); without any, sequences of one length and no padding. routers:
    layer id to router module, where they cannot be found by their names.

    Only the choice is replayed: weights come from the model's own scores and gradients flow into its routers. A
    sequence's last token, padding and rows declared missing go by the native router, and the report counts them.
    Several forwards of the same batch may run in one block (old log-probabilities, then the update).

    Backward may run inside the block or after it, also after later blocks of other batches: where an activation
    checkpoint keeps the graph recomputing, the hooks stay until that graph is gone and replay its recomputes only.

    Yields a ReplayReport. Raises a RoutesError or LayoutError before any forward, an UnprovenReplay during a forward,
    a backward or at the block's end: nothing counts as replayed unless each router was called once, asked topk once,
    and returned the installed experts in every row that has a route.
    """
    refuse_compiled(model)
    by_layer = dict(sorted((find_routers(model) if routers is None else routers).items()))
    sequences: Sequence[RoutesLike] = routes if isinstance(routes, Sequence) else [routes]
    layout = describe_batch(
        [each.num_tokens for each in sequences],
        attention_mask=attention_mask,
        lengths=lengths,
        padding_side=padding_side,
        cu_seqlens=cu_seqlens,
        width=width,
    )
    plan = ReplayPlan(sequences, layout, geometry_of(model, by_layer))
    block = ReplayBlock(model, by_layer, plan)
    try:
        yield block.report
        block.require_a_forward()
    finally:
        block.close()
