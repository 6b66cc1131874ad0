"""Keeping and committing inside compiled forwards, where a hook in Python is not run but traced.

Two custom operators stand in the compiled code and call back at run time, or once while a graph is captured. What a
compiler produced may be overwritten as soon as its last reader is done, whoever else refers to it: so the ids are
copied, one small kernel a layer. Both operators claim to write a token, which keeps them, and their order, in the code.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Sink(Protocol):
    """Whose forward this is, is found out when it runs."""

    def keep_compiled(self, moe_index: int, topk_ids: Tensor) -> None: ...

    def commit_compiled(self, inputs: list[Tensor], layout: int) -> None: ...


_SINKS: weakref.WeakValueDictionary[int, Sink] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)


def register(sink: Sink) -> int:
    """A number that stands for `sink` in compiled code, as long as it lives."""
    handle = next(_HANDLES)
    _SINKS[handle] = sink
    return handle


@torch.library.custom_op("r3::keep", mutates_args={"token"})
def keep(topk_ids: Tensor, token: Tensor, handle: int, moe_index: int) -> None:
    """A router chose."""
    if (sink := _SINKS.get(handle)) is not None:
        sink.keep_compiled(moe_index, topk_ids)


@torch.library.custom_op("r3::commit", mutates_args={"token"})
def commit(inputs: list[Tensor], token: Tensor, handle: int, layout: int) -> None:
    """The forward is over. inputs: as the engine's adapter laid them out; layout: its number for that."""
    if (sink := _SINKS.get(handle)) is not None:
        sink.commit_compiled(inputs, layout)


@keep.register_fake
def _(topk_ids: Tensor, token: Tensor, handle: int, moe_index: int) -> None:
    return None


@commit.register_fake
def _(inputs: list[Tensor], token: Tensor, handle: int, layout: int) -> None:
    return None


def keeper(handle: int, token: Tensor, eager: Callable[[int, Tensor], None]) -> Callable[[int, Tensor], None]:
    """`keep(moe_index, topk_ids)` for hooks: `eager`, or the operator where a compiler traces."""

    def keep_either(moe_index: int, topk_ids: Tensor) -> None:
        if torch.compiler.is_compiling():
            keep(topk_ids, token, handle, moe_index)
        else:
            eager(moe_index, topk_ids)

    return keep_either
