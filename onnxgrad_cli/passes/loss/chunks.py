"""The loss of a language model by chunks of its tokens, each with the head's product for it.

Of the logits there are as many as tokens times words, 156 MB for 256 tokens of a vocabulary of 151,936, and a loss and
its gradient hold them several times. What lies between the last narrow values, such as the head's input, and the loss
treats each token for itself. So it is written once for each chunk of the tokens, and no value of all logits remains;
`passes.in_turn` lets one chunk end before the next begins. Losses and gradients are the same sums in another order.

Source: P. Hsu et al., Liger Kernel, 2024, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy), of which this is the
form in standard operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onnx import TensorProto, helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import reduced
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import HALVES, shape_of
from onnxgrad_cli.losses.classes import ahead, log_softmax, picked
from onnxgrad_cli.record import Chunks, LossRecord

LARGE, USUAL = 2**15, 4
"""From so many words on the tokens are taken in chunks if nobody asks for a number, and in how many.

Each chunk unpacks a matrix of few bits anew. Measured: `benchmarks.qlora --only decoder`.
"""

THIN = 64
"""A trained factor of the head has at most so many columns: the gradient of a whole matrix is as large as the logits,
and each chunk would have one."""

OPSET = 18
"""From here on Split takes empty parts, and Min takes integers on every runtime."""

ALONG = frozenset("Add Cast Clip Div Identity Mul Neg Sub Tanh".split())
"""Operators that treat each element for itself, or with one of the same column."""


def write_chunks(
    op: Op, training: LossRecord, prediction: Val, label: Val, ignore_index: int, asked: int | None
) -> tuple[Val, Val] | None:
    """The sum of the losses of causal-lm, and how many tokens count, written by chunks of tokens.

    Args:
        op: the emitter of the loss.
        training: the record; what the chunks are is noted there.
        prediction: logits (N, T, V).
        label: tokens (N, T).
        ignore_index: the label of tokens that do not count.
        asked: how many chunks; None: `USUAL` for a large vocabulary, else none.

    Returns:
        None where the loss is to be written as a whole: for few words, or where the model makes the logits otherwise
        than token by token, or a whole matrix of the head is trained.
    """
    count = _count(prediction, asked)
    if count < 2 or op.opset < OPSET:
        return None
    head = _head(op.graph, training, prediction)
    if head is None:
        return None
    following = op.reshape(ahead(op, label, ignore_index), [-1])
    cuts = _Cuts(_sizes(op, following, count), tuple(op.graph.fresh_symbol() for _ in range(count)))
    pieces = {name: cuts.of(op, op.reshape(op.val(name), [-1, _width(op, name)])) for name in head.inputs}
    labels = cuts.of(op, following)
    starts = tuple(tuple(part[i].name for part in pieces.values()) for i in range(count))
    totals, nodes, logits = [], [], []
    for i, own in enumerate(labels):
        before = len(op.nodes)
        y = _copied(op, head, {name: part[i] for name, part in pieces.items()}, prediction.name)
        logits.append(y.name)
        wide = op.cast(y, TensorProto.FLOAT) if y.dtype in HALVES else y
        losses, _ = picked(op, log_softmax(op, wide, 1), own, None, ignore_index, axis=1)
        totals.append(reduced(op, "ReduceSum", losses))
        nodes.append(frozenset(node.name for node in op.nodes[before:]))
    training.chunks = Chunks(prediction.name, tuple(logits), starts, tuple(nodes))
    weights = op.cast(op.Not(op.Equal(following, ignore_index)), totals[0])
    return op.Sum(*totals), reduced(op, "ReduceSum", weights)


def _count(prediction: Val, asked: int | None) -> int:
    words = prediction.shape[-1]
    if not isinstance(words, int):
        return 1
    return (USUAL if words >= LARGE else 1) if asked is None else asked


class _Cuts(NamedTuple):
    """How tokens are cut into chunks: the sizes, and the symbols for them."""

    sizes: Val
    symbols: tuple[str, ...]

    def of(self, op: Op, x: Val) -> list[Val]:
        """The chunks of something that has an entry for each token."""
        parts = op.Split(x, self.sizes, axis=0, outputs=len(self.symbols))
        return [op.state(part, [own, *x.shape[1:]]) for part, own in zip(parts, self.symbols, strict=True)]


def _width(op: Op, name: str) -> int:
    size = op.val(name).shape[-1]
    assert isinstance(size, int)
    return size


def _sizes(op: Op, tokens: Val, count: int) -> Val:
    """As many sizes, which are equal but for the last ones, which may be 0."""
    number = op.shape(tokens)
    step = (number + (count - 1)) / count
    ends = op.Min(op.ints(range(1, count + 1)) * step, number)
    begins = op.Min(op.ints(range(count)) * step, number)
    return ends - begins


# -- the head ---------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """What makes the logits of narrower values, token by token.

    Attributes:
        nodes: in order.
        inputs: what they read of the model's values, (N, T, .) each.
    """

    nodes: list[Node]
    inputs: list[str]


def _head(graph: Graph, training: LossRecord, prediction: Val) -> _Head | None:
    """The nodes that logits are made by as long as values are as wide; None where one treats tokens together."""
    if training.predictions.count(prediction.name) > 1:
        return None
    makers, fed = graph.producers(), _fed(graph)
    trained = graph.ancestors(training.trained) & graph.initializers.keys()
    names, inputs = set[str](), dict[str, None]()
    waiting = [prediction.name]
    while waiting:
        name = waiting.pop()
        if not _is_wide(graph, name, prediction):
            inputs[name] = None
            continue
        node = makers.get(name)
        if node is None or not _by_token(graph, node, fed) or _trains_a_matrix(graph, node, fed, trained):
            return None
        names.add(node.name)
        waiting += [other for other in node.input if other in fed and other not in inputs]
    nodes = [node for node in graph.nodes if node.name in names]
    if _is_read_elsewhere(graph, nodes, prediction.name) or not all(_has_tokens(graph, name) for name in inputs):
        return None
    return _Head(nodes, list(inputs))


def _is_read_elsewhere(graph: Graph, nodes: Sequence[Node], logits: str) -> bool:
    """Whether another node reads what nodes make, or the model returns something of it besides the logits."""
    names = {node.name for node in nodes}
    read = {name for node in graph.nodes if node.name not in names for name in reads(node)}
    read.update(name for name in graph.output_names if name != logits)
    return any(name in read for node in nodes for name in node.output)


def _has_tokens(graph: Graph, name: str) -> bool:
    """Whether a value is (N, T, .)."""
    return len(shape_of(graph.types.get(name)) or ()) == 3


def _fed(graph: Graph) -> set[str]:
    """The values that depend on what the model is fed."""
    found = {name for name in graph.input_names if name not in graph.initializers}
    for node in graph.nodes:
        if not found.isdisjoint(reads(node)):
            found.update(filter(None, node.output))
    return found


def _is_wide(graph: Graph, name: str, prediction: Val) -> bool:
    shape = shape_of(graph.types.get(name))
    return not shape or not isinstance(shape[-1], int) or shape[-1] == prediction.shape[-1]


def _trains_a_matrix(graph: Graph, node: Node, fed: set[str], trained: set[str]) -> bool:
    """Whether a whole matrix is trained that a stored operand of a node is made of."""
    stored = graph.ancestors(set(node.input) - fed) & trained
    return any(len(dims) > 1 and min(dims) > THIN for dims in (graph.initializers[name].dims for name in stored))


def _by_token(graph: Graph, node: Node, fed: set[str]) -> bool:
    """Whether a node treats each token for itself: its stored operands have no axis for tokens."""
    if not is_standard(node.domain):
        return False
    shapes = {name: shape_of(graph.types.get(name)) for name in node.input if name}
    stored = [shapes[name] for name in shapes if name not in fed]
    if any(shape is None or (name in fed and not _has_tokens(graph, name)) for name, shape in shapes.items()):
        return False
    if node.op_type == "MatMul":
        return node.input[0] in fed and node.input[1] not in fed and len(shapes[node.input[1]] or ()) == 2
    return node.op_type in ALONG and all(len(shape or ()) < 2 for shape in stored)


def _copied(op: Op, head: _Head, pieces: Mapping[str, Val], result: str) -> Val:
    """The head's nodes on a piece of what they read; the piece of `result`."""
    values, scope = dict(pieces), op.scope
    for node in head.nodes:
        op.scope = f"{scope}/{node.name}"
        inputs = [values.get(name) or op.val(name) if name else None for name in node.input]
        values[node.output[0]] = op.emit(node.op_type, *inputs, **dict(_attributes(node)))
    op.scope = scope
    return values[result]


def _attributes(node: Node) -> Iterator[tuple[str, Any]]:
    for attribute in node.attribute:
        yield attribute.name, helper.get_attribute_value(attribute)
