"""Groups of weights that are trained by themselves: biases, normalizations, the last layers.

A file knows no layers, so they follow from the graph: a layer begins where a weight is read, and goes on through the
elementwise steps that scale or shift its result by further weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnxgrad_cli.common.choices import Preset
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir import modules
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import captured
from onnxgrad_cli.options import ParameterOptions

VIEWS = modules.VIEWS | {"Expand"}
ELEMENTWISE = frozenset("Add Sub Mul Div PRelu".split())
NORMALIZATIONS = frozenset(f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "RMS"))

BIASES = frozenset(
    {("Conv", 2), ("ConvTranspose", 2), ("Gemm", 2), ("LSTM", 3), ("GRU", 3), ("RNN", 3)}
    | {(op_type, 2) for op_type in NORMALIZATIONS}
)
"""Operand positions that hold a bias; so do vectors that are added."""

SPREADS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare"})
"""What a normalization written in single operators divides by the root of."""


@dataclass
class Layer:
    """A node that reads weights, and the elementwise steps after it that do.

    Attributes:
        first: the node that it begins with.
        uses: weight, the node that reads it, and at which input (-1: inside a body), in the order of the graph.
    """

    first: Node
    uses: list[tuple[str, Node, int]] = field(default_factory=list)

    @property
    def weights(self) -> set[str]:
        """The weights that it reads."""
        return {name for name, _, _ in self.uses}


def chosen(graph: Graph, options: ParameterOptions, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Those of `weights` that `options.preset` and `options.train_last` name.

    Args:
        graph: the model, typed.
        options: what was asked for.
        predictions: the outputs that are judged.
        weights: what could be trained.

    Raises:
        UsageError: a preset names no weight, or there are not so many layers.
    """
    found: set[str] = set()
    for name in options.preset:
        group = PRESETS[name](graph, predictions, weights)
        if not group:
            raise UsageError(
                f"`preset={name!r}`: the model has no such weight that can be trained",
                "leave `preset` out, and choose weights with `train=GLOB`",
            )
        found |= group
    if options.train_last:
        found |= _last(graph, predictions, weights, options.train_last)
    return found


def layers(graph: Graph, outputs: Sequence[str], weights: Sequence[str]) -> list[Layer]:
    """The layers on the way to `outputs` that read any of `weights`, in the order of the graph."""
    needed = graph.ancestors(outputs)
    weights_in: dict[str, tuple[str, ...]] = {
        name: (name,) for name in weights
    }  # a weight, or what is made of some alone -> these
    layer_of: dict[str, Layer] = {}  # a value -> the layer whose result it is, or a view of
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
    """The weights whose numbers a node only arranges otherwise, as exporters do with the gates of an LSTM."""
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
        raise UsageError(
            f"`train_last={count}`: the model has {len(every)} layers with weights that can be trained",
            f"from the last: {', '.join(layer.first.name for layer in every[:-6:-1])}",
        )
    return set().union(*(layer.weights for layer in every[-count:]))


def _bias(graph: Graph, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Every bias, those of normalizations too.

    Source: E. Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
    Language-models, ACL 2022.
    """
    uses = [use for layer in layers(graph, predictions, weights) for use in layer.uses]
    others = {name for name, node, position in uses if not _shifts(graph, name, node, position)}
    return {name for name, _, _ in uses} - others


def _shifts(graph: Graph, name: str, node: Node, position: int) -> bool:
    if node.op_type in ("Add", "Sub"):
        return sum(size > 1 for size in graph.initializers[name].dims) <= 1
    return (node.op_type, position) in BIASES


def _norm(graph: Graph, predictions: Sequence[str], weights: Sequence[str]) -> set[str]:
    """Scales and shifts of normalizations, be they one operator or written in single ones."""
    producers = graph.producers()
    found = [
        layer
        for layer in layers(graph, predictions, weights)
        if layer.first.op_type in NORMALIZATIONS
        or (layer.first.op_type in ELEMENTWISE and any(_normalized(producers, name) for name in layer.first.input))
    ]
    return {name for layer in found for name, node, _ in layer.uses if _belongs(graph, layer, name, node)}


def _belongs(graph: Graph, layer: Layer, name: str, node: Node) -> bool:
    """Return True if a weight is of the normalization that a layer begins with: no slope, and no table added later."""
    if node is layer.first and node.op_type in NORMALIZATIONS:
        return True
    return node.op_type != "PRelu" and sum(size > 1 for size in graph.initializers[name].dims) <= 1


def _normalized(producers: Mapping[str, Node], name: str) -> bool:
    """Whether a value is a normalization's result, before it is scaled."""
    node = producers.get(name)
    while node is not None and node.op_type in modules.HANDED_ON:
        node = producers.get(node.input[0])
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
    """The last layer before each judged output that does more than to scale and shift, and those after it."""
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
"""Name -> the weights of a group, of those that could be trained."""
