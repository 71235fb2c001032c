"""Integrated gradients: what each number adds to the score on the straight way from a baseline.

Source: M. Sundararajan, A. Taly, Q. Yan, Axiomatic Attribution for Deep Networks, 2017, arXiv:1703.01365.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxgrad_cli.explanations.scorer import Case


class Integrated(NamedTuple):
    """Attributions, and for each sample what they should add up to.

    Attributes:
        values: float64, of the shape of x.
        difference: S(x) - S(baseline), float64 (n,).
    """

    values: np.ndarray
    difference: np.ndarray

    def gap(self) -> np.ndarray:
        """How far each sum is from the difference that it should be, as a share of this; float64 (n,).

        By the axiom of completeness it is 0 but for the steps of the sum.
        """
        sums = self.values.reshape(len(self.values), -1).sum(1)
        scale = np.maximum(np.abs(self.difference), np.finfo(np.float32).eps)
        return np.abs(sums - self.difference) / scale


def integrated_gradients(case: Case, baseline: np.ndarray, steps: int = 50) -> Integrated:
    """(x - b) ∫₀¹ ∂S/∂x (b + α (x - b)) dα, by the midpoints of `steps` equal parts.

    Args:
        case: the samples.
        baseline: b, which broadcasts to x.
        steps: of the sum.
    """
    x, start = case.x.astype(np.float64), np.broadcast_to(baseline, case.x.shape).astype(np.float64)
    total = np.zeros(x.shape)
    for step in range(steps):
        share = (step + 0.5) / steps
        total += case.gradients((start + share * (x - start)).astype(case.x.dtype))[1]
    difference = case.scores(case.x) - case.scores(start.astype(case.x.dtype))
    return Integrated((x - start) * total / steps, difference)
