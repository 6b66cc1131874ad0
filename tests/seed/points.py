"""`tests/seed.toml` as data, and everything that can be wrong with it. Pure but for reading files."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.source_tree import ROOT

FILE = ROOT / "tests" / "seed.toml"
ELSEWHERE = ("make test-engines", "tests/gpu")
"""Targets other than `make test` that may run a named test."""

SERIES = (
    *(f"question-{number}" for number in range(1, 16)),
    *(f"suppressed-{number}" for number in range(1, 5)),
    *(f"smaller-{number}" for number in range(1, 7)),
    *(f"still-open-{name}" for name in ("a2", "a3", "server-flag", "test-teardown")),
)
"""Points that the pull request numbers or lists itself: none may be left out."""

NUM_OPEN = 17
"""Issues that the last review counted as open."""

FIELDS = frozenset(("id", "text", "answer", "cannot_occur", "tests", "pending"))


@dataclass(frozen=True, slots=True)
class Named:
    """A test by node id, without parameters. where: the target that runs it, "" for `make test`."""

    test: str
    where: str = ""

    @property
    def function(self) -> str:
        return self.test.rpartition("::")[2]


@dataclass(frozen=True, slots=True)
class Point:
    """One point. pending: at least one of its tests is not written yet."""

    id: str
    text: str
    answer: str
    cannot_occur: str
    tests: tuple[Named, ...]
    pending: bool


def load(text: str) -> list[Point]:
    """The points of a file. Raises ValueError for a field that means nothing."""
    return [_point(entry) for entry in tomllib.loads(text)["point"]]


def _point(entry: dict[str, Any]) -> Point:
    if unknown := set(entry) - FIELDS:
        raise ValueError(f"{entry.get('id')}: unknown fields {sorted(unknown)}")
    tests = tuple(Named(x) if isinstance(x, str) else Named(**x) for x in entry.get("tests", ()))
    texts = (entry.get(name, "") for name in ("id", "text", "answer", "cannot_occur"))
    return Point(*texts, tests, entry.get("pending", False))


# ------------------------------------------------------------------ what can be wrong


def malformed(points: Sequence[Point]) -> Iterator[str]:
    """Points that do not say what a point must say."""
    seen: set[str] = set()
    for point in points:
        if not point.id or point.id in seen:
            yield f"{point.id or 'a point'}: every point has an id of its own"
        seen.add(point.id)
        if not point.text:
            yield f"{point.id}: no text"
        if bool(point.tests) == bool(point.cannot_occur):
            yield f"{point.id}: either tests or cannot_occur, and not both"
        if bool(point.tests) != bool(point.answer):
            yield f"{point.id}: an answer with its tests, and none without"
        if len({named.test for named in point.tests}) < len(point.tests):
            yield f"{point.id}: a test is named twice"
        for named in point.tests:
            if named.where not in ("", *ELSEWHERE):
                yield f"{point.id}: {named.where} is no target that runs tests"


def left_out(points: Sequence[Point]) -> Iterator[str]:
    """Numbers that are missing, and questions without a test that carries their name."""
    known = {point.id: point for point in points}
    yield from (f"{name} is missing" for name in SERIES if name not in known)
    still_open = [name for name in known if name.startswith("open-")]
    if len(still_open) != NUM_OPEN:
        yield f"{len(still_open)} of {NUM_OPEN} open issues"
    for name in (*(name for name in SERIES if name.startswith("question-")), *still_open):
        prefix = f"test_{name.replace('-', '_')}_"
        if name in known and not any(named.function.startswith(prefix) for named in known[name].tests):
            yield f"{name}: no test is named {prefix}..."


def unwritten(points: Sequence[Point], exists: Callable[[str], bool]) -> Iterator[str]:
    """Tests that do not exist, but for pending points; and pending points whose tests all exist."""
    for point in points:
        missing = [named.test for named in point.tests if not exists(named.test)]
        if point.pending and not missing:
            yield f"{point.id}: every test of it exists, so it is not pending"
        elif not point.pending:
            yield from (f"{point.id}: {test} does not exist" for test in missing)


def unheld(points: Sequence[Point], passed: Iterable[str], exists: Callable[[str], bool]) -> Iterator[str]:
    """Tests of `make test` that did not pass in a whole run; those of a pending point only if they exist."""
    ran = {node.partition("[")[0] for node in passed}
    for point in points:
        for named in point.tests:
            if not named.where and named.test not in ran and not (point.pending and not exists(named.test)):
                yield f"{point.id}: {named.test} did not run and pass"


def is_written(test: str) -> bool:
    """Whether a node id names a test function of a file, parameters left out."""
    path, _, name = test.partition("::")
    return path.startswith("tests/") and name in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    """Test functions of a file; read and not collected, so that a run of one file can check them all."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text()).body
    return frozenset(each.name for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"))
