"""Add rows to the rows of a table at indices that may repeat, as in the gradient of a Gather and in graph networks.

The index of the table's row to which a row is added is called its place. onnxruntime has no operator for this sum that
is both correct and fast. Its ScatterND(add) loses updates with two threads. Its ScatterElements(add) adds one element
at a time on one thread. A matrix product uses all threads. The rows are therefore sorted by their places and split into
blocks. Each block is multiplied by a small matrix of zeros and ones, which adds up the rows of each place. A graph
network gathers rows along its edges and then adds them up. For this case, a faster way gathers the rows in the order of
their places, so that the gathered rows need not be stored.
"""

from __future__ import annotations

from functools import reduce
from operator import mul

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import HALVES, MAX_INT64

ONE_HOT = 64
"""Largest number of rows of a table for which the sum is computed as one product with a one-hot matrix.

For 8,192 rows of 768, this takes 0.6 times as long as sorted blocks at 32 places, equally long at 64, and 1.6 times as
long at 128 (one thread).
"""

MIN_SORTED_ROW, MIN_SORTED_ELEMENTS = 64, 2**16
"""Rows are sorted if a row has at least MIN_SORTED_ROW elements, and rows and table together MIN_SORTED_ELEMENTS.

Times of sorted blocks relative to the faster of the two ways to use ScatterElements, with one thread:

- 8,192 rows of 768 into 30,522: 0.25
- 1,024 rows of 768 into 30,522: 0.35
- 256 rows of 768 into 50,257: 0.37
- 4,096 rows of 768 into 1,000: 0.4
- 4,096 rows of 128 into 30,522: 0.3
- 2,048 rows of 64 into 1,000: 0.7
- 32,768 rows of 64 into 4,096: 1.1, or 0.85 if two sums share the sorted places

Below these limits, sorted blocks are slower:

- 32 rows of 64 into 1,000: 1.15
- 65,536 rows of 32 into 4,096: 1.5
- 1,024 rows of 16 into 50,000: 2
"""

BLOCK = 23
"""Number of rows in a sorted block. Numbers from 15 to 35 take about the same time.

The product of a block has one row more, 24, which is a multiple of the number of floats that a processor handles at
once.
"""

MAX_ROW_RATIO, TYPICAL = 4, 1024
"""Largest ratio of a table's rows to the added rows with which both are flattened for ScatterElements.

An unknown number of rows counts as TYPICAL. Times relative to ScatterElements without flattening, with two threads:
0.25 for 16,384 rows of 64 into 1,000, and 0.93 for 131,072 rows of 32 into 32,768. For 1,024 rows of 64 into 100,000 it
would be 1.7.
"""

FAR = 2**62


def added(op: Op, zeros: Val, places: Val, g: Val, axis: int = 0) -> Val:
    """Add `g` to `zeros` by ScatterElements. 16-bit floats are added in float32, because their CPU kernel fails."""
    return op.cast(op.ScatterElements(op.wide(zeros), places, op.wide(g), axis=axis, reduction="add"), zeros)


def add_rows(op: Op, zeros: Val, g: Val, rows: Val, axis: int, shared: bool = False) -> Val:
    """Return `zeros` with the i-th slice of `g` along `axis` added at index rows[i] of that axis.

    The result is correct for repeated indices and any number of threads. Before opset 16, ScatterElements can't add, so
    a product with a one-hot matrix is used.

    Args:
        op: the emitter.
        zeros: the table of zeros, in the shape of the result.
        g: the slices to add.
        rows: for each slice, the index at which it is added; a negative index counts from the end.
        axis: the axis along which the slices are counted.
        shared: True if the result will be added to another tensor. For few rows, one ScatterElements then computes both
            sums.
    """
    size = op.size(zeros, axis)
    count = rows.shape[0]
    if count == 0:
        return zeros
    # onnxruntime returns garbage for a batch of products with an inner size of 0
    safe = isinstance(count, int) or not 0 < axis < g.rank - 1
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
    """Return the name of the fastest way to add `count` rows to a table, unless the user or the target prefers another.

    Returns:
        "gathered" (gather the rows again), "sorted" (products of sorted blocks), "flat" (ScatterElements on flat
        tensors) or "expanded" (ScatterElements with indices expanded to the shape of the rows).
    """
    form, width = "flat" if suits_flat(table, count) else "expanded", _row_width(table)
    if gathered and suits_gathered(table, gathered[0], count):
        return op.variant("row sums", ("gathered", "sorted", form), "gathered")
    if width < MIN_SORTED_ROW or 0 in table.shape or (shared and form == "expanded"):
        return form
    large = (_number(count) + _number(table.shape[0])) * width >= MIN_SORTED_ELEMENTS
    return op.variant("row sums", ("sorted", form), "sorted" if large else form)


def _row_width(table: Val) -> int:
    """Return the number of elements of a row of `table`, or 0 if it is unknown."""
    sizes = table.shape[1:]
    return reduce(mul, (size if isinstance(size, int) else 0 for size in sizes), 1)


def _number(size: int | str) -> int:
    return size if isinstance(size, int) else TYPICAL


def suits_flat(table: Val, count: int | str) -> bool:
    """Return True if ScatterElements adds `count` rows to a table faster after flattening both, as `add_flat` does."""
    return table.rank > 1 and _number(table.shape[0]) <= MAX_ROW_RATIO * _number(count)


def add_flat(op: Op, table: Val, g: Val, rows: Val) -> Val:
    """Add the rows of `g` to rows of `table` by ScatterElements(add) on flat tensors, in the order of the rows."""
    sizes = op.sizes(table)
    width = reduce(mul, sizes[1:])
    places = op.unsqueeze(op.cast(rows, TensorProto.INT64) * width, [1]) + op.steps(width)
    flat, places, g = (op.reshape(v, [-1]) for v in (table, places, g))
    return op.state(op.reshape(added(op, flat, places, g), sizes), table.shape)


def suits_gathered(table: Val, source: Val, count: int | str) -> bool:
    """Return True if `sum_gathered` is the fastest form for adding `count` rows from `source` to a table.

    Times of forward and backward with one thread, relative to the other forms: 0.4 for 32,768 rows of 128 into 4,096,
    0.7 for rows of 64, and 1 for 2,048 rows of 64 into 512. It would be 1.2 for 512 rows of 64 into 128, and 1.4 for
    32,768 rows of 32 into 4,096.
    """
    width = _row_width(table)
    large = (_number(count) + _number(table.shape[0])) * width >= MIN_SORTED_ELEMENTS
    matrices = table.rank == source.rank == 2 and table.shape[1] == source.shape[1]
    return matrices and width >= MIN_SORTED_ROW and large and suits_flat(source, count) and suits_flat(table, count)


def sum_gathered(op: Op, table: Val, source: Val, picks: Val, rows: Val) -> Val:
    """For each i, add row `picks[i]` of `source` to row `rows[i]` of the result, which starts at zero.

    This is the product of a sparse matrix of ones with `source`. The pairs (pick, row) are sorted by row and split into
    chunks. All pairs of a chunk have the same row. A chunk has at most the average number of pairs per row. The picked
    rows of a chunk are gathered, padded with zeros and summed. If a row has several chunks, their sums are added to the
    sum of its first chunk.

    Args:
        op: the emitter.
        table: a tensor in the shape of the result, [P, width].
        source: the tensor whose rows are added, [S, width].
        picks, rows: int64 or int32 vectors of equal length; negative entries count from the end.

    Returns:
        [P, width], in float32 for 16-bit floats.
    """
    size, count, width = _size(op, table), op.vector([op.size(rows, 0)]), _row_width(table)
    rows, picks = _from_begin(op, rows, size), _from_begin(op, picks, op.size(source, 0))
    places, order, rank, begins, longest = _chunks(op, rows, count)
    within = op.Range(op.const(0), op.squeeze(longest, [0]), op.const(1))
    members = op.unsqueeze(begins, [1]) + within
    ends = op.unsqueeze(op.Concat(_window(op, begins, 1, MAX_INT64), count, axis=0), [1])
    picks = op.Concat(op.Gather(picks + 1, order), op.Expand(op.ints([0]), longest), axis=0)  # row 0 is zero
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
    """Return indices counted from the start. Invalid negative indices become so large that kernels raise an error."""
    indices = op.cast(indices, TensorProto.INT64)
    indices = op.Where(indices < 0, indices + size, indices)
    return op.Where(indices < 0, op.const(FAR), indices)


def _chunks(op: Op, places: Val, count: Val) -> tuple[Val, Val, Val, Val, Val]:
    """Sort the places, and split the sorted places into chunks of equal places.

    Returns:
        1. The places in ascending order.
        2. The position of each place before sorting.
        3. The position of each sorted place among the places that are equal to it, from 0.
        4. The position at which each chunk begins among the sorted places.
        5. The length of the longest chunk, as a vector of one element.
    """
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
    if axis == g.rank - 1:  # g is the left operand: onnxruntime does not return zeros if an empty g is on the right
        hot = op.cast(op.Equal(op.unsqueeze(rows, [1]), every), g)
        return op.state(op.MatMul(g, hot), zeros.shape)
    hot = op.cast(op.Equal(op.unsqueeze(every, [1]), rows), g)
    if g.rank - axis > 2:
        sizes = op.sizes(g)
        g = op.reshape(g, [*sizes[: axis + 1], reduce(mul, sizes[axis + 1 :])])
        return op.reshape_like(op.MatMul(hot, g), zeros)
    return op.state(op.MatMul(hot, g), zeros.shape)


def _sorted_product(op: Op, zeros: Val, g: Val, rows: Val, width: int) -> Val:
    """Sort the rows by place, add up the rows of each place within a block, then add these sums over the blocks.

    A place is the index of a row in the result. Each block is multiplied by a matrix of zeros and ones. Row 0 of the
    product is zero, and the rows from 1 on hold the sums, one for each place in the block. A place without any rows
    takes row 0 of the first block as its sum. If the rows of a place continue in a later block, the first sum of that
    block is added to the place's sum in the block where its rows begin. If a number is not finite, other numbers of its
    block become NaN, because the number is multiplied by zeros.
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

    heads_begin = op.unsqueeze(_window(op, begins, 0, MAX_INT64, BLOCK), [1])
    going_on = op.Where(heads_begin, op.const(0.0, g), op.squeeze(op.Slice(sums, *map(op.ints, ([1], [2], [1]))), [1]))
    to = op.Gather(firsts, _window(op, places, 0, MAX_INT64, BLOCK))
    sums = add_flat(op, op.Reshape(sums, op.ints([-1, width])), going_on, to)
    result = op.Gather(sums, _window(op, firsts, 0, -1), axis=0)
    return op.reshape_like(op.cast(result, zeros), zeros)


def _size(op: Op, table: Val) -> int | Val:
    """Return the number of rows of a table.

    If an input of the graph has an axis with the same symbol, the size is read from that input. Several sums then read
    the same value, and can share the sorted places.
    """
    symbol = table.shape[0]
    for name in op.graph.input_names if isinstance(symbol, str) and symbol != "?" else ():
        given = op.val(name)
        if symbol in (given.known_shape or ()):
            return op.dim(given, given.shape.index(symbol))
    return op.size(table, 0)


def _in_blocks(op: Op, g: Val, rows: Val, size: int | Val) -> tuple[Val, Val, Val]:
    """Sort rows by their places, and append entries so that the last block is full.

    The appended entries have the place `size`, after the last one, and repeat a row of `g`. If the number of rows is
    known only at run time, there may be no row to repeat. Then a row of zeros is appended to `g`, and the entries use
    it.

    Returns:
        The rows, their places in ascending order, and the position of each sorted row in `g`.
    """
    count = op.size(rows, 0)
    spare: int | Val
    left: int | Val
    places = op.Where(rows < 0, rows + size, rows)  # instead of Mod, which fails on zero rows
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
