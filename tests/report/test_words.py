"""Figures and times in words."""

from __future__ import annotations

import pytest

from onnxgrad_cli.report.words import figure
from tests.jobs.train.test_train import shell as shell


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-6, "3.000e-06"), (0.69314, "0.6931"), (1, "1.000"), (999.96, "1,000"), (12345.6, "12,346"), (0, "0.000"),
     (-2.5, "-2.500"), (float("nan"), "nan"), (3e12, "3.000e+12")],
)  # fmt: skip
def test_figures_are_significant(value: float, text: str) -> None:
    assert figure(value) == text
