"""Several runs in one block, and a parent that stands in a batch without a token: rows stay with their own request."""

from __future__ import annotations

from typing import Any

import pytest

from collector.client import RouteClient
from engine_side.engines.transformers import capture_routes
from tests.engines.running import Ask, batching, check_all, check_rows, generation, run
from tests.harness.daemon import RunningDaemon
from tests.harness.tiny import prompts

pytestmark = pytest.mark.timeout(240)


def test_two_runs_in_one_block_do_not_mix(model: Any, witness: Any, collector: RunningDaemon, seed: int) -> None:
    texts = prompts(6, seed)
    with capture_routes(model, collector.engines) as capture:
        runs = [
            model.generate_batch(part, generation_config=generation(8), continuous_batching_config=batching())
            for part in (texts[:3], texts[3:])
        ]
    assert capture.stats().errors == 0
    with RouteClient(collector.trainers, timeout=30.0) as client:
        for outputs in runs:
            assert len(outputs) == 3
            for name, output in outputs.items():
                tokens = [*output.prompt_ids, *output.generated_tokens]
                assert check_rows(witness, client.pull(name, token_ids=tokens), tokens) == len(tokens) - 1


def test_a_parent_with_one_token_left_takes_nobody_elses_rows(
    model: Any, witness: Any, collector: RunningDaemon, seed: int
) -> None:
    # 65 tokens in chunks of 32: the parent's last token waits for the fork while others run.
    texts = [text[:65] for text in prompts(4, seed, shared=(66, 80))]
    asks = [Ask(text, f"parent-{i}", 6, siblings=3 if i % 2 == 0 else 1) for i, text in enumerate(texts)]
    done = run(model, collector.engines, asks, batching(max_batch_tokens=64))
    assert len(done.outputs) == 8
    assert check_all(witness, collector.trainers, done) == 8 * 70
