"""Batches of token sequences, what a model's routers choose for them, and that as routes. Its own hooks throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.replay.families import VOCAB


@dataclass
class Pulled:
    """The attributes of a pull's answer that replay reads."""

    request_id: str
    array: NDArray[np.int16]
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    num_tokens: int
    status: str = "complete"
    missing: tuple[tuple[int, int], ...] = ()


@dataclass
class Batch:
    """inputs: a model's arguments. layout: `replay_routes`' arguments. places: flat rows of each sequence's tokens."""

    inputs: dict[str, Any]
    layout: dict[str, Any]
    places: list[list[int]] = field(default_factory=list)


def sentences(seed: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def padded(sequences: list[torch.Tensor], side: str, width: int) -> Batch:
    ids = torch.zeros((len(sequences), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    places = []
    for index, tokens in enumerate(sequences):
        start = 0 if side == "right" else width - len(tokens)
        ids[index, start : start + len(tokens)] = tokens
        mask[index, start : start + len(tokens)] = 1
        places.append([index * width + start + step for step in range(len(tokens))])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    return Batch(inputs, {"attention_mask": mask}, places)


def packed(sequences: list[torch.Tensor]) -> Batch:
    """As transformers packs: one sequence, position_ids that start again, no attention_mask."""
    ends = np.cumsum([len(tokens) for tokens in sequences]).tolist()
    places = [list(range(end - len(tokens), end)) for tokens, end in zip(sequences, ends, strict=True)]
    positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])[None]
    inputs = {"input_ids": torch.cat(sequences)[None], "position_ids": positions, "use_cache": False}
    return Batch(inputs, {"cu_seqlens": [0, *ends]}, places)


def routers_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    found = {}
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")):
            found[int(name.split(".layers.")[1].split(".")[0])] = module
    assert found, "the test's own search for routers found none"
    return found


@contextmanager
def used_ids(model: torch.nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Layer to the ids `[flat rows, top_k]` that its router returned last."""
    used: dict[int, torch.Tensor] = {}
    handles = [
        router.register_forward_hook(lambda _m, _a, output, at=layer: used.__setitem__(at, output[2].clone().cpu()))
        for layer, router in routers_of(model).items()
    ]
    try:
        yield used
    finally:
        for handle in handles:
            handle.remove()


def run(model: torch.nn.Module, batch: Batch, backward: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a next-token loss over the batch's real tokens."""
    model.zero_grad()
    logits = model(**batch.inputs).logits
    if backward:
        loss_of(logits, batch).backward()
    return logits.detach().clone(), gradients(model)


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    flat, tokens = logits.flatten(0, 1).float().log_softmax(-1), batch.inputs["input_ids"].flatten()
    return -sum(flat[place[:-1]].gather(1, tokens[place[1:]][:, None]).sum() for place in batch.places)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def routes_of(model: torch.nn.Module, batch: Batch, used: dict[int, torch.Tensor]) -> list[Pulled]:
    """What a collector would serve had the rollout chosen these ids."""
    layers = tuple(sorted(used))
    top_k, num_experts = used[layers[0]].shape[1], next(iter(routers_of(model).values())).num_experts
    pulled = []
    for index, places in enumerate(batch.places):
        array = np.full((len(places) - 1, model.config.num_hidden_layers, top_k), -1, dtype=np.int16)
        for layer in layers:
            array[:, layer] = used[layer][places[:-1]].numpy()
        pulled.append(Pulled(f"request-{index}", array, layers, num_experts, len(places)))
    return pulled


def own_routes(model: torch.nn.Module, batch: Batch) -> list[Pulled]:
    with used_ids(model) as used, torch.no_grad():
        model(**batch.inputs)
    return routes_of(model, batch, used)


def random_routes(model: torch.nn.Module, batch: Batch, seed: int) -> list[Pulled]:
    """Distinct random ids in every row: what no router of this model would choose everywhere."""
    generator = np.random.default_rng(seed)
    routes = own_routes(model, batch)
    for each in routes:
        rows, top_k = each.array.shape[0], each.array.shape[2]
        for layer in each.moe_layer_ids:
            each.array[:, layer] = generator.random((rows, each.num_experts)).argsort(axis=1)[:, :top_k]
    return routes


def installed_ids(batch: Batch, routes: list[Pulled], layer: int) -> torch.Tensor:
    """int64 `[flat rows, top_k]`, -1 where there is no row: laid out here, without the code under test."""
    rows = batch.inputs["input_ids"].numel()
    flat = torch.full((rows, routes[0].array.shape[2]), -1, dtype=torch.long)
    for places, each in zip(batch.places, routes, strict=True):
        for row, place in enumerate(places[:-1]):
            flat[place] = torch.from_numpy(each.array[row, layer].astype(np.int64))
    return flat


def same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Equal to the last bit, parameter by parameter."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
