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
from engine_side.facts import EngineFacts
from engine_side.support import require
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
    twice: set[int] = set()
    sharing: set[int] = set()
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
            twice.add(layer)
        if layer_of.setdefault(module, layer) != layer:
            sharing |= {layer_of[module], layer}
        found[layer] = module
    require(
        EngineFacts(
            layers_with_two_routers=tuple(sorted(twice)),
            layers_sharing_a_router=tuple(sorted(sharing)),
            layers_without_a_router=tuple(sorted(with_experts - set(found))),
        )
    )
    return dict(sorted(found.items()))


def router_names(model: nn.Module) -> list[str]:
    """Paths of everything that looks like a router, wherever it is."""
    return [name for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]


def sizes_of(config: Any) -> tuple[int | None, int | None]:
    """(experts a layer, experts a token) as a text config names them, None for what it does not name: a list, one
    figure a layer, is no size either."""
    experts = (getattr(config, name, None) for name in ("n_routed_experts", "num_local_experts", "num_experts"))
    top_k = getattr(config, "num_experts_per_tok", None)
    return next((n for n in experts if n and isinstance(n, int)), None), top_k if isinstance(top_k, int) else None


def geometry_of(model: nn.Module, routers: dict[int, nn.Module]) -> Geometry:
    """The model's geometry: all decoder layers, the layers with a router. Raises CaptureRefused for a dense model, and
    for sizes that no row can have."""
    config = _config(model)
    num_experts, named = sizes_of(config)
    top_k = next((n for r in routers.values() if (n := getattr(r, "top_k", None)) is not None), named)
    require(EngineFacts(moe_layers=len(routers)))  # first: the sizes of a dense model say nothing
    known = num_experts is not None and top_k is not None
    require(EngineFacts(sizes_known=known, num_experts=num_experts, top_k=top_k))
    try:
        return Geometry(config.num_hidden_layers, tuple(routers), int(top_k or 0), num_experts or 0).validate()
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
