"""Where a loss that is not finite begins: the first weight, input or node whose value is not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import FLOATS, Arrays
from onnxgrad_cli.verification.feeds import DescribedModel, finite, part

INPUT, WEIGHT = "input", "weight"
"""What a value may be that no operator has made."""

OF_THE_LOSS = "loss/"
"""What the names of the nodes begin with that a loss has written, of which the constants are no value of the user's."""


def first_bad(described: DescribedModel, feeds: Mapping[str, np.ndarray], loss: np.ndarray) -> str:
    """Where the first value comes from that is as the loss is, in words; "" for none. See `origin_of`."""
    name, maker = origin_of(described, feeds, loss)
    if maker in ("", INPUT, WEIGHT):
        return f", from the {maker} '{name}' on" if maker else ""
    return f", from '{name}', an output of {maker} on"


def origin_of(described: DescribedModel, feeds: Mapping[str, np.ndarray], loss: np.ndarray) -> tuple[str, str]:
    """Return the first value that is as the loss is, NaN or at least not finite, and the operator that made it.

    In place of the operator stands `INPUT` or `WEIGHT`; both are "" if there is no such value.

    That is followed back through what is not finite: a NaN may come of an infinite weight, and a mask may well be
    infinite where nothing comes of it.

    Args:
        described: the training model.
        feeds: data for its inputs.
        loss: what came of them.
    """
    forward = part(described.model, described.roles.loss)
    taken = {value.name for value in forward.graph.input}
    given = {name: x for name, x in feeds.items() if name in taken}
    stored = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in forward.graph.initializer if tensor.name not in feeds and tensor.data_type in FLOATS
    }  # fmt: skip
    made = {name: x for name, x in _made(forward, given).items() if isinstance(x, np.ndarray) and x.dtype.kind in "fV"}
    makers = {name: node for node in forward.graph.node for name in node.output}
    ours = {name for node in forward.graph.node if node.name.startswith(OF_THE_LOSS) for name in node.input}
    values = {**{name: x for name, x in stored.items() if name not in ours}, **given, **made}
    only_nan = bool(np.isnan(loss).any())
    first = next((name for name in makers if name in made and _is_bad(made[name], only_nan)), "")
    if not first:
        return "", ""
    name = _origin(first, makers, values)
    if name in makers:
        return name, makers[name].op_type
    return name, INPUT if name in given and described.roles.inputs.get(name) != "weight" else WEIGHT


def _is_bad(x: np.ndarray, only_nan: bool) -> bool:
    return not finite(x) and not (only_nan and not np.isnan(np.asarray(x, np.float64)).any())


def _origin(name: str, makers: Mapping[str, NodeProto], values: Arrays) -> str:
    """The value of which another comes that is not finite: one that is made of finite values, or of none."""
    while name in makers:
        before = next((each for each in makers[name].input if each in values and not finite(values[each])), None)
        if before is None:
            return name
        name = before
    return name


def _made(forward: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """What every node makes."""
    del forward.graph.output[:]
    names = [name for node in forward.graph.node for name in node.output if name]
    forward.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return Executor(forward, fallback=False)(feeds)
