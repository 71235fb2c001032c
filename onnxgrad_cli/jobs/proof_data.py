"""The arrays of a user that a proof is made on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.metadata import Roles


def read_data(path: Path) -> dict[str, np.ndarray]:
    """The arrays in an .npz file.

    Raises:
        OnnxgradError: it can't be read.
    """
    if not path.exists():
        raise OnnxgradError(f"no such file: '{path}'")
    from onnxgrad_cli.training.data import npz  # most builds have no data, and need not wait for this

    try:
        return npz.arrays_of(path)[0]
    except UsageError as error:
        raise OnnxgradError(error.message, error.hint, error.details) from None


def fit(
    data: Mapping[str, np.ndarray], model: ModelProto, roles: Roles, tell: Tell, source: Path | None = None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays that are inputs of a training model or a model of derivatives, in its types, and the sizes they give
    to its symbols.

    Raises:
        UsageError: none is an input, or one is of another shape or type, or holds a class or row that there is not.
    """
    if not data:
        return {}, {}
    from onnxgrad_cli.training.data import ranges_of
    from onnxgrad_cli.training.data.validate import check_whole

    types = {value.name: value.type for value in model.graph.input}
    ranges = ranges_of(model) if roles.losses else {}
    sizes: dict[str, int] = {}
    fitting = {name: _fitted(name, data[name], types[name], sizes) for name in data if name in types}
    for name in filter(ranges.__contains__, fitting):
        check_whole(source or Path("the data"), name, data[name], ranges[name])
    unknown = [name for name in data if name not in fitting]
    if not fitting:
        raise UsageError(
            f"no input of the model is called {' or '.join(repr(name) for name in unknown[:5])}",
            suggest(unknown[0], roles.inputs, "inputs"),
        )
    _tell_apart(unknown, [name for name in roles.fed if name not in fitting], tell)
    return fitting, sizes


def _tell_apart(unknown: Sequence[str], drawn: Sequence[str], tell: Tell) -> None:
    """Say which arrays are no inputs, and which inputs have none."""
    for names, what in ((unknown, "not an input, left out"), (drawn, "not in the data, drawn at random")):
        if names:
            tell(f"{what}: {', '.join(names)}", 0)


def _fitted(name: str, array: np.ndarray, value_type: TypeProto, sizes: dict[str, int]) -> np.ndarray:
    """An array in the type of the input it is for; the sizes that it gives to symbols are added to `sizes`.

    Raises:
        UsageError: its shape or type is another.
    """
    dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype_of(value_type))
    shape = shape_of(value_type) or array.shape
    dims = zip(shape, array.shape, strict=False)
    bound = [n if d == "?" else sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in dims]
    if len(shape) != array.ndim or tuple(bound) != array.shape:
        raise UsageError(f"'{name}' has shape {list(array.shape)} in the data, and {list(shape)} in the model")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(f"'{name}' is of type {array.dtype} in the data, and {dtype} in the model")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)
