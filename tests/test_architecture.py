"""The folder listing is the architecture: who may import whom, what stays pure, how long a file may be.

Each rule reads sources as syntax trees, so it also sees an import that no test executes. A rule that no file
falls under is an error, and each rule is shown a violation that it must catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from tests.source_checks import (
    MAX_LINES,
    OUTSIDE,
    UNSAFE_MODULES,
    Check,
    eager,
    has_docstrings,
    is_short,
    no_unsafe_decoding,
    only,
    reaches_nothing_impure,
    within_layer,
    without,
)
from tests.source_tree import PACKAGES, ROOT, Source, sources

PURE_FOLDERS = ("protocol", "collector/core")
PURE_FILES = (
    "engine_side/export/plan.py",
    "engine_side/export/planner.py",
    "engine_side/shipping/stream.py",
    "engine_side/shipping/window.py",
    "engine_side/facts.py",
    "engine_side/support.py",
)


@dataclass(frozen=True)
class Rule:
    """`check` yields one line for each violation in a file that `covers` says the rule is about."""

    name: str
    covers: Callable[[str], bool]
    check: Check
    planted_path: str
    planted_text: str


def inside(*folders: str) -> Callable[[str], bool]:
    return lambda path: path.startswith(tuple(f"{folder}/" for folder in folders))


def outside(*folders: str) -> Callable[[str], bool]:
    """In one of the three packages, but in none of these folders."""
    return lambda path: inside(*PACKAGES)(path) and not inside(*folders)(path)


def is_pure(path: str) -> bool:
    return inside(*PURE_FOLDERS)(path) or path in PURE_FILES


RULES = (
    Rule(
        "pure modules reach nothing of the outside",
        is_pure,
        reaches_nothing_impure,
        "collector/core/planted.py",
        "def now():\n    from time import monotonic\n    return monotonic()\n",
    ),
    Rule(
        "protocol needs the standard library, numpy and msgspec",
        inside("protocol"),
        only("protocol", "numpy", "msgspec", stdlib=True),
        "protocol/planted.py",
        "import typer\n",
    ),
    Rule(
        "protocol imports neither side",
        inside("protocol"),
        within_layer("protocol"),
        "protocol/planted.py",
        "from collector import core\n",
    ),
    Rule(
        "engine_side never imports collector",
        inside("engine_side"),
        within_layer("protocol", "engine_side"),
        "engine_side/planted.py",
        "if True:\n    import collector.client\n",
    ),
    Rule(
        "collector never imports engine_side",
        inside("collector"),
        within_layer("protocol", "collector"),
        "collector/planted.py",
        'import importlib\nimportlib.import_module("engine_side.capture")\n',
    ),
    Rule(
        "core knows no shell",
        inside("collector/core"),
        within_layer("protocol", "collector.core"),
        "collector/core/planted.py",
        "from ..daemon import server\n",
    ),
    Rule(
        "the client needs no daemon",
        inside("collector/client"),
        without("collector.core", "collector.daemon", "collector.cli", "collector.ray", "collector.replay"),
        "collector/client/planted.py",
        "from collector.core.life import Life\n",
    ),
    Rule(
        "replay knows only what a pull returns",
        inside("collector/replay"),
        within_layer("protocol", "collector.replay", "collector.client.routes"),
        "collector/replay/planted.py",
        "from collector.client.client import RouteClient\n",
    ),
    Rule(
        "no decoder runs what it reads",
        inside(*PACKAGES),
        no_unsafe_decoding,
        "collector/planted.py",
        "def read(socket):\n    return socket.recv_pyobj()\n",
    ),
    Rule(
        "the terminal is the CLI's",
        outside("collector/cli"),
        without("typer", "rich", "click"),
        "collector/daemon/planted.py",
        "import rich.table\n",
    ),
    Rule(
        "metrics are the daemon's",
        outside("collector/daemon"),
        without("prometheus_client"),
        "collector/core/planted.py",
        "from prometheus_client import Counter\n",
    ),
    Rule(
        "collector loads torch only to replay",
        lambda path: inside("collector")(path) and not inside("collector/replay")(path),
        without("torch", "transformers", "safetensors", when=eager),
        "collector/client/planted.py",
        "try:\n    import torch.nn\nexcept ImportError:\n    pass\n",
    ),
    Rule(
        "Ray is the Ray actor's",
        outside("collector/ray"),
        without("ray"),
        "engine_side/planted.py",
        "import ray\n",
    ),
    Rule(
        f"no file is longer than {MAX_LINES} lines",
        lambda path: not inside("tests/data")(path),
        is_short,
        "deploy/planted.py",
        "pass\n" * (MAX_LINES + 1),
    ),
    Rule(
        "what protocol and core offer is documented",
        inside("protocol", "collector/core"),
        has_docstrings,
        "protocol/planted.py",
        '"""A module."""\n\n\ndef offered() -> None:\n    pass\n',
    ),
)

by_name = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "-"))


def violations(rule: Rule, files: Iterable[Source]) -> list[str]:
    return [f"{source.path}: {line}" for source in files if rule.covers(source.path) for line in rule.check(source)]


@by_name
def test_the_repository_keeps_the_rule(rule: Rule) -> None:
    files = [source for source in sources(*PACKAGES, "deploy", "tests") if rule.covers(source.path)]
    assert files, f"no file falls under the rule: {rule.name}"
    found = violations(rule, files)
    assert not found, f"{rule.name}:\n" + "\n".join(found)


@by_name
def test_the_rule_catches_a_planted_violation(rule: Rule) -> None:
    harmless = '"""A module that only adds."""\n\nfrom protocol import limits\n\n_BOUND = limits\n'
    assert violations(rule, [Source(rule.planted_path, rule.planted_text)])
    assert not violations(rule, [Source(rule.planted_path, harmless)])


@pytest.mark.parametrize("name", sorted(UNSAFE_MODULES | {"eval", "exec", "send_pyobj", "allow_pickle"}))
def test_each_unsafe_decoder_is_caught(name: str) -> None:
    text = {
        "eval": "eval(text)\n",
        "exec": "exec(text)\n",
        "send_pyobj": "socket.send_pyobj({})\n",
        "allow_pickle": "numpy.load(file, allow_pickle=True)\n",
    }.get(name, f"from {name} import loads\n")
    assert list(no_unsafe_decoding(Source("protocol/planted.py", text)))
    assert not list(no_unsafe_decoding(Source("protocol/planted.py", "model.eval()\n")))


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_each_outside_module_is_caught_in_pure_code(name: str) -> None:
    assert list(reaches_nothing_impure(Source("protocol/planted.py", f"import {name}\n")))


def test_purity_is_followed_through_other_modules() -> None:
    text = "from collector.client.client import RouteClient\n"
    found = list(reaches_nothing_impure(Source("collector/core/planted.py", text)))
    assert any("collector.client.client imports zmq" in line for line in found), found


def test_type_checking_imports_are_not_loaded_but_still_seen() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import zmq\n"
    found = {each.module: each.eager for each in Source("collector/planted.py", text).imports()}
    assert found["torch"] is False
    assert found["zmq"] is True


@pytest.mark.parametrize("path", [*PURE_FOLDERS, *PURE_FILES])
def test_what_is_promised_pure_exists(path: str) -> None:
    assert (ROOT / path).exists()
