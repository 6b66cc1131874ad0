"""An engine that finds as much memory as a test says, and what it makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import cache as engine

from tests.engines.running import batching, generation


def allow(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have every cache of this engine find `nbytes` of free memory; configurations of `sized` may take all of it."""
    patch.setattr(engine, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), nbytes, 0, 0))


def sized(**settings: Any) -> Any:
    """A configuration that leaves the number of blocks to the engine."""
    defaults = {
        "num_blocks": None,
        "max_batch_tokens": 64,
        "max_memory_percent": 1.0,
        "max_blocks_per_request": 0,
        "max_requests_per_batch": 16,
    }
    return batching(**defaults | settings)


@dataclass(frozen=True)
class Planned:
    """What the engine settled on. blocks: in the unit that it counts in, of `block_tokens` tokens."""

    planner: Any
    batch_tokens: int
    blocks: int

    @property
    def block_tokens(self) -> int:
        return int(getattr(self.planner, "tokens_per_sector", 0) or self.planner.block_size)


def noting(patch: pytest.MonkeyPatch, then: Exception | None = None) -> list[Planned]:
    """What each cache made from now on is planned as. then: raised instead of making it."""
    planned: list[Planned] = []
    check = engine.PagedAttentionMemoryHandler._check_footprint

    def note(self: Any, batch_tokens: int, blocks: int) -> Any:
        found = check(self, batch_tokens, blocks)
        planned.append(Planned(self, batch_tokens, blocks))
        if then is not None:
            raise then
        return found

    patch.setattr(engine.PagedAttentionMemoryHandler, "_check_footprint", note)
    return planned


def make_processor(model: Any, config: Any) -> tuple[Any, Any]:
    """A manager and its processor, that was never run."""
    manager = model.init_continuous_batching(generation_config=generation(), continuous_batching_config=config)
    manager.batch_processor = manager._create_batch_processor()
    return manager, manager.batch_processor


def kv_bytes(cache: Any) -> int:
    """Bytes of the keys and values."""
    tensors = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else [*cache.key_cache, *cache.value_cache]
    return sum(x.numel() * x.element_size() for x in tensors)
