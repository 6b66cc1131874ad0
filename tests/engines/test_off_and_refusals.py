"""Off is off, and what was installed is gone at the end. Refusals: tests/engine_side/test_support.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_side.capture.errors import CaptureRefused
from engine_side.engines.transformers import capture_routes
from engine_side.engines.transformers.compat import PagedSlots
from tests.engines.running import batching
from tests.harness.tiny import prompts

_OFF = """
import os, sys, threading, torch
torch.set_num_threads(1)
from transformers import GenerationConfig
from engine_side.engines.transformers import capture_routes
from tests.engines.running import batching
from tests.harness.tiny import load_tiny, prompts
for name in [n for n in sys.modules if n.split(".")[0] in ("zmq", "engine_side", "protocol", "collector", "msgspec")]:
    pass
before = set(sys.modules)
model = load_tiny(torch.float32, attention="sdpa")
greedy = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
own = hooks(), set(vars(model)), threading.active_count()
texts = prompts(3, 7)
plain = model.generate_batch(texts, generation_config=greedy, continuous_batching_config=batching())
after_plain = hooks(), threading.active_count()
with capture_routes(model, "ipc:///nowhere/at/all.sock", enabled=False) as capture:
    assert not capture.enabled
    inside = hooks(), threading.active_count()
    again = model.generate_batch(texts, generation_config=greedy, continuous_batching_config=batching())
assert inside == after_plain, (inside, after_plain)
assert [x.generated_tokens for x in plain.values()] == [x.generated_tokens for x in again.values()]
new = {n for n in set(sys.modules) - before if n.startswith(("engine_side.capture", "engine_side.shipping"))}
assert not new, new
print("off is off")
"""


def test_off_imports_installs_and_starts_nothing(tmp_path: Path) -> None:
    code = _OFF.replace("from tests.engines.running import batching", _BATCHING)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.endswith("off is off\n"), done.stderr[-2000:]


_BATCHING = """
import transformers
from transformers import ContinuousBatchingConfig
def batching():
    page = "block_size" if transformers.__version__.startswith("5.17.") else "page_size"
    return ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256, use_cuda_graph=False, **{page: 32})
"""


def test_on_changes_no_output_and_leaves_nothing(model: Any, tmp_path: Path, seed: int) -> None:
    from transformers import GenerationConfig

    greedy = GenerationConfig(do_sample=False, max_new_tokens=10, eos_token_id=-1, pad_token_id=0)
    texts = prompts(4, seed)

    def tokens() -> list[list[int]]:
        outputs = model.generate_batch(texts, generation_config=greedy, continuous_batching_config=batching())
        assert len(outputs) == 4
        return [output.generated_tokens for output in outputs.values()]

    plain = tokens()
    before = set(vars(model)), _hooks(model), threading.active_count(), _descriptors()
    with capture_routes(model, f"ipc://{tmp_path}/nobody.sock", drain_s=0.2):
        assert tokens() == plain
    assert (set(vars(model)), _hooks(model), threading.active_count()) == before[:3]
    assert _descriptors() <= before[3]
    assert tokens() == plain


def test_an_exception_inside_the_block_leaves_nothing_either(model: Any, tmp_path: Path) -> None:
    before = set(vars(model)), _hooks(model), threading.active_count()
    with pytest.raises(KeyError), capture_routes(model, f"ipc://{tmp_path}/nobody.sock", drain_s=0.2):
        raise KeyError("the user's own")
    assert (set(vars(model)), _hooks(model), threading.active_count()) == before


def test_a_cache_of_sliding_windows_alone_is_refused() -> None:
    class SlidingAttentionCacheAllocator:
        """Stands for the class of that name in transformers' cache allocators."""

    class Cache:
        """Stands for `PagedAttentionCache` of a model with sliding layers only."""

        def __init__(self) -> None:
            self.cache_allocators = {"sliding_attention": SlidingAttentionCacheAllocator()}

    with pytest.raises(CaptureRefused, match="sliding_window_only"):
        PagedSlots(Cache())


def _hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
