"""Which tests of this run passed, and whether it was the whole of what `make test` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

ELSEWHERE = "engines"
"""Tests with this marker belong to a target of their own: leaving them out leaves the run whole."""


@dataclass(slots=True)
class Outcomes:
    """passed: node ids that ran and passed so far. partial: something that `make test` runs was left out."""

    partial: bool = False
    passed: set[str] = field(default_factory=set)


class OutcomesPlugin:
    """Watches a run. Tests marked `runs_last` see the outcomes of all others."""

    def __init__(self, config: pytest.Config) -> None:
        whole = (config.getini("testpaths"), [str(config.rootpath / path) for path in config.getini("testpaths")])
        chosen = config.args not in whole
        narrowed = any(config.getoption(name, None) for name in ("ignore", "ignore_glob"))
        self.seen = Outcomes(chosen or narrowed)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.seen.partial |= any(item.get_closest_marker(ELSEWHERE) is None for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.get_closest_marker("runs_last") is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seen.passed.add(report.nodeid)
        elif report.failed:
            self.seen.passed.discard(report.nodeid)
