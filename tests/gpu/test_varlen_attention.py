"""The serving benchmark's attention gives what the engine's own does; its kernels give what plain attention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.running import batching
from tests.gpu import paged, varlen
from tests.harness.tiny import load_tiny, prompts

only_where_it_registers = pytest.mark.skipif(bool(varlen.supported()), reason=varlen.supported())


def test_sequence_by_sequence_equals_a_dense_mask() -> None:
    assert varlen.check("cpu", heads=8, kv_heads=2, dim=32) < 0.02
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 4, 16, generator=generator) for n in (9, 14, 14))
    cu_q, cu_k = torch.tensor([0, 4, 5, 9]), torch.tensor([0, 7, 8, 14])
    mask = torch.full((9, 14), -torch.inf)
    for i in range(3):
        n, m = int(cu_q[i + 1] - cu_q[i]), int(cu_k[i + 1] - cu_k[i])
        for row in range(n):
            mask[cu_q[i] + row, cu_k[i] : cu_k[i] + m - n + row + 1] = 0.0
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask
    )
    found = varlen.varlen_attention(q, k, v, cu_q, cu_k, 9, 14, 16**-0.5)
    torch.testing.assert_close(found, dense[0].transpose(0, 1), atol=1e-5, rtol=0.0)


@only_where_it_registers
@pytest.mark.parametrize("blocks", [0, 16], ids=["indices", "block-table"])
def test_continuous_batching_says_the_same_as_with_sdpa(blocks: int, seed: int, monkeypatch: Any) -> None:
    torch.set_num_threads(1)
    texts = prompts(6, seed, families=2, shared=(70, 100), own=(4, 40))
    calls = []
    inner = paged.decode_attention
    monkeypatch.setattr(paged, "decode_attention", lambda *args: (calls.append(1), inner(*args))[1])
    tokens, logprobs, hits = _run("paged|sdpa", texts, 0)
    assert hits > 0
    assert calls == []
    found, theirs, again = _run(varlen.register(), texts, blocks)
    assert again == hits
    assert bool(calls) == bool(blocks)
    assert found == tokens
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(logprobs), atol=2e-4, rtol=0.0)


def _run(attention: str, texts: list[list[int]], blocks: int) -> tuple[list[list[int]], list[list[float]], int]:
    """Tokens and log-probabilities of greedy decoding in chunks of 48 tokens, and the tokens of prefix hits."""
    from transformers import GenerationConfig

    manager = load_tiny(attention=attention).init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=10, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching(
            page_size=16, max_batch_tokens=48, max_blocks_per_request=0, return_logprobs=True
        ),
    )
    manager.continuous_batching_config.max_blocks_per_request = blocks
    for i, text in enumerate(texts):
        manager.add_request(text, f"{i}", max_new_tokens=10)
    manager.start()
    outputs: dict[str, Any] = {}
    while len(outputs) < len(texts) and (output := manager.get_result(timeout=30.0)) is not None:
        assert output.error is None
        outputs[output.request_id] = output
    hits = manager.batch_processor.cache._total_prefix_length
    manager.stop(block=True)
    found = [outputs[f"{i}"] for i in range(len(texts))]
    return [each.generated_tokens for each in found], [each.logprobs for each in found], hits
