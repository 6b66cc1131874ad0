"""A bench with one engine whose rows are all different."""

from __future__ import annotations

from typing import Any

import numpy as np

from protocol.messages import Kind
from tests.core.driver import Answer, Bench, Emitter
from tests.harness.patches import SMALL, Seg, random_seg

F, R, C, REPAIR = Kind.FORWARD, Kind.RECOMPUTE, Kind.CACHED, Kind.REPAIR


class Shipped:
    """A bench with one welcomed engine, and segments with rows that are all different."""

    def __init__(self, seed: int, geometry: Any = SMALL, **config: Any) -> None:
        self.bench = Bench(**config)
        self.engine = Emitter(self.bench, geometry=geometry)
        self.engine.hello()
        self.geometry = geometry
        self.rng = np.random.default_rng(seed)

    def seg(self, start: int, n: int, kind: Kind = F, life: str = "1", **more: Any) -> Seg:
        return random_seg(self.rng, self.geometry, life, start, n, kind=kind, **more)

    def served(self, name: str = "x", num_tokens: int | None = None, **more: Any) -> Answer:
        answer = self.bench.pull(name, num_tokens, **more)
        assert answer.routes is not None, answer.code
        return answer

    def rows(self, answer: Answer) -> np.ndarray:
        """int16 [rows, moe_layers, top_k]."""
        assert answer.array is not None
        return answer.array[:, list(self.geometry.moe_layer_ids)]
