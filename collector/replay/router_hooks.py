"""The hooks on one router: force its choice while it runs, and hand on what it returned."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from collector.replay.errors import AmbiguousTopk, RouterSkippedTopk
from collector.replay.forced_topk import ForcedTopk
from collector.replay.plan import ReplayPlan


class Owner(Protocol):
    """What decides about a router's call, and what takes its output."""

    def claims(self, layer: int) -> bool:
        """Whether the call that begins now is to replay. Raises when it may not happen."""

    def take(self, layer: int, output: Any) -> None:
        """The router returned this from a call that replayed."""


class RouterHooks:
    """Three hooks: enter the mode last of all pre-hooks, leave it before any other forward hook, then check.

    Leaving is an always-called hook: a router that raises, as the early stop of a checkpoint does in mid-forward,
    leaves no mode behind. Other users' hooks on the router run outside the mode.
    """

    def __init__(self, router: torch.nn.Module, layer: int, plan: ReplayPlan, owner: Owner) -> None:
        self._layer = layer
        self._plan = plan
        self.owner = owner
        self._entered: ForcedTopk | None = None
        self._handles: list[RemovableHandle] = [
            router.register_forward_pre_hook(self._enter),
            router.register_forward_hook(self._leave, prepend=True, always_call=True),
            router.register_forward_hook(self._check),
        ]
        self._left: ForcedTopk | None = None

    def remove(self) -> None:
        """Take the hooks off the router. Twice is fine."""
        for handle in self._handles:
            handle.remove()

    def abandon(self) -> None:
        """Leave a mode that an interrupt, which runs no hook, left behind."""
        self._leave()

    def _enter(self, *_: Any) -> None:
        self._left = None
        if self.owner.claims(self._layer):
            mode = ForcedTopk(self._plan, self._layer)
            mode.__enter__()
            self._entered = mode

    def _leave(self, *_: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._left, self._entered = self._entered, None

    def _check(self, router: torch.nn.Module, _args: Any, output: Any) -> None:
        mode, self._left = self._left, None
        if mode is None:
            return
        kind = type(router).__name__
        if mode.answers == 0:
            raise RouterSkippedTopk(
                f"{kind} chose its experts without torch.topk: nothing was forced",
                layer=self._layer,
                expected=f"one topk(k={self._plan.model.top_k}) over {self._plan.model.num_experts} experts",
                found="none",
                way_out="turn fused or compiled routing off",
            )
        if mode.answers > 1:
            raise AmbiguousTopk(
                f"{kind} called topk more than once in the shape of its choice",
                layer=self._layer,
                expected=1,
                found=mode.answers,
            )
        self.owner.take(self._layer, output)
