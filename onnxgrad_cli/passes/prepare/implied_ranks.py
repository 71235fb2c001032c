"""Infer the rank of a value from the operators that read it. For example, a 2-D convolution reads four axes.

An input of the model is then declared with this rank. Any other value gets a guard, which makes a run fail if the value
has a different rank.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.shape_values import SAME_RANK
from onnxgrad_cli.ir.types import dtype_of, shape_of, tensor_type
from onnxgrad_cli.passes.prepare.runtime_shape_probe import keep_rank

FIXED: dict[str, tuple[int | None, ...]] = {
    "AffineGrid": (3,),
    "BatchNormalization": (None, 1, 1, 1, 1),
    "Col2Im": (3,),
    "DeformConv": (4, 4, 4, 1, 4),
    "DepthToSpace": (4,),
    "Gemm": (2, 2),
    "GRU": (3, 3, 3, 2, 1, 3),
    "InstanceNormalization": (None, 1, 1),
    "LSTM": (3, 3, 3, 2, 1, 3, 3, 2),
    "MaxRoiPool": (4, 2),
    "RNN": (3, 3, 3, 2, 1, 3),
    "RoiAlign": (4, 2, 1),
    "SpaceToDepth": (4,),
    "STFT": (3,),
}
"""Map from an operator to the ranks that its operands must have, in order; None: any rank."""

ALIKE: dict[str, tuple[int, ...]] = {
    "Conv": (0, 1),
    "ConvInteger": (0, 1),
    "ConvTranspose": (0, 1),
    "GatherElements": (0, 1),
    "GridSample": (0, 1),
    "QLinearConv": (0, 3),
    "ScatterElements": (0, 1, 2),
}
"""Map from an operator to the positions of operands that must have equal ranks."""

WINDOWS = frozenset("AveragePool Conv ConvTranspose LpPool MaxPool MaxUnpool".split())
"""Operators whose first operand has two axes more than `kernel_shape` has entries."""

KEEPS_RANK = SAME_RANK | frozenset(
    "Abs Cast CastLike Celu Clip CumSum Dropout Elu Erf Exp Gelu HardSigmoid HardSwish Identity LayerNormalization "
    "LeakyRelu Log LogSoftmax Mish Neg Reciprocal Relu Selu Sigmoid Softmax Softplus Softsign Sqrt Swish Tanh".split()
)
"""Operators whose first operand has the same rank as their result."""

LENGTHS: dict[str, tuple[int, int]] = {"Pad": (1, 2), "Tile": (1, 1)}
"""Map: operator -> (N, count), if its input N is a vector with `count` numbers for each axis of input 0."""


def imply_ranks(graph: Graph) -> bool:
    """Declare or guard the values whose ranks follow from the nodes that read them. Return True if there are any."""
    unknown = [name for name in (*graph.input_names, *graph.made()) if name and is_tensor_of_any_rank(graph, name)]
    ranks = _implied(graph, set(unknown)) if unknown else {}
    for value in graph.proto.graph.input:
        if value.name in ranks:
            value.type.CopyFrom(tensor_type(dtype_of(graph.types[value.name]), [None] * ranks[value.name]))
            graph.types[value.name] = graph.named(value.type)
    made = [(name, node) for node in graph.nodes for name in node.output if name in ranks]
    first = [name for name, node in made if ranks.keys().isdisjoint(node.input[:])]
    for name in first:
        graph.types[name] = graph.named(tensor_type(dtype_of(graph.types[name]), [None] * ranks[name]))
        keep_rank(graph, name)
    return bool(ranks)


def is_tensor_of_any_rank(graph: Graph, name: str) -> bool:
    """Return True if a value is a tensor of unknown rank."""
    value_type = graph.types.get(name)
    return bool(dtype_of(value_type)) and shape_of(value_type) is None


def _implied(graph: Graph, unknown: set[str]) -> dict[str, int]:
    """Return value -> rank, for those of `unknown` whose rank follows from the nodes that read them.

    A value is left out if two readers imply different ranks.
    """
    found: dict[str, set[int]] = defaultdict(set)

    def known(name: str) -> int | None:
        shape = shape_of(graph.types.get(name))
        if shape is not None:
            return len(shape)
        return next(iter(found[name])) if len(found.get(name, ())) == 1 else None

    for node in reversed(graph.nodes):
        if not unknown.isdisjoint(node.input[:]) and is_standard(node.domain):
            for at, rank in _operands(graph, node, known):
                if rank is not None and node.input[at] in unknown:
                    found[node.input[at]].add(rank)
    return {name: ranks.pop() for name, ranks in found.items() if len(ranks) == 1}


def _operands(graph: Graph, node: Node, known: Callable[[str], int | None]) -> Iterator[tuple[int, int | None]]:
    """Yield (position, rank) for operands whose rank may follow from the node. The rank is None if it does not."""
    names = node.input[:]
    yield from enumerate(FIXED.get(node.op_type, ())[: len(names)])
    if node.op_type in ALIKE or node.op_type == "Concat":
        group = [at for at in ALIKE.get(node.op_type, range(len(names))) if at < len(names)]
        yield from itertools.product(group, {known(names[at]) for at in group})
    if node.op_type in KEEPS_RANK:
        yield 0, known(node.output[0])
    given = attributes_of(node) if node.op_type in WINDOWS or node.op_type == "Transpose" else {}
    if "kernel_shape" in given:
        yield 0, len(given["kernel_shape"]) + 2
    if "perm" in given:
        yield 0, len(given["perm"])
    if node.op_type in LENGTHS and len(names) < 4:  # the axes of a Pad
        at, times = LENGTHS[node.op_type]
        length = (shape_of(graph.types.get(names[at])) or (None,))[0] if at < len(names) else None
        if isinstance(length, int):
            yield 0, length // times
