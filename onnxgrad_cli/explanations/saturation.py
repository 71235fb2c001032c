"""Operators that leave no gradient because they saturate, such as a Softmax of scores that are far apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from onnxgrad_cli.execution.session import of_samples, start_session
from onnxgrad_cli.explanations.samples import Scored
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Arrays, is_float, shape_of

MIN_SLOPE = 1e-6
"""An operator saturates where its derivative is less than this."""

MAX_MARGIN = 80.0
"""Scores further apart than this leave cross-entropy no gradient in float32: exp(-87) is its least normal number."""

MOSTLY = 0.95
"""Share of its values that an operator inside the network saturates in, to be named if none saturates in all."""

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
"""Operator -> its derivative, or a value that is zero where that is, by what it takes and gives."""

KEEPS_ORDER = frozenset(SLOPES) - {"Relu"} | {"Cast", "Identity", "Log", "LogSoftmax"}
"""Operators that leave the order of scores as it is, except where they saturate."""


@dataclass(frozen=True)
class Saturation:
    """Saturated operators.

    Attributes:
        nodes: each as "Softmax 'name'", the last of the model first.
        logits: the scores before all of them, of which a gradient is left; "" if there are none.
        far: the scores that are attacked, if they are too far apart for a gradient; else "".
    """

    nodes: list[str]
    logits: str = ""
    far: str = ""

    def __str__(self) -> str:
        parts = []
        if self.nodes:
            *before, last = self.nodes
            nodes = f"{', '.join(before)} and {last} saturate" if before else f"{last} saturates"
            hint = f": attack the scores before with `output={self.logits!r}`" if self.logits else ""
            parts.append(f"{nodes} there{hint}")
        if self.far:
            parts.append(
                f"the scores '{self.far}' of a sample are further apart than {MAX_MARGIN:g} there, which leaves "
                "cross-entropy no gradient in float32"
            )
        return "".join(f"; {part}" for part in parts)


def with_outputs(model: ModelProto, graph: Graph, names: Iterable[str]) -> ModelProto:
    """Return a model in which values in between are outputs too; the model itself if none of `names` is such a value.

    Args:
        model: the model, which is not changed.
        graph: it, typed.
        names: values of floats; others are ignored.
    """
    made = {output for node in model.graph.node for output in node.output}.difference(graph.output_names)
    inner = [name for name in dict.fromkeys(names) if name in made and is_float(graph.types.get(name))]
    if not inner:
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(onnx.helper.make_value_info(name, graph.types[name]) for name in inner)
    return copy


def find_saturation(
    model: ModelProto, path: Path | None, graph: Graph, what: Scored, feeds: Arrays, flat: np.ndarray
) -> Saturation:
    """Find the operators that saturate in samples without a gradient.

    Args:
        model, path: the model, and where it was read from.
        graph: it, typed.
        what: the output of scores.
        feeds: a batch.
        flat: bool (n,), the samples of it that have no gradient.
    """
    makers = {output: node for node in model.graph.node for output in node.output}
    needed = graph.ancestors([what.output])
    tail = _tail(makers, what.output)
    inner = [n for n in reversed(model.graph.node) if n.op_type in SLOPES and n.output[0] in needed and n not in tail]
    nodes = [node for node in [*tail, *inner] if is_standard(node.domain)]
    scores = tail[0].input[0] if tail and tail[0].op_type == "Softmax" else what.output  # as they are attacked
    read = [scores, *(name for node in nodes for name in (node.input[0], node.output[0]))]
    values = _values(model, path, graph, feeds, read)
    shares = [(node, _share(node, values, flat)) for node in nodes if node.op_type in SLOPES]
    ends = [node for node, share in shares if share == 1 and node in tail]
    far = scores if scores in values and not _has_gradient(values[scores], flat) else ""
    if ends:
        logits = tail[-1].input[0]
        usable = logits != scores and _are_scores(graph, what, logits) and _has_gradient(values.get(logits), flat)
        return Saturation(list(map(_label, ends)), logits if usable else "", far)
    if far:
        return Saturation([], far=far)
    whole = [node for node, share in shares if share == 1] or [node for node, share in shares if share >= MOSTLY]
    return Saturation(list(map(_label, whole)))


def _tail(makers: Mapping[str, NodeProto], name: str) -> list[NodeProto]:
    """The operators between scores and an output that only change their scale, the last one first."""
    found: list[NodeProto] = []
    while (node := makers.get(name)) is not None and node.op_type in KEEPS_ORDER:
        found.append(node)
        name = node.input[0]
    return found


def _values(model: ModelProto, path: Path | None, graph: Graph, feeds: Arrays, names: Collection[str]) -> Arrays:
    """Run a model on a batch, and return values in between."""
    session = start_session(with_outputs(model, graph, names), path)
    wanted = [value.name for value in session.get_outputs() if value.name in names]
    taken = {value.name for value in session.get_inputs()}
    with of_samples():
        arrays = session.run(wanted, {name: array for name, array in feeds.items() if name in taken})
    return {**feeds, **dict(zip(wanted, arrays, strict=True))}


def _share(node: NodeProto, values: Arrays, flat: np.ndarray) -> float:
    """The share of its values, in samples without a gradient, in which an operator saturates."""
    x, y = values.get(node.input[0]), values.get(node.output[0])
    if x is None or y is None or x.shape != y.shape or len(y) != len(flat):
        return 0.0
    with np.errstate(over="ignore"):
        slopes = SLOPES[node.op_type](x[flat].astype(np.float64), y[flat].astype(np.float64))
    return float(np.mean(slopes < MIN_SLOPE))


def _are_scores(graph: Graph, what: Scored, name: str) -> bool:
    """Return True if a value has one number for each class, as an attack takes them."""
    return name in graph.types and shape_of(graph.types[name]) == shape_of(graph.types[what.output])


def _has_gradient(scores: np.ndarray | None, flat: np.ndarray) -> bool:
    """Return True if cross-entropy of scores has a gradient in a sample that had none."""
    if scores is None:
        return False
    ordered = np.sort(scores[flat], axis=-1)
    return bool((ordered[:, -1] - ordered[:, -2] < MAX_MARGIN).any())


def _label(node: NodeProto) -> str:
    return f"{node.op_type} '{node.name or node.output[0]}'"
