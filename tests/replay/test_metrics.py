"""The comparison figures, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collector.replay import R3Metrics, r3_verify
from collector.replay.metrics import BypassedLogprobs, VerifyError
from protocol.errors import R3Error

ROLLOUT = np.array([[-1.0, -2.0, -0.5, -9.0], [-0.25, -3.0, -1.5, -7.0]])
TRAINER = np.array([[-1.25, -1.5, -0.5625, 1.0], [-0.25, -3.0, -1.0, np.nan]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_the_figures_are_those_on_paper() -> None:
    # d over the five marked tokens: 0.25, -0.5, 0.0625, 0, 0
    found = r3_verify(ROLLOUT, TRAINER, MASK)
    assert found.tokens == 5
    assert found.kl == pytest.approx((0.25 - 0.5 + 0.0625) / 5)
    assert found.abs_diff == pytest.approx((0.25 + 0.5 + 0.0625) / 5)
    assert found.frac_abs_gt_0_1 == pytest.approx(2 / 5)
    k3 = [math.exp(-0.25) - 1 + 0.25, math.exp(0.5) - 1 - 0.5, math.exp(-0.0625) - 1 + 0.0625, 0, 0]
    assert found.k3 == pytest.approx(sum(k3) / 5)
    assert found.max_abs_diff == pytest.approx(0.5)
    assert found.worst_token == (0, 1)


def test_the_sign_is_rollout_minus_trainer() -> None:
    found = r3_verify(np.array([-1.0]), np.array([-2.0]), np.array([True]))
    assert found.kl == pytest.approx(1.0)
    assert found.k3 == pytest.approx(math.exp(-1.0))
    assert isinstance(found, R3Metrics)


def test_a_difference_of_exactly_a_tenth_does_not_count() -> None:
    found = r3_verify(np.array([0.1, 0.125]), np.zeros(2), np.ones(2, bool))
    assert found.frac_abs_gt_0_1 == 0.5


def test_small_differences_keep_their_k3() -> None:
    found = r3_verify(np.full(3, 1e-9), np.zeros(3), np.ones(3, bool))
    assert found.k3 == pytest.approx(5e-19, rel=1e-3, abs=0)


def test_single_precision_is_computed_in_double() -> None:
    rollout = np.full(10_000, -1.0, np.float32)
    trainer = np.full(10_000, -1.0 - 2**-20, np.float32)
    assert r3_verify(rollout, trainer, np.ones(10_000, bool)).kl == pytest.approx(2**-20, rel=1e-6, abs=0)


@pytest.mark.parametrize("copied", ["same array", "copy", "narrowed copy", "equal where marked"])
def test_a_bypass_is_refused(copied: str) -> None:
    trainer = {
        "same array": ROLLOUT,
        "copy": ROLLOUT.copy(),
        "narrowed copy": (ROLLOUT + 1e-12).astype(np.float32),
        "equal where marked": np.where(MASK == 1, ROLLOUT, 0.0),
    }[copied]
    with pytest.raises(BypassedLogprobs) as caught:
        r3_verify(ROLLOUT, trainer, MASK)
    assert isinstance(caught.value, R3Error)


def test_one_bit_of_difference_is_no_bypass() -> None:
    trainer = ROLLOUT.copy()
    trainer[0, 0] = np.nextafter(trainer[0, 0], 0)
    assert r3_verify(ROLLOUT, trainer, MASK).max_abs_diff > 0


@pytest.mark.parametrize(
    ("rollout", "trainer", "mask"),
    [
        (ROLLOUT, TRAINER[:, :3], MASK),
        (ROLLOUT, TRAINER, MASK[0]),
        (ROLLOUT, TRAINER, np.zeros_like(MASK)),
        (ROLLOUT, TRAINER, np.ones_like(MASK)),  # marks the NaN
        (np.where(MASK == 1, -np.inf, ROLLOUT), TRAINER, MASK),
        (ROLLOUT, TRAINER, MASK * 0.5),
        (ROLLOUT, TRAINER, MASK * 2),
    ],
    ids=["shapes", "mask shape", "empty mask", "nan", "inf", "weights", "counts"],
)
def test_streams_that_cannot_be_compared_are_refused(
    rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray
) -> None:
    with pytest.raises(VerifyError) as caught:
        r3_verify(rollout, trainer, mask)
    assert not isinstance(caught.value, BypassedLogprobs)
