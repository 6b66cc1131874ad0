"""The repository's Python files as syntax trees: what each imports, and what it defines for others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "engine_side", "collector")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. `eager` is False inside a function or under `if TYPE_CHECKING:`."""

    module: str
    line: int
    eager: bool
    typing_only: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its path below the repository's root with `/` between the parts, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path, self.text)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """What a leading dot in a relative import stands for."""
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]

    def imports(self) -> list[Import]:
        """Every import, wherever it stands; a `from a import b` counts as both `a` and `a.b`."""
        return list(_imports(self.tree, self.package, eager=True, typing_only=False))


@cache
def _parse(path: str, text: str) -> ast.Module:
    return ast.parse(text, filename=path)


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below these folders of the repository, in order of path."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return tuple(Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files)


def _imports(node: ast.AST, package: str, *, eager: bool, typing_only: bool) -> Iterator[Import]:
    for name in _imported_names(node, package):
        yield Import(name, getattr(node, "lineno", 0), eager, typing_only)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        eager = False
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, package, eager=False, typing_only=True)
        for child in node.orelse:
            yield from _imports(child, package, eager=eager, typing_only=typing_only)
        return
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, eager=eager, typing_only=typing_only)


def _imported_names(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*parts, *([module] if module else [])])
            return [base, *(f"{base}.{alias.name}" for alias in names if alias.name != "*")]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            # importlib.import_module("torch") and __import__("torch") hide an import from a plain reading.
            called = ast.unparse(func).rpartition(".")[2]
            return [name] if called in ("import_module", "__import__") else []
    return []
