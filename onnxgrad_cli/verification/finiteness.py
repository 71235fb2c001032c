"""Where a loss that is not finite begins: the first weight, input or node whose value is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import FLOATS, Arrays
from onnxgrad_cli.verification.feeds import DescribedModel, part


def first_bad(described: DescribedModel, feeds: Mapping[str, np.ndarray], loss: np.ndarray) -> str:
    """The first value that is as the loss is, NaN or at least not finite, in words; "" where none is found.

    Args:
        described: the training model.
        feeds: data for its inputs.
        loss: what came of them.
    """
    is_bad: Callable[[np.ndarray], np.ndarray] = np.isnan if np.isnan(loss).any() else _is_not_finite
    for what, x in _values(described, feeds):
        if x.dtype.kind == "f" and is_bad(x).any():
            return f", from {what} on"
    return ""


def _is_not_finite(x: np.ndarray) -> np.ndarray:
    return ~np.isfinite(x)


def _values(described: DescribedModel, feeds: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """What there is on the way to the loss, in order, and what it is."""
    forward = part(described.model, described.roles.loss)
    for tensor in forward.graph.initializer:
        if tensor.name not in feeds and tensor.data_type in FLOATS:
            yield f"the weight '{tensor.name}'", np.asarray(numpy_helper.to_array(tensor), np.float64)
    taken = {value.name for value in forward.graph.input}
    for name, x in feeds.items():
        if name in taken:
            yield f"the input '{name}'", x
    values = _made(forward, {name: x for name, x in feeds.items() if name in taken})
    for node in forward.graph.node:
        for name in node.output:
            if isinstance(values.get(name), np.ndarray):
                yield f"'{name}', an output of {node.op_type}", values[name]


def _made(forward: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """What every node makes."""
    del forward.graph.output[:]
    names = [name for node in forward.graph.node for name in node.output if name]
    forward.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return Executor(forward, fallback=False)(feeds)
