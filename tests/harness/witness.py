"""The independent witness: what routes and log-probabilities a plain forward of the same tokens gives.

It shares nothing with the capture under test. Capture looks at what a router returns, in whatever batches the
engine forms; the witness looks at what the *experts were called with*, in one forward of one whole sequence,
without cache, and rebuilds the layer axis by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

UNROUTED = -1  # what a layer without experts holds


def prefill_routes(model: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[np.int16]:
    """`[num_tokens-1, num_layers, top_k]` int16: the experts of every token but the last, -1 at dense layers.

    Raises `ValueError` for a model that is not fp32 (in lower precision, near ties make honest routes differ)
    or whose attention was rewritten by continuous batching; `AssertionError` if a layer with experts did not
    run exactly once over every token.
    """
    widths = {str(parameter.dtype) for parameter in model.parameters()}
    if widths != {"torch.float32"}:
        raise ValueError(f"the witness needs a float32 model, not {', '.join(sorted(widths))}: load one for it")
    config = model.config.get_text_config()
    num_rows, top_k = len(token_ids) - 1, config.num_experts_per_tok
    routes = np.full((num_rows, config.num_hidden_layers, top_k), UNROUTED, np.int16)
    with _watched(model) as seen:
        if num_rows > 0:
            _forward(model, token_ids)
    for layer, calls in seen.items():
        shapes = [tuple(ids.shape) for ids in calls]
        expected = [(num_rows, top_k)] if num_rows > 0 else []
        assert shapes == expected, f"layer {layer}: experts called with {shapes}, expected {expected}"
        for ids in calls:
            routes[:, layer] = ids.numpy()
    return routes


def logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """`[num_tokens-1]`: log-probability in nats of each token but the first, given those before it.

    The forward runs in the model's own dtype, the softmax in float64, temperature 1.
    """
    if len(token_ids) < 2:
        return np.empty(0, np.float64)
    logits = _forward(model, token_ids)
    chosen = torch.tensor(list(token_ids[1:]), dtype=torch.int64, device=logits.device)
    every = torch.log_softmax(logits.double(), dim=-1)
    return every.gather(1, chosen[:, None])[:, 0].cpu().numpy()


def differing_rows(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """`[n, 2]`: the (row, layer) pairs whose experts differ, in order; columns may stand in any order.

    `a` and `b` are `[rows, num_layers, top_k]`; `ValueError` if their shapes differ. A repeated expert makes
    a row differ from one that names it once.
    """
    if a.shape != b.shape or a.ndim != 3:
        raise ValueError(f"routes of shapes {a.shape} and {b.shape} cannot be compared row by row")
    unequal = np.sort(a.astype(np.int64), axis=-1) != np.sort(b.astype(np.int64), axis=-1)
    return np.argwhere(unequal.any(axis=-1))


@torch.no_grad()
def _forward(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """`[num_tokens-1, vocabulary]` logits of one unpadded sequence, last token left out."""
    attention = str(model.config._attn_implementation)
    if attention.startswith("paged|"):
        raise ValueError(f"attention is {attention!r}: continuous batching owns this model; load another instance")
    ids = torch.tensor([list(token_ids[:-1])], dtype=torch.int64, device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[dict[int, list[Tensor]]]:
    """Per layer with experts, the expert ids of each call as int64 on the CPU, `[tokens, top_k]`."""
    seen: dict[int, list[Tensor]] = {}
    handles = []
    try:
        for layer, block in enumerate(model.get_decoder().layers):
            for name, module in block.named_modules():
                if name.rpartition(".")[2] == "experts":
                    calls = seen.setdefault(layer, [])
                    handles.append(module.register_forward_pre_hook(_noting(calls)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _noting(calls: list[Tensor]) -> Any:
    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append(inputs[1].detach().to("cpu", torch.int64).clone())  # (hidden states, expert ids, weights)

    return note
