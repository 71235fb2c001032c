"""Compute the loss of a language model in chunks of tokens, so that the logits never exist as a whole.

The logits have one number per token and vocabulary entry: 156 MB for 256 tokens and a vocabulary of 151,936. A loss
and its gradient hold them several times. The head of the model consists of the nodes that compute the logits from
narrower values, the last hidden states. If the head treats each token separately, its nodes and the loss are written
once for each chunk of tokens, and no value holds all logits. `passes.sequential_chunks` makes one chunk end before the
next begins. Losses and gradients are the same sums in a different order.

Source: P. Hsu et al., Liger Kernel, 2024, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy). This is its form in
standard operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import reduced
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of, depending_on, reads
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.losses.classification import ahead, log_softmax, picked
from onnxgrad_cli.record import Chunks, LossRecord

MIN_CHUNKED_VOCABULARY, DEFAULT_CHUNKS = 2**15, 4
"""Smallest vocabulary for which the loss is computed in chunks by default, and the default number of chunks.

More chunks are not better: each chunk unpacks a low-bit matrix of the head again. Measured with `benchmarks.qlora
--only decoder`.
"""

MAX_THIN_COLUMNS = 64
"""Chunks are used only if each trained matrix of the head has at most this many rows or columns, as LoRA matrices have.

If the whole matrix of the head is trained, its gradient is as large as the logits. Each chunk would compute such a
gradient, so chunks would save no memory.
"""

OPSET = 18
"""The first opset at which Split may return empty outputs and every runtime has Min for integers."""

ALONG = frozenset("Add Cast Clip Div Identity Mul Neg Sub Tanh".split())
"""Elementwise operators, which treat each token separately if their other operand has no axis of tokens."""


def write_chunks(
    op: Op, training: LossRecord, prediction: Val, label: Val, ignore_index: int, asked: int | None
) -> tuple[Val, Val] | None:
    """Write causal-lm in chunks of tokens. Return the sum of the losses and the number of labels that are not ignored.

    Args:
        op: the emitter of the loss.
        training: the record, which receives the chunks.
        prediction: the logits (N, T, V), computed by nodes that the chunks replace.
        label: tokens (N, T).
        ignore_index: the label of tokens that the loss ignores.
        asked: number of chunks; None means `DEFAULT_CHUNKS` for a large vocabulary and no chunks for others.

    Returns:
        None if the loss has to be written as a whole: for a small vocabulary, if a node of the head mixes tokens, or if
        a whole matrix of the head is trained.
    """
    count = _count(prediction, asked)
    if count < 2 or op.opset < OPSET:
        return None
    head = _head(op.graph, training, prediction)
    if head is None:
        return None
    nodes_of_head, inputs = head
    following = op.reshape(ahead(op, label, ignore_index), [-1])
    cuts = _Cuts(_sizes(op, following, count), tuple(op.graph.fresh_symbol() for _ in range(count)))
    pieces = {name: cuts.of(op, op.reshape(op.val(name), [-1, _width(op, name)])) for name in inputs}
    labels = cuts.of(op, following)
    starts = tuple(tuple(part[i].name for part in pieces.values()) for i in range(count))
    totals, nodes, logits = [], [], []
    for i, own in enumerate(labels):
        before = len(op.nodes)
        y = _copied(op, nodes_of_head, {name: part[i] for name, part in pieces.items()}, prediction.name)
        logits.append(y.name)
        losses, _ = picked(op, log_softmax(op, op.wide(y), 1), own, None, ignore_index, axis=1)
        totals.append(reduced(op, "ReduceSum", losses))
        nodes.append(frozenset(node.name for node in op.nodes[before:]))
    training.chunks = Chunks(prediction.name, tuple(logits), starts, tuple(nodes))
    weights = op.cast(op.Not(op.Equal(following, ignore_index)), totals[0])
    return op.Sum(*totals), reduced(op, "ReduceSum", weights)


def _count(prediction: Val, asked: int | None) -> int:
    words = prediction.shape[-1]
    if not isinstance(words, int):
        return 1
    return (DEFAULT_CHUNKS if words >= MIN_CHUNKED_VOCABULARY else 1) if asked is None else asked


class _Cuts(NamedTuple):
    """The sizes of the chunks, and the symbols that name these sizes in shapes."""

    sizes: Val
    symbols: tuple[str, ...]

    def of(self, op: Op, x: Val) -> list[Val]:
        """Split a tensor whose first axis has one entry per token into chunks."""
        parts = op.Split(x, self.sizes, axis=0, outputs=len(self.symbols))
        return [op.state(part, [own, *x.shape[1:]]) for part, own in zip(parts, self.symbols, strict=True)]


def _width(op: Op, name: str) -> int:
    size = op.val(name).shape[-1]
    assert isinstance(size, int)
    return size


def _sizes(op: Op, tokens: Val, count: int) -> Val:
    """Return the sizes of `count` chunks. They are equal, except that the last ones may be smaller or 0."""
    number = op.shape(tokens)
    step = (number + (count - 1)) / count
    ends = op.Min(op.ints(range(1, count + 1)) * step, number)
    begins = op.Min(op.ints(range(count)) * step, number)
    return ends - begins


# -- the head ---------------------------------------------------------------------------------------------------------


def _head(graph: Graph, training: LossRecord, prediction: Val) -> tuple[list[Node], list[str]] | None:
    """Return the head's nodes in order, and the values that it reads: hidden states (N, T, size).

    Return None if a node of the head mixes tokens, or trains a whole matrix.
    """
    if training.predictions.count(prediction.name) > 1:
        return None
    makers, inputs_of_model = graph.producers(), set(graph.input_names).difference(graph.initializers)
    fed = depending_on(graph.nodes, inputs_of_model)
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
    return nodes, list(inputs)


def _is_read_elsewhere(graph: Graph, nodes: Sequence[Node], logits: str) -> bool:
    """Return True if other nodes read an output of `nodes`, or if the model returns one that isn't the logits."""
    names = {node.name for node in nodes}
    read = {name for node in graph.nodes if node.name not in names for name in reads(node)}
    read.update(name for name in graph.output_names if name != logits)
    return any(name in read for node in nodes for name in node.output)


def _has_tokens(graph: Graph, name: str) -> bool:
    """Return True if a value has three axes, (N, T, .)."""
    return len(shape_of(graph.types.get(name)) or ()) == 3


def _is_wide(graph: Graph, name: str, prediction: Val) -> bool:
    shape = shape_of(graph.types.get(name))
    return not shape or not isinstance(shape[-1], int) or shape[-1] == prediction.shape[-1]


def _trains_a_matrix(graph: Graph, node: Node, fed: set[str], trained: set[str]) -> bool:
    """Return True if a node reads, or reads a value computed from, a trained matrix that is too large for chunks.

    Both sides of such a matrix are above `MAX_THIN_COLUMNS`. Operands that depend on inputs of the model (`fed`) are
    not followed.
    """
    stored = graph.ancestors(set(node.input) - fed) & trained
    return any(
        len(dims) > 1 and min(dims) > MAX_THIN_COLUMNS for dims in (graph.initializers[name].dims for name in stored)
    )


def _by_token(graph: Graph, node: Node, fed: set[str]) -> bool:
    """Return True if a node treats each token separately: its stored operands have no axis of tokens."""
    if not is_standard(node.domain):
        return False
    shapes = {name: shape_of(graph.types.get(name)) for name in node.input if name}
    stored = [shapes[name] for name in shapes if name not in fed]
    if any(shape is None or (name in fed and not _has_tokens(graph, name)) for name, shape in shapes.items()):
        return False
    if node.op_type == "MatMul":
        return node.input[0] in fed and node.input[1] not in fed and len(shapes[node.input[1]] or ()) == 2
    return node.op_type in ALONG and all(len(shape or ()) < 2 for shape in stored)


def _copied(op: Op, nodes: Sequence[Node], pieces: Mapping[str, Val], result: str) -> Val:
    """Copy the head's nodes for one chunk; `pieces` are its parts of the head's inputs. Return the part of `result`."""
    values, scope = dict(pieces), op.scope
    for node in nodes:
        op.scope = f"{scope}/{node.name}"
        inputs = [values.get(name) or op.val(name) if name else None for name in node.input]
        values[node.output[0]] = op.emit(node.op_type, *inputs, **attributes_of(node))
    op.scope = scope
    return values[result]
