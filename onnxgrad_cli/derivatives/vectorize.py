"""Rewrite nodes so that they compute all rows of a Jacobian at once, like vmap in JAX and PyTorch.

A row stands for one of many runs of the nodes. Values that depend on the row get a leading axis of rows. The table
`FORMS` has a short function for each supported operator. If an operator is not in the table, or has attributes or
operands that its function does not cover, nothing is written, and the caller loops over the rows instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_letters
from typing import Any

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.node import FORWARD, Node, metadata_of
from onnxgrad_cli.ir.node_values import attributes_of, captured, reads
from onnxgrad_cli.ir.types import Shape


class NotVectorized(Exception):
    """Raised if a node can't be written for all rows at once."""


def vectorized(op: Op, nodes: Sequence[Node], rows: Mapping[str, Val], names: Sequence[str]) -> list[Val] | None:
    """Emit nodes once so that they compute their results for many rows of the values that they read.

    Args:
        op: the emitter that the nodes are written to.
        nodes: the nodes that depend on `rows`, in order.
        rows: value -> its rows, stacked on axis 0. There is at least one value.
        names: the requested results.

    Returns:
        For each of `names`, its values for all rows, stacked on axis 0. If a node can't be written for all rows,
        nothing is emitted and None is returned.
    """
    trial = Op(op.graph)
    trial.role = op.role
    vectorizer = _Vectorizer(trial, {name: trial.val(stack.name) for name, stack in rows.items()})
    try:
        for node in nodes:
            vectorizer.write(node)
        found = [vectorizer.full(name) for name in names]
    except (NotVectorized, Unknown):
        return None
    op.nodes.extend(trial.nodes)
    return [op.val(value.name) for value in found]


def split(nodes: Sequence[Node], names: Iterable[str]) -> tuple[list[Node], list[Node]]:
    """Return the nodes whose results depend on one of the values `names`, and the remaining nodes."""
    reached = set(names)
    dependent: list[Node] = []
    others: list[Node] = []
    for node in nodes:
        depends = not reached.isdisjoint(reads(node))
        (dependent if depends else others).append(node)
        reached.update(node.output if depends else ())
    return dependent, others


class _Vectorizer:
    """Writes nodes for all rows, and gives the functions in `FORMS` their operands.

    Attributes:
        op: the emitter.
        count: the number of rows.
        leading: the shape of the axis of rows, a number or a symbol.
        rows: original name of a value that depends on the row -> the value for all rows.
        others: original name of a value that doesn't depend on the row -> the new value, such as the shape of a single
            row.
    """

    def __init__(self, op: Op, rows: dict[str, Val]) -> None:
        self.op = op
        first = next(iter(rows.values()))
        self.count = op.size(first, 0)
        self.leading = first.shape[:1]
        self.rows = rows
        self.others: dict[str, Val] = {}

    def write(self, node: Node) -> None:
        """Emit a node for all rows, or once if it doesn't depend on the row.

        Raises:
            NotVectorized: the node can't be written for all rows.
        """
        op = self.op
        op.scope = node.name.rpartition("/")[0]
        op.forward = metadata_of(node, FORWARD)
        given = attributes_of(node)
        attributes = {**op.attributes(node.op_type, node.domain), **given}
        if captured(node):
            raise NotVectorized
        if node.op_type == "Shape":
            part = slice(given.get("start"), given.get("end"))
            self.others[node.output[0]] = op.vector(self.sizes(node.input[0])[part])
        elif self.rows.keys().isdisjoint(node.input):
            self.others.update(_named(node, self.emit(node, *self.fixed(node.input), **given)))
        elif node.op_type in FORMS and not node.domain:
            found = _named(node, FORMS[node.op_type](self, node, attributes))
            self.rows.update((name, op.state(value, self.shape(name))) for name, value in found.items())
        else:
            raise NotVectorized

    def shape(self, name: str) -> Shape:
        """Return the shape of a value for all rows, with symbols for unknown sizes."""
        return (*self.leading, *self.get(name).shape[name in self.rows :])

    def emit(self, node: Node, *inputs: Val | None, **attributes: Any) -> Any:
        """Emit the operator of a node with these operands instead of the node's own."""
        return self.op.emit(node.op_type, *inputs, outputs=len(node.output), domain=node.domain, **attributes)

    def get(self, name: str) -> Val:
        """Return a value: for all rows if it depends on the row, otherwise the value itself."""
        return self.rows.get(name) or self.others.get(name) or self.op.val(name)

    def rank(self, name: str) -> int:
        """Return the rank of a value for a single row."""
        return self.get(name).rank - (name in self.rows)

    def sizes(self, name: str) -> list[int | Val]:
        """Return the shape of a value for a single row."""
        x = self.get(name)
        return [self.op.size(x, axis) for axis in range(name in self.rows, x.rank)]

    def aligned(self, name: str, rank: int) -> Val:
        """Insert axes into a value so that it broadcasts, row by row, with values of up to `rank` axes per row."""
        missing = rank - self.rank(name) if name in self.rows else 0
        return self.op.unsqueeze(self.get(name), range(1, 1 + missing))

    def full(self, name: str) -> Val:
        """Return a value for all rows. A value that doesn't depend on the row is repeated."""
        x = self.get(name)
        if name in self.rows:
            return x
        return self.op.Expand(x, self.op.vector([self.count, *[1] * x.rank]), shape=self.shape(name))

    def fixed(self, names: Iterable[str]) -> list[Val | None]:
        """Return operands that must not depend on the row.

        Raises:
            NotVectorized: an operand depends on the row.
        """
        names = list(names)
        if not self.rows.keys().isdisjoint(names):
            raise NotVectorized
        return [self.get(name) if name else None for name in names]

    def wanted(self, node: Node) -> list[int | Val]:
        """Return the sizes in the second operand of a node if they are constant, otherwise the operand in a list."""
        (shape,) = self.fixed(node.input[1:])
        assert shape is not None
        return [shape] if shape.const is None else shape.const.tolist()


def _named(node: Node, found: Any) -> dict[str, Val]:
    return dict(zip(node.output, found if isinstance(found, tuple) else (found,), strict=True))


Attributes = dict[str, Any]
Form = Callable[[_Vectorizer, Node, Attributes], Any]
"""A function that writes a node for all rows and returns its result, or a tuple of its results."""


def _behind(axes: Any) -> Any:
    """Convert axes of a value for a single row to axes of the value for all rows. Axes are an int or an array."""
    return axes + (axes >= 0)


def _elementwise(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    rank = max(v.rank(name) for name in node.input)
    return v.emit(node, *(v.aligned(name, rank) for name in node.input), **attributes)


def _all_along(attribute: str) -> Form:
    """Return a `Form` for operators such as Concat, where `attribute` gives an axis that all operands have."""

    def write(v: _Vectorizer, node: Node, attributes: Attributes) -> Any:
        moved = {**attributes, attribute: _behind(attributes[attribute])}
        return v.emit(node, *map(v.full, node.input), **moved)

    return write


def _first_along(v: _Vectorizer, node: Node, attributes: Attributes) -> Any:
    """Write an operator of which only the first operand may depend on the row.

    If the operator has an attribute `axis`, it is an axis of that operand.
    """
    moved = {name: _behind(value) if name == "axis" else value for name, value in attributes.items()}
    return v.emit(node, v.get(node.input[0]), *v.fixed(node.input[1:]), **moved)


def _axes_at(position: int) -> Form:
    """Return a `Form` for operators such as Slice, whose operand at `position` lists axes of the first operand.

    If the list is absent, the axes are 0 to n - 1, where n is the number of elements of the second operand.
    """

    def write(v: _Vectorizer, node: Node, attributes: Attributes) -> Any:
        others = [*v.fixed(node.input[1:]), *[None] * position]
        if others[0] is None:
            raise NotVectorized
        given = others[position - 1]
        axes = np.arange(others[0].shape[0]) if given is None else given.const
        if axes is None:
            raise NotVectorized
        others[position - 1] = v.op.const(_behind(axes))
        return v.emit(node, v.get(node.input[0]), *others, **attributes)

    return write


def _reduce(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    x, others = v.get(node.input[0]), v.fixed(node.input[1:])
    axes = others[0].const if others and others[0] is not None else np.asarray(attributes.get("axes") or (), np.int64)
    if axes is None or (not axes.size and attributes.get("noop_with_empty_axes")):
        raise NotVectorized
    return v.op.reduce(node.op_type, x, _behind(axes).tolist() or range(1, x.rank), bool(attributes["keepdims"]))


def _pad(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    if any(node.input[3:]):
        return _axes_at(3)(v, node, attributes)
    pads, *value = v.fixed(node.input[1:3])
    assert pads is not None
    rank = v.rank(node.input[0])
    halves = v.op.split(pads, [rank, rank], 0) if pads.const is None else pads.const.reshape(2, rank).tolist()
    begins, ends = ([half] if isinstance(half, Val) else half for half in halves)
    return v.emit(node, v.get(node.input[0]), v.op.vector([0, *begins, 0, *ends]), *value, **attributes)


def _reshape(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    shape = v.op.vector([v.count, *v.wanted(node)])
    return v.emit(node, v.get(node.input[0]), shape, **attributes, shape=[*v.leading, *v.op.val(node.output[0]).shape])


def _expand(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    wanted, rank = v.wanted(node), v.op.val(node.output[0]).rank
    missing = rank - v.get(node.input[1]).shape[0]  # type: ignore[operator]
    return v.emit(node, v.aligned(node.input[0], rank), v.op.vector([v.count, *[1] * missing, *wanted]))


def _transpose(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    perm = attributes["perm"] or range(v.rank(node.input[0]))[::-1]
    return v.op.transpose(v.get(node.input[0]), [0, *(axis + 1 for axis in perm)])


def _matmul(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    ranks = [v.rank(name) for name in node.input]
    if 1 in ranks and ranks != [1, 2]:
        raise NotVectorized
    left, right = (v.aligned(name, max(ranks)) if min(ranks) > 1 else v.get(name) for name in node.input)
    return left @ right


def _gemm(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    flags = (attributes["transA"], attributes["transB"])
    left, right = (v.op.swap_last(v.get(x)) if flag else v.get(x) for x, flag in zip(node.input, flags, strict=False))
    product = _times(left @ right, attributes["alpha"])
    return product + _times(v.aligned(node.input[2], 2), attributes["beta"]) if any(node.input[2:]) else product


def _times(x: Val, factor: float) -> Val:
    return x if factor == 1 else x * factor


def _einsum(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    terms, arrow, result = attributes["equation"].decode().replace(" ", "").partition("->")
    free = next((letter for letter in ascii_letters if letter not in terms), None)
    if free is None or not arrow:
        raise NotVectorized
    marked = [free * (name in v.rows) + term for name, term in zip(node.input, terms.split(","), strict=True)]
    return v.emit(node, *map(v.get, node.input), equation=f"{','.join(marked)}->{free}{result}")


def _samples(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    """Write an operator that treats the samples on axis 0 of its first operand independently: rows become samples."""
    x, *others = node.input
    if x not in v.rows:
        return _filters(v, node, attributes)
    found = v.emit(node, _folded(v, x, v.get(x)), *v.fixed(others), **attributes)
    return _unfolded(v, x, found)


def _folded(v: _Vectorizer, name: str, x: Val) -> Val:
    """Merge the axis of rows of `x` into the next axis. `x` has the shape of the value `name` for all rows."""
    first, *others = v.sizes(name)
    known = isinstance(first, int) and isinstance(v.count, int)
    return v.op.reshape(x, [first * v.count if known else -1, *others])


def _unfolded(v: _Vectorizer, name: str, x: Val) -> Val:
    """Split the first axis of `x` into the axis of rows and the first axis of the value `name`."""
    return v.op.reshape(x, [v.count, v.sizes(name)[0], *(v.op.size(x, axis) for axis in range(1, x.rank))])


def _filters(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    """Write a convolution whose kernel depends on the row, as one convolution with the filters of all rows.

    A convolution with a bias is not covered.
    """
    image, kernel, *bias = node.input
    count, *others = v.sizes(kernel)
    if node.op_type != "Conv" or bias or not isinstance(count, int):
        raise NotVectorized
    groups = [attributes["group"], v.count, count // attributes["group"]]
    axes = range(3, 2 + v.get(kernel).rank - 1)
    kernels = v.op.transpose(v.op.reshape(v.get(kernel), [v.count, groups[0], groups[2], *others]), [1, 0, 2, *axes])
    (x,) = v.fixed([image])
    found = v.emit(node, x, v.op.reshape(kernels, [-1, *others]), **attributes)
    batch, _, *space = (v.op.size(found, axis) for axis in range(found.rank))
    found = v.op.transpose(v.op.reshape(found, [batch, *groups, *space]), [2, 0, 1, *axes])
    return v.op.reshape(found, [v.count, batch, count, *space])


def _unpool(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    """Write a MaxUnpool. Its indices count elements over all samples, so each row's indices get an offset."""
    x, indices, *output_shape = node.input
    space = [size for size in v.op.val(node.output[0]).shape[2:] if isinstance(size, int)]
    if output_shape or len(space) + 2 < v.rank(x):
        raise NotVectorized
    (within,) = v.fixed([indices])
    elements = v.op.ReduceProd(v.op.vector([*v.sizes(x)[:2], *space]), keepdims=0)
    among = within + v.op.steps(v.count, rank=1 + v.rank(x)) * elements
    found = v.emit(node, _folded(v, x, v.get(x)), _folded(v, x, among), **attributes)
    return _unfolded(v, x, found)


def table(operators: str, form: Any) -> dict[str, Any]:
    """Return a table that maps each of the operators, separated by spaces, to the same function."""
    return dict.fromkeys(operators.split(), form)


FORMS: Mapping[str, Form] = {
    **table("Add Cast Div Identity Mean Mul Neg Sub Sum Where", _elementwise),
    **table("Concat GatherElements ScatterElements", _all_along("axis")),
    **table("GatherND", _all_along("batch_dims")),
    **table("Gather Split Trilu", _first_along),
    **table("CumSum Squeeze Unsqueeze", _axes_at(1)),
    **table("Slice", _axes_at(3)),
    **table("ReduceMean ReduceSum", _reduce),
    **table("AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool SpaceToDepth", _samples),
    **table("MaxUnpool", _unpool),
    **table("Einsum", _einsum),
    **table("Expand", _expand),
    **table("Gemm", _gemm),
    **table("MatMul", _matmul),
    **table("Pad", _pad),
    **table("Reshape", _reshape),
    **table("Transpose", _transpose),
}
"""Operator -> the function that writes it for all rows. An operand that depends on the row must enter linearly."""
