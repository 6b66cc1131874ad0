"""Nothing counts as replayed unless every router is seen to have used the installed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from collector.replay import replay_routes
from collector.replay.errors import (
    AlreadyReplaying,
    AmbiguousTopk,
    BatchMismatch,
    CompiledModel,
    LostWeight,
    NothingReplayed,
    ReplayError,
    RouterCalledTwice,
    RouterNotCalled,
    RouterOutputUnknown,
    RouterOutsideForward,
    RouterSkippedTopk,
    RoutersNotFound,
    UsedOtherExperts,
    WrongLayerAxis,
)
from protocol.errors import R3Error
from tests.replay import fakes
from tests.replay.fakes import FakeMoe, routes_for, tokens
from tests.replay.families import PROMISED
from tests.replay.rollout import own_routes, padded, random_routes, routers_of, run, sentences

Watch = Callable[[Any], Any]
MakeModel = Callable[[str], Any]


@pytest.fixture
def fake(watched: Watch, seed: int) -> Callable[..., FakeMoe]:
    def make(*routers: type[torch.nn.Module]) -> FakeMoe:
        torch.manual_seed(seed)
        return watched(FakeMoe(*routers))

    return make


@pytest.mark.parametrize(
    "router", [fakes.HonestRouter, fakes.SortedColumnsRouter, fakes.MethodTopkRouter, fakes.GroupsOfOneRouter]
)
def test_routers_that_can_be_replayed_are(
    router: type[torch.nn.Module], fake: Callable[..., FakeMoe], seed: int
) -> None:
    model, routes = fake(router, router), routes_for(seed)
    seen = []
    handle = model.layers[1].gate.register_forward_hook(lambda _m, _a, output: seen.append(output[2]))
    with replay_routes(model, routes) as report:
        model(tokens())
    handle.remove()
    installed = torch.from_numpy(routes.array[:, 1].astype("int64"))
    assert torch.equal(seen[0][:-1].sort(1).values, installed.sort(1).values)
    assert report.share == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize(
    ("router", "error"),
    [
        (fakes.SortRouter, RouterSkippedTopk),
        (fakes.FusedRouter, RouterSkippedTopk),
        (fakes.LyingRouter, UsedOtherExperts),
        (fakes.TwiceRouter, AmbiguousTopk),
        (fakes.SilentRouter, RouterOutputUnknown),
    ],
)
def test_a_router_that_would_be_silently_off_raises(
    router: type[torch.nn.Module], error: type[ReplayError], fake: Callable[..., FakeMoe], seed: int
) -> None:
    model = fake(fakes.HonestRouter, router)
    with pytest.raises(error) as caught, replay_routes(model, routes_for(seed)) as report:
        model(tokens())
    assert isinstance(caught.value, R3Error)
    assert caught.value.layer == 1
    assert report.forwards == 0


def test_the_error_names_request_row_layer_expected_and_found(fake: Callable[..., FakeMoe], seed: int) -> None:
    model, routes = fake(fakes.LyingRouter), routes_for(seed)
    with pytest.raises(UsedOtherExperts) as caught, replay_routes(model, routes) as report:
        model(tokens())
    error, row = caught.value, fakes.TOKENS - 2
    expected = routes.array[row, 0].tolist()
    found = [(expert + 1) % fakes.EXPERTS for expert in expected]
    assert (error.request_id, error.row, error.layer) == ("request-0", row, 0)
    assert (error.expected, error.found) == (expected, found)
    assert all(str(part) in str(error) for part in ("request-0", f"row {row}", "layer 0", expected, found))
    assert report.share[0] < 1


def test_weights_lost_to_a_mask_raise(fake: Callable[..., FakeMoe], seed: int) -> None:
    model, routes = fake(fakes.MaskedRouter), routes_for(seed)
    scores = model.embed(tokens())[0] @ model.layers[0].gate.weight.T
    routes.array[0, 0] = scores[0].argsort()[: fakes.TOP_K].numpy()  # the two that the mask surely drops
    with pytest.raises(LostWeight) as caught, replay_routes(model, routes):
        model(tokens())
    assert (caught.value.row, caught.value.layer) == (0, 0)


@pytest.mark.parametrize("family", PROMISED)
def test_a_router_called_twice_in_one_forward_raises(family: str, make_model: MakeModel, seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (5,)), "right", 5)
    routes = own_routes(model, batch)
    layer, router = max(routers_of(model).items())
    block = next(each for each in model.modules() if router in each.children())
    handle = block.register_forward_pre_hook(lambda _m, args: router(args[0].flatten(0, 1)) and None)
    with pytest.raises(RouterCalledTwice) as caught, replay_routes(model, routes):
        run(model, batch)
    handle.remove()
    assert caught.value.layer == layer


@pytest.mark.parametrize("family", PROMISED)
def test_a_layer_left_out_of_the_forward_raises(family: str, make_model: MakeModel, seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (5,)), "right", 5)
    routes = own_routes(model, batch)
    model.model.layers[-1].forward = lambda hidden, **_: hidden
    with pytest.raises(RouterNotCalled) as caught, replay_routes(model, routes):
        run(model, batch)
    assert caught.value.layer == len(model.model.layers) - 1


@pytest.mark.parametrize("family", PROMISED)
def test_a_block_that_routes_without_calling_its_router_raises(family: str, make_model: MakeModel, seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (5,)), "right", 5)
    routes = own_routes(model, batch)
    layer, router = max(routers_of(model).items())
    block = next(each for each in model.modules() if router in each.children())
    name = next(each for each, child in block.named_children() if child is router)
    block.__dict__[name] = router.forward  # found before the module of that name: no hook runs
    with pytest.raises(RouterNotCalled) as caught, replay_routes(model, routes):
        run(model, batch)
    assert caught.value.layer == layer


@pytest.mark.parametrize("family", PROMISED)
def test_a_layer_left_out_of_the_routers_given_raises(family: str, make_model: MakeModel, seed: int) -> None:
    model = make_model(family)
    batch = padded(sentences(seed, (5,)), "right", 5)
    routes, routers = own_routes(model, batch), routers_of(model)
    del routers[max(routers)]
    with pytest.raises(WrongLayerAxis), replay_routes(model, routes, routers=routers):
        run(model, batch)


def test_hooks_on_another_model_than_the_one_called_raise(fake: Callable[..., FakeMoe], seed: int) -> None:
    called, hooked = fake(), fake()
    with pytest.raises(NothingReplayed), replay_routes(hooked, routes_for(seed)):
        called(tokens())


def test_a_part_of_the_model_called_alone_raises(make_model: MakeModel, seed: int) -> None:
    model = make_model("mixtral")
    batch = padded(sentences(seed, (5,)), "right", 5)
    routes = own_routes(model, batch)
    with pytest.raises(RouterOutsideForward), replay_routes(model, routes):
        model.model(**batch.inputs)
    with replay_routes(model.model, routes) as report:  # the way out that the error names
        model(**batch.inputs)
    assert report.forwards == 1


def test_two_blocks_at_once_on_one_model_raise(fake: Callable[..., FakeMoe], seed: int) -> None:
    model, routes = fake(), routes_for(seed)
    with replay_routes(model, routes) as report:
        model(tokens())
        with pytest.raises(AlreadyReplaying), replay_routes(model.layers, routes):
            raise AssertionError("the second block opened")
    assert report.forwards == 1


def test_two_models_replay_at_once(fake: Callable[..., FakeMoe], seed: int) -> None:
    one, other = fake(), fake()
    with replay_routes(one, routes_for(seed)) as first, replay_routes(other, routes_for(seed + 1)) as second:
        one(tokens())
        other(tokens())
        one(tokens())
    assert (first.forwards, second.forwards) == (2, 1)


@pytest.mark.parametrize("error", [RuntimeError("failed"), KeyboardInterrupt()])
def test_a_router_that_raises_leaves_no_mode_behind(
    error: BaseException, fake: Callable[..., FakeMoe], seed: int
) -> None:
    model = fake(fakes.HonestRouter, fakes.RaisingRouter)
    model.layers[1].gate.error = error
    scores = torch.rand(fakes.TOKENS, fakes.EXPERTS)
    with pytest.raises(type(error)), replay_routes(model, routes_for(seed)):
        model(tokens())
    assert torch._C._len_torch_function_stack() == 0
    assert torch.equal(torch.topk(scores, fakes.TOP_K).indices, scores.argsort(descending=True)[:, : fakes.TOP_K])


def test_a_failed_forward_can_be_tried_again_in_the_block(fake: Callable[..., FakeMoe], seed: int) -> None:
    model = fake(fakes.HonestRouter, fakes.RaisingRouter)
    with replay_routes(model, routes_for(seed)) as report:
        with pytest.raises(RuntimeError):
            model(tokens())
        model.layers[1].gate.choose = lambda scores: fakes.HonestRouter.choose(model.layers[1].gate, scores)
        model(tokens())
    assert report.forwards == 1


class Passing(TorchFunctionMode):
    """Somebody else's mode, which lets everything through and remembers the topk calls it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.topk
        return func(*args, **(kwargs or {}))


def test_other_function_modes_around_and_inside_the_block_change_nothing(
    fake: Callable[..., FakeMoe], seed: int
) -> None:
    model, routes = fake(), routes_for(seed)
    with replay_routes(model, routes):
        wanted = model(tokens())
    with Passing() as outer, torch.device("cpu"), replay_routes(model, routes) as report:
        with Passing() as inner:
            found = model(tokens())
        assert torch.equal(model(tokens()), wanted)
    assert torch.equal(found, wanted)
    assert report.forwards == 2
    assert inner.seen == 2  # once a router, for the row without a route; the others never reach a topk
    assert outer.seen == 4


def test_other_peoples_hooks_on_a_router_call_the_real_topk(fake: Callable[..., FakeMoe], seed: int) -> None:
    model, routes = fake(), routes_for(seed)
    native, seen = model.layers[0].gate(model.embed(tokens()))[2], []
    router = model.layers[0].gate
    handles = [
        router.register_forward_pre_hook(
            lambda module, args: seen.append(torch.topk(args[0][0] @ module.weight.T, fakes.TOP_K).indices)
        ),
        router.register_forward_hook(lambda _m, _a, output: seen.append(torch.topk(output[0], fakes.TOP_K).indices)),
    ]
    with replay_routes(model, routes):
        model(tokens())
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    assert all(torch.equal(each, native) for each in seen)


def test_a_hook_that_rewrites_the_routers_ids_is_caught(fake: Callable[..., FakeMoe], seed: int) -> None:
    model = fake()
    handle = model.layers[0].gate.register_forward_hook(
        lambda _m, _a, output: (*output[:2], (output[2] + 1) % fakes.EXPERTS)
    )
    with pytest.raises(UsedOtherExperts), replay_routes(model, routes_for(seed)):
        model(tokens())
    handle.remove()


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_is_refused(how: str, fake: Callable[..., FakeMoe], seed: int) -> None:
    model = fake()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(CompiledModel), replay_routes(model, routes_for(seed)):
        raise AssertionError("the block opened")


def test_a_function_compiled_before_the_block_does_not_run_unreplayed_unseen(
    fake: Callable[..., FakeMoe], seed: int
) -> None:
    model = fake()
    compiled = torch.compile(lambda ids: model(ids), backend="eager")
    compiled(tokens())
    with pytest.raises(NothingReplayed), replay_routes(model, routes_for(seed)):
        compiled(tokens())
    torch._dynamo.reset()


@pytest.mark.parametrize("change", ["one token less", "two sequences", "other pads"])
def test_another_batch_than_described_raises(change: str, make_model: MakeModel, seed: int) -> None:
    model = make_model("qwen3_moe")
    batch = padded(sentences(seed, (5,)), "left", 6)
    routes = random_routes(model, batch, seed)
    inputs = dict(batch.inputs)
    if change == "one token less":
        inputs = {"input_ids": inputs["input_ids"][:, 1:]}
    elif change == "two sequences":
        inputs = {"input_ids": inputs["input_ids"].reshape(2, 3)}
    else:
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    with pytest.raises(BatchMismatch), replay_routes(model, routes, **batch.layout):
        model(**inputs)


def test_a_model_that_drops_tokens_on_the_way_raises(fake: Callable[..., FakeMoe], seed: int) -> None:
    model = fake()
    inner = model.forward
    model.forward = lambda input_ids: inner(input_ids[:, 1:])
    with pytest.raises(BatchMismatch) as caught, replay_routes(model, routes_for(seed)):
        model(tokens())
    assert (caught.value.expected, caught.value.found) == (fakes.TOKENS, fakes.TOKENS - 1)


def test_a_model_without_routers_and_one_with_two_in_a_layer_are_refused(
    fake: Callable[..., FakeMoe], seed: int
) -> None:
    with pytest.raises(RoutersNotFound), replay_routes(torch.nn.Linear(2, 2), routes_for(seed)):
        raise AssertionError("the block opened")
    model = fake()
    model.layers[1].draft_gate = fakes.HonestRouter()
    with pytest.raises(RoutersNotFound) as caught, replay_routes(model, routes_for(seed)):
        raise AssertionError("the block opened")
    assert caught.value.layer == 1
    routers = {0: model.layers[0].gate, 1: model.layers[1].gate}
    with replay_routes(model, routes_for(seed), routers=routers) as report:
        model(tokens())
    assert report.forwards == 1
