"""Nodes for all rows of a Jacobian at once: what depends on the row has one axis more, in front.

Each operator says in a line or two how it is written then. Where one is not in the table, or stands in a form that is
not covered, nothing is written, and the caller loops over the rows instead.
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
from onnxgrad_cli.ir.nodes import attributes_of, captured, reads
from onnxgrad_cli.ir.types import Shape


class NotVectorized(Exception):
    """A node can't be written for all rows at once."""


def vectorized(op: Op, nodes: Sequence[Node], rows: Mapping[str, Val], names: Sequence[str]) -> list[Val] | None:
    """Emit nodes once for many values of what they read.

    Args:
        op: where they are written.
        nodes: the nodes, in order, that depend on `rows`.
        rows: value -> all that it takes, stacked on axis 0; at least one.
        names: the results that are asked for.

    Returns:
        For each of `names` its values for all rows, stacked on axis 0. None, and nothing is written, where a node has
        no such form.
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
    """The nodes whose results depend on one of these values, and the others."""
    reached = set(names)
    dependent: list[Node] = []
    others: list[Node] = []
    for node in nodes:
        depends = not reached.isdisjoint(reads(node))
        (dependent if depends else others).append(node)
        reached.update(node.output if depends else ())
    return dependent, others


class _Vectorizer:
    """The values written so far, and operands in the forms that the table asks for.

    Attributes:
        op: where they are written.
        count: how many rows there are.
        rows: the values that depend on the row, for all rows.
        others: values that were computed from the shape of one that does.
    """

    def __init__(self, op: Op, rows: dict[str, Val]) -> None:
        self.op = op
        first = next(iter(rows.values()))
        self.count = op.size(first, 0)
        self.leading = first.shape[:1]
        self.rows = rows
        self.others: dict[str, Val] = {}

    def write(self, node: Node) -> None:
        """Emit a node for all rows, or once where it depends on none; NotVectorized where there is no form."""
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
        """The shape of a value for all rows, sizes that are not known as symbols."""
        return (*self.leading, *self.get(name).shape[name in self.rows :])

    def emit(self, node: Node, *inputs: Val | None, **attributes: Any) -> Any:
        """The same operator on other operands."""
        return self.op.emit(node.op_type, *inputs, outputs=len(node.output), domain=node.domain, **attributes)

    def get(self, name: str) -> Val:
        """A value, for all rows where it depends on the row."""
        return self.rows.get(name) or self.others.get(name) or self.op.val(name)

    def rank(self, name: str) -> int:
        """The rank of a value for one row."""
        return self.get(name).rank - (name in self.rows)

    def sizes(self, name: str) -> list[int | Val]:
        """The shape of a value for one row."""
        x = self.get(name)
        return [self.op.size(x, axis) for axis in range(name in self.rows, x.rank)]

    def aligned(self, name: str, rank: int) -> Val:
        """A value that broadcasts with others of up to `rank` axes a row, and with their rows."""
        missing = rank - self.rank(name) if name in self.rows else 0
        return self.op.unsqueeze(self.get(name), range(1, 1 + missing))

    def full(self, name: str) -> Val:
        """A value for all rows, whether it depends on the row or not."""
        x = self.get(name)
        if name in self.rows:
            return x
        return self.op.Expand(x, self.op.vector([self.count, *[1] * x.rank]), shape=self.shape(name))

    def fixed(self, names: Iterable[str]) -> list[Val | None]:
        """Operands that must not depend on the row."""
        names = list(names)
        if not self.rows.keys().isdisjoint(names):
            raise NotVectorized
        return [self.get(name) if name else None for name in names]

    def wanted(self, node: Node) -> list[int | Val]:
        """The shape that is the second operand of a node: its sizes, or itself."""
        (shape,) = self.fixed(node.input[1:])
        assert shape is not None
        return [shape] if shape.const is None else shape.const.tolist()


def _named(node: Node, found: Any) -> dict[str, Val]:
    return dict(zip(node.output, found if isinstance(found, tuple) else (found,), strict=True))


Attributes = dict[str, Any]
Form = Callable[[_Vectorizer, Node, Attributes], Any]


def _behind(axes: Any) -> Any:
    """Axes of a value for one row, where they are for all: an int or an array."""
    return axes + (axes >= 0)


def _elementwise(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    rank = max(v.rank(name) for name in node.input)
    return v.emit(node, *(v.aligned(name, rank) for name in node.input), **attributes)


def _all_along(attribute: str) -> Form:
    """Every operand has the axes that `attribute` counts, and so needs the rows."""

    def write(v: _Vectorizer, node: Node, attributes: Attributes) -> Any:
        moved = {**attributes, attribute: _behind(attributes[attribute])}
        return v.emit(node, *map(v.full, node.input), **moved)

    return write


def _first_along(v: _Vectorizer, node: Node, attributes: Attributes) -> Any:
    """The first operand alone has the axis that is counted, if any is; the others are indices, sizes and such."""
    moved = {name: _behind(value) if name == "axis" else value for name, value in attributes.items()}
    return v.emit(node, v.get(node.input[0]), *v.fixed(node.input[1:]), **moved)


def _axes_at(position: int) -> Form:
    """The axes are an operand; without it, they are as many as the second operand has elements."""

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
    """The first axis of the first operand counts samples, each computed by itself: the rows are more of them."""
    x, *others = node.input
    if x not in v.rows:
        return _filters(v, node, attributes)
    found = v.emit(node, _folded(v, x, v.get(x)), *v.fixed(others), **attributes)
    return _unfolded(v, x, found)


def _folded(v: _Vectorizer, name: str, x: Val) -> Val:
    """`x`, of the shape of a value for all rows, with the rows in that value's first axis."""
    first, *others = v.sizes(name)
    known = isinstance(first, int) and isinstance(v.count, int)
    return v.op.reshape(x, [first * v.count if known else -1, *others])


def _unfolded(v: _Vectorizer, name: str, x: Val) -> Val:
    """`x`, whose first axis holds the rows and that of a value, with an axis for each."""
    return v.op.reshape(x, [v.count, v.sizes(name)[0], *(v.op.size(x, axis) for axis in range(1, x.rank))])


def _filters(v: _Vectorizer, node: Node, attributes: Attributes) -> Val:
    """A convolution with another kernel a row is one with the filters of all; a bias is not a row's."""
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
    """The indices count through all samples, so that a row's start behind those of the rows before it."""
    x, indices, *output_shape = node.input
    space = [size for size in v.op.val(node.output[0]).shape[2:] if isinstance(size, int)]
    if output_shape or len(space) + 2 < v.rank(x):
        raise NotVectorized
    (within,) = v.fixed([indices])
    elements = v.op.ReduceProd(v.op.vector([*v.sizes(x)[:2], *space]), keepdims=0)
    among = within + v.op.steps(v.count, rank=1 + v.rank(x)) * elements
    found = v.emit(node, _folded(v, x, v.get(x)), _folded(v, x, among), **attributes)
    return _unfolded(v, x, found)


def _of(operators: str, form: Form) -> dict[str, Form]:
    return dict.fromkeys(operators.split(), form)


FORMS: Mapping[str, Form] = {
    **_of("Add Cast Div Identity Mean Mul Neg Sub Sum Where", _elementwise),
    **_of("Concat GatherElements ScatterElements", _all_along("axis")),
    **_of("GatherND", _all_along("batch_dims")),
    **_of("Gather Split Trilu", _first_along),
    **_of("CumSum Squeeze Unsqueeze", _axes_at(1)),
    **_of("Slice", _axes_at(3)),
    **_of("ReduceMean ReduceSum", _reduce),
    **_of("AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool SpaceToDepth", _samples),
    **_of("MaxUnpool", _unpool),
    **_of("Einsum", _einsum),
    **_of("Expand", _expand),
    **_of("Gemm", _gemm),
    **_of("MatMul", _matmul),
    **_of("Pad", _pad),
    **_of("Reshape", _reshape),
    **_of("Transpose", _transpose),
}
"""How an operator is written for all rows. Only what is linear in an operand can depend on the row."""
