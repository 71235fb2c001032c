"""Parallel steps in small slices, so that small models are split."""

from __future__ import annotations

import pytest

from onnxgrad_cli.training.steps import sliced as sliced_steps
from onnxgrad_cli.training.steps.in_place_optimizer import InPlace


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, "SLICE", 7)
    monkeypatch.setattr(sliced_steps, "ALONE", 5)
    monkeypatch.setattr(sliced_steps, "MIN_SLICED_ELEMENTS", 12)  # b is not sliced
    monkeypatch.setattr(sliced_steps, "MIN_SLICED_TOTAL", 12)
    monkeypatch.setattr(sliced_steps, "update_of", InPlace)
