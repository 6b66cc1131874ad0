"""What the serving benchmark serves: the model's geometry, the cases, their prompts and the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Case:
    """`concurrency` requests at once, `prompt` tokens in, `new` out, `waves` times in one run.

    The first tokens of a wave come while others prefill: the steps in which all decode are about `new` less the
    prefill's steps, per wave."""

    concurrency: int
    prompt: int
    new: int
    waves: int = 1

    @property
    def name(self) -> str:
        return f"serving/{self.prompt}in-{self.new}out-at-{self.concurrency}"


@dataclass(frozen=True)
class Scale:
    """A size to run at: the model, the page and batch sizes, the cases by their concurrency at full size."""

    geometry: dict[str, int]
    page: int
    batch_tokens: int
    kv_interval: int
    cases: dict[int, Case]


FULL = Scale(
    geometry={
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 4096,
    },
    page=256,
    batch_tokens=8192,
    kv_interval=32768,
    cases={64: Case(64, 1024, 256), 256: Case(256, 1024, 256), 16: Case(16, 8192, 64, waves=2)},
)
TINY = Scale(
    geometry={
        "num_hidden_layers": 3,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
    page=16,
    batch_tokens=64,
    kv_interval=256,
    cases={64: Case(4, 40, 16), 256: Case(8, 40, 16), 16: Case(2, 100, 8, waves=2)},
)


def build_model(scale: Scale, attention: str, device: str, dtype: torch.dtype, seed: int) -> Any:
    """Random weights, standard deviation 0.04, made where they stay. Experts run as one grouped product: the loop over
    experts asks the device which of them were hit, which a CUDA graph cannot."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **scale.geometry,
        norm_topk_prob=True,
        initializer_range=0.04,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        model = Qwen3MoeForCausalLM._from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation="grouped_mm"
        )
    found = model.config._experts_implementation
    assert found == "grouped_mm", f"the experts run as {found!r}, which a CUDA graph cannot capture"
    assert model.config._attn_implementation == attention
    return model.eval()


def prompts_of(scale: Scale, case: Case, wave: int, seed: int) -> list[list[int]]:
    """Token ids, the same in every run. No two prompts share a page: prefix hits would make one run's work less."""
    rng = np.random.default_rng([seed, case.concurrency, wave])
    return rng.integers(0, scale.geometry["vocab_size"], (case.concurrency, case.prompt)).tolist()


def prefill_steps(scale: Scale, case: Case) -> int:
    """About how many steps pass before every request of a wave decodes."""
    return ceil(case.concurrency * case.prompt / max(1, scale.batch_tokens - case.concurrency)) + 1


def pages_of(scale: Scale, case: Case) -> int:
    """Pages a request may hold: the engine can take one more at the prompt's end and one at a chunk's."""
    return ceil((case.prompt + case.new) / scale.page) + 2


def batching_of(scale: Scale, case: Case, graphs: bool, overlap: bool) -> ContinuousBatchingConfig:
    """The engine's settings. Queries are padded to the concurrency, so that a decode step has one size; the cache is
    large enough that nothing is preempted. No block tables are asked for: the engine has them for flash-attn alone."""
    return ContinuousBatchingConfig(
        block_size=scale.page,
        num_blocks=case.concurrency * pages_of(scale, case),
        max_batch_tokens=scale.batch_tokens,
        max_requests_per_batch=case.concurrency,
        max_blocks_per_request=0,
        q_padding_interval_size=case.concurrency,
        kv_padding_interval_size=scale.kv_interval,
        safety_margin=0.0,
        use_cuda_graph=graphs,
        use_async_batching=overlap,
    )


def generation_of(case: Case) -> GenerationConfig:
    """Greedy, so that off and on do the same work; never stopped by a token."""
    return GenerationConfig(do_sample=False, max_new_tokens=case.new, eos_token_id=-1, pad_token_id=0)
