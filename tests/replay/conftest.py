"""A tiny model for each test, checked afterwards: no hook of the package under test on it, no function mode left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.replay.families import build

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def count_hooks(model: torch.nn.Module) -> int:
    """Hooks of any kind on all modules, but for those that the models' own library sets to stay."""
    hooks = (hook for module in model.modules() for kind in HOOKS for hook in getattr(module, kind).values())
    return sum(not str(hook.__module__).startswith("transformers.") for hook in hooks)


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Hand a model in: when the test is over it must have as many hooks as it had then."""
    models: list[tuple[Any, int]] = []

    def watch(model: Any) -> Any:
        models.append((model, count_hooks(model)))
        return model

    yield watch
    gc.collect()  # a graph that a test dropped in a cycle takes its hooks along
    for model, before in models:
        assert count_hooks(model) == before, "a hook outlived its test"
    assert torch._C._len_torch_function_stack() == 0, "a function mode outlived its test"


@pytest.fixture
def make_model(watched: Callable[[Any], Any], seed: int) -> Callable[[str], Any]:
    """Family name to a seeded tiny model."""
    return lambda family: watched(build(family, seed))
