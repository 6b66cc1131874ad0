"""Hand-made decoders of a few lines: routing in plain sight, so that a test can bend one thing about it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


class PlainTopKRouter(nn.Module):
    """`(logits, weights, ids)` of hidden states [T, HIDDEN], as routers of transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = TOP_K
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights, ids


class Block(nn.Module):
    """A MoE block, and a decoder layer's only content."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = PlainTopKRouter()
        self.experts = nn.ParameterList([torch.randn(EXPERTS, HIDDEN)])
        self.used: Tensor | None = None  # the ids that the experts were run with

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden)
        self.used = ids
        return torch.tanh(hidden + (self.experts[0][ids % EXPERTS] * weights[..., None]).sum(-2))


class Layer(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.mlp: Any = Block() if moe else nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden)


class Decoder(nn.Module):
    """`layers` decoder layers, those in `dense` without experts. Its forward takes hidden states [T, HIDDEN]."""

    def __init__(self, layers: int = 4, dense: Iterable[int] = ()) -> None:
        super().__init__()
        dense = set(dense)
        self.config = SimpleNamespace(num_hidden_layers=layers, num_experts_per_tok=TOP_K, num_experts=EXPERTS)
        self.layers = nn.ModuleList(Layer(layer not in dense) for layer in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
