"""Tiny random models of seven MoE families, fp32 and seeded: five that are promised, two that come for free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 64
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED_QUERY = {**_SHARED, "num_key_value_heads": 2}
_WITH_HEAD_DIM = {**_GROUPED_QUERY, "head_dim": 8}


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_WITH_HEAD_DIM,
        num_hidden_layers=4,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _olmoe() -> Any:
    config = transformers.OlmoeConfig(
        **_GROUPED_QUERY, num_hidden_layers=3, intermediate_size=16, num_experts=8, num_experts_per_tok=2
    )
    return transformers.OlmoeForCausalLM(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(
        **_WITH_HEAD_DIM, num_hidden_layers=3, intermediate_size=16, num_local_experts=6, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _deepseek_v3() -> Any:
    config = transformers.DeepseekV3Config(
        **{**_SHARED, "num_key_value_heads": 4},
        num_hidden_layers=4,
        first_k_dense_replace=1,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **_WITH_HEAD_DIM,
        num_hidden_layers=3,
        intermediate_size=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.GptOssForCausalLM(config)


def _qwen2_moe() -> Any:
    config = transformers.Qwen2MoeConfig(
        **_GROUPED_QUERY,
        num_hidden_layers=3,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _glm4_moe() -> Any:
    config = transformers.Glm4MoeConfig(
        **_WITH_HEAD_DIM,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )
    return transformers.Glm4MoeForCausalLM(config)


PROMISED: dict[str, Callable[[], Any]] = {
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
FREE: dict[str, Callable[[], Any]] = {"qwen2_moe": _qwen2_moe, "glm4_moe": _glm4_moe}


def build(family: str, seed: int) -> Any:
    """A model in training mode, weights wide enough that its routers disagree with chance."""
    torch.manual_seed(seed)
    model = {**PROMISED, **FREE}[family]().float().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model
