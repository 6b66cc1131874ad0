"""The small real model of `tests/data/tiny-moe`, the text it was trained on, and prompts for it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

CHECKPOINT = Path(__file__).resolve().parent.parent / "data" / "tiny-moe"
END_OF_FILE = 256  # the one token that is no byte: it stands before each file, and ends a generation
VOCABULARY = 257
# Modules that training never sees. Every supported Python has them, so they can be scored everywhere.
HELD_OUT = ("fractions.py", "heapq.py", "shlex.py", "statistics.py", "textwrap.py", "zipapp.py")

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def load_tiny(dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """A fresh instance in eval mode, weights rounded to bf16 on disk and widened to `dtype` here.

    Continuous batching rewrites the attention setting of the model it is given: hand the engine one instance
    and the witness another.
    """
    model = Qwen3MoeForCausalLM.from_pretrained(
        CHECKPOINT, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    return model.eval()


def training_files() -> list[Path]:
    """The standard library's top level in order of name, less what is held out or was made for one machine."""
    return [
        path
        for path in sorted(STANDARD_LIBRARY.glob("*.py"))
        if path.name not in HELD_OUT and not path.name.startswith("_sysconfigdata")
    ]


def held_out_files() -> list[Path]:
    """The files of `HELD_OUT`, in that order."""
    return [STANDARD_LIBRARY / name for name in HELD_OUT]


def read_tokens(paths: Iterable[Path]) -> NDArray[np.int64]:
    """`[num_tokens]`: each file's bytes behind an `END_OF_FILE`, and one more at the end."""
    parts = [np.frombuffer(bytes_, np.uint8) for bytes_ in (path.read_bytes() for path in paths)]
    mark = np.array([END_OF_FILE], np.int64)
    return np.concatenate([*(piece for part in parts for piece in (mark, part)), mark])


def prompts(
    n: int,
    seed: int,
    *,
    families: int = 4,
    shared: tuple[int, int] = (64, 224),
    own: tuple[int, int] = (8, 96),
) -> list[list[int]]:
    """`n` prompts of held-out source, prompt `i` of family `i % families`.

    A family's prompts begin with the same stretch of text, its length drawn from `shared`; then each goes on
    with a stretch of its own, length from `own`. Lengths are in tokens, both ends included. The lengths are
    arbitrary, so a shared prefix ends inside a page of any size.
    """
    rng = np.random.default_rng(seed)
    text = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in held_out_files()])

    def stretch(lengths: tuple[int, int]) -> list[int]:
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        start = int(rng.integers(0, len(text) - length + 1))
        return [int(byte) for byte in text[start : start + length]]

    prefixes = [stretch(shared) for _ in range(families)]
    return [prefixes[i % families] + stretch(own) for i in range(n)]
