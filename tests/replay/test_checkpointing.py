"""A checkpoint's recompute replays the routes of the forward it repeats, whenever the backward comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from collector.replay import replay_routes
from collector.replay.errors import UnprovenReplay, UntracedRecompute
from tests.replay.conftest import count_hooks
from tests.replay.fakes import FakeMoe, LyingRouter, SortRouter, StoppedRouter, routes_for, tokens
from tests.replay.families import PROMISED
from tests.replay.rollout import (
    Batch,
    Pulled,
    gradients,
    loss_of,
    own_routes,
    padded,
    random_routes,
    run,
    same_gradients,
    sentences,
    used_ids,
)

MakeModel = Callable[[str], Any]
reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])


def replayed(model: Any, batch: Batch, routes: list[Pulled]) -> dict[str, torch.Tensor]:
    """Gradients of replay without any checkpoint."""
    with replay_routes(model, routes, **batch.layout):
        return run(model, batch)[1]


def enable(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def batch_of(seed: int, lengths: tuple[int, ...] = (7, 4)) -> Batch:
    return padded(sentences(seed, lengths), "right", max(lengths))


@reentrant
@pytest.mark.parametrize("family", PROMISED)
def test_backward_in_the_block(family: str, reentrant: bool, make_model: MakeModel, seed: int) -> None:
    model, batch = make_model(family), batch_of(seed)
    routes = random_routes(model, batch, seed)
    wanted = replayed(model, batch, routes)
    enable(model, reentrant)
    before = count_hooks(model)
    _, native = run(model, batch)
    with replay_routes(model, routes, **batch.layout) as report:
        _, found = run(model, batch)
    assert same_gradients(found, wanted)
    assert not same_gradients(native, wanted)
    assert (report.forwards, report.recomputes) == (1, len(routes[0].moe_layer_ids))
    assert count_hooks(model) == before  # the graph is gone, and the hooks with it


@reentrant
@pytest.mark.parametrize("family", PROMISED)
def test_backward_after_the_block(family: str, reentrant: bool, make_model: MakeModel, seed: int) -> None:
    model, batch = make_model(family), batch_of(seed)
    routes = random_routes(model, batch, seed)
    wanted = replayed(model, batch, routes)
    enable(model, reentrant)
    before = count_hooks(model)
    model.zero_grad()
    with replay_routes(model, routes, **batch.layout) as report:
        loss = loss_of(model(**batch.inputs).logits, batch)
    with used_ids(model) as used:
        loss.backward()
    assert same_gradients(gradients(model), wanted)
    assert report.recomputes == len(routes[0].moe_layer_ids)
    first = used[routes[0].moe_layer_ids[0]][batch.places[0][:-1]]
    assert torch.equal(first, torch.from_numpy(routes[0].array[:, routes[0].moe_layer_ids[0]].astype("int64")))
    del loss
    assert count_hooks(model) == before


@reentrant
@pytest.mark.parametrize("order", ["first to last", "last to first", "summed"])
def test_backwards_after_several_blocks_each_replay_their_own(
    order: str, reentrant: bool, make_model: MakeModel, seed: int
) -> None:
    model = make_model("qwen3_moe")
    batches = [batch_of(seed + number, lengths) for number, lengths in enumerate([(7, 4), (7, 4), (5,)])]
    routes = [random_routes(model, batch, seed + number) for number, batch in enumerate(batches)]
    wanted = [replayed(model, *both) for both in zip(batches, routes, strict=True)]
    enable(model, reentrant)
    model.zero_grad()
    losses, reports = [], []
    for batch, mine in zip(batches, routes, strict=True):
        with replay_routes(model, mine, **batch.layout) as report:
            losses.append(loss_of(model(**batch.inputs).logits, batch))
        reports.append(report)
    if order == "summed":
        sum(losses).backward()
    for loss in {"first to last": losses, "last to first": losses[::-1], "summed": []}[order]:
        loss.backward()
    for name, gradient in gradients(model).items():
        total = sum(each[name] for each in wanted)
        torch.testing.assert_close(gradient, total, rtol=1e-4, atol=1e-5 * float(total.abs().max()))
    assert [report.recomputes for report in reports] == [3, 3, 3]


@reentrant
def test_native_forwards_before_and_after_the_block_stay_native(
    reentrant: bool, make_model: MakeModel, seed: int
) -> None:
    model, batch = make_model("mixtral"), batch_of(seed)
    routes = random_routes(model, batch, seed)
    wanted = replayed(model, batch, routes)
    _, native = run(model, batch)
    enable(model, reentrant)
    earlier = loss_of(model(**batch.inputs).logits, batch)
    with replay_routes(model, routes, **batch.layout) as report:
        mine = loss_of(model(**batch.inputs).logits, batch)
        model.zero_grad()
        earlier.backward()  # made before the block, recomputed inside it
        assert same_gradients(gradients(model), native)
        assert report.recomputes == 0
    later = loss_of(model(**batch.inputs).logits, batch)
    for loss, expected in ((later, native), (mine, wanted)):
        model.zero_grad()
        loss.backward()
        assert same_gradients(gradients(model), expected)


@reentrant
def test_a_recompute_of_a_forward_that_was_not_seen_raises(reentrant: bool, make_model: MakeModel, seed: int) -> None:
    model, batch = make_model("mixtral"), batch_of(seed)
    enable(model, reentrant)
    with replay_routes(model, random_routes(model, batch, seed), **batch.layout):
        mine = loss_of(model(**batch.inputs).logits, batch)
    unseen = model.model(**batch.inputs).last_hidden_state.sum()  # a part of the model: it has no hook of the block's
    with pytest.raises(UntracedRecompute):
        unseen.backward()
    del mine
    model.model(**batch.inputs).last_hidden_state.sum().backward()  # the block's graph is gone, and its hooks


def test_a_graph_that_is_kept_replays_in_every_backward(make_model: MakeModel, seed: int) -> None:
    model, batch = make_model("gpt_oss"), batch_of(seed)
    routes = random_routes(model, batch, seed)
    wanted = replayed(model, batch, routes)
    enable(model, False)
    with replay_routes(model, routes, **batch.layout) as report:
        loss = loss_of(model(**batch.inputs).logits, batch)
    for keep in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        assert same_gradients(gradients(model), wanted)
    assert report.recomputes == 9


def test_without_a_checkpoint_hooks_go_with_the_block(make_model: MakeModel, seed: int) -> None:
    model, batch = make_model("olmoe"), batch_of(seed)
    before = count_hooks(model)
    with replay_routes(model, own_routes(model, batch), **batch.layout):
        loss = loss_of(model(**batch.inputs).logits, batch)
    assert count_hooks(model) == before
    loss.backward()


def test_a_graph_dropped_unused_takes_the_hooks_along(make_model: MakeModel, seed: int) -> None:
    model, batch = make_model("olmoe"), batch_of(seed)
    enable(model, False)
    before = count_hooks(model)
    with replay_routes(model, own_routes(model, batch), **batch.layout):
        logits = model(**batch.inputs).logits
    assert count_hooks(model) > before
    del logits
    assert count_hooks(model) == before


@reentrant
def test_a_loss_of_a_hidden_state_replays_after_the_outputs_are_dropped(
    reentrant: bool, make_model: MakeModel, seed: int
) -> None:
    model, batch = make_model("mixtral"), batch_of(seed)
    routes, states = random_routes(model, batch, seed), []
    handle = model.model.norm.register_forward_pre_hook(lambda _m, args: states.append(args[0]))
    with replay_routes(model, routes, **batch.layout):
        model(**batch.inputs)
        model.zero_grad()
        states.pop().sum().backward()
    wanted = gradients(model)
    enable(model, reentrant)
    with replay_routes(model, routes, **batch.layout):
        model(**batch.inputs)
    model.zero_grad()
    states.pop().sum().backward()
    handle.remove()
    assert same_gradients(gradients(model), wanted)


def test_outputs_whose_graph_cannot_be_followed_are_refused(watched: Callable[[Any], Any], seed: int) -> None:
    model = watched(FakeMoe())
    model.checkpointing = {"use_reentrant": False}
    inner = model.forward
    model.forward = lambda input_ids: {inner(input_ids)}
    with pytest.raises(UntracedRecompute), replay_routes(model, routes_for(seed)):
        model(tokens())


@reentrant
@pytest.mark.parametrize("router", [LyingRouter, SortRouter], ids=["other experts", "no topk"])
def test_a_recompute_that_does_not_replay_raises_in_the_backward(
    router: type[torch.nn.Module], reentrant: bool, watched: Callable[[Any], Any], seed: int
) -> None:
    torch.manual_seed(seed)
    model = watched(FakeMoe())
    model.checkpointing = {"use_reentrant": reentrant}
    with replay_routes(model, routes_for(seed)) as report:
        loss = model(tokens()).sum()
    model.layers[1].gate.__class__ = router
    with pytest.raises(UnprovenReplay) as caught:
        loss.backward()
    assert caught.value.layer == 1
    assert (report.forwards, report.recomputes) == (1, 0)


def test_the_whole_model_in_one_nonreentrant_checkpoint(make_model: MakeModel, seed: int) -> None:
    model, batch = make_model("qwen3_moe"), batch_of(seed)
    routes = random_routes(model, batch, seed)
    wanted = replayed(model, batch, routes)
    model.zero_grad()
    with replay_routes(model, routes, **batch.layout) as report:
        logits = checkpoint(lambda: model(**batch.inputs).logits, use_reentrant=False)
        loss = loss_of(logits, batch)
    loss.backward()
    assert same_gradients(gradients(model), wanted)
    assert (report.forwards, report.recomputes) == (1, 3)


def test_the_whole_model_in_one_reentrant_checkpoint_is_refused(watched: Callable[[Any], Any], seed: int) -> None:
    model = watched(FakeMoe())
    anchor = torch.ones(1, requires_grad=True)
    with pytest.raises(UntracedRecompute), replay_routes(model, routes_for(seed)):
        checkpoint(lambda one: model(tokens()) * one, anchor, use_reentrant=True)


@pytest.mark.parametrize("inside", [True, False], ids=["reentrant in reentrant", "nonreentrant in reentrant"])
@pytest.mark.parametrize("when", ["in the block", "after the block"])
def test_a_checkpoint_nested_in_a_reentrant_one_is_refused_not_left_native(
    inside: bool, when: str, watched: Callable[[Any], Any], seed: int
) -> None:
    torch.manual_seed(seed)
    model = watched(FakeMoe())
    for layer in model.layers:
        layer.forward = _checkpointed(layer.forward, inside)
    model.checkpointing = {"use_reentrant": True}
    with replay_routes(model, routes_for(seed)):
        loss = model(tokens()).sum()
        if when == "in the block":
            with pytest.raises(UntracedRecompute):
                loss.backward()
    if when == "after the block":
        with pytest.raises(UntracedRecompute):
            loss.backward()


def test_nested_nonreentrant_checkpoints_replay(watched: Callable[[Any], Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = watched(FakeMoe())
    with replay_routes(model, routes_for(seed)):
        model(tokens()).sum().backward()
    wanted = gradients(model)
    for layer in model.layers:
        layer.forward = _checkpointed(layer.forward, False)
    model.checkpointing = {"use_reentrant": False}
    model.zero_grad()
    with replay_routes(model, routes_for(seed)) as report:
        loss = model(tokens()).sum()
    loss.backward()
    assert same_gradients(gradients(model), wanted)
    assert report.recomputes >= 2


def test_a_recompute_that_stops_inside_a_router_leaves_no_mode_behind(watched: Callable[[Any], Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = watched(FakeMoe(StoppedRouter, StoppedRouter))
    with replay_routes(model, routes_for(seed)):
        model(tokens()).sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    for layer in model.layers:
        layer.checkpointed_gate = True
    with replay_routes(model, routes_for(seed)) as report:
        loss = model(tokens()).sum()
    loss.backward()
    assert torch._C._len_torch_function_stack() == 0
    assert same_gradients(gradients(model), wanted)
    assert (report.forwards, report.recomputes) == (1, 0)  # no recompute came to its end


def _checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda hidden: checkpoint(forward, hidden, use_reentrant=reentrant)
