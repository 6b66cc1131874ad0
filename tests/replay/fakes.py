"""A two-layer MoE of thirty lines whose routers misbehave on purpose: each class is one way to be silently off."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.replay.rollout import Pulled

EXPERTS, TOP_K, WIDTH, TOKENS = 6, 2, 8, 5


class HonestRouter(nn.Module):
    """Softmax, topk, renormalise."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = TOP_K, EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = hidden.reshape(-1, WIDTH) @ self.weight.T
        return logits, *self.choose(logits.softmax(-1))

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(scores, TOP_K, dim=-1)
        return values / values.sum(-1, keepdim=True), ids


class SortedColumnsRouter(HonestRouter):
    """Orders its columns by id, weights along with them: another order, the same experts."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().choose(scores)
        ids, order = ids.sort(-1)
        return weights.gather(1, order), ids


class MethodTopkRouter(HonestRouter):
    """Calls topk as a method, everything by name."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = scores.topk(k=TOP_K, dim=1, sorted=False)
        return found.values, found.indices


class GroupsOfOneRouter(HonestRouter):
    """As many groups as experts: the group choice has the shape of the final one, with another k."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        allowed = torch.topk(scores, TOP_K + 1, dim=-1).indices
        masked = torch.zeros_like(scores).scatter(1, allowed, 1.0) * 0 + scores
        return super().choose(masked)


class SortRouter(HonestRouter):
    """Never calls topk."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = scores.sort(-1, descending=True)
        return values[:, :TOP_K], ids[:, :TOP_K]


class FusedRouter(HonestRouter):
    """Calls a kernel that no function mode sees."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.topk.default(scores, TOP_K)


class LyingRouter(HonestRouter):
    """Asks topk, and uses other experts in its last row but one."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().choose(scores)
        ids = ids.clone()
        ids[-2] = (ids[-2] + 1) % EXPERTS
        return weights, ids


class TwiceRouter(HonestRouter):
    """Two choices of one shape: which is the final one?"""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        super().choose(scores)
        return super().choose(scores)


class MaskedRouter(HonestRouter):
    """Takes its weights from scores that it masked to its own best three."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.topk(scores, TOP_K + 1, dim=-1).indices
        return super().choose(scores * torch.zeros_like(scores).scatter(1, best, 1.0))


class StoppedRouter(HonestRouter):
    """Its last step saves nothing for a backward: a checkpoint around it stops recomputing before that."""

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().choose(scores)
        return weights.neg().neg(), ids


class SilentRouter(HonestRouter):
    """Returns no ids."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden)[:2]


class RaisingRouter(HonestRouter):
    """Fails after its topk; which exception is set by the test."""

    error: BaseException = RuntimeError("the router failed")

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        super().choose(scores)
        raise self.error


class FakeLayer(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.gate = router
        self.checkpointed_gate = False
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.checkpointed_gate:
            _, weights, ids = checkpoint(self.gate, hidden, use_reentrant=False)
        else:
            _, weights, ids = self.gate(hidden)
        flat = hidden.reshape(-1, WIDTH)
        out = torch.einsum("th,tkhw,tk->tw", flat, self.experts[ids], weights)
        return hidden + out.reshape(hidden.shape)


class FakeMoe(nn.Module):
    """`checkpointing`: none, or the arguments of a checkpoint around each layer."""

    def __init__(self, first: type[nn.Module] = HonestRouter, second: type[nn.Module] = HonestRouter) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([FakeLayer(first()), FakeLayer(second())])
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, **self.checkpointing) if self.checkpointing else layer(hidden)
        return hidden


def tokens() -> torch.Tensor:
    return torch.arange(TOKENS)[None]


def routes_for(seed: int) -> Pulled:
    """Random routes of one request of TOKENS tokens for a FakeMoe."""
    ids = np.random.default_rng(seed).random((TOKENS - 1, 2, EXPERTS)).argsort(axis=2)[..., :TOP_K]
    return Pulled("request-0", ids.astype(np.int16), (0, 1), EXPERTS, TOKENS)
