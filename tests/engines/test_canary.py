"""The start-up proof on the real engine: every way that it executes runs once before any request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_side.capture.errors import CaptureRefused
from engine_side.engines.transformers import canary, capture_routes
from tests.engines.running import batching, generation
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts


def _start(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, int]:
    """Start an engine under capture as far as its first step. Returns the ways that its proof ran, with their tokens,
    and looks at what each left."""
    ran: dict[str, int] = {}
    prove = canary.prove_coverage

    def noting(geometry: Any, ways: Any) -> None:
        ran.update({way.name: way.num_tokens for way in ways})
        prove(geometry, ways)

    monkeypatch.setattr(canary, "prove_coverage", noting)
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0) as capture:
        manager = model.init_continuous_batching(
            generation_config=generation(), continuous_batching_config=batching(**settings)
        )
        processor = manager._create_batch_processor()
        (captured,) = (reference() for reference in capture._processors)
        assert captured.processor is processor
        store = captured.pipeline.store
        assert not (store.stamps[:, 0] >> 8).any(), "the proof left rows that a request could read"
        assert capture.stats().rows == 0
    return ran


def test_the_canary_runs_every_way_the_engine_executes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _start(model, monkeypatch)
    assert ran == {"prefill": 8, "chunk after a cached prefix": 5, "decode of one token": 1, "decode of a batch": 3}


@pytest.mark.parametrize(("limit", "ran"), [(4, (4, 4, 1, 3)), (2, (2, 2, 1, 2))])
def test_an_engine_of_small_batches_is_proven_within_its_limits(
    model: Any, monkeypatch: pytest.MonkeyPatch, limit: int, ran: tuple[int, ...]
) -> None:
    assert tuple(_start(model, monkeypatch, max_batch_tokens=limit).values()) == ran


def test_an_engine_whose_single_tokens_route_outside_the_router_does_not_start(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = model.model.layers[4].mlp
    by_router = block.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(flat) > 1:
            return by_router(hidden)
        weights, ids = (flat @ block.gate.weight.T).float().softmax(-1).topk(block.gate.top_k, dim=-1)
        return block.experts(flat, ids, weights.to(flat.dtype)).reshape(hidden.shape)

    monkeypatch.setattr(block, "forward", forward)
    with pytest.raises(CaptureRefused, match="decode of one token: layer 4 did not report") as refused:
        _start(model, monkeypatch)
    assert "in 1 of 4 ways" in str(refused.value)


def test_capture_changes_no_token_that_is_sampled(model: Any, collector: RunningDaemon, seed: int) -> None:
    """The start-up proof samples too; not from the random numbers that requests are sampled with."""
    texts = prompts(3, seed)
    settings = {"generation_config": generation(8), "continuous_batching_config": batching(seed=seed % 1000)}
    tokens = []
    for enabled in (False, True):
        with capture_routes(model, collector.engines, enabled=enabled):
            outputs = model.generate_batch(texts, **settings)
        tokens.append([output.generated_tokens for output in outputs.values()])
    assert tokens[0] == tokens[1]
    assert len({tuple(each) for each in tokens[0]}) > 1
