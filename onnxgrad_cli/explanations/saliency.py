"""Saliency: how strongly the score answers to each number.

Source: K. Simonyan, A. Vedaldi, A. Zisserman, Deep Inside Convolutional Networks, 2013, arXiv:1312.6034.
"""

from __future__ import annotations

import numpy as np

from onnxgrad_cli.explanations.scorer import Case


def saliency(case: Case) -> np.ndarray:
    """|∂S/∂x|, float64 of the shape of x."""
    return np.abs(case.gradients(case.x)[1])
