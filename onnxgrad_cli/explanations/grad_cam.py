"""Grad-CAM: where in a layer the channels lie that speak for a class.

Source: R. Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks, 2016, arXiv:1610.02391.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.explanations.scorer import Case


def grad_cam(case: Case) -> np.ndarray:
    """max(0, Σ_k α_k A_k), where α_k is the mean of ∂S/∂A_k over the places; float64 (n, *places).

    Args:
        case: the samples, whose subject A is a layer, [n, channels, *places].
    """
    gradients = case.gradients(case.x)[1]
    weights = gradients.mean(tuple(range(2, gradients.ndim)), keepdims=True)
    return np.maximum((weights * case.x).sum(1), 0.0)
