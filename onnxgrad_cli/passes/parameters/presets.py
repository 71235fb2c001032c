"""Groups of weights that can be trained alone: biases, normalizations, the last layers.

A file does not list layers, so they are inferred from the graph. A layer begins with a node that reads a weight, and
includes the elementwise nodes after it that scale or shift its result by further weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnxgrad_cli.common.choices import Preset
from onnxgrad_cli.errors import no_data, wrong_value
from onnxgrad_cli.ir import modules
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import captured, source_of
from onnxgrad_cli.options import ParameterOptions

VIEWS = modules.VIEWS | {"Expand"}
ELEMENTWISE = frozenset("Add Sub Mul Div PRelu".split())
NORMALIZATIONS = frozenset(f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "RMS"))

BIASES = frozenset(
    {("Conv", 2), ("ConvTranspose", 2), ("Gemm", 2), ("LSTM", 3), ("GRU", 3), ("RNN", 3)}
    | {(op_type, 2) for op_type in NORMALIZATIONS}
)
"""Operands, as (operator, position), that are a bias. Vectors that are added are biases too."""

SPREADS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare"})
"""Reductions that compute the variance in a normalization that is written out as simple operators."""


@dataclass
class Layer:
    """A layer: a node that reads weights, and the elementwise nodes after it that read weights too.

    Attributes:
        first: the first node.
        uses: (weight, node that reads it, input position) in the order of the graph. Position -1: a body of the node
            reads it.
    """

    first: Node
    uses: list[tuple[str, Node, int]] = field(default_factory=list)

    @property
    def weights(self) -> set[str]:
        """The weights that the layer reads."""
        return {name for name, _, _ in self.uses}


def chosen(graph: Graph, options: ParameterOptions, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Return those of `weights` that `options.preset` and `options.train_last` select.

    Args:
        graph: the model, with inferred types.
        options: the options of the build.
        predictions: the outputs that losses are computed on.
        weights: the weights that could be trained.

    Raises:
        UsageError: a preset selects no weight, or there are fewer layers than `train_last`.
    """
    found: set[str] = set()
    for name in options.preset:
        group = PRESETS[name](graph, predictions, weights)
        if not group:
            raise no_data(
                f"`preset={name!r}` selects no weight that can be trained",
                "leave `preset` out, and choose weights with `train=GLOB`",
            )
        found |= group
    if options.train_last:
        found |= _last(graph, predictions, weights, options.train_last)
    return found


def layers(graph: Graph, outputs: Sequence[str], weights: Sequence[str]) -> list[Layer]:
    """Return the layers on the way to `outputs` that read any of `weights`, in the order of the graph."""
    needed = graph.ancestors(outputs)
    # a weight, or a value computed from weights alone -> these weights
    weights_in: dict[str, tuple[str, ...]] = {name: (name,) for name in weights}
    layer_of: dict[str, Layer] = {}  # a value -> the layer that computes it, or a value that it is a view of
    found: list[Layer] = []
    for node in graph.nodes:
        if needed.isdisjoint(node.output):
            continue
        uses = [(each, node, at) for at, name in _inputs(node) for each in weights_in.get(name, ())]
        layer = next((layer_of[name] for name in node.input if name in layer_of), None)
        arranged = _arranged(node, weights_in)
        if arranged or node.op_type in modules.HANDED_ON:
            weights_in.update(dict.fromkeys(node.output, arranged) if arranged else {})
        elif uses:
            if layer is None or node.op_type not in ELEMENTWISE:
                layer = Layer(node)
                found.append(layer)
            layer.uses += uses
        else:
            continue
        if layer is not None:
            layer_of.update(dict.fromkeys(node.output, layer))
    return found


def _arranged(node: Node, weights_in: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the weights that a node only rearranges, as exporters do with the gates of an LSTM; () for other nodes."""
    if node.op_type == "Concat" and all(name in weights_in for name in node.input):
        return tuple(dict.fromkeys(weight for name in node.input for weight in weights_in[name]))
    handed_on = node.op_type in modules.HANDED_ON or node.op_type in ("Slice", "Split")
    return weights_in.get(node.input[0], ()) if handed_on else ()


def _inputs(node: Node) -> Iterator[tuple[int, str]]:
    yield from enumerate(node.input)
    yield from ((-1, name) for name in (captured(node) if node.attribute else ()))


def _last(graph: Graph, predictions: Sequence[str], weights: Sequence[str], count: int) -> set[str]:
    every = layers(graph, predictions, weights)
    if not 0 < count <= len(every):
        last = ", ".join(layer.first.name for layer in every[:-6:-1])
        raise wrong_value(
            f"`train_last={count}` is out of range: the model has {len(every)} layers with weights that can be trained",
            f"the last layers, from the end, are {last}" if every else None,
        )
    return set().union(*(layer.weights for layer in every[-count:]))


def _bias(graph: Graph, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Select every bias, including those of normalizations.

    Source: E. Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
    Language-models, ACL 2022.
    """
    uses = [use for layer in layers(graph, predictions, weights) for use in layer.uses]
    others = {name for name, node, position in uses if not _shifts(graph, name, node, position)}
    return {name for name, _, _ in uses} - others


def _shifts(graph: Graph, name: str, node: Node, position: int) -> bool:
    return (node.op_type, position) in BIASES or (node.op_type in ("Add", "Sub") and _is_vector(graph, name))


def _norm(graph: Graph, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Select the scales and shifts of normalizations, whether a normalization is one operator or written out."""
    producers = graph.producers()
    found: set[str] = set()
    for layer in layers(graph, predictions, weights):
        first = layer.first
        is_one = first.op_type in NORMALIZATIONS
        if is_one or (first.op_type in ELEMENTWISE and any(_normalized(producers, name) for name in first.input)):
            for name, node, _ in layer.uses:  # slopes and added tables don't belong to the normalization
                if (is_one and node is first) or (node.op_type != "PRelu" and _is_vector(graph, name)):
                    found.add(name)
    return found


def _is_vector(graph: Graph, name: str) -> bool:
    return sum(size > 1 for size in graph.initializers[name].dims) <= 1


def _normalized(producers: Mapping[str, Node], name: str) -> bool:
    """Return True if a value is the result of a normalization, possibly before its scale is applied."""
    node = source_of(name, producers, modules.HANDED_ON)
    if node is None or node.op_type in NORMALIZATIONS:
        return node is not None
    return node.op_type in ("Div", "Mul") and any(_root_of_mean(producers, name) for name in node.input)


def _root_of_mean(producers: Mapping[str, Node], name: str, rooted: bool = False, depth: int = 6) -> bool:
    node = producers.get(name)
    if node is None or depth == 0:
        return False
    if node.op_type in SPREADS:
        return rooted
    rooted = rooted or node.op_type in ("Sqrt", "Pow")
    steps = ("Add", "Cast", "CastLike", "Clip", "Div", "Identity", "Max", "Pow", "Reciprocal", "Sqrt")
    return node.op_type in steps and any(_root_of_mean(producers, x, rooted, depth - 1) for x in node.input)


def _head(graph: Graph, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """For each prediction, select the last layer that does more than scale and shift, and the layers after it."""
    found: set[str] = set()
    for prediction in predictions:
        for layer in reversed(layers(graph, [prediction], weights)):
            found |= layer.weights
            if layer.first.op_type not in ELEMENTWISE | NORMALIZATIONS:
                break
    return found


PRESETS: Mapping[Preset, Callable[[Graph, Sequence[str], Sequence[str]], set[str]]] = {
    "bias": _bias,
    "norm": _norm,
    "head": _head,
}
"""Map from the name of a preset to the function that selects its weights, from those that could be trained."""
