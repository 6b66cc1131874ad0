"""The kernels: all layers of a forward committed by one, rows of the slot store read back by another.

One lane holds the ids of one (token, layer): they are checked against each other in registers, narrowed from int32 or
int64 there, and leave as whole words. Layers are found through a table of addresses, so nothing is stacked or cast on
the way, and a captured graph replays the kernel as it stands.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_side.capture.records import RecordLayout

_SMALL = 512
"""Up to so many tokens two a program are fastest, beyond it four (an H200, 62 layers: 1.9 us at 256, 11.9 at 8,192)."""


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _store_word(base, offset, value, mask, WORD: tl.constexpr):
    if WORD == 8:
        tl.store(base.to(tl.pointer_type(tl.int64)) + offset // 8, value, mask=mask)
    elif WORD == 4:
        tl.store(base.to(tl.pointer_type(tl.int32)) + offset // 4, value.to(tl.int32), mask=mask)
    elif WORD == 2:
        tl.store(base.to(tl.pointer_type(tl.int16)) + offset // 2, value.to(tl.int16), mask=mask)
    else:
        tl.store(base.to(tl.pointer_type(tl.int8)) + offset, value.to(tl.int8), mask=mask)


@triton.jit
def _load_word(base, offset, mask, WORD: tl.constexpr):
    # A masked lane is all ones: -1 in an int16 row, 255 in a uint8 row.
    if WORD == 8:
        value = tl.load(base.to(tl.pointer_type(tl.int64)) + offset // 8, mask=mask, other=-1)
    elif WORD == 4:
        value = tl.load(base.to(tl.pointer_type(tl.int32)) + offset // 4, mask=mask, other=-1).to(tl.int64)
    elif WORD == 2:
        value = tl.load(base.to(tl.pointer_type(tl.int16)) + offset // 2, mask=mask, other=-1).to(tl.int64)
    else:
        value = tl.load(base.to(tl.pointer_type(tl.int8)) + offset, mask=mask, other=-1).to(tl.int64)
    return value


@triton.jit(do_not_specialize=["num_tokens", "pad_slot", "num_experts"])
def _commit(
    table,  # int64 [3 x M]: address, row stride in elements, columns that hold ids (0: the layer did not report)
    slots,
    positions,
    input_ids,
    state,  # int64 [2]: weight version, number of this commit
    records,
    store_rows,
    store_stamps,
    store_positions,
    num_tokens,
    stride,
    pad_slot,
    num_experts,
    M: tl.constexpr,
    K: tl.constexpr,
    M2: tl.constexpr,
    BT: tl.constexpr,
    ID64: tl.constexpr,
    SIZE: tl.constexpr,
    WORD: tl.constexpr,
    STORE: tl.constexpr,
):
    PER: tl.constexpr = WORD // SIZE
    MASK: tl.constexpr = (1 << (8 * SIZE)) - 1
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    m = tl.arange(0, M2)
    real_t, real_m = t < num_tokens, m < M
    address = tl.load(table + m, mask=real_m, other=0)
    row_stride = tl.load(table + M + m, mask=real_m, other=0)
    columns = tl.load(table + 2 * M + m, mask=real_m, other=0)
    token = tl.load(input_ids + t, mask=real_t, other=0).to(tl.int64)
    position = tl.load(positions + t, mask=real_t, other=0).to(tl.int32)
    version = tl.load(state)
    number = tl.load(state + 1)
    t = t.to(tl.int64)
    if ID64:
        base = address.to(tl.pointer_type(tl.int64))[None, :] + t[:, None] * row_stride[None, :]
    else:
        base = address.to(tl.pointer_type(tl.int32))[None, :] + t[:, None] * row_stride[None, :]
    cell = real_t[:, None] & real_m[None, :]
    bits = tl.zeros([BT, M2], tl.int32)
    ids = ()
    for j in tl.static_range(K):
        raw = tl.load(base + j, mask=cell & (j < columns)[None, :], other=-1)
        wrong = (raw < -1) | (raw >= num_experts)
        one = tl.where(wrong, -1, raw).to(tl.int32)
        bits |= (raw == -1).to(tl.int32) | (wrong.to(tl.int32) * 4)
        for i in tl.static_range(j):
            bits |= ((ids[i] == one) & (one >= 0)).to(tl.int32) * 2
        ids = ids + (one,)  # noqa: RUF005
    slot = tl.full([BT], -1, tl.int64)
    if STORE:
        slot = tl.load(slots + tl.where(real_t, t, 0)).to(tl.int64)
        slot = tl.where((slot < 0) | (slot > pad_slot), pad_slot, slot)
    at = m * (K * SIZE)
    for w in tl.static_range(K // PER):
        word = tl.zeros([BT, M2], tl.int64)
        for i in tl.static_range(PER):
            word |= (ids[w * PER + i] & MASK).to(tl.int64) << (i * 8 * SIZE)
        _store_word(records, t[:, None] * stride + (at + w * WORD)[None, :], word, cell, WORD)
        if STORE:
            _store_word(store_rows, slot[:, None] * (M * K * SIZE) + (at + w * WORD)[None, :], word, cell, WORD)
    status = tl.reduce(tl.where(cell, bits, 0), 1, _or).to(tl.int64)
    stamp = (number << 8) | status
    trailer = records.to(tl.pointer_type(tl.int32)) + t * (stride // 4) + (stride // 4 - 4)
    tl.store(trailer, token.to(tl.int32), mask=real_t)
    tl.store(trailer + 1, position, mask=real_t)
    tl.store(trailer + 2, stamp.to(tl.int32), mask=real_t)
    tl.store(trailer + 3, slot.to(tl.int32), mask=real_t)
    if STORE:
        tl.store(store_stamps + slot * 2, stamp, mask=real_t)
        tl.store(store_stamps + slot * 2 + 1, (version << 32) | (token & 0xFFFFFFFF), mask=real_t)
        tl.store(store_positions + slot, position, mask=real_t)


@triton.jit(do_not_specialize=["count", "max_commit", "num_slots"])
def _read(
    asked,  # int32 [3, N]: slot, token id, position
    store_rows,
    store_stamps,
    store_positions,
    records,
    count,
    max_commit,
    stride,
    num_slots,
    ROW: tl.constexpr,
    ROW2: tl.constexpr,
    WORD: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(asked + i).to(tl.int64)
    token = tl.load(asked + count + i)
    position = tl.load(asked + 2 * count + i)
    # The pad row holds whatever was padded last: nothing is read from it.
    inside = (slot >= 0) & (slot < num_slots)
    slot = tl.where(inside, slot, 0)
    stamp = tl.load(store_stamps + slot * 2)
    known = tl.load(store_stamps + slot * 2 + 1)
    number = stamp >> 8
    proven = inside & (number > 0) & (number <= max_commit)
    proven = proven & (known.to(tl.int32) == token) & (tl.load(store_positions + slot) == position)
    at = tl.arange(0, ROW2) * WORD
    words = _load_word(store_rows, slot * ROW + at, at < tl.where(proven, ROW, 0), WORD)
    _store_word(records, i * stride + at, words, at < ROW, WORD)
    trailer = records.to(tl.pointer_type(tl.int32)) + i * (stride // 4) + (stride // 4 - 4)
    tl.store(trailer, token)
    tl.store(trailer + 1, position)
    tl.store(trailer + 2, tl.where(proven, stamp.to(tl.int32), 8))
    tl.store(trailer + 3, (known >> 32).to(tl.int32))


def commit(
    table: Tensor,
    id64: bool,
    slots: Tensor,
    positions: Tensor,
    input_ids: Tensor,
    state: Tensor,
    records: Tensor,
    store: tuple[Tensor, Tensor, Tensor] | None,
    num_tokens: int,
    layout: RecordLayout,
) -> None:
    """Launch the commit of `num_tokens` rows on the current stream. table: int64 [3 x moe_layers] on the device."""
    geometry = layout.geometry
    layers, top_k = geometry.row_shape
    tokens_each, warps = (2, 4) if num_tokens <= _SMALL else (4, 8)
    rows, stamps, at = store if store is not None else (records, state, positions)
    _commit[(triton.cdiv(num_tokens, tokens_each),)](
        table, slots, positions, input_ids, state, records, rows, stamps, at,
        num_tokens, layout.stride, rows.shape[0] - 1, geometry.num_experts,
        M=layers, K=top_k, M2=triton.next_power_of_2(layers), BT=tokens_each, ID64=id64,
        SIZE=layout.itemsize, WORD=_word(top_k * layout.itemsize), STORE=store is not None, num_warps=warps,
    )  # fmt: skip


def read(
    asked: Tensor, store: tuple[Tensor, Tensor, Tensor], records: Tensor, max_commit: int, layout: RecordLayout
) -> None:
    """Launch the read of `asked`, int32 [3, N] (slots, token ids, positions), into the first N `records`."""
    rows, stamps, at = store
    word = _word(layout.row_bytes)
    _read[(asked.shape[1],)](
        asked, rows, stamps, at, records, asked.shape[1], max_commit, layout.stride, rows.shape[0] - 1,
        ROW=layout.row_bytes, ROW2=triton.next_power_of_2(layout.row_bytes // word), WORD=word, num_warps=1,
    )  # fmt: skip


def _word(nbytes: int) -> int:
    return next(word for word in (8, 4, 2, 1) if nbytes % word == 0)
