"""Compiled forwards: custom operators keep and commit, since a hook in Python is traced and not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from engine_side.capture.recorder import RouteRecorder
from tests.engines.running import Ask, batching, cached_rows, check_all, pulled, run
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts

pytestmark = pytest.mark.engines


def test_a_compiled_forward_captures_every_row(
    model: Any, witness: Any, collector: RunningDaemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    backend = "aot_eager"
    kept, keep_copy = [], RouteRecorder.keep_copy

    def counted(self: RouteRecorder, index: int, ids: torch.Tensor) -> None:
        kept.append(index)
        keep_copy(self, index, ids)

    monkeypatch.setattr(RouteRecorder, "keep_copy", counted)
    texts = prompts(2, seed, families=1, shared=(64, 96))
    waves = [[Ask(text, f"{backend}-{wave}-{i}", 6) for i, text in enumerate(texts)] for wave in range(2)]
    compiling = CompileConfig(backend=backend, mode=None, fullgraph=False, dynamic=True)
    done = run(model, collector.engines, waves[0], batching(varlen_compile_config=compiling), then=waves[1:])
    assert set(kept) == set(range(6))  # by the operator, in every layer that routes
    assert done.stats.rows_lost == 0
    assert check_all(witness, collector.trainers, done) == sum(len(done.tokens(n)) - 1 for n in done.outputs)
    with pulled(collector.trainers, f"{backend}-1-0", token_ids=done.tokens(f"{backend}-1-0")) as routes:
        assert cached_rows(routes) > 0
