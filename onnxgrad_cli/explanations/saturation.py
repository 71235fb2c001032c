"""Find operators that make gradients vanish because they saturate, such as a Softmax of scores that are far apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from onnxgrad_cli.execution.session import of_samples, open_session
from onnxgrad_cli.explanations.open_samples import Scored
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Arrays, is_float, shape_of
from onnxgrad_cli.ir.weightless_copy import copied

MIN_SLOPE = 1e-6
"""An element of an operator's result counts as saturated if its derivative is smaller than this."""

MAX_MARGIN, MAX_MARGIN_OF_DOUBLES = 80.0, 700.0
"""Differences of scores at which the gradient of cross-entropy vanishes, in float32 and in float64.

The smallest normal number is about exp(-87) in float32 and exp(-708) in float64.
"""

MOSTLY = 0.95
"""Smallest fraction of saturated elements at which an operator inside the network is reported.

It is used only if no operator is completely saturated.
"""

SLOPES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Atan": lambda x, y: 1 / (1 + x * x),
    "Clip": lambda x, y: np.equal(x, y),
    "Erf": lambda x, y: np.exp(-x * x),
    "HardSigmoid": lambda x, y: y * (1 - y),
    "Relu": lambda x, y: y > 0,
    "Sigmoid": lambda x, y: y * (1 - y),
    "Softmax": lambda x, y: y * (1 - y),
    "Softsign": lambda x, y: 1 / (1 + np.abs(x)) ** 2,
    "Tanh": lambda x, y: 1 - y * y,
}
"""Operator -> a function of its input and output: its derivative, or a value that is small if the derivative is."""

KEEPS_ORDER = frozenset(SLOPES) - {"Relu"} | {"Cast", "Identity", "Log", "LogSoftmax"}
"""Operators that don't change the order of the scores of the classes, unless they saturate."""


@dataclass(frozen=True)
class Saturation:
    """The reason why gradients vanish, and values that an attack can use instead.

    Attributes:
        nodes: the saturated operators, each as "Softmax 'name'", the last one in the model first.
        logits: the name of scores that are computed before all saturated operators, so that their gradient doesn't
            vanish. "" if the model has no such scores.
        far: the name of the scores (`logits`, or those that were attacked) if they are too far apart for cross-entropy,
            otherwise "".
    """

    nodes: list[str]
    logits: str = ""
    far: str = ""

    def __str__(self) -> str:
        parts, options = [], []
        if self.nodes:
            *before, last = self.nodes
            parts.append(f"{', '.join(before)} and {last} saturate" if before else f"{last} saturates")
        if self.logits:
            options.append(f"`output={self.logits!r}`")
        if self.far:
            parts.append(f"scores in '{self.far}' differ so much that the gradient of cross-entropy underflows")
            options.append("`loss='margin'`")
        fix = f"; attack with {' and '.join(options)}" if options else ""
        return f": {'; '.join(parts)}{fix}" if parts else ""


def with_outputs(model: ModelProto, graph: Graph, names: Iterable[str]) -> ModelProto:
    """Return a copy of a model with inner values as outputs, or the model itself if no name is an inner value.

    Args:
        model: the model, which is not changed.
        graph: the model with types.
        names: the names of inner values. Names of outputs, inputs and values that are not float are ignored.
    """
    made = {output for node in model.graph.node for output in node.output}.difference(graph.output_names)
    inner = [name for name in dict.fromkeys(names) if name in made and is_float(graph.types.get(name))]
    if not inner:
        return model
    copy = copied(model)
    copy.graph.output.extend(onnx.helper.make_value_info(name, graph.types[name]) for name in inner)
    return copy


def find_saturation(
    model: ModelProto,
    path: Path | None,
    graph: Graph,
    what: Scored,
    scores: str,
    exponential: bool,
    feeds: Arrays,
    flat: np.ndarray,
) -> Saturation:
    """Return the reason why the gradients of some samples vanish.

    Args:
        model: the model.
        path: the file that the model was read from.
        graph: the model with types.
        what: the output with the scores.
        scores: the value that the loss is computed from; see `logits_of`.
        exponential: True if the gradient of the loss decreases exponentially with the difference of the scores, as for
            cross-entropy.
        feeds: a batch of samples.
        flat: bool (n,), True for the samples of the batch whose gradient vanishes.
    """
    makers = {output: node for node in model.graph.node for output in node.output}
    tail = _tail(makers, scores)
    needed = graph.ancestors([scores])
    inside = [node for node in reversed(model.graph.node) if node.op_type in SLOPES and node.output[0] in needed]
    nodes = [node for node in [*tail, *(each for each in inside if each not in tail)] if is_standard(node.domain)]
    read = [scores, *(name for node in nodes for name in (node.input[0], node.output[0]))]
    values = run_values(model, path, graph, feeds, read)
    shares = [(node, _share(node, values, flat)) for node in nodes if node.op_type in SLOPES]
    whole = [node for node, share in shares if share == 1]
    ends = [node for node in whole if node in tail]
    first = tail[-1].input[0] if ends else ""
    logits = first if shape_of(graph.types.get(first)) == shape_of(graph.types[what.output]) else ""
    base = logits or scores
    far = base if exponential and base in values and _are_far(values[base][flat]) else ""
    if ends or far:
        return Saturation(list(map(_label, ends)), logits, far)
    return Saturation(list(map(_label, whole or [node for node, share in shares if share >= MOSTLY])))


def _tail(makers: Mapping[str, NodeProto], name: str) -> list[NodeProto]:
    """Return the chain of operators in `KEEPS_ORDER` that ends in the value `name`, the last operator first."""
    found: list[NodeProto] = []
    while (node := makers.get(name)) is not None and node.op_type in KEEPS_ORDER:
        found.append(node)
        name = node.input[0]
    return found


def run_values(model: ModelProto, path: Path | None, graph: Graph, feeds: Arrays, names: Collection[str]) -> Arrays:
    """Run a model on a batch. Return name -> array, for its feeds and the values `names`, including inner values."""
    session = open_session(with_outputs(model, graph, names), path)
    wanted = [value.name for value in session.get_outputs() if value.name in names]
    taken = {value.name for value in session.get_inputs()}
    with of_samples():
        arrays = session.run(wanted, {name: array for name, array in feeds.items() if name in taken})
    return {**feeds, **dict(zip(wanted, arrays, strict=True))}


def _share(node: NodeProto, values: Arrays, flat: np.ndarray) -> float:
    """Return the fraction of saturated elements in an operator's result, over the samples whose gradient vanishes."""
    x, y = values.get(node.input[0]), values.get(node.output[0])
    if x is None or y is None or x.shape != y.shape or len(y) != len(flat):
        return 0.0
    with np.errstate(over="ignore"):
        slopes = SLOPES[node.op_type](x[flat].astype(np.float64), y[flat].astype(np.float64))
    return float(np.mean(slopes < MIN_SLOPE))


def _are_far(scores: np.ndarray) -> bool:
    """Return True if in any sample the two largest scores [n, classes] are too far apart for cross-entropy."""
    ordered = np.sort(scores.astype(np.float64), axis=-1)
    most = MAX_MARGIN_OF_DOUBLES if scores.dtype == np.float64 else MAX_MARGIN
    return bool((ordered[:, -1] - ordered[:, -2] >= most).any())


def _label(node: NodeProto) -> str:
    return f"{node.op_type} '{node.name or node.output[0]}'"
