"""Which forward does a recompute belong to? Read from autograd, so that no checkpoint implementation is named.

Autograd numbers its nodes, rising, per thread. During a backward the node that is executing was made by the forward
that is being differentiated: also when that node asks a checkpoint to recompute, because non-reentrant checkpoints
recompute inside the unpacking of a saved tensor, and reentrant ones inside their own node.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_REENTRANT = CheckpointFunction.forward.__code__
_TOKEN = "r3_replay"


class GraphToken:
    """Lives as long as any autograd node that it was attached to."""

    __slots__ = ("__weakref__",)


def in_backward() -> bool:
    """Whether this thread is executing a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def next_number() -> int:
    """The number that this thread's next autograd node gets."""
    return int(torch.autograd._get_sequence_nr())


def executing_number() -> int:
    """The number of the node that is executing now. Only inside a backward."""
    return int(torch._C._current_autograd_node()._sequence_nr())


def keeps_activations() -> bool:
    """Whether what is computed now is recorded whole, so that nothing of it can be recomputed.

    False under no_grad (a reentrant checkpoint runs its forward so) and under saved-tensor hooks (a non-reentrant
    one replaces what is saved by holders).
    """
    return torch.is_grad_enabled() and not _saved_tensor_hooks()


def nests_checkpoints() -> bool:
    """Whether the recompute that is running makes nodes that recompute again: their origin could not be read.

    That is one without gradients, or a checkpoint that saves into holders while a reentrant one recomputes.
    """
    inside_reentrant = torch._C._current_autograd_node().name() == "CheckpointFunctionBackward"
    return not torch.is_grad_enabled() or (inside_reentrant and _saved_tensor_hooks())


def inside_reentrant_forward() -> bool:
    """Whether a caller of this function is the forward of a reentrant checkpoint."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _REENTRANT:
            return True
    return False


def attach(token: GraphToken, outputs: Iterable[torch.Tensor], since: int) -> int:
    """Make the token live as long as any part of the graph behind these tensors. Returns how many nodes hold it.

    Every node counts, not the last ones alone: a loss may be made of a hidden state, and the outputs be dropped.
    Nodes older than `since` are another graph's; those that gather gradients have no number and live with their
    parameters.
    """
    until, seen = next_number(), set()
    waiting = [each.grad_fn for each in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not since <= node._sequence_nr() < until:
            continue
        seen.add(node)
        node.metadata[_TOKEN] = token
        waiting.extend(below for below, _ in node.next_functions)
    return len(seen)


def when_gone(token: weakref.ReferenceType[GraphToken], call: Callable[[], None]) -> None:
    """Call once the graph is gone; at once if it is gone already."""
    alive = token()
    if alive is None:
        call()
    else:
        weakref.finalize(alive, call).atexit = False


def tensors_in(output: Any) -> Iterable[torch.Tensor]:
    """Every tensor in a module's output: a tensor, or tuples, lists and mappings of them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):  # Hugging Face's ModelOutput is one
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)


def _saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
