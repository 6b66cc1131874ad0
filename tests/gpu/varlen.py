"""Attention for continuous batching without flash-attn: torch's own variable-length flash attention, no dense mask.

`paged|sdpa` needs a mask of batch tokens x cache tokens, tens of GiB at a serving size. This reads and writes the paged
cache as the engine's own flash path does, then calls the flash kernel that torch ships; batches that come with a block
table, as decode steps can, go to `tests.gpu.paged`. Nothing in it waits for the device, so it can be captured into a
CUDA graph. On a CPU the same is computed sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.gpu import paged

NAME = "paged|varlen"
"""What `set_attn_implementation` takes after `register`."""

longest_query = 1 << 30
"""The most tokens that one request can have in a batch, set by whoever knows: the engine says only how many the batch
has, padding included, and the kernel starts a block for each that could be."""


def supported() -> str:
    """Why this version of the engine cannot be given an attention of one's own; empty if it can."""
    if transformers.__version__.startswith("5.17."):
        return ""
    return (
        f"continuous batching of transformers {transformers.__version__} takes eager, sdpa and flash-attn alone; "
        "5.17 takes any registered attention"
    )


def register() -> str:
    """Make the attention known to transformers. Returns its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if reason := supported():
        raise RuntimeError(reason)
    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_varlen_forward)
    return NAME


def paged_varlen_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: Any = 0,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, heads, tokens, dim]` in, `[tokens, heads, dim]` out, the cache read and written in between."""
    if cache is None or attention_mask is not None or cu_seq_lens_q is None:
        raise ValueError(f"{NAME} serves continuous batching: a paged cache and no mask")
    if getattr(module, "sliding_window", None):
        raise ValueError(f"{NAME} knows full attention only")
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k["full_attention"], max_seqlen_k["full_attention"]
    scale = module.scaling if scaling is None else scaling
    if block_table is not None:
        group, layer = cache.layer_index_to_group_indices[module.layer_idx]
        caches, table = (cache.key_cache[layer], cache.value_cache[layer]), block_table[group]
        out = paged.decode_attention(query[0], key[0], value[0], *caches, table, cu_seq_lens_k, cache.block_size, scale)
        return out, None
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    out = varlen_attention(
        query.transpose(1, 2).squeeze(0).contiguous(),
        keys.contiguous(),
        values.contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_k,
        min(int(max_seqlen_q), longest_query),
        int(max_seqlen_k),
        scale,
    )
    return out, None


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> Tensor:
    """Causal attention of packed sequences, `[tokens, heads, dim]` each; the last query of a sequence sees all of its
    keys. Rows behind the last sequence are padding: what stands there is arbitrary on CUDA, zero on a CPU."""
    if not q.is_cuda:
        return _one_by_one(q, k, v, cu_q.tolist(), cu_k.tolist(), scale)
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), max_q, max_k, 0.0, True, False, scale=scale)[0]


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], scale: float) -> Tensor:
    out = torch.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        own, seen = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        n, m = cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]
        if n == 0:
            continue
        keys = k[seen].repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[own], keys).float() * scale
        # Bottom right: query j of n stands at position m - n + j.
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
        out[own] = torch.einsum("hqk,khd->qhd", weights, v[seen].repeat_interleave(groups, dim=1))
    return out


def check(device: str, heads: int = 32, kv_heads: int = 4, dim: int = 128) -> float:
    """Compare the kernel on `device` with the computation above: a prefill, a chunk behind a prefix, decode rows, empty
    sequences and padding. Returns the largest difference, relative to 1 + the value; raises where that exceeds
    bf16 rounding."""
    generator = torch.Generator().manual_seed(20)
    queries, seen = [37, 5, 1, 1, 0, 0], [37, 300, 1, 129, 0, 0]

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def made(tokens: int, count: int) -> Tensor:
        return torch.randn(tokens, count, dim, generator=generator).to(torch.bfloat16)

    q, k, v = made(sum(queries) + 4, heads), made(sum(seen) + 9, kv_heads), made(sum(seen) + 9, kv_heads)
    cu_q, cu_k, scale, used = ends(queries), ends(seen), dim**-0.5, sum(queries)
    expected = _one_by_one(q.float(), k.float(), v.float(), cu_q.tolist(), cu_k.tolist(), scale)[:used]
    moved = [each.to(device) for each in (q, k, v, cu_q, cu_k)]
    found = varlen_attention(*moved, len(q), 512, scale)[:used].float().cpu()
    worst = float(((found - expected).abs() / (1 + expected.abs())).max())
    if not worst < 0.02:
        raise AssertionError(f"{NAME} on {device} differs from plain attention by {worst:.3g}")
    return worst
