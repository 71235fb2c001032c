"""Low-bit matrices: multiply by them with onnxruntime's kernels, and unpack them only in the backward part.

Operators such as MatMulNBits have a kernel that reads packed matrices. For differentiation, their definition unpacks
the matrix to floats. A runtime would constant-fold that, and a 4-bit model would take the memory of float32. So this
pass restores the operator in the forward part. The backward part needs the matrix W, with N rows and K columns, once,
in dX = G W. A control dependency delays the unpacking of W until G is computed.

Likewise, the output of a DequantizeLinear is computed again for each product, after the other operand of the product.
So only one matrix at a time is in memory as floats. This also prevents onnxruntime from fusing a DequantizeLinear with
a single reader into a low-bit product, whose kernel rounds the other operand unless the session's settings forbid it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.unpacking import unpacked
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.options import BackwardOptions
from onnxgrad_cli.passes.control_dependencies import zero_after
from onnxgrad_cli.passes.stored_integers import before_views
from onnxgrad_cli.record import Training

MIN_UNPACKED, MAX_UNPACKED, PIECES = 2**19, 2**22, 4
"""Lower and upper bound on the bytes of a matrix that are unpacked at a time, and the usual number of parts.

Within the bounds, a quarter of a matrix is unpacked at a time. Measured for 8 products of 8 rows with matrices of 2048
x 2048, on one thread: halves take 0.9 times as long as the whole matrix, quarters and eighths 0.75 times. With more
parts, the nodes take more memory than the floats.
"""


class Packed(NamedTuple):
    """The packed matrix of a MatMulNBits.

    Attributes:
        bytes: the stored uint8 [rows, blocks, bytes of a block], the low bits first.
        scales, zeros: the scale and the zero point of each block. If `zeros` is None, the middle of the integers' range
            represents 0.
        bits: number of bits of an element.
        rows, columns: the sizes of the matrix.
        size: number of elements of a block. The last block of a row may be padded.
    """

    bytes: Val
    scales: Val
    zeros: Val | None
    bits: int
    rows: int
    columns: int
    size: int

    @staticmethod
    def of(op: Op, node: Node) -> Packed:
        """Return the packed matrix that a MatMulNBits reads."""
        given = {attribute.name: attribute.i for attribute in node.attribute}
        packed, scales, zeros = (op.val(name) if name else None for name in [*node.input[1:4], ""][:3])
        assert packed is not None and scales is not None
        bits, size = given.get("bits", 4), given.get("block_size", 128)
        return Packed(packed, scales, zeros, bits, given["N"], given["K"], size)

    @property
    def places(self) -> int:
        """Number of elements in a byte."""
        return 8 // self.bits

    def after(self, op: Op, g: Val) -> Packed:
        """Return the matrix as a list of blocks, delayed until `g` is computed.

        Zero points in uint8 are neither reshaped nor delayed.
        """
        count, zero = self.rows * self.blocks, zero_after(op, [g])

        def late(x: Val, *sizes: int) -> Val:
            return op.Reshape(x, op.ints([count, *sizes]) + zero, shape=[count, *sizes])

        floats = self.zeros is not None and self.zeros.dtype != TensorProto.UINT8
        zeros = late(self.zeros) if floats and self.zeros is not None else self.zeros
        return self._replace(bytes=late(self.bytes, self.size // self.places), scales=late(self.scales), zeros=zeros)

    @property
    def blocks(self) -> int:
        """Number of blocks in a row."""
        return -(-self.columns // self.size)


def late_product(op: Op, g: Val, w: Packed) -> Val:
    """Return the product of `g` and the unpacked matrix W of `w`.

    W is unpacked only after `g` is computed, a few rows at a time. The products with these rows are added up.
    """
    late, sums = w.after(op, g), list[Val]()
    numbers = w.rows * w.blocks * w.size // w.places
    step = max(1, w.rows * min(max(int(numbers / PIECES), MIN_UNPACKED), MAX_UNPACKED) // numbers)
    for start in range(0, w.rows, step):
        rows = range(start, min(start + step, w.rows))
        own = g if len(rows) == w.rows else _slice(op, g, g.rank - 1, rows)
        products = [own @ op.cast(matrix, g) for matrix in _matrices(op, late, rows)]
        sums = [old + new for old, new in zip(sums, products, strict=True)] if sums else products
    parts = [(b - a) * 2.0 ** (-w.bits * i) for i, (a, b) in enumerate(pairwise(sums), 1)]
    return _interleaved(op, [sums[0], *parts], w)


def _interleaved(op: Op, parts: list[Val], w: Packed) -> Val:
    """Interleave the columns: the first column of each part, then the second of each, ...; cut off the padding."""
    rank, lead, whole = parts[0].rank, parts[0].shape[:-1], w.blocks * w.size
    d = parts[0]
    if len(parts) > 1:
        side_by_side = op.Concat(*(op.unsqueeze(part, [rank]) for part in parts), axis=rank)
        d = op.Reshape(side_by_side, op.ints([0] * (rank - 1) + [whole]), shape=[*lead, whole])
    return d if whole == w.columns else _slice(op, d, rank - 1, range(w.columns))


def _slice(op: Op, x: Val, axis: int, span: range) -> Val:
    shape = [len(span) if i == axis else size for i, size in enumerate(x.shape)]
    return op.Slice(x, op.ints([span.start]), op.ints([span.stop]), op.ints([axis]), shape=shape)


def _matrices(op: Op, w: Packed, rows: range) -> Iterator[Val]:
    """For each position of an element in a byte, yield the given rows as a matrix with one column per byte.

    The first matrix holds the first element of each byte. The second matrix holds the first element plus 2^bits times
    the second one, and so on up to the whole byte. So higher bits are masked out, but no bits have to be shifted.
    """
    blocks = range(rows.start * w.blocks, rows.stop * w.blocks)
    numbers, scales = _piece(op, w.bytes, blocks), _piece(op, w.scales, blocks)
    floats = w.zeros if w.zeros is not None and w.zeros.dtype != TensorProto.UINT8 else None
    shift = None if floats is None else op.unsqueeze(_piece(op, floats, blocks) * scales, [1])
    for place in range(w.places):
        below = w.bits * (place + 1)
        steps = numbers if below == 8 else op.BitwiseAnd(numbers, op.const(2**below - 1, numbers))
        values = op.DequantizeLinear(steps, scales, _zeros(op, w, blocks, place) if floats is None else None, axis=0)
        if shift is not None:
            values = values - shift * float((2**below - 1) // (2**w.bits - 1))
        yield op.reshape(values, [len(rows), w.blocks * w.size // w.places])


def _piece(op: Op, x: Val, blocks: range) -> Val:
    """Return the entries of `x` that belong to some blocks. The first axis of `x` has one entry per block."""
    return x if x.shape[0] == len(blocks) else _slice(op, x, 0, blocks)


def _zeros(op: Op, w: Packed, blocks: range, place: int) -> Val:
    """Return the constant zero points of some blocks, repeated in the bits of each position of a byte up to `place`."""
    if w.zeros is None:
        middle = 2 ** (w.bits - 1) * (2 ** (w.bits * (place + 1)) - 1) // (2**w.bits - 1)
        value = numpy_helper.from_array(np.array([middle], np.uint8))
        return op.ConstantOfShape(op.ints([len(blocks)]), value=value, shape=[len(blocks)])
    each = unpacked(op, op.reshape(w.zeros, [w.rows, -1]), w.bits, [w.rows, -1], w.blocks)
    own = _piece(op, op.reshape(each, [w.rows * w.blocks]), blocks)
    zeros = own
    for _ in range(place):
        zeros = op.BitwiseOr(op.BitShift(zeros, op.const(w.bits, zeros), direction="LEFT"), own)
    return zeros


NARROW = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
"""Types for which onnxruntime's Reshape has kernels only at the newest opsets."""


def late_floats(op: Op, dequantizer: Node, after: Val) -> Val:
    """Return a DequantizeLinear's output, which runtimes can compute only after `after`.

    For this, the stored integers pass through a Reshape whose shape depends on `after`. If Reshape has no kernel for
    their type, the scale passes through it instead. Several DequantizeLinear nodes may then read the same stored
    integers. This is avoided for other types: onnxruntime sometimes converts stored int8 to uint8, and can't do so if
    several nodes read the integers.
    """
    integers, scale, *zero_point = (op.val(name) if name else None for name in dequantizer.input)
    assert integers is not None and scale is not None
    zero = zero_after(op, [after])
    if integers.dtype in NARROW:
        scale = _late(op, scale, zero)
    else:
        integers = _late(op, integers, zero)
    return op.DequantizeLinear(integers, scale, *zero_point, **attributes_of(dequantizer))


def _late(op: Op, x: Val, zero: Val) -> Val:
    """Return a stored tensor through a Reshape that can run only after `zero`, a value of 0, is computed."""
    sizes = [int(size) for size in x.shape]
    shape = op.ints(sizes) + zero if sizes else op.Slice(op.ints([1]), op.ints([0]), op.reshape(zero, [1]))
    return op.Reshape(x, shape, shape=sizes)


def times_transposed(op: Op, x: Val, floats: Val) -> Val:
    """Return X Wᵀ by Gemm, for W from `late_floats`.

    A Transpose of W is not used, because onnxruntime would move the DequantizeLinear of W past it.
    """
    rows = op.reshape(x, [-1, x.shape[-1] if isinstance(x.shape[-1], int) else op.dim(x, -1)]) if x.rank > 2 else x
    y = op.Gemm(rows, floats, transB=1)
    if x.rank == 2:
        return y
    lead = [op.size(x, axis) for axis in range(x.rank - 1)]
    return op.Reshape(y, op.vector([*lead, op.size(floats, 0)]), shape=[*x.shape[:-1], floats.shape[0]])


ROUNDS = "accuracy_level"
"""The attribute that allows a kernel to round the factor that is not stored."""

FED = {"MatMulNBits": 0, "GatherBlockQuantized": 1}
"""Map from an operator that reads a low-bit matrix to the position of its input that is not stored."""


def restore_kernels(graph: Graph, options: BackwardOptions, training: Training) -> None:
    """Use low-bit kernels where possible, and dequantize other matrices only where they are used.

    Kernels whose definitions were expanded are restored. Other products unpack the matrix just before it is used.
    """
    writer = _LowBitWriter(graph)
    if not training.forward_stays and writer.matrices:
        graph.rewrite(writer.replaced)


class _LowBitWriter:
    """Writes the nodes that replace readers of low-bit matrices.

    Attributes:
        matrices: map from a dequantized matrix to its source node: the kernel that returns it or multiplies by it, or
            the DequantizeLinear that computes it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._op = Op(graph)
        self._stored = graph.initializers.keys() - {*graph.input_names, *graph.not_constant}
        found = {node.output[0]: node for node in graph.nodes if node.op_type == "DequantizeLinear"} | graph.kernels
        self.matrices = {value: node for value, node in found.items() if self._is_frozen(node)}

    @cached_property
    def _makers(self) -> dict[str, Node]:
        return self.graph.producers()

    def _is_frozen(self, node: Node) -> bool:
        """Return True if everything that a node dequantizes is stored and is neither an input nor trained."""
        fed = FED.get(node.op_type)
        return all(name in self._stored for at, name in enumerate(node.input[:4]) if name and at != fed)

    def replaced(self, node: Node) -> list[Node] | None:
        """Return the nodes to write instead of `node`, or None if it stays."""
        if not is_standard(node.domain) or not node.output:
            return None
        kernel = self.matrices.get(node.output[0])
        if kernel is not None and kernel.op_type == "GatherBlockQuantized":
            return [self._kernel(node, kernel, list(kernel.input))]
        for position, name in enumerate(node.input[:2] if node.op_type in ("Gemm", "MatMul") else ()):
            value, turned = before_views(self._makers, name, self.matrices)
            if value in self.matrices:
                return self._product(node, position, self.matrices[value], turned)
        return None

    def _product(self, node: Node, position: int, source: Node, turned: bool) -> list[Node] | None:
        """Return the nodes of a product with a low-bit matrix (transposed if `turned`) that the node `source` reads."""
        other = node.input[1 - position]
        if source.op_type == "DequantizeLinear":
            return self._with_floats(node, position, source, turned)
        if (node.op_type, position) != ("MatMul", 1) or len(shape_of(self.graph.types.get(other)) or ()) < 2:
            return None
        if not turned:
            return [self._kernel(node, source, [other, *source.input[1:4]])]
        op = self._begun(node)
        op.rename(late_product(op, op.val(other), Packed.of(op, source)), node.output[0])
        return op.nodes

    def _with_floats(self, node: Node, position: int, source: Node, turned: bool) -> list[Node] | None:
        """Return the nodes of a product with the output of a DequantizeLinear.

        If a DequantizeLinear computes the other factor too, the product is not changed, because runtimes have integer
        kernels for such products.
        """
        other = node.input[1 - position]
        maker = self._makers.get(other)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return None
        op = self._begun(node)
        x = op.val(other)
        floats = late_floats(op, source, x)
        if turned and (node.op_type, position) == ("MatMul", 1) and x.rank > 1:
            op.rename(times_transposed(op, x, floats), node.output[0])
            return op.nodes
        node.input[position] = (op.transpose(floats, [1, 0]) if turned else floats).name
        return [*op.nodes, node]

    def _begun(self, node: Node) -> Op:
        """Empty the emitter and return it. The nodes that it adds get the role and the name prefix of `node`."""
        self._op.nodes, self._op.scope = [], node.name
        self._op.role, self._op.forward = metadata_of(node, ROLE), metadata_of(node, FORWARD)
        return self._op

    def _kernel(self, node: Node, kernel: Node, operands: list[str]) -> Node:
        """Return a node with the kernel's operator in place of `node`. It may not round the other operand."""
        written = make_node(kernel.op_type, operands, node.output, node.name, domain=kernel.domain)
        written.attribute.extend(attribute for attribute in kernel.attribute if attribute.name != ROUNDS)
        written.metadata = node.metadata
        self.graph.use_domain(kernel.domain)
        self.graph.declared_shapes.update(node.output)
        return written
