"""Data that lie in memory, by the names of the inputs: what Python holds goes through the checks of what files hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import helper

from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.ir.types import dtype_of
from onnxgrad_cli.training.data.columns import single
from onnxgrad_cli.training.data.dataset import Data
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.reading import Found
from onnxgrad_cli.training.data.states import (
    NOT_RECURRENT,
    Recurrent,
    arrays_batch_first,
    batch_axes,
    with_batch_first,
    zero_states,
)
from onnxgrad_cli.training.data.validate import check

IN_MEMORY = Path("the arrays")
"""What arrays that are in no file are called in messages."""


def data_of(
    arrays: Mapping[str, np.ndarray],
    inputs: InputTypes,
    ranges: Mapping[str, Range] | None = None,
    finite: bool = True,
    recurrent: Recurrent = NOT_RECURRENT,
) -> Data:
    """Arrays as data, whose first axis is the sample.

    Args:
        arrays: by the names of inputs; others are left out.
        inputs, ranges, finite, recurrent: see `open_data`.

    Raises:
        UsageError: they don't fit.
    """
    axes = batch_axes(inputs, recurrent)
    inputs = with_batch_first(inputs, axes)
    held = {name: single(np.asarray(array), inputs, name) for name, array in arrays.items() if name in inputs}
    held |= arrays_batch_first(IN_MEMORY, held, inputs, axes)
    held |= zero_states(held, inputs, recurrent, silent)
    others = [name for name in arrays if name not in inputs]
    checked = check(IN_MEMORY, Found(held, others), inputs, ranges or {}, finite)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(dtype_of(value_type)) for name, value_type in inputs.items()}
    return Data(IN_MEMORY, held, dtypes, checked.size, checked.sizes, checked.batch_size, axes=axes)
