"""Routes of one request are held against the model before anything runs. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collector.replay.errors import (
    DuplicateExpert,
    ExpertOutOfRange,
    MissingRowsDisagree,
    PartialRow,
    WrongExpertCount,
    WrongLayerAxis,
    WrongRowCount,
    WrongTopK,
)


class RoutesLike(Protocol):
    """What replay reads of a pull's answer; `collector.client.Routes` is one.

    array: integers `[num_tokens-1, layers, top_k]`. missing: ranges [start, stop) of rows that hold -1 throughout.
    Read when there: `request_id` (for messages), `layers` (global ids of axis 1, else all decoder layers in order) and
    `row_start` (not 0 for a slice, which is refused).
    """

    array: Any
    moe_layer_ids: Sequence[int]
    num_experts: int
    num_tokens: int
    status: str
    missing: Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """num_layers: all decoder layers. moe_layer_ids: the ones with a router, rising. top_k and num_experts of each."""

    num_layers: int
    moe_layer_ids: tuple[int, ...]
    top_k: int
    num_experts: int


def name_of(routes: RoutesLike, index: int) -> str:
    """The request's id, or its place in the batch if the object carries none."""
    return str(getattr(routes, "request_id", None) or f"#{index} of the batch")


def checked_rows(
    routes: RoutesLike, name: str, num_tokens: int, model: ModelGeometry
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """What to install for a sequence of `num_tokens` tokens.

    Returns int16 `[num_tokens-1, moe layers, top_k]` and bool `[num_tokens-1]`, True where the row has a route.
    Raises a RoutesError that names request, row and layer.
    """
    array = np.asarray(routes.array)
    _check_shape(routes, array, name, num_tokens, model)
    columns = _columns(routes, array, name, model)
    rows = array[:, [columns[layer] for layer in model.moe_layer_ids]]
    holds = _held(routes, rows, name, model)
    _check_ids(rows, holds, name, model)
    return rows.astype(np.int16), holds


def _check_shape(routes: RoutesLike, array: NDArray[Any], name: str, num_tokens: int, model: ModelGeometry) -> None:
    if routes.num_experts != model.num_experts:
        raise WrongExpertCount(
            "the routes are of another model", request_id=name, expected=model.num_experts, found=routes.num_experts
        )
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise WrongLayerAxis(
            "routes must be integers [num_tokens-1, layers, top_k]",
            request_id=name,
            found=f"{array.dtype} {list(array.shape)}",
        )
    if array.shape[2] != model.top_k:
        raise WrongTopK("experts per token", request_id=name, expected=model.top_k, found=array.shape[2])
    start = getattr(routes, "row_start", 0)
    if start != 0:
        raise WrongRowCount(
            "a slice of rows was pulled", request_id=name, expected="rows from 0", found=f"from {start}"
        )
    if routes.num_tokens != num_tokens:
        raise WrongRowCount(
            "the batch holds another number of this request's tokens",
            request_id=name,
            expected=f"{routes.num_tokens} tokens",
            found=f"{num_tokens} in the batch",
            way_out=f"pull with num_tokens={num_tokens}, or check the layout",
        )
    if array.shape[0] != num_tokens - 1:
        raise WrongRowCount(
            f"{num_tokens} tokens", request_id=name, expected=f"{num_tokens - 1} rows", found=f"{array.shape[0]} rows"
        )


def _columns(routes: RoutesLike, array: NDArray[Any], name: str, model: ModelGeometry) -> dict[int, int]:
    """Global layer id to index on axis 1."""
    if tuple(routes.moe_layer_ids) != model.moe_layer_ids:
        raise WrongLayerAxis(
            "layers with a router", request_id=name, expected=model.moe_layer_ids, found=tuple(routes.moe_layer_ids)
        )
    every = tuple(range(model.num_layers))
    layers = tuple(getattr(routes, "layers", every))
    if len(layers) != array.shape[1] or layers not in (every, model.moe_layer_ids):
        raise WrongLayerAxis(
            "layers of the routes",
            request_id=name,
            expected=f"all {model.num_layers}, or the {len(model.moe_layer_ids)} with a router",
            found=f"{array.shape[1]} (ids {layers})",
        )
    dense = [index for index, layer in enumerate(layers) if layer not in model.moe_layer_ids]
    holding = np.argwhere((array[:, dense] != -1).any(axis=2))
    if len(holding):  # a layer axis that is shifted by a dense first layer shows here
        row, index = (int(each) for each in holding[0])
        raise WrongLayerAxis(
            "a layer without a router holds ids",
            request_id=name,
            row=row,
            layer=layers[dense[index]],
            expected=-1,
            found=array[row, dense[index]].tolist(),
        )
    return {layer: index for index, layer in enumerate(layers)}


def _held(routes: RoutesLike, rows: NDArray[Any], name: str, model: ModelGeometry) -> NDArray[np.bool_]:
    """Which rows have a route: all of a row is there or none of it, and none of it is as declared."""
    empty = (rows == -1).sum(axis=2)
    missing = (empty == model.top_k).all(axis=1)
    partial = np.argwhere((empty > 0) & ~missing[:, None])
    if len(partial):
        row, index = (int(each) for each in partial[0])
        raise PartialRow(
            "a row is there in part",
            request_id=name,
            row=row,
            layer=model.moe_layer_ids[index],
            expected=f"{model.top_k} ids, or -1 at every layer",
            found=rows[row, index].tolist(),
        )
    declared = np.zeros(len(rows), dtype=np.bool_)
    for start, stop in routes.missing:
        declared[start:stop] = True
    if routes.status == "complete" and declared.any():
        raise MissingRowsDisagree("complete routes declare missing rows", request_id=name, found=list(routes.missing))
    differ = np.flatnonzero(declared != missing)
    if len(differ):
        row = int(differ[0])
        told, seen = ("missing", "ids") if declared[row] else ("ids", "-1 at every layer")
        raise MissingRowsDisagree("row and declaration disagree", request_id=name, row=row, expected=told, found=seen)
    return ~missing


def _check_ids(rows: NDArray[Any], holds: NDArray[np.bool_], name: str, model: ModelGeometry) -> None:
    outside = np.argwhere(((rows < 0) | (rows >= model.num_experts)).any(axis=2) & holds[:, None])
    if len(outside):
        row, index = (int(each) for each in outside[0])
        raise ExpertOutOfRange(
            "expert id",
            request_id=name,
            row=row,
            layer=model.moe_layer_ids[index],
            expected=f"0 to {model.num_experts - 1}",
            found=rows[row, index].tolist(),
        )
    ranked = np.sort(rows, axis=2)
    twice = np.argwhere((ranked[..., 1:] == ranked[..., :-1]).any(axis=2) & holds[:, None])
    if len(twice):
        row, index = (int(each) for each in twice[0])
        raise DuplicateExpert(
            "a row names an expert twice",
            request_id=name,
            row=row,
            layer=model.moe_layer_ids[index],
            expected=f"{model.top_k} distinct ids",
            found=rows[row, index].tolist(),
        )
