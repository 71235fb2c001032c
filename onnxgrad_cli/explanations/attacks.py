"""Inputs that differ by little from samples and are classified otherwise.

Sources: I. Goodfellow, J. Shlens, C. Szegedy, Explaining and Harnessing Adversarial Examples, 2014, arXiv:1412.6572
(FGSM); A. Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, 2017, arXiv:1706.06083 (PGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.common.choices import Norm
from onnxgrad_cli.explanations.scorer import Case


@dataclass(frozen=True)
class Ball:
    """Where an attack may go.

    Attributes:
        epsilon: the largest distance from a sample.
        norm: how it is measured: 'inf', the largest change of a number, or '2', the square root of their squares' sum.
        low, high: the least and the largest number of an input.
    """

    epsilon: float
    norm: Norm = "inf"
    low: float = -np.inf
    high: float = np.inf

    def project(self, moved: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The nearest inputs to `moved` within the distance of `x`, cut off at the range; float64 (n, ...)."""
        change = moved - x
        if self.norm == "inf":
            change = np.clip(change, -self.epsilon, self.epsilon)
        else:
            length = _length(change)
            change = change * np.minimum(1.0, self.epsilon / np.maximum(length, np.finfo(np.float64).tiny))
        return np.clip(x + change, self.low, self.high)

    def direction(self, gradient: np.ndarray) -> np.ndarray:
        """The way that raises the loss the most, of length 1: the sign of the gradient, or the gradient scaled."""
        if self.norm == "inf":
            return np.sign(gradient)
        length = _length(gradient)
        return np.divide(gradient, length, out=np.zeros_like(gradient), where=length > 0)

    def drawn(self, x: np.ndarray, sources: Sequence[np.random.Generator]) -> np.ndarray:
        """An input within the distance of each sample, at random."""
        if self.norm == "inf":
            change = np.stack([source.uniform(-self.epsilon, self.epsilon, x.shape[1:]) for source in sources])
        else:
            change = np.stack([source.standard_normal(x.shape[1:]) for source in sources])
            radius = np.array([source.uniform() for source in sources]) ** (1 / max(x[0].size, 1))
            change *= self.epsilon * radius.reshape(-1, *[1] * (x.ndim - 1)) / _length(change)
        return self.project(x + change, x)


def attack(
    case: Case, ball: Ball, steps: int, step_size: float, targeted: bool, sources: Sequence[np.random.Generator] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """x ← project(x + step ∂L/∂x's direction), `steps` times; FGSM is one step of epsilon.

    Args:
        case: the samples; their score is the logarithm of the probability of a class, the negative loss.
        ball: where they may go.
        steps: how often.
        step_size: how far each time.
        targeted: raise the probability of the class, in place of lowering it.
        sources: of the random numbers by which each sample begins elsewhere; none begins at the sample.

    Returns:
        The inputs, of the shape and type of x, and of each whether its first gradient was zero throughout.
    """
    x = case.x.astype(np.float64)
    moved = ball.drawn(x, sources) if sources else x
    flat = np.zeros(len(x), bool)
    for step in range(steps):
        gradient = case.gradients(moved.astype(case.x.dtype))[1]
        if step == 0:
            flat = np.all(gradient.reshape(len(x), -1) == 0, axis=1)
        way = ball.direction(gradient if targeted else -gradient)
        moved = ball.project(moved + step_size * way, x)
    return moved.astype(case.x.dtype), flat


def _length(x: np.ndarray) -> np.ndarray:
    axes = tuple(range(1, x.ndim))
    return np.sqrt((x**2).sum(axes, keepdims=True))
