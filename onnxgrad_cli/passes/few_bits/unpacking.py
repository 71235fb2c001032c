"""G W in the backward part, for a matrix W of few bits, which is unpacked a piece at a time, and late.

Nothing is shifted, and numbers that share a byte are never put side by side: each place in a byte is a matrix of its
own, whose product has those columns of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.autodiff.definitions.contrib import unpacked
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.passes.control import zero_after

LEAST, MOST, PIECES = 2**19, 2**22, 4
"""How many numbers of each place in a byte are unpacked at a time: of a matrix a quarter, but within these bounds.

Of the time of 8 products of 2048 x 2048 by 8 rows, one thread, with the whole matrix, halves take 0.9, quarters and
eighths 0.75. With more pieces the nodes take more memory than the floats.
"""


class Packed(NamedTuple):
    """The matrix of a MatMulNBits.

    Attributes:
        bytes: what is stored, uint8 [rows, blocks, bytes of a block], the low bits first.
        scales, zeros: of each block; without zeros, the middle value is 0.
        bits: how many a number has.
        rows, columns: the sizes of the matrix.
        size: the numbers of a block; the last of a row may be filled up.
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
        """The matrix that a node reads."""
        given = {attribute.name: attribute.i for attribute in node.attribute}
        packed, scales, zeros = (op.val(name) if name else None for name in [*node.input[1:4], ""][:3])
        assert packed is not None and scales is not None
        bits, size = given.get("bits", 4), given.get("block_size", 128)
        return Packed(packed, scales, zeros, bits, given["N"], given["K"], size)

    @property
    def places(self) -> int:
        """How many numbers a byte has."""
        return 8 // self.bits

    def after(self, op: Op, g: Val) -> Packed:
        """The same by blocks, one after the other, and not before `g` has come; small zero points stay as they are."""
        count, zero = self.rows * self.blocks, zero_after(op, [g])

        def late(x: Val, *sizes: int) -> Val:
            return op.Reshape(x, op.ints([count, *sizes]) + zero, shape=[count, *sizes])

        floats = self.zeros is not None and self.zeros.dtype != TensorProto.UINT8
        zeros = late(self.zeros) if floats and self.zeros is not None else self.zeros
        return self._replace(bytes=late(self.bytes, self.size // self.places), scales=late(self.scales), zeros=zeros)

    @property
    def blocks(self) -> int:
        """How many a row has."""
        return -(-self.columns // self.size)


def late_product(op: Op, g: Val, w: Packed) -> Val:
    """G W, where W is unpacked when G has come, in pieces whose products are added up."""
    late, sums = w.after(op, g), list[Val]()
    numbers = w.rows * w.blocks * w.size // w.places
    step = max(1, w.rows * min(max(int(numbers / PIECES), LEAST), MOST) // numbers)
    for start in range(0, w.rows, step):
        rows = range(start, min(start + step, w.rows))
        own = g if len(rows) == w.rows else _slice(op, g, g.rank - 1, rows)
        products = [own @ op.cast(matrix, g) for matrix in _matrices(op, late, rows)]
        sums = [old + new for old, new in zip(sums, products, strict=True)] if sums else products
    parts = [(b - a) * 2.0 ** (-w.bits * i) for i, (a, b) in enumerate(pairwise(sums), 1)]
    return _interleaved(op, [sums[0], *parts], w)


def _interleaved(op: Op, parts: list[Val], w: Packed) -> Val:
    """The first column of each of the parts, the second of each, and so on, as many as the matrix has."""
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
    """Some rows as matrices of as many columns as a row has bytes.

    The first is of the first numbers in each byte. The next has the second ones 2^bits times added, and so on up to
    the whole byte: what is above is masked out, and nothing needs to be shifted.
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
    """What is of some blocks, of something that has an entry for each."""
    return x if x.shape[0] == len(blocks) else _slice(op, x, 0, blocks)


def _zeros(op: Op, w: Packed, blocks: range, place: int) -> Val:
    """The zero points of some blocks, at each place of a byte up to one; constant, and computed in advance."""
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
