"""Rows added up at places that may repeat: the cotangent of every selection, and what a graph network computes.

onnxruntime has no operator that does this both rightly and fast. Its ScatterND(add) loses updates with two threads, its
ScatterElements(add) takes one element at a time on one thread. A matrix product takes all, so rows are sorted by
their places, cut into blocks, and each block is multiplied with a small matrix of zeros and ones that adds up the
rows of one place. Rows that were themselves gathered, as a graph network sends them along its edges, are gathered again
in the order of their places, and are never made.
"""

from __future__ import annotations

from functools import reduce
from operator import mul

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import HALVES

ONE_HOT = 64
"""Up to this many places the sum is a product with the one-hot matrix of all: against sorted blocks, 8,192 rows of 768
take 0.6 of the time at 32 places, the same at 64, 1.6 times as much at 128 (one thread)."""

WIDE, LARGE = 64, 2**16
"""Rows of WIDE numbers and more are sorted, if rows and places together have LARGE numbers. Against the faster of the
forms of ScatterElements, one thread: 0.25 for 8,192 rows of 768 into 30,522, 0.35 for 1,024 of 768 into 30,522, 0.37
for 256 of 768 into 50,257, 0.4 for 4,096 of 768 into 1,000, 0.3 for 4,096 of 128 into 30,522, 0.7 for 2,048 of 64
into 1,000, 1.1 for 32,768 of 64 into 4,096 (0.85 where two sums share the sorted places); but 1.15 for 32 of 64 into
1,000, 1.5 for 65,536 of 32 into 4,096, 2 for 1,024 of 16 into 50,000."""

BLOCK = 23
"""Rows in a block: 15 to 35 take about the same time. The products have one row more, a multiple of what processors
take at a time."""

FEW, TYPICAL = 4, 1024
"""A table of up to FEW times as many rows as are added to it is laid flat for ScatterElements: 0.25 of the time for
16,384 rows of 64 into 1,000, 0.93 for 131,072 of 32 into 32,768; but 1.7 for 1,024 of 64 into 100,000 (two threads).
An unknown number counts as TYPICAL."""

LAST, FAR = 2**63 - 1, 2**62


def added(op: Op, zeros: Val, places: Val, g: Val, axis: int = 0) -> Val:
    """`g` added to `zeros` by ScatterElements, in float32 for the half types: its CPU kernel fails on them."""
    return op.cast(op.ScatterElements(op.wide(zeros), places, op.wide(g), axis=axis, reduction="add"), zeros)


def add_rows(op: Op, zeros: Val, g: Val, rows: Val, axis: int, shared: bool = False) -> Val:
    """`zeros` with the i-th slice of `g` along `axis` added at rows[i]; negative rows count from the end.

    Right with repeated rows at any number of threads. Before opset 16, where ScatterElements does not sum, always a
    one-hot product.

    Args:
        shared: whether the result is to be added to another: of few rows, ScatterElements makes both sums at once.
    """
    size = op.size(zeros, axis)
    count = rows.shape[0]
    if count == 0:
        return zeros
    safe = isinstance(count, int) or not 0 < axis < g.rank - 1  # of no rows onnxruntime makes garbage of a batch
    if op.opset < 16 or (isinstance(size, int) and size <= ONE_HOT and safe):
        return _one_hot_product(op, zeros, g, rows, size, axis)
    gathered = op.gathered(g) if axis == 0 else None
    form = _form(op, zeros, count, shared, gathered) if axis == 0 else "expanded"
    if gathered and form == "gathered":
        source, picks = gathered
        return op.cast(sum_gathered(op, zeros, source, picks, rows), zeros)
    if form == "sorted":
        return _sorted_product(op, zeros, g, rows, _row_width(zeros))
    if form == "flat":
        return add_flat(op, zeros, g, rows)
    places = op.Expand(op.unsqueeze(rows, range(1, g.rank - axis)), op.shape(g))
    return op.scatter(zeros, places, g, axis) if zeros.dtype not in HALVES else added(op, zeros, places, g, axis)


def _form(op: Op, table: Val, count: int | str, shared: bool, gathered: tuple[Val, Val] | None) -> str:
    """How `count` rows are added to a table: as those that they were gathered from, as a product of sorted ones, or by
    ScatterElements, flat or expanded."""
    form, width = "flat" if suits_flat(table, count) else "expanded", _row_width(table)
    if gathered and suits_gathered(table, gathered[0], count):
        return op.variant("row sums", ("gathered", "sorted", form), "gathered")
    if width < WIDE or 0 in table.shape or (shared and form == "expanded"):
        return form
    large = (_number(count) + _number(table.shape[0])) * width >= LARGE
    return op.variant("row sums", ("sorted", form), "sorted" if large else form)


def _row_width(table: Val) -> int:
    """How many numbers a row of `table` has; 0 where that is unknown."""
    sizes = table.shape[1:]
    return reduce(mul, (size if isinstance(size, int) else 0 for size in sizes), 1)


def _number(size: int | str) -> int:
    return size if isinstance(size, int) else TYPICAL


def suits_flat(table: Val, count: int | str) -> bool:
    """Whether `add_flat` is the faster form of ScatterElements to add `count` rows to a table."""
    return table.rank > 1 and _number(table.shape[0]) <= FEW * _number(count)


def add_flat(op: Op, table: Val, g: Val, rows: Val) -> Val:
    """ScatterElements(add) of flat tensors: the rows of `g` added to those of `table`, number by number in order."""
    sizes = [op.size(table, axis) for axis in range(table.rank)]
    width = reduce(mul, sizes[1:])
    places = op.unsqueeze(op.cast(rows, TensorProto.INT64) * width, [1]) + op.steps(width)
    flat, places, g = (op.reshape(v, [-1]) for v in (table, places, g))
    return op.state(op.reshape(added(op, flat, places, g), sizes), table.shape)


def suits_gathered(table: Val, source: Val, count: int | str) -> bool:
    """Whether `sum_gathered` is the fastest form to add `count` rows, gathered from `source`, to a table.

    Against the other forms, forward and backward, one thread: 0.4 for 32,768 rows of 128 into 4,096, 0.7 of 64, 1 for
    2,048 of 64 into 512; but 1.2 for 512 of 64 into 128, 1.4 for 32,768 of 32 into 4,096.
    """
    width = _row_width(table)
    large = (_number(count) + _number(table.shape[0])) * width >= LARGE
    matrices = table.rank == source.rank == 2 and table.shape[1] == source.shape[1]
    return matrices and width >= WIDE and large and suits_flat(source, count) and suits_flat(table, count)


def sum_gathered(op: Op, table: Val, source: Val, picks: Val, rows: Val) -> Val:
    """Sums of gathered rows: place `rows[i]` gets row `picks[i]` of `source`. A sparse matrix of ones times `source`.

    The pairs are sorted by their places and cut into chunks, each of one place and up to as long as a place has rows on
    average. A chunk's rows are gathered, behind them as many zeros as it is short of, and summed. A place takes the sum
    of its first chunk, to which those of its others are added.

    Args:
        table: of as many rows as there are places, [P, width].
        source: what the rows are of, [S, width].
        picks, rows: int64 or int32 vectors of one length; negative ones count from the end.

    Returns:
        [P, width], in float32 for the half types.
    """
    size, count, width = _size(op, table), op.vector([op.size(rows, 0)]), _row_width(table)
    rows, picks = _from_begin(op, rows, size), _from_begin(op, picks, op.size(source, 0))
    places, order, rank, begins, longest = _chunks(op, rows, count)
    within = op.Range(op.const(0), op.squeeze(longest, [0]), op.const(1))
    members = op.unsqueeze(begins, [1]) + within
    ends = op.unsqueeze(op.Concat(_window(op, begins, 1, LAST), count, axis=0), [1])
    picks = op.Concat(op.Gather(picks + 1, order), op.Expand(op.ints([0]), longest), axis=0)  # row 0 is one of zeros
    taken = op.Where(members < ends, op.Gather(picks, members), op.const(0))
    source = op.Concat(op.zeros([1, width], op.wide(source)), op.wide(source), axis=0)
    sums = op.Concat(op.zeros([1, width], source), op.sum(op.Gather(source, taken), [1], keepdims=False), axis=0)

    first = op.Equal(op.Gather(rank, begins), op.const(0))
    firsts, others = (op.squeeze(op.NonZero(each), [0]) for each in (first, op.Not(first)))
    places = op.Gather(places, begins)
    chunk = op.ScatterElements(op.zeros([size], TensorProto.INT64), op.Gather(places, firsts), firsts + 1, axis=0)
    sums = add_flat(op, sums, op.Gather(sums, others + 1), op.Gather(chunk, op.Gather(places, others)))
    return op.reshape_like(op.Gather(sums, chunk, axis=0), table)


def _from_begin(op: Op, indices: Val, size: int | Val) -> Val:
    """Indices that count from the begin; what lies before it is far behind the end, so that a kernel refuses it."""
    indices = op.cast(indices, TensorProto.INT64)
    indices = op.Where(indices < 0, indices + size, indices)
    return op.Where(indices < 0, op.const(FAR), indices)


def _chunks(op: Op, places: Val, count: Val) -> tuple[Val, Val, Val, Val, Val]:
    """The places in ascending order, which ones those are, the number of each among equal ones, where chunks begin, and
    the length of the longest, a vector of one element."""
    places, order = op.TopK(places, count, axis=0, largest=0, outputs=2)
    new = op.Not(op.Equal(places, op.Concat(op.ints([-1]), _window(op, places, 0, -1), axis=0)))
    starts = op.squeeze(op.NonZero(new), [0])
    number = op.CumSum(op.cast(new, TensorProto.INT64), op.const(0))
    rank = op.steps(op.size(order, 0)) - op.Gather(starts, number - 1)
    one, distinct = op.ints([1]), op.Shape(starts)
    longest = op.Max((count + distinct / 2) / op.Max(distinct, one), one)
    begins = op.squeeze(op.NonZero(op.Equal(op.Mod(rank, longest), op.const(0))), [0])
    return places, order, rank, begins, longest


def _one_hot_product(op: Op, zeros: Val, g: Val, rows: Val, size: int | Val, axis: int) -> Val:
    rows, every = op.Mod(rows, size), op.steps(size)
    if axis == g.rank - 1:  # a vector on the left: of one on the right without elements onnxruntime makes no zeros
        hot = op.cast(op.Equal(op.unsqueeze(rows, [1]), every), g)
        return op.state(op.MatMul(g, hot), zeros.shape)
    hot = op.cast(op.Equal(op.unsqueeze(every, [1]), rows), g)
    if g.rank - axis > 2:
        sizes = [op.size(g, a) for a in range(g.rank)]
        g = op.reshape(g, [*sizes[: axis + 1], reduce(mul, sizes[axis + 1 :])])
        return op.reshape_like(op.MatMul(hot, g), zeros)
    return op.state(op.MatMul(hot, g), zeros.shape)


def _sorted_product(op: Op, zeros: Val, g: Val, rows: Val, width: int) -> Val:
    """Sums of rows within blocks of the sorted rows; each place takes its first one, to which the others are added.

    A block's sums are numbered from 1, so that its row 0 is zero: the first of all is what a place without rows
    takes. A block's first sum goes on with the last of the block before where no new place begins there. As in every
    product with zeros, a number that is not finite makes others of its block NaN.
    """
    size = _size(op, zeros)
    g, places, order = _in_blocks(op, op.reshape(op.wide(g), [-1, width]), rows, size)
    begins = op.Not(op.Equal(places, op.Concat(op.ints([-1]), _window(op, places, 0, -1), axis=0)))
    heads = op.const((np.arange(BLOCK) == 0)[None])
    numbers = op.CumSum(op.cast(op.Or(op.Reshape(begins, op.ints([-1, BLOCK])), heads), TensorProto.INT32), op.const(1))
    hot = op.Equal(op.unsqueeze(numbers, [1]), op.const(np.arange(BLOCK + 1, dtype=np.int32)[:, None]))
    taken = op.Reshape(op.Gather(g, order, axis=0), op.ints([-1, BLOCK, width]))
    sums = op.MatMul(op.cast(hot, g), taken)

    blocks = op.steps(op.size(numbers, 0), 0, 2)
    number = op.Reshape(op.cast(numbers, TensorProto.INT64) + blocks * (BLOCK + 1), op.ints([-1]))
    none = op.zeros([size + 1], TensorProto.INT64)
    firsts = op.ScatterElements(none, places, number * op.cast(begins, TensorProto.INT64), axis=0, reduction="add")

    heads_begin = op.unsqueeze(_window(op, begins, 0, LAST, BLOCK), [1])
    going_on = op.Where(heads_begin, op.const(0.0, g), op.squeeze(op.Slice(sums, *map(op.ints, ([1], [2], [1]))), [1]))
    to = op.Gather(firsts, _window(op, places, 0, LAST, BLOCK))
    sums = add_flat(op, op.Reshape(sums, op.ints([-1, width])), going_on, to)
    result = op.Gather(sums, _window(op, firsts, 0, -1), axis=0)
    return op.reshape_like(op.cast(result, zeros), zeros)


def _size(op: Op, table: Val) -> int | Val:
    """How many rows a table has: of a graph's input, where one has its symbol, so that sums share the sorted places."""
    symbol = table.shape[0]
    for name in op.graph.input_names if isinstance(symbol, str) and symbol != "?" else ():
        given = op.val(name)
        if symbol in (given.known_shape or ()):
            return op.dim(given, given.shape.index(symbol))
    return op.size(table, 0)


def _in_blocks(op: Op, g: Val, rows: Val, size: int | Val) -> tuple[Val, Val, Val]:
    """The rows of `g`, their places in ascending order, and which rows those are: as many as fill blocks.

    What fills the last block has the place behind the last one. Where the number of rows is known only at run time
    there may be none, so a row of zeros is appended to be taken instead.
    """
    count = op.size(rows, 0)
    spare: int | Val
    left: int | Val
    places = op.Where(rows < 0, rows + size, rows)  # Mod fails where there are no rows
    places, order = op.TopK(places, op.vector([count]), axis=0, largest=0, outputs=2)
    if isinstance(count, int):
        spare, left = 0, -count % BLOCK
    else:
        spare, left = count, (count / BLOCK + 1) * BLOCK - count
        g = op.Concat(g, op.zeros([1, op.size(g, 1)], g), axis=0)
    if isinstance(left, int) and left == 0:
        return g, places, order
    fill = op.vector([left])
    places = op.Concat(places, op.Expand(op.vector([size]), fill), axis=0)
    return g, places, op.Concat(order, op.Expand(op.vector([spare]), fill), axis=0)


def _window(op: Op, vector: Val, start: int, end: int, step: int = 1) -> Val:
    return op.Slice(vector, op.ints([start]), op.ints([end]), op.ints([0]), op.ints([step]))
