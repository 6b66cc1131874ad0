"""What a file can break: each check reads one source and yields a line per violation, naming the offender."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable

from tests.source_tree import PACKAGES, Import, Source, sources

CLOCKS_AND_CHANCE = ("random", "signal", "time")
WORKERS = ("asyncio", "concurrent", "multiprocessing", "subprocess", "threading")
INPUT_AND_OUTPUT = ("os", "select", "selectors", "socket", "tempfile", "zmq")
OUTSIDE = frozenset((*CLOCKS_AND_CHANCE, *WORKERS, *INPUT_AND_OUTPUT, "ray", "torch", "transformers"))
UNSAFE_MODULES = frozenset(("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"))
UNSAFE_CALLS = frozenset(("recv_pyobj", "send_pyobj"))
MAX_LINES = 400

Check = Callable[[Source], Iterable[str]]


def without(*modules: str, when: Callable[[Import], bool] = lambda _: True) -> Check:
    """A check that a file imports none of these modules, nor anything inside them."""

    def check(source: Source) -> Iterable[str]:
        for found in source.imports():
            if when(found) and any(found.module == name or found.module.startswith(f"{name}.") for name in modules):
                yield f"line {found.line} imports {found.module}"

    return check


def only(*roots: str, stdlib: bool = False) -> Check:
    """A check that whatever a file imports from outside its allowed roots does not exist."""

    def check(source: Source) -> Iterable[str]:
        for found in source.imports():
            if found.root not in roots and not (stdlib and found.root in sys.stdlib_module_names):
                yield f"line {found.line} imports {found.module}"

    return check


def within_layer(*allowed: str) -> Check:
    """A check that of this repository a file imports only these modules or what is inside them."""

    def check(source: Source) -> Iterable[str]:
        for found in source.imports():
            ours = found.root in PACKAGES
            # `from collector.core import life` is both `collector.core` and `collector.core.life`.
            if ours and not any(f"{found.module}.".startswith(f"{name}.") for name in allowed):
                yield f"line {found.line} imports {found.module}"

    return check


def reaches_nothing_impure(source: Source) -> Iterable[str]:
    """Follow this repository's own modules: purity borrowed from an impure neighbour is none."""
    known = {each.module: each for each in sources(*PACKAGES)}
    seen, queue = {source.module}, [(source, source.module)]
    while queue:
        current, chain = queue.pop()
        for found in current.imports():
            if found.root in OUTSIDE and not (found.typing_only and current is not source):
                yield f"{chain} imports {found.module} (line {found.line})"
            if found.module in known and found.module not in seen and not found.typing_only:
                seen.add(found.module)
                queue.append((known[found.module], f"{chain} -> {found.module}"))


def no_unsafe_decoding(source: Source) -> Iterable[str]:
    """No decoder that runs what it reads. `model.eval()` is a method and none of them."""
    for found in source.imports():
        if found.root in UNSAFE_MODULES:
            yield f"line {found.line} imports {found.module}"
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as called)):
                yield f"line {node.lineno} calls {called}()"
            case ast.Attribute(attr=called) if called in UNSAFE_CALLS:
                yield f"line {node.lineno} uses {called}"
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield f"line {node.value.lineno} allows pickle"


def is_short(source: Source) -> Iterable[str]:
    """A long file is a question; past this it is an answer."""
    lines = source.text.count("\n")
    if lines > MAX_LINES:
        yield f"{lines} lines, at most {MAX_LINES}"


def has_docstrings(source: Source) -> Iterable[str]:
    """Public functions and classes of a module, and the module itself."""
    if ast.get_docstring(source.tree) is None:
        yield "the module has no docstring"
    for node in source.tree.body:
        defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if defines and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield f"line {node.lineno}: {node.name} has no docstring"


def eager(found: Import) -> bool:
    """Whether importing the file also runs this import."""
    return found.eager
