"""SmoothGrad: the mean gradient around a sample, in which what flickers from one number to the next cancels.

Source: D. Smilkov et al., SmoothGrad: removing noise by adding noise, 2017, arXiv:1706.03825.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad_cli.explanations.scorer import Case


def smoothgrad(case: Case, rows: Sequence[int], repeats: int = 50, noise: float = 0.15, seed: int = 0) -> np.ndarray:
    """1/n Σ ∂S/∂x (x + ε), ε from N(0, σ²) with σ = `noise` (max x - min x) of each sample; float64 like x.

    Args:
        case: the samples.
        rows: their numbers, which each has its own noise of: it does not depend on what else is explained.
        repeats: n.
        noise: σ as a share of the range of the sample.
        seed: of the noise.
    """
    sources = [np.random.default_rng([seed, row]) for row in rows]
    axes = tuple(range(1, case.x.ndim))
    sigma = noise * (case.x.max(axes, keepdims=True) - case.x.min(axes, keepdims=True)).astype(np.float64)
    total = np.zeros(case.x.shape)
    for _ in range(repeats):
        drawn = np.stack([source.standard_normal(case.x.shape[1:]) for source in sources])
        total += case.gradients((case.x + sigma * drawn).astype(case.x.dtype))[1]
    return total / repeats
