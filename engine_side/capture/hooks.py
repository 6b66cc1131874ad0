"""Finds a Hugging Face model's MoE routers and hooks them.

A router of transformers 5 is a module whose class name ends in `TopKRouter` (or `TopkRouter`) and whose forward returns
`(router_logits, routing_weights, selected_experts)`. A layer with experts but without such a module routes where no
hook sees it, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from engine_side.capture.errors import CaptureRefused
from protocol.errors import GeometryError
from protocol.geometry import Geometry

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTER = re.compile(r"Top[kK]Router$")
_DRAFTERS = re.compile(r"(?:^|\.)(?:mtp|nextn|draft|eagle|medusa)[^.]*(?:\.|$)", re.IGNORECASE)


def find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """Global layer id to router module, ascending. Routers of drafters and of layers past the decoder's are not the
    target model's and are left out. Raises CaptureRefused for two routers in one layer, one in two layers, or experts
    without a router."""
    num_layers = _config(model).num_hidden_layers
    found: dict[int, nn.Module] = {}
    layer_of: dict[nn.Module, int] = {}
    with_experts: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        match = _LAYER.search(name)
        if match is None or _DRAFTERS.search(name):
            continue
        layer = int(match[1])
        if layer >= num_layers:
            continue
        if name.endswith(".experts"):
            with_experts.add(layer)
        if not _ROUTER.search(type(module).__name__):
            continue
        if layer in found and found[layer] is not module:
            raise CaptureRefused(f"layer {layer} has two routers ({name} is the second): which one routes is unknown")
        if layer_of.setdefault(module, layer) != layer:
            raise CaptureRefused(
                f"layers {layer_of[module]} and {layer} share a router: its calls cannot be told apart"
            )
        found[layer] = module
    if unseen := sorted(with_experts - set(found)):
        raise CaptureRefused(
            f"layers {unseen} have experts but no *TopKRouter: {type(model).__name__} routes where no hook sees it"
        )
    return dict(sorted(found.items()))


def geometry_of(model: nn.Module, routers: dict[int, nn.Module]) -> Geometry:
    """The model's geometry: all decoder layers, the layers with a router. Raises CaptureRefused for a dense model."""
    config = _config(model)
    if not routers:
        raise CaptureRefused(f"{type(model).__name__} has no MoE router: a dense model has no routes to capture")
    top_k = next((n for r in routers.values() if (n := getattr(r, "top_k", None))), None)
    top_k = top_k or config.num_experts_per_tok
    experts = (getattr(config, name, None) for name in ("n_routed_experts", "num_local_experts", "num_experts"))
    num_experts = next((n for n in experts if n), None)
    if num_experts is None:
        raise CaptureRefused(f"{type(config).__name__} does not say how many experts a layer has")
    try:
        return Geometry(config.num_hidden_layers, tuple(routers), int(top_k), int(num_experts)).validate()
    except GeometryError as error:
        raise CaptureRefused(str(error)) from None


@contextmanager
def hooked(routers: dict[int, nn.Module], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While open, `keep(moe_index, topk_ids)` gets what each router chose. moe_index counts captured layers."""
    handles = []
    try:
        for index, router in enumerate(routers.values()):
            handles.append(router.register_forward_hook(_keeper(index, keep)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(index: int, keep: Callable[[int, Tensor], None]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # Never raises into the model's forward: a router of another kind leaves its layer uncaptured, which is marked.
        ids = output[2] if isinstance(output, tuple) and len(output) == 3 else None
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            keep(index, ids.flatten(0, -2))

    return hook


def _config(model: nn.Module) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
