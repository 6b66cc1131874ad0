"""Decode attention out of the paged cache, in one kernel a layer: what flash-attn's `flash_attn_with_kvcache` does.

Each program serves one request and one key-value head: it stores the new token's key and value in its slot and attends
to them and to everything before. The query heads that share the key-value head are the rows of one product. No index of
the whole cache is built on the host and nothing is gathered, so a decode step costs what it costs with flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = tl = None

TILE = 64


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    cu_k: Tensor,
    page: int,
    scale: float,
    kernel: bool | None = None,
) -> Tensor:
    """`[requests, heads, dim]`. query, key, value: `[heads, requests, dim]`, one token each. The caches are
    `[slots, kv_heads, dim]`, written here; table is `[requests, pages]`; cu_k counts the new token. A request of length
    0 is padding: nothing is written for it, its output is zero. kernel: the Triton kernel; by default where it can run.
    """
    if query.is_cuda if kernel is None else kernel:
        return _launch(query, key, value, k_cache, v_cache, table, cu_k, page, scale)
    heads, requests, dim = query.shape
    out = query.new_zeros((requests, heads, dim))
    ends = cu_k.tolist()
    for i in range(requests):
        length = ends[i + 1] - ends[i]
        if length == 0:
            continue
        at = torch.arange(length, device=query.device)
        slots = table[i].long()[at // page] * page + at % page
        k_cache[slots[-1]], v_cache[slots[-1]] = key[:, i], value[:, i]
        keys, values = (each[slots].float().repeat_interleave(heads // len(key), 1) for each in (k_cache, v_cache))
        weights = (torch.einsum("hd,khd->hk", query[:, i].float(), keys) * scale).softmax(-1)
        out[i] = torch.einsum("hk,khd->hd", weights, values).to(query.dtype)
    return out


def _launch(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, cu: Tensor, page: int, scale: float
):
    heads, requests, dim = q.shape
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    assert all(each.is_contiguous() for each in (kc, vc, cu))
    assert table.stride(-1) == 1
    assert len(table) == requests == len(cu) - 1, f"{requests} tokens, {len(table)} rows, {len(cu) - 1} lengths"
    out = torch.empty((requests, heads, dim), dtype=q.dtype, device=q.device)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0))
    groups = heads // len(k)
    _decode[(requests, len(k))](
        q, k, v, kc, vc, table, cu, out, scale, *strides, len(k), groups, dim, page, max(16, groups), TILE
    )  # fmt: skip
    return out


def _kernel(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


@_kernel
def _decode(
    q,
    k,
    v,
    k_cache,
    v_cache,
    table,
    cu,
    out,
    scale,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(cu + request + 1) - tl.load(cu + request)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    used = (rows < GROUP)[:, None]
    at_q = (head * GROUP + rows)[:, None] * q_head + request * q_token + dims[None, :]
    at_out = (request * KV_HEADS * GROUP + head * GROUP + rows)[:, None] * DIM + dims[None, :]
    if length > 0:
        queries = tl.load(q + at_q, mask=used, other=0.0)
        past = length - 1
        key = tl.load(k + head * k_head + request * k_token + dims)
        value = tl.load(v + head * v_head + request * v_token + dims)
        slot = tl.load(table + request * table_row + past // PAGE).to(tl.int64) * PAGE + past % PAGE
        tl.store(k_cache + (slot * KV_HEADS + head) * DIM + dims, key)
        tl.store(v_cache + (slot * KV_HEADS + head) * DIM + dims, value)
        # The new token comes from registers: what other programs see of the stores above does not matter.
        top = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total = tl.full((ROWS,), 1.0, tl.float32)
        found = tl.zeros((ROWS, DIM), tl.float32) + value.to(tl.float32)[None, :]
        for start in range(0, past, TILE_):
            at = start + tl.arange(0, TILE_)
            seen = at < past
            pages = tl.load(table + request * table_row + at // PAGE, mask=seen, other=0).to(tl.int64)
            base = ((pages * PAGE + at % PAGE) * KV_HEADS + head) * DIM
            keys = tl.load(k_cache + base[None, :] + dims[:, None], mask=seen[None, :], other=0.0)
            scores = tl.where(seen[None, :], tl.dot(queries, keys) * scale, float("-inf"))
            peak = tl.maximum(top, tl.max(scores, 1))
            kept, weights = tl.exp(top - peak), tl.exp(scores - peak[:, None])
            values = tl.load(v_cache + base[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
            found = found * kept[:, None] + tl.dot(weights.to(values.dtype), values)
            total = total * kept + tl.sum(weights, 1)
            top = peak
        tl.store(out + at_out, (found / total[:, None]).to(out.dtype.element_ty), mask=used)
    else:
        tl.store(out + at_out, tl.zeros((ROWS, DIM), out.dtype.element_ty), mask=used)


def check(device: str, heads: int = 32, kv_heads: int = 4, dim: int = 128, kernel: bool | None = None) -> float:
    """Compare on `device` with the loop above, in bf16: outputs and what was written. Returns the largest difference,
    relative to 1 + the value; raises where that exceeds bf16 rounding."""
    generator = torch.Generator().manual_seed(20)
    page, lengths = 16, [1, 2, 16, 17, 65, 200, 0]
    requests, pages = len(lengths), 13

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    q, k, v = made(heads, requests, dim), made(kv_heads, requests, dim), made(kv_heads, requests, dim)
    caches = made(2, requests * pages * page, kv_heads, dim)
    table = torch.randperm(requests * pages, generator=generator).to(torch.int32).view(requests, pages)
    table[-1] = -1
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    theirs = caches.clone()
    expected = decode_attention(q, k, v, theirs[0], theirs[1], table, cu, page, dim**-0.5, kernel=False).float()
    ours = caches.to(device)
    moved = [each.to(device) for each in (q, k, v)]
    found = decode_attention(*moved, ours[0], ours[1], table.to(device), cu.to(device), page, dim**-0.5, kernel)
    assert torch.equal(ours.cpu(), theirs), "the decode kernel wrote other keys or values than it should"
    worst = float(((found.float().cpu() - expected).abs() / (1 + expected.abs())).max())
    if not worst < 0.02:
        raise AssertionError(f"decode attention on {device} differs from plain attention by {worst:.3g}")
    return worst
