"""Train the small model from nothing and write everything in this folder: `python -m tests.data.tiny-moe.train`.

A byte-level Qwen3-MoE whose first and last layers are dense, trained on the source of the standard library of
the Python that runs this. Seeded; the figures it writes are measured on the checkpoint as read back from disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.harness.tiny import (
    CHECKPOINT,
    END_OF_FILE,
    VOCABULARY,
    held_out_files,
    load_tiny,
    read_tokens,
    training_files,
)

from .measure import nats_per_byte, routing
from .readme import readme

SEED = 20
THREADS = 2
STEPS = 1600
TOKENS_PER_STEP = 1024
LENGTHS = (256, 512, 1024)  # in turn, so that the model has met every position a test is likely to use
PEAK_RATE = 4e-3
WARM_UP = 40
BALANCE = 0.01
SCORED = 65536  # tokens of the training text that are scored beside the held-out text

CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "mlp_only_layers": [0, 7],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "bos_token_id": END_OF_FILE,
    "eos_token_id": END_OF_FILE,
    # No pad_token_id: an embedding never learns its padding row, and END_OF_FILE has one to learn.
}


def batches(tokens: Tensor) -> Iterator[Tensor]:
    """Endless int64 `[batch, length]` of stretches drawn from `tokens`, `TOKENS_PER_STEP` tokens each."""
    chance = torch.Generator().manual_seed(SEED)
    while True:
        for length in LENGTHS:
            starts = torch.randint(len(tokens) - length + 1, (TOKENS_PER_STEP // length, 1), generator=chance)
            yield tokens[starts + torch.arange(length)]


def imbalance(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """1 when every layer uses its experts evenly, more when not. Each layer counts by itself: the library's
    own loss sums over layers first, and layers that each drop other experts look balanced to it."""
    total = torch.zeros(())
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        num_experts = probabilities.shape[-1]
        chosen = torch.bincount(probabilities.topk(top_k).indices.flatten(), minlength=num_experts)
        total = total + (chosen / chosen.sum() * probabilities.mean(0)).sum() * num_experts
    return total / len(router_logits)


def rate(step: int) -> float:
    """Learning rate: a short way up, level until 40%, then straight down to nothing."""
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP, (1 - step / STEPS) / 0.6)


def train(model: PreTrainedModel, tokens: Tensor) -> None:
    """Run all steps in fp32, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()
    for step, batch in zip(range(STEPS), batches(tokens), strict=False):
        output = model(input_ids=batch, output_router_logits=True, use_cache=False)
        nats = cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        (nats + BALANCE * imbalance(output.router_logits, model.config.num_experts_per_tok)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {STEPS}: {nats.item():.3f} nats", flush=True)


def save(model: PreTrainedModel) -> None:
    """Weights in bf16, which halves the file; whoever loads them says in which dtype."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_FILE, eos_token_id=END_OF_FILE, pad_token_id=END_OF_FILE
    )
    model.save_pretrained(CHECKPOINT)


def measured(seconds: float, training: Tensor, held_out: Tensor) -> dict[str, Any]:
    """The figures of the checkpoint on disk, loaded as fp32."""
    model = load_tiny()
    return {
        "train_nats_per_byte": nats_per_byte(model, training[:SCORED]),
        "held_out_nats_per_byte": nats_per_byte(model, held_out),
        "uniform_nats_per_byte": math.log(VOCABULARY),
        **routing(model, held_out),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file_bytes": (CHECKPOINT / "model.safetensors").stat().st_size,
        "seconds": seconds,
        "steps": STEPS,
        "tokens_seen": STEPS * TOKENS_PER_STEP,
        "training_tokens": len(training),
        "held_out_tokens": len(held_out),
        "training_sha256": hashlib.sha256(training.numpy().astype("<i2").tobytes()).hexdigest(),
        "seed": SEED,
        "threads": THREADS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Train, save, measure, write the figures, write the README from them."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    training, held_out = (torch.from_numpy(read_tokens(files)) for files in (training_files(), held_out_files()))
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    model.set_experts_implementation("grouped_mm")  # on a CPU 1.3 times the default loop, 30 times "batched_mm"
    began = time.perf_counter()
    train(model, training)
    seconds = time.perf_counter() - began
    save(model)
    figures = measured(seconds, training, held_out)
    (CHECKPOINT / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    (CHECKPOINT / "README.md").write_text(readme(figures))
    print((CHECKPOINT / "README.md").read_text())


if __name__ == "__main__":
    main()
