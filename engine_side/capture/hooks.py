"""Finds a Hugging Face model's MoE routers and hooks them.

A router of transformers 5 is a module whose class name ends in `TopKRouter` (or `TopkRouter`) and whose forward returns
`(router_logits, routing_weights, selected_experts)`. A layer with experts but without such a module routes where no
hook sees it, and is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine_side.capture.errors import CaptureRefused
from engine_side.facts import EngineFacts
from engine_side.support import require
from protocol.errors import GeometryError
from protocol.geometry import Geometry

_LAYER = re.compile(r"((?:^|.*?\.)layers\.)(\d+)\.")
_ROUTER = re.compile(r"Top[kK]Router$")
_DRAFTERS = re.compile(r"(?:^|\.)(?:mtp|nextn|draft|eagle|medusa)[^.]*(?:\.|$)", re.IGNORECASE)


def find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """Global layer id to router module, ascending. Routers of drafters, and any outside the `num_hidden_layers` layers
    of the decoder, are not the target model's and are left out. Raises CaptureRefused for two routers in one layer, one
    in two layers, experts or a layer that the config calls MoE without a router, a config without that number, and
    layers in several places of a model that does not say which are its decoder's."""
    found: dict[int, nn.Module] = {}
    layer_of: dict[nn.Module, int] = {}
    with_experts: set[int] = set()
    twice: set[int] = set()
    sharing: set[int] = set()
    for layer, name, module in _modules_of_layers(model):
        if name.endswith(".experts") and not _is_placeholder(module):
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
            layers_without_a_router=tuple(sorted((with_experts | _moe_layers(_config(model))) - set(found))),
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
def hooked(
    routers: dict[int, nn.Module], keep: Callable[[int, Tensor], None], geometry: Geometry | None = None
) -> Iterator[None]:
    """While open, `keep(moe_index, topk_ids)` gets what each router chose, integer [T, >= top_k], before any hook that
    was there changes it. moe_index counts captured layers. With `geometry`, ids wider than top_k are cut to it, and a
    row whose cut columns hold routed experts has num_experts everywhere, which is out of range."""
    handles = []
    try:
        for index, router in enumerate(routers.values()):
            # First of all hooks: expert-parallel and load-balancing hooks turn logical ids into physical ones.
            handles.append(router.register_forward_hook(_keeper(index, keep, geometry), prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(
    index: int, keep: Callable[[int, Tensor], None], geometry: Geometry | None
) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        # Never raises into the model's forward: a router of another kind leaves its layer uncaptured, which is marked.
        ids = output[2] if isinstance(output, tuple) and len(output) == 3 else None
        if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.ndim >= 2:
            ids = ids.flatten(0, -2)
            if geometry is not None and ids.shape[1] > geometry.top_k:
                ids = _cut(ids, geometry)
            # A hook behind this one may remap in place, which a mere reference would follow.
            keep(index, ids.clone() if len(module._forward_hooks) > 1 else ids)

    return hook


def _cut(ids: Tensor, geometry: Geometry) -> Tensor:
    """The first top_k columns of ids [T, > top_k]. Columns behind them may be those of fused shared experts, numbered
    past the routed ones; a routed expert among them means that a shared one stands in front, or that top_k is wrong."""
    behind = ids[:, geometry.top_k :]
    routed = ((behind >= 0) & (behind < geometry.num_experts)).any(1, keepdim=True)
    return ids[:, : geometry.top_k].to(torch.int32).masked_fill(routed, geometry.num_experts)


def _modules_of_layers(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Layer id, name and module of everything inside the target model's decoder layers."""
    num_layers, own = getattr(_config(model), "num_hidden_layers", None), _decoder_layers(model)
    if num_layers is None:
        name = type(model).__name__
        raise CaptureRefused(f"the config of {name} does not say how many layers it has: name num_hidden_layers in it")
    by_place: dict[str, list[tuple[int, str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        match = _LAYER.match(name)
        if match is None or _DRAFTERS.search(name) or own not in (None, match[1]) or int(match[2]) >= num_layers:
            continue
        by_place.setdefault(match[1], []).append((int(match[2]), name, module))
    if len(by_place) > 1:
        places = " and ".join(f"{place}*" for place in sorted(by_place))
        raise CaptureRefused(f"{type(model).__name__} has layers {places}: which are the target model's is unknown")
    return [each for modules in by_place.values() for each in modules]


def _decoder_layers(model: nn.Module) -> str | None:
    """The name that the decoder's own layers begin with, where the model says which module its decoder is."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(getattr(decoder, "layers", None), nn.Module):
        return None
    name = next((name for name, module in model.named_modules() if module is decoder), None)
    return None if name is None else f"{name}.layers.".lstrip(".")


def _is_placeholder(module: nn.Module) -> bool:
    """Named like experts, but an empty module of torch itself: it computes nothing."""
    state = itertools.chain(module.parameters(), module.buffers())
    return type(module).__module__.startswith("torch.nn.") and next(state, None) is None


def _moe_layers(config: Any) -> set[int]:
    """Layers that the config calls MoE, by the three rules transformers has for it; none where it says nothing."""
    layers = range(config.num_hidden_layers)
    if kinds := getattr(config, "mlp_layer_types", None):
        return {layer for layer, kind in zip(layers, kinds, strict=False) if kind != "dense"}
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        return set(layers[first:])
    if (step := getattr(config, "decoder_sparse_step", None)) and getattr(config, "num_experts", None):
        dense = getattr(config, "mlp_only_layers", None) or ()
        return {layer for layer in layers if layer not in dense and (layer + 1) % step == 0}
    return set()


def _config(model: nn.Module) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
