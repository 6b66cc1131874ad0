"""Every point of the pull request that the project answers is held by a test that exists, and that ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.outcomes import Outcomes
from tests.seed.points import FILE, Named, Point, is_written, left_out, load, malformed, unheld, unwritten

POINTS = load(FILE.read_text())


def test_every_point_says_what_a_point_must_say() -> None:
    assert not list(malformed(POINTS))


def test_no_number_is_left_out_and_each_question_has_a_test_of_its_name() -> None:
    assert not list(left_out(POINTS))


def test_every_named_test_exists() -> None:
    assert not list(unwritten(POINTS, is_written))


def test_no_point_waits_for_its_test() -> None:
    assert not [point.id for point in POINTS if point.pending]


@pytest.mark.runs_last
def test_every_named_test_ran_and_passed(outcomes: Outcomes) -> None:
    if outcomes.partial:
        pytest.skip("a part of the tests was chosen: only their existence is checked")
    assert not list(unheld(POINTS, outcomes.passed, is_written))


# ------------------------------------------------------------------ the checks can fail

_A = "tests/test_seed.py::test_every_named_test_exists"
_NONE = "tests/test_seed.py::test_nobody_wrote_this"


def _point(name: str = "x", *tests: str | Named, **more: object) -> Point:
    named = tuple(Named(each) if isinstance(each, str) else each for each in tests or (_A,))
    fields = {"id": name, "text": "t", "answer": "a", "cannot_occur": "", "tests": named, "pending": False}
    return Point(**(fields | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([_point(), _point()], "an id of its own"),
        ([_point(text="")], "no text"),
        ([_point(cannot_occur="why")], "and not both"),
        ([_point(tests=())], "either tests or"),
        ([_point(answer="")], "an answer"),
        ([_point("x", _A, _A)], "named twice"),
        ([_point("x", Named(_A, "make tea"))], "make tea"),
    ],
)
def test_a_malformed_point_is_found(points: list[Point], says: str) -> None:
    assert any(says in line for line in malformed(points))
    assert not list(malformed([_point()]))


def test_a_number_or_a_name_left_out_is_found() -> None:
    without = [point for point in POINTS if point.id not in ("question-7", "suppressed-2", "open-draft-model")]
    assert list(left_out(without)) == ["question-7 is missing", "suppressed-2 is missing", "16 of 17 open issues"]
    renamed = [_point("question-7") if point.id == "question-7" else point for point in POINTS]
    assert list(left_out(renamed)) == ["question-7: no test is named test_question_7_..."]


def test_a_test_that_nobody_wrote_is_found() -> None:
    assert is_written(_A)
    assert not is_written(_NONE)
    assert not is_written("tests/test_nothing.py::test_every_named_test_exists")
    assert not is_written("tests/test_seed.py::_point")
    assert list(unwritten([_point("x", _NONE)], is_written)) == [f"x: {_NONE} does not exist"]
    assert not list(unwritten([_point("x", _NONE, pending=True)], is_written))
    assert list(unwritten([_point(pending=True)], is_written)) == ["x: every test of it exists, so it is not pending"]


def test_a_test_that_did_not_pass_is_found() -> None:
    def found(point: Point, *passed: str, exists: Callable[[str], bool] = is_written) -> list[str]:
        return list(unheld([point], passed, exists))

    assert found(_point()) == [f"x: {_A} did not run and pass"]
    assert not found(_point(), f"{_A}[a-1]")
    assert found(_point(), f"{_A}_not") == [f"x: {_A} did not run and pass"]
    assert not found(_point("x", Named(_A, "make test-engines")))
    assert not found(_point("x", _NONE, pending=True))
    assert found(_point("x", _NONE, _A, pending=True)) == [f"x: {_A} did not run and pass"]


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(ValueError, match="answr"):
        load('[[point]]\nid = "x"\nanswr = "y"\n')
