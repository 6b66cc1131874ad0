"""One block of replay on one model: from its hooks to the last recompute of its graph."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from collector.replay import lineage, proof
from collector.replay.batch import check_batch
from collector.replay.errors import (
    AlreadyReplaying,
    NothingReplayed,
    RouterCalledTwice,
    RouterNotCalled,
    RouterOutsideForward,
    UntracedRecompute,
)
from collector.replay.plan import ReplayPlan
from collector.replay.report import ReplayReport
from collector.replay.router_hooks import RouterHooks


class ReplayBlock:
    """Open: replays forwards and their recomputes. Closed: replays recomputes of its own graph until that is gone.

    Autograd's numbers say whose a recompute is: nodes made between opening and closing are this block's, earlier ones
    and those of the model's later forwards are not. Anything else in a backward is refused, never left native.
    """

    def __init__(self, model: torch.nn.Module, routers: Mapping[int, torch.nn.Module], plan: ReplayPlan) -> None:
        _refuse_second_block(routers)
        self.report = ReplayReport(
            used=dict.fromkeys(plan.model.moe_layer_ids, 0), installed=dict.fromkeys(plan.model.moe_layer_ids, 0)
        )
        self._plan = plan
        self._thread = threading.get_ident()
        self._outputs: dict[int, proof.RouterOutput] | None = None  # of the forward that is running
        self._records_graph = False  # whether that forward runs under gradients
        self._recomputes_possible = False
        self._token: lineage.GraphToken | None = lineage.GraphToken()
        self._opened = lineage.next_number()
        self._closed: int | None = None
        self._others_until = 0  # after closing: nodes below this number are of later forwards
        self._routers = [RouterHooks(router, layer, plan, self) for layer, router in routers.items()]
        self._model_hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._abandon, always_call=True),
            model.register_forward_hook(self._finish, prepend=True),
        ]

    @property
    def open(self) -> bool:
        """Whether forwards replay now."""
        return self._closed is None

    def require_a_forward(self) -> None:
        """A block that saw no whole forward replayed nothing: the hooks were on another model than was called."""
        if self.report.forwards == 0:
            raise NothingReplayed(
                "the block ended without a complete forward of the model it was given",
                expected="at least one forward",
                found="none",
                way_out="give replay_routes the module that you call",
            )

    def close(self) -> None:
        """End the block. Hooks go now, or with the graph if a checkpoint may still recompute it."""
        if self._token is None:
            return
        self._closed = self._others_until = lineage.next_number()
        self._outputs = None
        for router in self._routers:
            router.abandon()
        token = weakref.ref(self._token)
        self._token = None
        if self._recomputes_possible:
            lineage.when_gone(token, self._remove)
        else:
            self._remove()

    def claims(self, layer: int) -> bool:
        """Whether the router call that begins now replays."""
        if lineage.in_backward():
            return self._claims_recompute(layer)
        if not self.open:
            return False
        if self._outputs is None or threading.get_ident() != self._thread:
            raise RouterOutsideForward(
                "a router ran outside a forward of the model",
                layer=layer,
                way_out="give replay_routes the module that you call, and call it in the thread that opened the block",
            )
        if layer in self._outputs:
            raise RouterCalledTwice(
                "a router ran again in one forward", layer=layer, expected="1 call", found="2 calls"
            )
        return True

    def take(self, layer: int, output: Any) -> None:
        """A recompute is proven at once, a forward when it is complete."""
        read = proof.read_output(output, self._plan, layer)
        if self._outputs is None:
            proof.check({layer: read}, self._plan)
            self.report.recomputes += 1
            return
        self._outputs[layer] = read
        self._recomputes_possible |= self._records_graph and not lineage.keeps_activations()

    def _claims_recompute(self, layer: int) -> bool:
        number = lineage.executing_number()
        if number < self._opened or (self._closed is not None and self._closed <= number < self._others_until):
            return False
        if self._closed is not None and number >= self._closed:
            raise UntracedRecompute("a recompute of a graph that no forward is known for", layer=layer)
        if lineage.nests_checkpoints():
            raise UntracedRecompute(
                "a checkpoint inside a recomputing checkpoint", layer=layer, way_out="use use_reentrant=False for both"
            )
        return True

    def _begin(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if lineage.in_backward() or not self.open:
            return  # a recompute of the whole model, or a forward after the block
        self._records_graph = torch.is_grad_enabled()
        if not self._records_graph and lineage.inside_reentrant_forward():
            raise UntracedRecompute(
                "the whole forward is inside a reentrant checkpoint", way_out="use use_reentrant=False"
            )
        check_batch(model, args, kwargs, self._plan.layout)
        self._outputs = {}

    def _finish(self, _model: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._outputs is None:
            return
        missing = [layer for layer in self.report.used if layer not in self._outputs]
        if missing:
            raise RouterNotCalled(
                "a forward ended without having run every router",
                layer=missing[0],
                expected=list(self.report.used),
                found=list(self._outputs),
                way_out="a fused or compiled MoE block routes inside: turn it off",
            )
        for layer in self._outputs:
            self.report.installed[layer] += self._plan.rows_replayed
        proof.check(self._outputs, self._plan)
        self._follow_graph(output)
        self._count()

    def _follow_graph(self, output: Any) -> None:
        """Where a checkpoint may recompute this forward, know for how long."""
        if self._token is None or not (self._records_graph and self._recomputes_possible):
            return
        if lineage.attach(self._token, lineage.tensors_in(output), self._opened) == 0:
            raise UntracedRecompute(
                "a forward under checkpoints returned nothing whose graph could be followed",
                expected="tensors with gradients, in tuples, lists or mappings",
                found=type(output).__name__,
            )

    def _count(self) -> None:
        self.report.forwards += 1
        self.report.used = dict(self.report.installed)
        self.report.rows_replayed += self._plan.rows_replayed
        self.report.rows_missing += self._plan.rows_missing
        self.report.rows_last += self._plan.rows_last
        self.report.rows_padding += self._plan.rows_padding

    def _abandon(self, *_: Any) -> None:
        """The forward is over, returned or raised."""
        self._outputs = None
        if not self.open and not lineage.in_backward():
            self._others_until = lineage.next_number()

    def _remove(self) -> None:
        for hook in (*self._routers, *self._model_hooks):
            hook.remove()


def _refuse_second_block(routers: Mapping[int, torch.nn.Module]) -> None:
    for layer, router in routers.items():
        for hook in router._forward_pre_hooks.values():
            owner = getattr(getattr(hook, "__self__", None), "owner", None)
            if isinstance(owner, ReplayBlock) and owner.open:
                raise AlreadyReplaying("another block replays on this model", layer=layer, way_out="close it first")
