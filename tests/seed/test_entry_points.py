"""What was asked about switches: refusals through the calls that users make, off that is off, and what is written."""

from __future__ import annotations

import ast
import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from collector.cli.main import app
from collector.client import errors
from engine_side.capture import compiled
from engine_side.capture.errors import CaptureRefused
from engine_side.engines.transformers import capture_routes
from tests.engines.running import batching, generation
from tests.harness.tiny import load_tiny, prompts
from tests.source_tree import PACKAGES, ROOT, Source, sources


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_tiny(torch.float32, attention="sdpa")


CALLS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


@pytest.mark.parametrize("call", CALLS)
def test_open_refusal_entry_points_kv_offload_is_refused_through_every_call_that_users_make(
    model: Any, tmp_path: Path, call: str
) -> None:
    before = _installed(model)
    with (
        capture_routes(model, f"ipc://{tmp_path}/x.sock", drain_s=0.0),
        pytest.raises(CaptureRefused, match="KV offload"),
    ):
        _run_with_offload(model, call)
    assert _installed(model) == before


def test_open_off_slot_lookup_nothing_of_the_engine_is_wrapped_when_off(model: Any) -> None:
    """The model and the manager it makes have the methods of their classes, and only these."""
    before = _installed(model)
    with capture_routes(model, "ipc:///nowhere/at/all.sock", enabled=False):
        assert _installed(model) == before
        manager = model.init_continuous_batching(generation_config=generation(), continuous_batching_config=batching())
        assert not any(inspect.isroutine(value) for value in vars(manager).values())
    with capture_routes(model, "ipc:///nowhere/at/all.sock", drain_s=0.0):
        assert _installed(model) != before
    assert _installed(model) == before


def _run_with_offload(model: Any, call: str) -> None:
    settings = {"generation_config": generation(), "continuous_batching_config": batching(cpu_offload_space=1.0)}
    asks = (prompts(1, 0),) if call == "generate_batch" else ()
    with ExitStack() as opened:
        answer = getattr(model, call)(*asks, **settings)
        # The context manager makes its engine when it is entered.
        opened.enter_context(answer)


def _installed(model: torch.nn.Module) -> tuple[set[str], int]:
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    return {name for name, value in vars(model).items() if inspect.isroutine(value)}, hooks


# ------------------------------------------------------------------ what a module may not have

WEAK = ("WeakKeyDictionary", "WeakSet", "WeakValueDictionary")
CONTAINERS = frozenset(("Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set", *WEAK))


def _kept_by_module(source: Source) -> Iterator[str]:
    """Names that a module could keep something in: containers, and what a function assigns globally."""
    tree = ast.parse(source.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno} global {', '.join(node.names)}"
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
            continue
        value = each.value if isinstance(each, ast.Assign | ast.AnnAssign) else None
        called = value.func if isinstance(value, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp) or name in CONTAINERS:
            yield f"{source.path}:{each.lineno} a container"
        elif isinstance(value, ast.Constant) and value.value is None:
            yield f"{source.path}:{each.lineno} a place for an instance"


BY_NUMBER = "engine_side/capture/compiled.py"
"""Compiled code can only hold a number that stands for a recorder, so this module looks it up; it owns none."""


def test_question_11_no_module_keeps_state_of_its_own() -> None:
    found = [line for source in sources(*PACKAGES) for line in _kept_by_module(source)]
    assert [line.partition(":")[0] for line in found] == [BY_NUMBER]


def test_question_11_what_compiled_code_knows_by_number_goes_with_its_owner() -> None:
    class Sink:
        """Stands for a recorder."""

        def __init__(self) -> None:
            self.kept: list[int] = []

        def keep_compiled(self, moe_index: int, topk_ids: torch.Tensor) -> None:
            self.kept.append(moe_index)

        def commit_compiled(self, inputs: list[torch.Tensor], layout: int) -> None:
            self.kept.append(-1)

    one, other, ids, token = Sink(), Sink(), torch.zeros(1, 2), torch.zeros(1)
    numbers = [compiled.register(each) for each in (one, other)]
    for at, number in enumerate(numbers):
        compiled.keep(ids, token, number, at)
    assert (one.kept, other.kept) == ([0], [1]), "each is its own"
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    compiled.keep(ids, token, numbers[0], 0)  # a graph that outlives its capture reports to nobody
    compiled.commit([ids], token, numbers[0], 0)
    assert other.kept == [1]
    assert compiled.register(Sink()) not in numbers


@pytest.mark.parametrize(
    "planted",
    ["_INSTANCE = None\n", "_ALL: list[int] = []\n", "_X = weakref.WeakSet()\n", "def f():\n    global x\n"],
)
def test_a_place_for_state_is_found(planted: str) -> None:
    assert list(_kept_by_module(Source("engine_side/planted.py", planted)))


# ------------------------------------------------------------------ what the README must name


def test_question_15_the_readme_names_every_option_and_every_error() -> None:
    readme = (ROOT / "README.md").read_text()
    serve: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [parameter.opts[-1] for parameter in serve.params if not parameter.hidden]
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__]
    raised = [each.__name__ for each in classes if not each.__subclasses__()]
    parameters = inspect.signature(capture_routes).parameters.values()
    settings = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    assert len(options) >= 7
    assert len(raised) >= 12
    assert not [word for word in (*options, *raised, *settings) if word not in readme]
