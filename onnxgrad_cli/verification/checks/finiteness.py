"""Find the origin of a loss that is not finite: the first weight, input or node output that is not finite."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.types import FLOATS, Arrays
from onnxgrad_cli.verification.feeds import DescribedModel, finite, loss_part

INPUT, WEIGHT = "input", "weight"
"""Returned by `origin_of` in place of an operator, for a value that no operator computes."""

OF_THE_LOSS = "loss/"
"""Prefix of the names of the nodes that compute a loss. Constants of these nodes don't belong to the user's model."""


def first_bad(described: DescribedModel, feeds: Mapping[str, np.ndarray], loss: np.ndarray) -> str:
    """Return a text that names the origin of a loss that is not finite, or "" if every value is finite.

    See `origin_of` for the arguments and for how the origin is found.
    """
    name, maker = origin_of(described, feeds, loss)
    if maker in ("", INPUT, WEIGHT):
        return f", from the {maker} '{name}' on" if maker else ""
    return f", from '{name}', an output of {maker} on"


def origin_of(described: DescribedModel, feeds: Mapping[str, np.ndarray], loss: np.ndarray) -> tuple[str, str]:
    """Return the value in which a loss that is not finite originates, and the operator that computed the value.

    The search begins at the first node output that is NaN or, if the loss is infinite, at the first one that is not
    finite. From there it goes back through inputs that are not finite, because a NaN may come from an infinite weight.
    So a mask with infinite values is reported only if the search arrives at it.

    Args:
        described: the training model.
        feeds: data for its inputs.
        loss: the loss for these feeds.

    Returns:
        The name of the value, and its operator, or `INPUT` or `WEIGHT` if no operator computes it. Both are "" if every
        value is finite.
    """
    forward = loss_part(described.model, described.roles.loss)
    taken = {value.name for value in forward.graph.input}
    given = {name: x for name, x in feeds.items() if name in taken}
    made = _made(forward, given)
    makers = {name: node for node in forward.graph.node for name in node.output}
    values = {**_stored(forward.graph, feeds), **given, **made}
    only_nan = bool(np.isnan(loss).any())
    first = next((name for name in makers if name in made and _is_bad(made[name], only_nan)), "")
    if not first:
        return "", ""
    name = _origin(first, makers, values)
    if name in makers:
        return name, makers[name].op_type
    return name, INPUT if name in given and described.roles.inputs.get(name) != "weight" else WEIGHT


def _stored(graph: GraphProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """Return the float initializers that are not fed, without the constants of the loss."""
    ours = {name for node in graph.node if node.name.startswith(OF_THE_LOSS) for name in node.input}
    floats = (tensor for tensor in graph.initializer if tensor.data_type in FLOATS)
    return {t.name: numpy_helper.to_array(t) for t in floats if t.name not in feeds and t.name not in ours}


def _is_bad(x: np.ndarray, only_nan: bool) -> bool:
    return bool(np.isnan(np.asarray(x, np.float64)).any()) if only_nan else not finite(x)


def _origin(name: str, makers: Mapping[str, NodeProto], values: Arrays) -> str:
    """Trace a value that is not finite back to a value that no operator computes, or computes from finite inputs."""
    while name in makers:
        before = next((each for each in makers[name].input if each in values and not finite(values[each])), None)
        if before is None:
            return name
        name = before
    return name


def _made(forward: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Run the forward part and return the float outputs of every node."""
    names = [name for node in forward.graph.node for name in node.output if name]
    refill(forward.graph.output, (onnx.ValueInfoProto(name=name) for name in names))
    outputs = Executor(forward, fallback=False)(feeds)
    return {name: x for name, x in outputs.items() if isinstance(x, np.ndarray) and x.dtype.kind in "fV"}
