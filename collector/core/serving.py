"""What a life looks like from outside: headers, spans and the rows themselves (rule 11 of assembly)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.core.arena import meta_kinds, meta_tokens, meta_versions
from collector.core.assembly import Assembly
from collector.core.life import Life, State
from protocol import codes, limits
from protocol.codec import token_digest
from protocol.geometry import UNCAPTURED
from protocol.messages import Pull, Range, Routes, Span

_WIDTH = {"uint8": 1, "int16": 2, "int32": 4}


class BadPull(ValueError):
    """A pull whose slice, dtype or size cannot be served; `code` is a word of `protocol.codes`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def spans(values: NDArray[np.int64], start: int) -> tuple[Span, ...]:
    """Runs of equal non-negative values as (start, stop, value); negative values belong to no span."""
    if not len(values):
        return ()
    cuts = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *cuts.tolist(), len(values)]
    return tuple((start + a, start + b, int(values[a])) for a, b in itertools.pairwise(edges) if values[a] >= 0)


def digest_of(assembly: Assembly, life: Life, num_tokens: int) -> bytes:
    """`token_digest` of the tokens that the first num_tokens-1 rows consumed."""
    return token_digest(meta_tokens(assembly.meta(life, 0, num_tokens - 1)))


def header_for(assembly: Assembly, life: Life, pull: Pull, num_tokens: int) -> Routes:
    """The header of the answer to `pull`. Raises BadPull for a slice, dtype or size that cannot be served."""
    geometry = life.session.geometry
    start, stop = pull.rows if pull.rows is not None else (0, num_tokens - 1)
    if not 0 <= start <= stop <= num_tokens - 1:
        raise BadPull(codes.BAD_REQUEST, f"rows [{start}, {stop}) are not within [0, {num_tokens - 1})")
    layers = pull.layers
    if layers is None:
        layers = geometry.moe_layer_ids if pull.axis == "moe" else tuple(range(geometry.num_layers))
    elif len(layers) > geometry.num_layers or any(not 0 <= x < geometry.num_layers for x in layers):
        raise BadPull(codes.BAD_REQUEST, f"layers must be global ids in [0, {geometry.num_layers})")
    shape = (stop - start, len(layers), geometry.top_k)
    size = math.prod(shape) * _WIDTH[pull.dtype]
    if size > limits.MAX_REPLY_BYTES:
        raise BadPull(codes.TOO_LARGE, f"{size} bytes in one answer, at most {limits.MAX_REPLY_BYTES}: pull row ranges")
    meta = assembly.meta(life, start, stop)
    held = meta != 0
    missing = _false_ranges(held, start)
    if pull.dtype == "uint8":
        if geometry.num_experts > 256:
            raise BadPull(codes.BAD_REQUEST, f"uint8 cannot hold ids of {geometry.num_experts} experts")
        if missing or not set(layers) <= set(geometry.moe_layer_ids):
            raise BadPull(codes.BAD_REQUEST, "uint8 cannot hold -1, and some cells are uncaptured: use axis='moe'")
    provenance = spans(np.where(held, meta_kinds(meta), -1), start)
    weights = spans(np.where(held, meta_versions(meta), -1), start)
    if max(len(missing), len(provenance), len(weights)) > limits.MAX_SPANS:
        text = f"its rows change their kind or weights more than {limits.MAX_SPANS} times: pull row ranges"
        raise BadPull(codes.TOO_LARGE, text)
    status = {State.COMPLETE: "complete", State.ABORTED: "aborted"}.get(life.state, "incomplete")
    return Routes(
        nonce=pull.nonce,
        request_id=life.name,
        status=status,  # type: ignore[arg-type]
        num_tokens=num_tokens,
        shape=shape,
        dtype=pull.dtype,
        layers=layers,
        geometry=geometry,
        weight_spans=weights,
        provenance=provenance,
        missing=missing,
        trimmed=life.num_tokens is not None and num_tokens < life.num_tokens,
        row_start=start,
        engine_id=life.session.engine_id,
        token_digest=digest_of(assembly, life, num_tokens),
    )


def nbytes_of(header: Routes) -> int:
    """Bytes of an answer's rows."""
    return math.prod(header.shape) * _WIDTH[header.dtype]


def gather(assembly: Assembly, life: Life, header: Routes) -> NDArray[Any] | None:
    """The array of an answer, C order, `header.shape` and `header.dtype`; -1 where nothing was captured. An incomplete
    life may have changed since its header was made: what came since is left out, and where rows that the header
    counts are gone there is no array."""
    geometry = life.session.geometry
    rows, start = header.shape[0], header.row_start
    held = np.ones(rows, np.bool_)
    for first, stop in header.missing:
        held[first - start : stop - start] = False
    if not (assembly.meta(life, start, start + rows)[held] != 0).all():
        return None
    cells = assembly.rows(life, start, start + rows).reshape(rows, *geometry.row_shape)
    column = {layer: i for i, layer in enumerate(geometry.moe_layer_ids)}
    if header.layers == geometry.moe_layer_ids:
        out = cells.astype(header.dtype)
    else:
        wanted = [(at, column[layer]) for at, layer in enumerate(header.layers) if layer in column]
        captured = len(wanted) == len(header.layers)
        # uint8 has no -1, and none of its layers needs one.
        out = np.empty(header.shape, header.dtype) if captured else np.full(header.shape, UNCAPTURED, header.dtype)
        if wanted:
            at, of = zip(*wanted, strict=True)
            out[:, list(at)] = cells[:, list(of)]
    if not held.all():
        out[~held] = UNCAPTURED
    return out


def _false_ranges(held: NDArray[np.bool_], start: int) -> tuple[Range, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([1], held, [1])).astype(np.int8))).tolist()
    return tuple((start + a, start + b) for a, b in zip(edges[::2], edges[1::2], strict=True))
