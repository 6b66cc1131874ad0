"""What `fused` does, in torch operations: for devices without Triton, and the other side of its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_side.capture.records import DUPLICATE_EXPERT, OUT_OF_RANGE, UNCAPTURED_LAYER, UNPROVEN, RecordLayout
from protocol.geometry import UNCAPTURED


def commit(
    kept: Sequence[Tensor | None],
    slots: Tensor,
    positions: Tensor,
    input_ids: Tensor,
    state: Tensor,
    records: Tensor,
    store: tuple[Tensor, Tensor, Tensor] | None,
    num_tokens: int,
    layout: RecordLayout,
) -> None:
    """Commit `num_tokens` rows. kept: what each captured layer's router chose, or None where it did not report."""
    geometry = layout.geometry
    ids = torch.full((num_tokens, *geometry.row_shape), UNCAPTURED, dtype=torch.int64, device=records.device)
    for index, one in enumerate(kept):
        if one is not None:
            width = min(geometry.top_k, one.shape[1])
            ids[:, index, :width] = one[:num_tokens, :width]
    missing = (ids == UNCAPTURED).flatten(1).any(1)
    wrong = (ids < UNCAPTURED) | (ids >= geometry.num_experts)
    ids.masked_fill_(wrong, UNCAPTURED)
    ordered = ids.sort(dim=-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).flatten(1).any(1)
    status = missing * UNCAPTURED_LAYER + twice * DUPLICATE_EXPERT + wrong.flatten(1).any(1) * OUT_OF_RANGE
    version, number = state[0], state[1]
    stamp = (number << 8) | status
    token = input_ids[:num_tokens].to(torch.int64)
    position = positions[:num_tokens].to(torch.int32)
    rows = ids.to(torch.uint8 if layout.narrow else torch.int16).flatten(1).view(torch.uint8)
    records[:num_tokens, : layout.row_bytes] = rows
    trailer = records[:num_tokens, layout.trailer_at :].view(torch.int32)
    trailer[:, 0] = token
    trailer[:, 1] = position
    trailer[:, 2] = _low(stamp)
    trailer[:, 3] = -1
    if store is not None:
        store_rows, stamps, store_positions = store
        pad = len(store_rows) - 1
        at = slots[:num_tokens].to(torch.int64)
        at = torch.where((at < 0) | (at > pad), pad, at)
        trailer[:, 3] = at
        store_rows[at] = rows
        stamps[at, 0] = stamp
        stamps[at, 1] = (version << 32) | (token & 0xFFFFFFFF)
        store_positions[at] = position


def read(
    asked: Tensor, store: tuple[Tensor, Tensor, Tensor], records: Tensor, max_commit: int, layout: RecordLayout
) -> None:
    """Read `asked`, int32 [3, N] (slots, token ids, positions), into the first N `records`."""
    store_rows, stamps, store_positions = store
    slots, tokens, positions = asked
    # The pad row holds whatever was padded last: nothing is read from it.
    inside = (slots >= 0) & (slots < len(store_rows) - 1)
    at = torch.where(inside, slots, 0).to(torch.int64)
    stamp, known = stamps[at, 0], stamps[at, 1]
    number = stamp >> 8
    proven = inside & (number > 0) & (number <= max_commit)
    proven &= (_low(known) == tokens) & (store_positions[at] == positions)
    count = asked.shape[1]
    # All ones are -1 in an int16 row, 255 in a uint8 row: uncaptured.
    records[:count, : layout.row_bytes] = torch.where(proven[:, None], store_rows[at], 0xFF)
    trailer = records[:count, layout.trailer_at :].view(torch.int32)
    trailer[:, 0] = tokens
    trailer[:, 1] = positions
    trailer[:, 2] = torch.where(proven, _low(stamp), UNPROVEN)
    trailer[:, 3] = known >> 32


def _low(words: Tensor) -> Tensor:
    """The low 32 bits of int64 words, as int32."""
    return (
        words.view(torch.int32)[..., ::2] if words.is_contiguous() else words.contiguous().view(torch.int32)[..., ::2]
    )
