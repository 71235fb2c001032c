"""All rows of a Jacobian in one run of the model: the vector-Jacobian products of all unit vectors.

The forward values are computed once. What depends on the unit vector is written once for all of them, with an axis of
rows in front, or else as the body of a Scan.
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

LARGEST = 1 << 21
"""Elements, over all rows, of the largest value that is written for all rows at once. Against the Scan, one thread, a
perceptron of 64-128-10: 3.4 times as fast with 80 x 1,024 elements, 1.3 times with 320 x 4,096, 0.9 times with
640 x 8,192; and the Scan holds the result and one row of the rest. A size that is not known counts as one."""


def jacobian(
    op: Op, y: Val, wanted: Sequence[str], training: Differentiation, meetings: Meetings | None = None
) -> list[Val]:
    """Emit the derivatives of every element of `y` with respect to every element of each x of `wanted`.

    Args:
        meetings: given where axis 0 of `y` is that of samples, which are independent, and where they meet the weights
            of `wanted`. What one of `y` has of another's x is zero: a unit vector is taken for all samples at once, and
            those zeros are left out.

    Returns:
        For each x a value of shape [*y, *x]; with `meetings`, of [samples, *y, *x] without the axes 0 of samples.

    Raises:
        UnsupportedError: nodes between them have no proven derivative.
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
    """The values `names`, which `nodes` compute from `seed`, for each unit vector in the shape of `y`, on axis 0.

    If `per_sample`, the unit vectors are those of one sample, each repeated for all of them.
    """
    shape = y.shape[per_sample:]
    known, static = _known_size(shape), all(isinstance(size, int) for size in shape)
    if static and known == 1:  # an axis for it would be lost: onnxruntime drops the axes of a constant 1 in 1 / a * b
        op.rename(op.fill(1.0, y), seed)
        op.nodes.extend(nodes)
        return [op.val(name) for name in names]
    sizes = [op.size(y, axis) for axis in range(per_sample, y.rank)]
    size: int | Val = known
    if not static:
        size = op.reshape(op.ReduceProd(op.vector(sizes), keepdims=0) if per_sample else op.Size(y), [1])
    # There is always a row: onnxruntime can neither loop over none nor multiply stacks of no matrices.
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
    if known * largest <= LARGEST:
        found = vectorized(op, nodes, {seed: unit(op, op.unsqueeze(steps, range(1, 1 + y.rank)))}, names)
    found = found or bodies.scan(op, row, [], [steps])[1]
    return found if static else [op.Slice(rows, op.ints([0]), size, op.ints([0])) for rows in found]


def _known_size(shape: Shape | None) -> int:
    """The number of elements, as far as it is known."""
    return math.prod(size for size in shape or () if isinstance(size, int))
