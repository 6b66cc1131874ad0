"""What a byte-level MoE model is worth: nats per byte, how its experts are used, how close its choices are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

WINDOW = 512
AT_ONCE = 8
GAPS = (1e-3, 1e-5, 1e-6)


@torch.no_grad()
def nats_per_byte(model: PreTrainedModel, tokens: Tensor) -> float:
    """Mean cross entropy of `tokens`, int64 `[num_tokens]`, in windows of `WINDOW` that share nothing."""
    total, count = 0.0, 0
    for batch in _batches(tokens):
        logits = model(input_ids=batch).logits[:, :-1]
        total += float(cross_entropy(logits.flatten(0, 1).double(), batch[:, 1:].flatten(), reduction="sum"))
        count += batch[:, 1:].numel()
    return total / count


@torch.no_grad()
def routing(model: PreTrainedModel, tokens: Tensor) -> dict[str, float]:
    """Figures of the routers over `tokens`, int64 `[num_tokens]`; a row is one token in one MoE layer.

    `expert_share_min` and `_max`: of one layer's choices, the part that goes to its least and most chosen
    expert. `rows_gap_below_X`: part of the rows whose last chosen and first left out expert have router
    probabilities less than X apart; `rows_logit_gap_below_0.001`: the same between their logits. A router that
    is sure of fewer than `top_k` experts leaves tiny probabilities to the rest: near in the first sense only.
    """
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    chosen: list[Tensor] = []
    gaps: list[Tensor] = []
    logit_gaps: list[Tensor] = []
    for batch in _batches(tokens):
        logits = torch.stack(model(input_ids=batch, output_router_logits=True).router_logits)
        best = logits.softmax(-1).topk(top_k + 1)  # [moe_layers, tokens, top_k+1]
        nearest = logits.topk(top_k + 1).values
        chosen.append(best.indices[..., :top_k].flatten(1))
        gaps.append((best.values[..., -2] - best.values[..., -1]).flatten())
        logit_gaps.append((nearest[..., -2] - nearest[..., -1]).flatten())
    gap = torch.cat(gaps)
    shares = torch.stack([torch.bincount(layer, minlength=num_experts) for layer in torch.cat(chosen, 1)])
    shares = shares / shares.sum(1, keepdim=True)
    return {
        "expert_share_min": float(shares.min()),
        "expert_share_max": float(shares.max()),
        **{f"rows_gap_below_{limit:g}": float((gap < limit).double().mean()) for limit in GAPS},
        "rows_logit_gap_below_0.001": float((torch.cat(logit_gaps) < 1e-3).double().mean()),
    }


def _batches(tokens: Tensor) -> tuple[Tensor, ...]:
    whole = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole.split(AT_ONCE)
