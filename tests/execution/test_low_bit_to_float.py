"""Kernels of weights of few bits, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad_cli.execution.executor import Executor, to_double
from tests.passes.test_low_bit import FORMS, Net


@pytest.mark.parametrize("form", list(FORMS))
def test_kernels_of_few_bits_in_float64(form: str) -> None:
    net = Net(**FORMS[form])  # type: ignore[arg-type]
    (y,) = Executor(to_double(net.model), fallback=False)({"x": net.x.astype(np.float64)}).values()
    h = np.tanh(net.x @ net.matrices[0].T + net.biases[0]) @ net.matrices[1].T + net.biases[1]
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, h, rtol=1e-10, atol=1e-10)
