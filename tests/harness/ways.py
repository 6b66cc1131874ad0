"""The ways of the start-up canary, run on a model by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_side.capture.coverage import Way
from engine_side.capture.hooks import find_routers, geometry_of, hooked
from engine_side.capture.recorder import RouteRecorder, StepRows
from engine_side.capture.records import RecordLayout
from protocol.geometry import Geometry


class Captured:
    """A model under capture: routers found once, hooks on while a way runs, one commit behind each forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.routers = find_routers(model)
        self.geometry: Geometry = geometry_of(model, self.routers)
        self.renew(self.geometry)

    def renew(self, geometry: Geometry) -> None:
        """Record as `geometry` says from now on."""
        self.geometry = geometry
        self.recorder = RouteRecorder(RecordLayout.of(geometry), 64, torch.device("cpu"))

    def step(self, num_tokens: int, forward: Callable[[], object]) -> StepRows:
        """The rows that one forward of `num_tokens` tokens committed."""
        at = torch.arange(num_tokens)
        self.recorder.begin(0)
        with hooked(self.routers, self.recorder.keep, self.geometry), torch.inference_mode():
            forward()
            return self.recorder.commit(at, at, at, num_tokens)

    def way(self, name: str, num_tokens: int, forward: Callable[[], object]) -> Way:
        return Way(name, num_tokens, lambda: self.step(num_tokens, forward))


def ways_of_causal_lm(captured: Captured, tokens: Tensor, verified: int = 4) -> list[Way]:
    """Prefill, a chunk behind a cached prefix, decode of one token and of a batch of three, verify of `verified`
    tokens. tokens: int64 [3, >= 12]."""
    from transformers import DynamicCache

    model = captured.model

    def behind_a_prefix(batch: Tensor, new: int) -> Callable[[], object]:
        cache = DynamicCache()
        with torch.inference_mode():
            model(batch[:, :-new], past_key_values=cache)
        return lambda: model(batch[:, -new:], past_key_values=cache)

    one = tokens[:1]
    return [
        captured.way("prefill", 8, lambda: model(one[:, :8])),
        captured.way("chunk after a cached prefix", 5, behind_a_prefix(one, 5)),
        captured.way("decode of one token", 1, behind_a_prefix(one, 1)),
        captured.way("decode of a batch", 3, behind_a_prefix(tokens[:3], 1)),
        captured.way("verify", verified, behind_a_prefix(one, verified)),
    ]
