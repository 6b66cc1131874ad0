"""Routes and layouts that do not fit are refused before the forward, naming request, row and layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collector.replay import replay_routes
from collector.replay.checks import ModelGeometry, checked_rows
from collector.replay.errors import (
    DuplicateExpert,
    ExpertOutOfRange,
    LayoutError,
    MissingRowsDisagree,
    PartialRow,
    ReplayError,
    WrongExpertCount,
    WrongLayerAxis,
    WrongRowCount,
    WrongTopK,
)
from collector.replay.layout import describe_batch
from protocol.errors import R3Error
from tests.replay.families import PROMISED
from tests.replay.rollout import Pulled, own_routes, padded, sentences

MODEL = ModelGeometry(num_layers=4, moe_layer_ids=(1, 2), top_k=3, num_experts=8)
TOKENS = 7


def good() -> Pulled:
    """Six rows; layer 1 holds (0, 1, 2) and layer 2 holds (5, 6, 7) throughout."""
    array = np.full((TOKENS - 1, 4, 3), -1, dtype=np.int16)
    array[:, 1], array[:, 2] = (0, 1, 2), (5, 6, 7)
    return Pulled("the-request", array, (1, 2), 8, TOKENS)


def too_few_rows(routes: Pulled) -> None:
    routes.array = routes.array[:-1]


def a_row_for_the_last_token(routes: Pulled) -> None:
    routes.array = np.concatenate([routes.array, routes.array[:1]])


def another_length(routes: Pulled) -> None:
    routes.num_tokens, routes.array = TOKENS + 1, np.concatenate([routes.array, routes.array[:1]])


def rows_of_a_prefix(routes: Pulled) -> None:
    routes.num_tokens = TOKENS + 1


def a_slice(routes: Pulled) -> None:
    routes.row_start = 2  # type: ignore[attr-defined]


def duplicate(routes: Pulled) -> None:
    routes.array[4, 2] = (5, 7, 5)


def above_range(routes: Pulled) -> None:
    routes.array[4, 2] = (5, 7, 8)


def below_range(routes: Pulled) -> None:
    routes.array[4, 2] = (5, 7, -2)


def partly_uncaptured(routes: Pulled) -> None:
    routes.array[4, 2] = (5, 7, -1)


def one_layer_uncaptured(routes: Pulled) -> None:
    routes.array[4, 2] = -1


def a_hole_not_declared(routes: Pulled) -> None:
    routes.array[4] = -1


def a_hole_declared_elsewhere(routes: Pulled) -> None:
    routes.array[4], routes.missing, routes.status = -1, ((3, 4),), "incomplete"


def complete_with_a_hole(routes: Pulled) -> None:
    routes.array[4], routes.missing = -1, ((4, 5),)


def zeros_at_a_dense_layer(routes: Pulled) -> None:
    routes.array[:, 0] = 0


def axis_shifted_by_the_dense_layer(routes: Pulled) -> None:
    routes.array = np.roll(routes.array, -1, axis=1)


def moe_layers_only_but_not_said(routes: Pulled) -> None:
    routes.array = routes.array[:, 1:3]


def a_layer_left_out(routes: Pulled) -> None:
    routes.moe_layer_ids = (1,)


def flat(routes: Pulled) -> None:
    routes.array = routes.array.reshape(TOKENS - 1, -1)


def floats(routes: Pulled) -> None:
    routes.array = routes.array.astype(np.float32)


def wrong_k(routes: Pulled) -> None:
    routes.array = routes.array[..., :2]


def other_experts(routes: Pulled) -> None:
    routes.num_experts = 16


@pytest.mark.parametrize(
    ("spoil", "error", "row", "layer"),
    [
        (too_few_rows, WrongRowCount, None, None),
        (a_row_for_the_last_token, WrongRowCount, None, None),
        (another_length, WrongRowCount, None, None),
        (rows_of_a_prefix, WrongRowCount, None, None),
        (a_slice, WrongRowCount, None, None),
        (duplicate, DuplicateExpert, 4, 2),
        (above_range, ExpertOutOfRange, 4, 2),
        (below_range, ExpertOutOfRange, 4, 2),
        (partly_uncaptured, PartialRow, 4, 2),
        (one_layer_uncaptured, PartialRow, 4, 2),
        (a_hole_not_declared, MissingRowsDisagree, 4, None),
        (a_hole_declared_elsewhere, MissingRowsDisagree, 3, None),
        (complete_with_a_hole, MissingRowsDisagree, None, None),
        (zeros_at_a_dense_layer, WrongLayerAxis, 0, 0),
        (axis_shifted_by_the_dense_layer, WrongLayerAxis, 0, 0),
        (moe_layers_only_but_not_said, WrongLayerAxis, None, None),
        (a_layer_left_out, WrongLayerAxis, None, None),
        (flat, WrongLayerAxis, None, None),
        (floats, WrongLayerAxis, None, None),
        (wrong_k, WrongTopK, None, None),
        (other_experts, WrongExpertCount, None, None),
    ],
)
def test_routes_that_do_not_fit_are_refused(
    spoil: Callable[[Pulled], None], error: type[ReplayError], row: int | None, layer: int | None
) -> None:
    routes = good()
    checked_rows(routes, "the-request", TOKENS, MODEL)
    spoil(routes)
    with pytest.raises(error) as caught:
        checked_rows(routes, "the-request", TOKENS, MODEL)
    assert isinstance(caught.value, R3Error)
    assert (caught.value.request_id, caught.value.row, caught.value.layer) == ("the-request", row, layer)
    assert "the-request" in str(caught.value)
    assert caught.value.found is not None


def test_good_rows_are_read_by_moe_layer_with_holes_where_declared() -> None:
    routes = good()
    routes.array[2:4], routes.missing, routes.status = -1, ((2, 4),), "incomplete"
    rows, holds = checked_rows(routes, "the-request", TOKENS, MODEL)
    assert rows.shape == (6, 2, 3)
    assert rows.dtype == np.int16
    assert holds.tolist() == [True, True, False, False, True, True]
    assert rows[5].tolist() == [[0, 1, 2], [5, 6, 7]]


@pytest.mark.parametrize("family", PROMISED)
def test_a_model_does_not_run_on_them(family: str, make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (4, TOKENS)), "right", TOKENS)
    ran = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1) and None)
    for spoil, error in (
        (lambda routes, row: too_few_rows(routes), WrongRowCount),
        (lambda routes, row: row.__setitem__(1, row[0]), DuplicateExpert),
        (lambda routes, row: row.__setitem__(1, routes.num_experts), ExpertOutOfRange),
        (lambda routes, row: setattr(routes, "array", routes.array[..., :1]), WrongTopK),
        (lambda routes, row: setattr(routes, "num_experts", routes.num_experts + 1), WrongExpertCount),
    ):
        routes = own_routes(model, batch)
        ran.clear()
        spoil(routes[1], routes[1].array[4, routes[1].moe_layer_ids[-1]])
        with pytest.raises(error) as caught, replay_routes(model, routes, **batch.layout):
            model(**batch.inputs)
        assert caught.value.request_id == "request-1"
        assert not ran
    handle.remove()


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])},
        {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 2, 3], [1, 1, 1]])},
        {"attention_mask": torch.ones(3)},
        {"attention_mask": torch.ones(2, 3), "width": 3},
        {"attention_mask": torch.ones(2, 3), "lengths": [3, 3]},
        {"lengths": [3, 0]},
        {"lengths": [3, 4], "width": 3},
        {"lengths": [3, 4], "padding_side": "middle"},
        {"cu_seqlens": [0, 3, 3]},
        {"cu_seqlens": [1, 3, 6]},
        {"cu_seqlens": [0]},
        {"cu_seqlens": [0, 3, 7], "width": 6},
        {},
        {"width": 5},
    ],
)
def test_layouts_that_are_none_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        describe_batch([3, 4], **arguments)


def test_layouts_place_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    by_mask = describe_batch([2, 4], attention_mask=mask)
    assert [each.tolist() for each in by_mask.positions] == [[1, 2], [4, 5, 6, 7]]
    assert by_mask.occupied().tolist() == mask.bool().tolist()
    left = describe_batch([2, 3], lengths=torch.tensor([2, 3]), padding_side="left", width=4)
    assert [each.tolist() for each in left.positions] == [[2, 3], [5, 6, 7]]
    right = describe_batch([2, 3], lengths=[2, 3])
    assert (right.shape, [each.tolist() for each in right.positions]) == ((2, 3), [[0, 1], [3, 4, 5]])
    pack = describe_batch([2, 3], cu_seqlens=np.array([0, 2, 5], np.int32), width=8)
    assert (pack.shape, [each.tolist() for each in pack.positions]) == ((1, 8), [[0, 1], [2, 3, 4]])
    assert describe_batch([3, 3]).shape == (2, 3)


def test_fewer_requests_than_sequences_are_refused(make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model("olmoe")
    batch = padded(sentences(seed, (4, 4)), "right", 4)
    routes = own_routes(model, batch)
    with pytest.raises(LayoutError), replay_routes(model, routes[:1], **batch.layout):
        raise AssertionError("the block opened")


def test_a_sequence_of_one_token_has_no_row(make_model: Callable[[str], Any], seed: int) -> None:
    model = make_model("olmoe")
    batch = padded(sentences(seed, (1, 4)), "right", 4)
    routes = own_routes(model, batch)
    assert routes[0].array.shape[0] == 0
    with replay_routes(model, routes, **batch.layout) as report:
        model(**batch.inputs)
    assert (report.rows_replayed, report.rows_last, report.rows_padding) == (3, 2, 3)
