"""Finding a model's routers by what they are, not by which family they belong to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collector.replay.checks import ModelGeometry
from collector.replay.errors import CompiledModel, RoutersNotFound

GIVE_THEM = "pass routers={layer id: module}"


def find_routers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Decoder layer id to router, rising: modules named `...Router` that know `top_k` and `num_experts`.

    The layer id is the first number in the module's path (`model.layers.3.mlp.gate`). Raises RoutersNotFound when
    there are none, or two for one layer (multi-token prediction shares its numbers with the backbone).
    """
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for path, module in model.named_modules():
        if not _is_router(module):
            continue
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        if not numbers:
            raise RoutersNotFound(f"router {path!r} is in no numbered layer", way_out=GIVE_THEM)
        if numbers[0] in found:
            both = f"{found[numbers[0]][0]!r} and {path!r}"
            raise RoutersNotFound("two routers in one layer", layer=numbers[0], found=both, way_out=GIVE_THEM)
        found[numbers[0]] = (path, module)
    if not found:
        raise RoutersNotFound(f"{type(model).__name__} has no router module", way_out=GIVE_THEM)
    return {layer: found[layer][1] for layer in sorted(found)}


def geometry_of(model: torch.nn.Module, routers: Mapping[int, torch.nn.Module]) -> ModelGeometry:
    """What the routers say of themselves; they must agree."""
    said = {(int(router.top_k), int(router.num_experts)) for router in routers.values()}
    if len(said) != 1:
        raise RoutersNotFound("routers differ in (top_k, num_experts)", expected="one pair", found=sorted(said))
    top_k, num_experts = said.pop()
    return ModelGeometry(_num_layers(model, max(routers)), tuple(routers), top_k, num_experts)


def refuse_compiled(model: torch.nn.Module) -> None:
    """Hooks set on a compiled module are not run by what was compiled before."""
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise CompiledModel(
                f"module {path or type(model).__name__!r} is compiled", way_out="replay on the uncompiled model"
            )


def _is_router(module: torch.nn.Module) -> bool:
    known = all(isinstance(getattr(module, name, None), int) for name in ("top_k", "num_experts"))
    return known and type(module).__name__.lower().endswith("router")


def _num_layers(model: torch.nn.Module, last: int) -> int:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return int(getattr(config, "num_hidden_layers", last + 1))
