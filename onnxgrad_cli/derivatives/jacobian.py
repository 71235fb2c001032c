"""Compute all rows of a Jacobian in one run of the model. Row i is the vector-Jacobian product of the i-th unit vector.

The forward values are computed once. The nodes that depend on the unit vector are written once for all unit vectors,
with a leading axis of rows. If that isn't possible, they become the body of a Scan over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.derivatives.sample_gradients import Meetings, sample_gradients
from onnxgrad_cli.derivatives.vectorize import split, vectorized
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape

MAX_VECTORIZED_ELEMENTS = 1 << 21
"""Rows are computed at once, not in a Scan, if no value then has more elements than this over all rows.

Unknown sizes count as 1. Measured on one thread, for a perceptron of 64-128-10: computing all rows at once is 3.4 times
as fast as the Scan with 80 x 1,024 elements, 1.3 times with 320 x 4,096, and 0.9 times with 640 x 8,192. The Scan needs
less memory: for the result, and for one row of the other values.
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
        meetings: the nodes that read both samples and weights, if axis 0 of `y` is the axis of independent samples. The
            derivatives are then per sample: one unit vector is used for all samples at once, and the blocks of the
            Jacobian between different samples, which are zero, are omitted.

    Returns:
        For each x a value of shape [*y, *x]. With `meetings` the shape is [samples, *y, *x], where y and x are without
        their axes of samples.

    Raises:
        UnsupportedError: nodes between x and `y` have no proven derivative.
    """
    graph, one = op.graph, Op(op.graph)
    seed = graph.fresh(f"{y.name}_unit")
    graph.types[seed] = graph.types[y.name]
    seeds = {y.name: one.val(seed)}
    if meetings is None:
        found = differentiate(graph, seeds, wanted, one, training)
    else:
        found = sample_gradients(one, seeds, wanted, meetings, training)
    names = list(dict.fromkeys(cotangent.name for x in wanted if (cotangent := found[x]) is not None))
    dependent, invariant = split(one.nodes, [seed])
    op.nodes.extend(invariant)
    some = names and 0 not in y.shape
    stacked = dict(zip(names, _stack(op, dependent, seed, y, names, meetings is not None), strict=True)) if some else {}
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


def _stack(op: Op, nodes: Sequence[Node], seed: str, y: Val, names: Sequence[str], per_sample: bool) -> list[Val]:
    """Return the values `names` for every unit vector in the shape of `y`, stacked on axis 0.

    `nodes` compute the values from the unit vector `seed`. If `per_sample`, a unit vector has the shape of one sample
    of `y` and is repeated for all samples.
    """
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
    one = op.expand_like(op.reshape(op.steps(size), sizes), y) if per_sample else None
    positions = one or op.reshape_like(op.steps(size), y)

    def unit(op: Op, position: Val) -> Val:
        return op.cast(op.Equal(positions, position), y)

    def row(inner: Op, states: Sequence[Val], at: Sequence[Val]) -> tuple[list[Val], list[Val]]:
        inner.rename(unit(inner, at[0]), seed)
        inner.nodes.extend(nodes)
        return [], [inner.val(name) for name in names]

    found = None
    largest = max((_known_size(op.val(name).known_shape) for node in nodes for name in node.output), default=1)
    if known * largest <= MAX_VECTORIZED_ELEMENTS:
        found = vectorized(op, nodes, {seed: unit(op, op.unsqueeze(steps, range(1, 1 + y.rank)))}, names)
    found = found or bodies.scan(op, row, [], [steps])[1]
    return found if static else [op.Slice(rows, op.ints([0]), size, op.ints([0])) for rows in found]


def _known_size(shape: Shape | None) -> int:
    """Return the product of the known sizes in a shape."""
    return math.prod(size for size in shape or () if isinstance(size, int))
