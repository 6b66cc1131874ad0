"""The README of this folder, made from the figures that training measured."""

from __future__ import annotations

from typing import Any

TEXT = """\
# tiny-moe

A small real mixture-of-experts language model: `Qwen3MoeForCausalLM`, 8 layers of which the first and the last
are dense, so 6 choose 4 of 32 experts; hidden size 128; vocabulary of the 256 bytes and one token, 256, that
stands before each file and ends a generation. It was trained, not drawn, so its routers have real preferences
and real near ties, and a text that it likes.

    python -m tests.data.tiny-moe.train

from the repository's root made every file here but the sources: `config.json`, `generation_config.json`,
`model.safetensors` (bf16), `figures.json` and this page. It trains in fp32 with AdamW on the top-level modules
of the standard library of the Python that runs it, less six that are held out (`tests/harness/tiny.py` names
them), with a load balancing loss per layer. Seeded; another version of Python brings another text, another
processor another order of additions, so a second run gives figures near these and not these.

`tests/harness/tiny.py` loads it. It is stored as bf16: pass the dtype that you want.

## Figures

{rows}

Measured by that command on the checkpoint as read back from disk in fp32, in windows of 512 tokens. A row is
one token in one MoE layer; its gap is the distance between the router probabilities of the last expert chosen
and the first left out. Where a router is sure of fewer than four experts, the fourth and the fifth both have
next to no probability: such rows are near in probability, but no near ties, as the gap between logits tells.
"""


def readme(figures: dict[str, Any]) -> str:
    """The page, its table made from `figures` as `figures.json` holds them."""
    table = {
        "held-out text, nats per byte": f"{figures['held_out_nats_per_byte']:.3f}",
        "training text, nats per byte": f"{figures['train_nats_per_byte']:.3f}",
        "uniform guess, nats per byte": f"{figures['uniform_nats_per_byte']:.3f}",
        "parameters": f"{figures['parameters']:,}",
        "model.safetensors, bytes": f"{figures['file_bytes']:,}",
        "training, seconds": f"{figures['seconds']:.0f} on {figures['threads']} cores",
        "steps; tokens seen": f"{figures['steps']:,}; {figures['tokens_seen']:,}",
        "training text; held-out text, tokens": f"{figures['training_tokens']:,}; {figures['held_out_tokens']:,}",
        "rows with a k/k+1 gap below 1e-3": f"{figures['rows_gap_below_0.001']:.2%}",
        "rows with a k/k+1 gap below 1e-5; 1e-6": (
            f"{figures['rows_gap_below_1e-05']:.3%}; {figures['rows_gap_below_1e-06']:.4%}"
        ),
        "rows whose k/k+1 gap between logits is below 1e-3": f"{figures['rows_logit_gap_below_0.001']:.2%}",
        "share of its layer's choices, least; most used expert (even: 3.125%)": (
            f"{figures['expert_share_min']:.2%}; {figures['expert_share_max']:.2%}"
        ),
        "Python; torch; transformers; seed": (
            f"{figures['python']}; {figures['torch']}; {figures['transformers']}; {figures['seed']}"
        ),
    }
    rows = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return TEXT.format(rows="\n".join(rows))
