"""The checkpoint that every claim about a real model rests on: it loads, it has learned, it has the shape we need."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.harness.tiny import CHECKPOINT, END_OF_FILE, held_out_files, load_tiny, read_tokens, training_files

SLICE = 8192  # tokens of the held-out text, from its beginning


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_tiny()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads((CHECKPOINT / "figures.json").read_text())


def test_it_predicts_text_it_never_saw(model: PreTrainedModel) -> None:
    measure = importlib.import_module("tests.data.tiny-moe.measure")
    tokens = torch.from_numpy(read_tokens(held_out_files())[:SLICE])
    assert measure.nats_per_byte(model, tokens) < 2.0
    shuffled = tokens[torch.randperm(SLICE, generator=torch.Generator().manual_seed(0))]
    assert measure.nats_per_byte(model, shuffled) > 3.0, "the measure itself tells text from noise"


def test_its_first_and_last_layers_are_dense_and_the_rest_choose_4_of_32(model: PreTrainedModel) -> None:
    with_experts = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert with_experts == [1, 2, 3, 4, 5, 6]
    assert model.config.num_hidden_layers == 8
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (32, 4)
    assert model.config.max_position_embeddings >= 2048
    assert model.config.vocab_size == 257


def test_every_expert_is_used_and_none_is_used_for_everything(model: PreTrainedModel) -> None:
    measure = importlib.import_module("tests.data.tiny-moe.measure")
    found = measure.routing(model, torch.from_numpy(read_tokens(held_out_files())[:SLICE]))
    assert found["expert_share_min"] > 0
    assert found["expert_share_max"] < 0.25, "0.25 would be an expert that every token chooses"


def test_a_generation_ends_on_the_token_that_is_no_byte(model: PreTrainedModel) -> None:
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == END_OF_FILE
    assert model.config.pad_token_id is None, "a padding row of the embedding would never have been trained"
    assert bool((model.get_input_embeddings().weight[END_OF_FILE] != 0).any())


def test_router_logits_stay_out_of_the_saved_configuration(model: PreTrainedModel) -> None:
    assert model.config.output_router_logits is False, "continuous batching cannot run with them"


def test_held_out_files_are_not_trained_on() -> None:
    assert {path.name for path in training_files()}.isdisjoint(path.name for path in held_out_files())
    assert np.count_nonzero(read_tokens(held_out_files()) == END_OF_FILE) == len(held_out_files()) + 1


def test_the_page_says_what_was_measured(model: PreTrainedModel, figures: dict[str, Any]) -> None:
    page = importlib.import_module("tests.data.tiny-moe.readme").readme(figures)
    assert (CHECKPOINT / "README.md").read_text() == page
    assert figures["file_bytes"] == (CHECKPOINT / "model.safetensors").stat().st_size
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
