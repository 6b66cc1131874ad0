"""For every test: one seed for the run, printed where a failure is read, and nothing left behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from tests.leaks import Before, leaks
from tests.outcomes import Outcomes, OutcomesPlugin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test asks a model hub

SEED = int(os.environ.get("R3_SEED") or secrets.randbelow(2**31))

# Other processes share the machine's cores, so how long one example takes says nothing here.
hypothesis.settings.register_profile("r3", deadline=None, print_blob=True)
hypothesis.settings.load_profile("r3")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw Hypothesis's examples from the same seed, unless the command line names another; watch what passes."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    config.pluginmanager.register(OutcomesPlugin(config), OutcomesPlugin.__name__)


def pytest_report_header() -> str:
    return _how_to_repeat()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", _how_to_repeat()))
    return report


@pytest.fixture
def seed() -> int:
    """The run's seed: give it to every generator that a test makes."""
    return SEED


@pytest.fixture
def outcomes(pytestconfig: pytest.Config) -> Outcomes:
    """What is known of this run so far."""
    plugin = pytestconfig.pluginmanager.get_plugin(OutcomesPlugin.__name__)
    assert isinstance(plugin, OutcomesPlugin)
    return plugin.seen


@pytest.fixture(autouse=True)
def _nothing_outlives_the_test() -> Iterator[None]:
    before = Before()
    yield
    found = leaks(before)
    assert not found, "outlived the test: " + "; ".join(found)


def _how_to_repeat() -> str:
    return f"R3_SEED={SEED}"
