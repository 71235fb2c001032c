"""G W in the backward part, for a matrix W of few bits, which is unpacked a piece at a time, and late.

Nothing is shifted, and numbers that share a byte are never put side by side: each place in a byte is a matrix of its
own, whose product has those columns of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from onnxgrad_cli.autodiff.definitions.contrib import unpacked
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.passes.control import zero_after

PIECE = 2**19
"""How many numbers of each place in a byte are unpacked at a time: what is in memory as floats, once for each place.

Of the time of the matrix as a whole (8 products of 2048 x 2048 by 8 rows, one thread) 2^20 take 0.9, 2^19 and 2^18
0.75; with less, the nodes take more memory than the floats.
"""


@dataclass(frozen=True)
class Packed:
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
    def of(op: Op, node: NodeProto) -> Packed:
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

    @property
    def blocks(self) -> int:
        """How many a row has."""
        return -(-self.columns // self.size)


def late_product(op: Op, g: Val, w: Packed) -> Val:
    """G W, where W is unpacked when G has come, and one piece of it when the product of the one before is done."""
    sums: list[Val] = []
    step = max(1, PIECE * w.places // (w.blocks * w.size))
    for start in range(0, w.rows, step):
        rows = range(start, min(start + step, w.rows))
        own = g if len(rows) == w.rows else _slice(op, g, g.rank - 1, rows)
        products = [own @ matrix for matrix in _matrices(op, w, rows, sums[-1] if sums else g, g)]
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


def _matrices(op: Op, w: Packed, rows: range, after: Val, like: Val) -> Iterator[Val]:
    """Some rows as matrices of as many columns as a row has bytes, unpacked when `after` has come.

    The first is of the first numbers in each byte. The next has the second ones 2^bits times added, and so on up to
    the whole byte: what is above is masked out, and nothing needs to be shifted.
    """
    zero, all_blocks = zero_after(op, [after]), w.rows * w.blocks
    blocks, width = range(rows.start * w.blocks, rows.stop * w.blocks), w.size // w.places

    def late(x: Val, sizes: list[int]) -> Val:
        """The part of something stored that is of these rows."""
        whole = op.Reshape(x, op.ints([all_blocks, *sizes]) + zero, shape=[all_blocks, *sizes])
        return whole if len(rows) == w.rows else _slice(op, whole, 0, blocks)

    numbers, scales = late(w.bytes, [width]), late(w.scales, [])
    exact = w.zeros is None or w.zeros.dtype == TensorProto.UINT8
    zeros, shift = None, late(w.zeros, []) * scales if w.zeros is not None and not exact else None
    for place in range(w.places):
        below = w.bits * (place + 1)
        steps = numbers if below == 8 else op.BitwiseAnd(numbers, op.const(2**below - 1, numbers))
        if exact:
            zeros = _zeros(op, w, blocks, place)
        values = op.DequantizeLinear(steps, scales, zeros, axis=0)
        if shift is not None:
            values = values - op.unsqueeze(shift, [1]) * float((2**below - 1) // (2**w.bits - 1))
        yield op.cast(op.reshape(values, [len(rows), w.blocks * width]), like)


def _zeros(op: Op, w: Packed, blocks: range, place: int) -> Val:
    """The zero points of some blocks, at each place of a byte up to one; constant, and computed in advance."""
    if w.zeros is None:
        middle = 2 ** (w.bits - 1) * (2 ** (w.bits * (place + 1)) - 1) // (2**w.bits - 1)
        value = numpy_helper.from_array(np.array([middle], np.uint8))
        return op.ConstantOfShape(op.ints([len(blocks)]), value=value, shape=[len(blocks)])
    each = unpacked(op, op.reshape(w.zeros, [w.rows, -1]), w.bits, [w.rows, -1], w.blocks)
    each = op.reshape(each, [w.rows * w.blocks])
    own = each if len(blocks) == w.rows * w.blocks else _slice(op, each, 0, blocks)
    zeros = own
    for _ in range(place):
        zeros = op.BitwiseOr(op.BitShift(zeros, op.const(w.bits, zeros), direction="LEFT"), own)
    return zeros
