"""Warn about weights that stay untrained although the user did not ask for that."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import NARROW, is_float, shape_of
from onnxgrad_cli.options import SelectionOptions
from onnxgrad_cli.passes.parameters.formulas import sample
from onnxgrad_cli.passes.stored_integers import quantized_matrices, scaled_integers, stored_behind
from onnxgrad_cli.record import ParameterRecord, SelectionRecord

UNTRAINED = "untrained"
"""The kind of the cautions in this module."""

LARGEST_SHARE = 0.01
"""Largest fraction of float parameters that may stay untrained without a warning, such as masks and statistics."""

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
"""Operators that multiply their input by weights."""

RANK = 8
"""The adapter rank that a warning suggests, unless a matrix is too small for it."""

CERTAIN = frozenset({"setting", "exporter", "scalar"})
"""Heuristics whose decisions need no warning: the role is stated in the file, or the tensor is a single number."""


def untrained(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> Iterator[Caution]:
    """Yield warnings about floats and stored integers that stay untrained, if no option selects or freezes weights."""
    if options.train or options.freeze or options.preset or options.train_last or options.lora:
        return
    left = [name for name in training.not_trained if name not in training.state]
    yield from untrained_floats(graph, training, left)
    yield from _integers(integer_weights(graph), options)


def untrained_floats(graph: Graph, training: ParameterRecord, names: Iterable[str]) -> Iterator[Caution]:
    """Yield a warning if the tensors `names` are a large share of the float parameters. They stay untrained."""
    counts = {name: math.prod(tensor.dims) for name, tensor in graph.initializers.items()}
    left = {
        name: counts[name]
        for name in names
        if name in counts and is_float(graph.types[name]) and training.heuristics.get(name) not in CERTAIN
    }
    count, trained = sum(left.values()), sum(counts[name] for name in training.trained)
    if not trained or count <= LARGEST_SHARE * (count + trained):
        return
    largest = max(left, key=lambda name: left[name])
    decided = largest in training.heuristics
    reason = training.not_trained[largest].removesuffix(" (name it with `train` to train it)")
    text = f"{count:,} of {count + trained:,} float parameters ({count / (count + trained):.0%}) stay untrained"
    text += f"; the largest tensor is '{largest}' ({left[largest]:,}): {reason}"
    text += f". `train='*'` together with `train={largest!r}` trains it too" if decided else ""
    yield Caution(UNTRAINED, "", text)


def _integers(weights: IntegerWeights, options: SelectionOptions) -> Iterator[Caution]:
    if not weights.counts:
        return
    count, names = sum(weights.counts.values()), list(weights.counts)
    named = listed(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    text = f"{count:,} parameters are stored as integers and stay untrained: {named}"
    if weights.dequantized and not options.straight_through:
        text += ". `quantization='ste'` trains them"
    elif weights.rank:
        text += f". `lora={weights.rank}` trains adapters for them"
    yield Caution(UNTRAINED, "", text)


class IntegerWeights(NamedTuple):
    """The weights that are stored as integers.

    Attributes:
        counts: map from an initializer to its number of parameters. Several parameters may share a byte.
        dequantized: the initializers that can be replaced by a float weight followed by a quantizer.
        rank: the rank to suggest for adapters of those weights that are matrices of products; 0 if there are none.
    """

    counts: dict[str, int]
    dequantized: list[str]
    rank: int


def integer_weights(graph: Graph) -> IntegerWeights:
    """Find the integer initializers that are weights.

    These are: tensors of at most 8 bits that are converted to floats, matrices of at most 8 bits that an operator reads
    directly, integer matrices that products read as floats, and inputs of DequantizeLinear. A tensor with only two
    different values counts as a mask, not as a weight.
    """
    stored = stored_behind(graph, folded=True)
    direct = {stored.get(n.input[0], n.input[0]) for n in graph.nodes if n.op_type == "DequantizeLinear"}
    known, counts = set(direct), dict[str, int]()
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear" or all(name in stored for name in node.output if name):
            continue
        matrix = _narrow_matrix(graph, node, stored)
        for name, count in (*_dequantized(graph, node, stored, direct), *matrix.items()):
            counts[name] = max(counts.get(name, 0), count)
        known |= set() if node.op_type == "Gather" or node.name in graph.unexpanded else matrix.keys()
    counts = {name: count for name, count in counts.items() if count and not _has_two_values(graph, name)}
    if not counts:
        return IntegerWeights({}, [], 0)
    known |= scaled_integers(graph)
    matrices = quantized_matrices(graph)
    sides = [min(graph.initializers[name].dims) for name in counts if name in matrices]
    rank = min(RANK, min(sides, default=1) - 1)
    return IntegerWeights(counts, [name for name in counts if name in known], rank)


def _dequantized(
    graph: Graph, node: Node, stored: Mapping[str, str], direct: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield (initializer, number of parameters) for each integer initializer from which a float operand is computed.

    The number is 0 if the integers are not weights.

    Args:
        graph: the model, with inferred types.
        node: the node that reads the float operands.
        stored: the result of `stored_behind`.
        direct: the integer initializers that DequantizeLinear reads.
    """
    for name in node.input:
        integers = stored.get(name, "")
        if integers and integers != name and is_float(graph.types.get(name)):
            sizes = [size for size in shape_of(graph.types[name]) or () if isinstance(size, int)]
            factor = len(sizes) > 1 and node.op_type in PRODUCTS
            is_weight = factor or integers in direct or graph.initializers[integers].data_type in NARROW
            yield integers, math.prod(sizes) if is_weight else 0


def _narrow_matrix(graph: Graph, node: Node, stored: Mapping[str, str]) -> dict[str, int]:
    """Return {matrix: number of elements} for the largest matrix of narrow integers that a node reads directly.

    Smaller matrices are zero points. Return {} if the node reads no such matrix.
    """
    tensors = {name: graph.initializers[name] for name in node.input if name and name == stored.get(name)}
    matrices = {n: math.prod(t.dims) for n, t in tensors.items() if t.data_type in NARROW and len(t.dims) > 1}
    largest = max(matrices, key=matrices.__getitem__, default="")
    return {largest: matrices[largest]} if matrices else {}


def _has_two_values(graph: Graph, name: str) -> bool:
    values = sample(graph.initializers[name], graph.path.parent if graph.path else None)
    return values is not None and len(np.unique(values)) <= 2
