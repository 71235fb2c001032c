"""Compute all rows of a Jacobian in one run of the model. Row i is the vector-Jacobian product of the i-th unit vector.

The forward values are computed once. The nodes that depend on the unit vector are vectorized: they process all unit
vectors at once, on an additional axis 0. If this takes too much memory, they become the body of a Scan over blocks of
rows. If an operator can't be vectorized, they become the body of a Scan over single rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnx import TensorProto

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.derivatives.sample_gradients import Meetings, sample_gradients
from onnxgrad_cli.derivatives.vectorize import NotVectorized, split, vectorized
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape

MAX_VECTORIZED_ELEMENTS = 1 << 21
"""Rows are computed at once only if no value has more elements than this in all of these rows together.

Unknown sizes count as 1. The speed of computing all rows at once was compared with a Scan over single rows, for a
perceptron of 64-128-10 on one thread. It depends on the number of rows and of elements of the largest value in a row:

- 80 rows x 1,024 elements: 3.4 times as fast
- 320 rows x 4,096 elements: 1.3 times as fast
- 640 rows x 8,192 elements: 0.9 times as fast

The Scan needs less memory, because it has only one row of each inner value in memory.
"""


def jacobian(
    op: Op, y: Val, wanted: Sequence[str], training: Differentiation, meetings: Meetings | None = None
) -> list[Val]:
    """Emit the derivatives of every element of `y` with respect to every element of each x in `wanted`.

    Args:
        op: the emitter for the nodes.
        y: the value to differentiate.
        wanted: the names of the values to differentiate with respect to.
        training: the record of the rules used.
        meetings: for derivatives per sample, the nodes that read both samples and weights. Axis 0 of `y` must then be
            the axis of independent samples. One unit vector is used for all samples at once. The derivatives of a
            sample with respect to a different sample are zero, and are omitted.

    Returns:
        For each x a value of shape [*y, *x]. With `meetings` the shape is [samples, *y, *x], where *y and *x do not
        include the axes of samples.

    Raises:
        UnsupportedError: nodes between x and `y` have no proven derivative.
    """
    one, unit = _unit(op, y)
    if meetings is None:
        found = differentiate(op.graph, {y.name: unit}, wanted, one, training)
    else:
        found = sample_gradients(one, {y.name: unit}, wanted, meetings, training)
    names = list(dict.fromkeys(cotangent.name for x in wanted if (cotangent := found[x]) is not None))
    some = names and 0 not in y.shape
    stacked = dict(zip(names, _stack(op, one, unit, y, names, meetings is not None), strict=True)) if some else {}
    derivatives = []
    for x, cotangent in ((op.val(name), found[name]) for name in wanted):
        first = int(meetings is not None and x.name in meetings.axes)
        sizes = [op.size(v, axis) for v, start in ((y, 0), (x, first)) for axis in range(start, v.rank)]
        rows = stacked[cotangent.name] if cotangent and stacked else None
        if rows is not None and meetings is not None:
            rows = rows if rows.rank > x.rank + 1 - first else op.unsqueeze(rows, [0])
            rows = op.transpose(rows, [1, 0, *range(2, rows.rank)])
        rows = op.zeros(sizes, x) if rows is None else op.reshape(rows, sizes)
        derivatives.append(op.state(rows, [*y.shape, *x.shape[first:]]))
    return derivatives


def diagonal(op: Op, y: Val, x: Val, training: Differentiation, per_sample: bool) -> Val | None:
    """Emit the derivative of each element of `y` with respect to the element of `x` at the same position.

    Each row of the Jacobian is reduced to its diagonal element right after it is computed. The memory therefore does
    not grow with the square of the number of elements.

    Args:
        op: the emitter for the nodes.
        y: the value to differentiate, which has the shape of `x`.
        x: the value to differentiate with respect to.
        training: the record of the rules used.
        per_sample: True if axis 0 is the axis of independent samples. One unit vector is then used for all samples.

    Returns:
        A value of the shape of `x`, or None if all derivatives are mathematically zero.

    Raises:
        UnsupportedError: nodes between x and `y` have no proven derivative.
    """
    one, unit = _unit(op, y)
    row = differentiate(op.graph, {y.name: unit}, [x.name], one, training)[x.name]
    if row is None or 0 in x.shape:
        return None
    # A product with the unit vector would be NaN if another element of the row is infinite.
    entries = one.Where(one.cast(unit, TensorProto.BOOL), row, one.const(0.0, x))
    if x.rank > per_sample:
        entries = one.sum(entries, range(per_sample, x.rank), keepdims=False)
    (rows,) = _stack(op, one, unit, y, [entries.name], per_sample, bounded=True)
    if per_sample and rows.rank == 2:
        rows = op.transpose(rows, [1, 0])
    return op.state(op.reshape(rows, [op.size(x, axis) for axis in range(x.rank)]), x.shape)


def _unit(op: Op, y: Val) -> tuple[Op, Val]:
    """Return an emitter and a unit vector shaped like `y`, on which the emitter's nodes depend."""
    seed = op.graph.fresh(f"{y.name}_unit")
    op.graph.types[seed] = op.graph.types[y.name]
    one = Op(op.graph)
    return one, one.val(seed)


def _stack(
    op: Op, one: Op, unit: Val, y: Val, names: Sequence[str], per_sample: bool, bounded: bool = False
) -> list[Val]:
    """Return the values `names` for every unit vector in the shape of `y`, stacked on axis 0.

    The nodes of the emitter `one` compute the values from `unit`. If `per_sample`, a unit vector has the shape of one
    sample of `y` and is repeated for all samples. If `bounded`, sizes that are known only at run time also limit the
    number of rows that are computed at once. This saves memory if the results are smaller than the inner values of the
    nodes.
    """
    seed = unit.name
    nodes, invariant = split(one.nodes, [seed])
    op.nodes.extend(invariant)
    shape = y.shape[per_sample:]
    known, static = _known_size(shape), all(isinstance(size, int) for size in shape)
    if static and known == 1:  # no axis of size 1: onnxruntime drops the axes of a constant 1 in 1 / a * b
        op.rename(op.fill(1.0, y), seed)
        op.nodes.extend(nodes)
        return [op.val(name) for name in names]
    sizes = [op.size(y, axis) for axis in range(per_sample, y.rank)]
    size: int | Val = known
    if not static:
        size = op.reshape(op.ReduceProd(op.vector(sizes), keepdims=0) if per_sample else op.Size(y), [1])
    # At least one row is computed: onnxruntime can't run loops of zero iterations or multiply empty stacks of matrices.
    steps = op.steps(known if static else op.Max(size, op.ints([1])))
    each = op.expand_like(op.reshape(op.steps(size), sizes), y) if per_sample else None
    positions = each or op.reshape_like(op.steps(size), y)

    def unit_at(op: Op, position: Val) -> Val:
        return op.cast(op.Equal(positions, position), y)

    def row(inner: Op, states: Sequence[Val], at: Sequence[Val]) -> tuple[list[Val], list[Val]]:
        inner.rename(unit_at(inner, at[0]), seed)
        inner.nodes.extend(nodes)
        return [], [inner.val(name) for name in names]

    found = None
    largest = max((_known_size(op.val(name).known_shape) for node in nodes for name in node.output), default=1)
    most = MAX_VECTORIZED_ELEMENTS // largest
    if known <= most and not (bounded and _has_unknown_size(y)):
        found = vectorized(op, nodes, {seed: unit_at(op, op.unsqueeze(steps, range(1, 1 + y.rank)))}, names)
    elif most > 1:
        found = _in_blocks(op, nodes, seed, unit_at, names, steps, y, most)
    found = found or bodies.scan(op, row, [], [steps])[1]
    return found if static else [op.Slice(rows, op.ints([0]), size, op.ints([0])) for rows in found]


def _in_blocks(
    op: Op, nodes: Sequence[Node], seed: str, unit: Callable[[Op, Val], Val], names: Sequence[str], steps: Val, y: Val,
    most: int,
) -> list[Val] | None:  # fmt: skip
    """Emit a Scan that computes a block of rows in each step. Return None if `nodes` can't be vectorized.

    Args:
        op, names, y: as in `_stack`.
        nodes: the nodes that compute the values from the unit vector, which is the value named `seed`.
        unit: a function that returns the unit vectors for positions.
        steps: the positions of all rows.
        most: the maximum number of rows in a block. Unknown sizes count as 1 here. At run time, the maximum is divided
            by the product of the unknown sizes of `y`.
    """
    count = op.size(steps, 0)
    length: int | Val
    block: int | Val
    if isinstance(count, int) and not _has_unknown_size(y):
        block = -(-count // -(-count // most))  # blocks of nearly equal size, so that few rows are computed in vain
        length = -(-count // block) * block
    else:
        one, rows = op.ints([1]), op.vector([count])
        unknown = op.reshape(op.Size(y), [1]) / _known_size(y.shape)
        limit = op.Max(op.Min(op.ints([most]) / op.Max(unknown, one), rows), one)
        blocks = (rows + limit - one) / limit
        block = (rows + blocks - one) / blocks
        length = blocks * block
    positions = op.reshape(op.steps(length), [-1, block])

    def step(inner: Op, states: Sequence[Val], at: Sequence[Val]) -> tuple[list[Val], list[Val]]:
        units = unit(inner, inner.unsqueeze(at[0], range(1, 1 + y.rank)))
        found = vectorized(inner, nodes, {seed: units}, names)
        if found is None:
            raise NotVectorized
        return [], found

    try:
        stacked = bodies.scan(op, step, [], [positions])[1]
    except NotVectorized:
        return None
    flat = [op.reshape(rows, [-1, *(op.size(rows, axis) for axis in range(2, rows.rank))]) for rows in stacked]
    if length == count:
        return flat
    return [op.Slice(rows, op.ints([0]), op.vector([count]), op.ints([0])) for rows in flat]


def _has_unknown_size(x: Val) -> bool:
    return not all(isinstance(size, int) for size in x.shape)


def _known_size(shape: Shape | None) -> int:
    """Return the product of the known sizes in a shape."""
    return math.prod(size for size in shape or () if isinstance(size, int))
