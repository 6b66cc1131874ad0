"""How far a trainer's log-probabilities are from the rollout's: Lumen-RL's `r3_verify` figures, and k3."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.errors import R3Error


class VerifyError(R3Error):
    """The two streams cannot be compared: shapes, mask or values that are not numbers."""


class BypassedLogprobs(VerifyError):
    """Both streams are one and the same: the trainer's log-probabilities were copied, and every figure would be 0."""


@dataclass(frozen=True, slots=True)
class R3Metrics:
    """d = rollout - trainer log-probability (nats) over the masked tokens.

    tokens: how many. kl: mean(d), signed. abs_diff: mean(|d|). frac_abs_gt_0_1: share of |d| > 0.1.
    k3: mean(exp(-d) - 1 + d), never negative. max_abs_diff, worst_token: the largest |d| and its index in the arrays.
    """

    tokens: int
    kl: float
    abs_diff: float
    frac_abs_gt_0_1: float
    k3: float
    max_abs_diff: float
    worst_token: tuple[int, ...]


def r3_verify(rollout_logprobs: ArrayLike, trainer_logprobs: ArrayLike, mask: ArrayLike) -> R3Metrics:
    """Compare log-probabilities of the same tokens under two models.

    rollout_logprobs, trainer_logprobs: float arrays of one shape, natural logarithms. mask: the same shape, bool or 0
    and 1; only what it marks is read, so padding may hold anything. Computed in float64.

    Raises VerifyError for shapes that differ, a mask that marks nothing, or a marked value that is not finite;
    BypassedLogprobs when the streams are equal to the last bit of the narrower dtype at every marked token.
    """
    rollout, trainer, marked = np.asarray(rollout_logprobs), np.asarray(trainer_logprobs), np.asarray(mask)
    if not rollout.shape == trainer.shape == marked.shape:
        raise VerifyError(
            f"rollout, trainer and mask must have one shape, found {rollout.shape}, {trainer.shape} and {marked.shape}"
        )
    chosen = _as_bool(marked)
    if not chosen.any():
        raise VerifyError(f"the mask of shape {marked.shape} marks no token: there is nothing to compare")
    where = np.argwhere(chosen)
    ours = _finite(trainer[chosen], where, "trainer")
    theirs = _finite(rollout[chosen], where, "rollout")
    narrow = min(rollout.dtype, trainer.dtype, key=lambda dtype: dtype.itemsize)
    if np.array_equal(ours.astype(narrow), theirs.astype(narrow)):
        raise BypassedLogprobs(
            f"rollout and trainer log-probabilities are the same at all {len(where)} marked tokens: they were copied, "
            "not computed twice; pass the ones of the trainer's own forward"
        )
    d = theirs - ours
    worst = int(np.abs(d).argmax())
    return R3Metrics(
        tokens=len(where),
        kl=float(d.mean()),
        abs_diff=float(np.abs(d).mean()),
        frac_abs_gt_0_1=float((np.abs(d) > 0.1).mean()),
        k3=float((np.expm1(-d) + d).mean()),
        max_abs_diff=float(np.abs(d[worst])),
        worst_token=tuple(int(index) for index in where[worst]),
    )


def _as_bool(mask: NDArray[np.generic]) -> NDArray[np.bool_]:
    """A mask of weights or positions is a mistake, not a mask."""
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        raise VerifyError(f"a mask holds booleans or 0 and 1, found other values of {mask.dtype}")
    return mask.astype(np.bool_)


def _finite(values: NDArray[np.generic], where: NDArray[np.intp], stream: str) -> NDArray[np.float64]:
    numbers = values.astype(np.float64)
    bad = ~np.isfinite(numbers)
    if bad.any():
        first = int(bad.argmax())
        token = tuple(int(index) for index in where[first])
        raise VerifyError(f"{stream} log-probability of token {token} is {numbers[first]}, expected a finite number")
    return numbers
