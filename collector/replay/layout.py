"""Where the tokens of each request lie in a trainer's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collector.replay.errors import LayoutError


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A batch of shape (batch, width), flattened as routers see it: flat row = sequence * width + column.

    positions: for each request, int64 `[its tokens]`, the flat rows of its tokens in order. Flat rows of no request
    are padding.
    """

    shape: tuple[int, int]
    positions: tuple[NDArray[np.int64], ...]

    @property
    def num_rows(self) -> int:
        """Flat rows of the batch, padding included."""
        return self.shape[0] * self.shape[1]

    def occupied(self) -> NDArray[np.bool_]:
        """bool `[batch, width]`: where there is a token of some request."""
        flat = np.zeros(self.num_rows, dtype=np.bool_)
        for positions in self.positions:
            flat[positions] = True
        return flat.reshape(self.shape)


def from_mask(attention_mask: Any) -> Layout:
    """Padded batch: 0/1 `[batch, width]`, one request per sequence, its ones in one run (left, right or both pads)."""
    mask = _host(attention_mask)
    if mask.ndim != 2 or not np.isin(mask, (0, 1)).all():
        raise LayoutError("attention_mask must be 0 and 1 of shape [batch, width]", found=f"{mask.dtype} {mask.shape}")
    real = mask.astype(np.bool_)
    for sequence, ones in enumerate(real):
        runs = int(np.count_nonzero(np.diff(np.concatenate(([False], ones)).astype(np.int8)) == 1))
        if runs != 1:
            raise LayoutError(
                f"sequence {sequence} of attention_mask", expected="one run of ones", found=f"{runs} runs"
            )
    width = real.shape[1]
    return Layout(
        (real.shape[0], width),
        tuple(index * width + np.flatnonzero(ones).astype(np.int64) for index, ones in enumerate(real)),
    )


def from_lengths(lengths: Any, width: int | None, padding_side: Literal["left", "right"]) -> Layout:
    """Padded batch of one request per sequence. width: tokens per sequence with padding, by default the longest."""
    counts = [int(length) for length in _host(lengths).reshape(-1)]
    if padding_side not in ("left", "right"):
        raise LayoutError("padding_side", expected="left or right", found=padding_side)
    if not counts or min(counts) < 1:
        raise LayoutError("lengths", expected="one length of at least 1 per request", found=counts)
    wide = max(counts) if width is None else width
    if wide < max(counts):
        raise LayoutError("width is less than the longest sequence", expected=f"at least {max(counts)}", found=wide)
    starts = [0 if padding_side == "right" else wide - count for count in counts]
    runs = zip(starts, counts, strict=True)
    return Layout(
        (len(counts), wide),
        tuple(np.arange(count, dtype=np.int64) + index * wide + start for index, (start, count) in enumerate(runs)),
    )


def from_cu_seqlens(cu_seqlens: Any, width: int | None) -> Layout:
    """Packed batch `[1, width]`: request i has the tokens `cu_seqlens[i]` to `cu_seqlens[i+1]`; a rest is padding."""
    bounds = [int(bound) for bound in _host(cu_seqlens).reshape(-1)]
    if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise LayoutError("cu_seqlens", expected="0 and then rising ends, one per request", found=bounds)
    wide = bounds[-1] if width is None else width
    if wide < bounds[-1]:
        raise LayoutError("width is less than the packed tokens", expected=f"at least {bounds[-1]}", found=wide)
    return Layout((1, wide), tuple(np.arange(a, b, dtype=np.int64) for a, b in pairwise(bounds)))


def describe_batch(
    num_tokens: Sequence[int],
    *,
    attention_mask: Any = None,
    lengths: Any = None,
    padding_side: Literal["left", "right"] = "right",
    cu_seqlens: Any = None,
    width: int | None = None,
) -> Layout:
    """The layout that the arguments describe; without any, sequences of one length and no padding."""
    given = [value is not None for value in (attention_mask, lengths, cu_seqlens)]
    if sum(given) > 1:
        raise LayoutError("more than one layout", expected="one of attention_mask, lengths and cu_seqlens")
    if attention_mask is not None:
        if width is not None:
            raise LayoutError("attention_mask has its own width; width goes with lengths or cu_seqlens")
        return from_mask(attention_mask)
    if cu_seqlens is not None:
        return from_cu_seqlens(cu_seqlens, width)
    if lengths is not None:
        return from_lengths(lengths, width, padding_side)
    if len(set(num_tokens)) > 1 or width is not None:
        raise LayoutError(
            "the requests differ in length, or the batch is wider than they are",
            found=f"num_tokens {list(num_tokens)}, width {width}",
            way_out="give attention_mask, lengths or cu_seqlens",
        )
    return from_lengths(num_tokens, None, "right")


def _host(values: Any) -> NDArray[Any]:
    """A list, a numpy array or a tensor on any device, as a numpy array."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
