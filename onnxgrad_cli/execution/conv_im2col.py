"""Replace convolutions by matrix products, because onnxruntime has no float64 kernel for Conv.

The elements that each kernel tap multiplies are gathered and laid side by side ("im2col"). One matrix product with the
weight then computes the convolution. The rules for gradients share no code with this module, because its results are
used to check them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import Shape, shape_of

MAX_TAPS = 128
"""A convolution with more kernel taps than this stays as it is, because a node for each tap would take too long."""

FIRST_OPSET = 11
"""The first opset in which Pad and Slice take their sizes as inputs, not as attributes."""

TO_THE_END = np.iinfo(np.int64).max


def unfold_convolutions(model: ModelProto) -> set[str]:
    """Rewrite convolutions as matrix products, in place, if the shape of their weight is known.

    Returns:
        The names of the values that the new nodes compute. Those nodes require opset `FIRST_OPSET`.
    """
    shapes: dict[str, Shape] = {value.name: shape_of(value.type) or () for value in model.graph.input}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes |= _given(model)
    nodes: list[NodeProto] = []
    written: set[str] = set()
    for node in model.graph.node:
        weight = _weight(node, shapes)
        unfolded = _Unfolded(model, node, weight).nodes if weight else []
        written.update(name for each in unfolded for name in each.output)
        nodes += unfolded or [node]
    if written:
        refill(model.graph.node, nodes)
    return written


def _weight(node: NodeProto, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return the shape of a convolution's weight if the convolution is to become a matrix product, otherwise ().

    A convolution stays as it is if the shape of its weight or its padding is known only at run time, or if its kernel
    is large. A depthwise convolution also stays: it is a sum of a few images rather than a matrix product, and
    onnx.reference computes it in a third of the time.
    """
    if node.op_type != "Conv" or not is_standard(node.domain):
        return ()
    given = attributes_of(node)
    padding = given.get("auto_pad", b"NOTSET")
    shape = shapes.get(node.input[1], ()) if padding in (b"NOTSET", b"VALID") else ()
    sizes = tuple(size for size in shape if isinstance(size, int))
    unfolds = len(sizes) == len(shape) and sizes[:2] != (given.get("group", 1), 1)
    return sizes if unfolds and math.prod(sizes[2:]) <= MAX_TAPS else ()


def _given(model: ModelProto) -> dict[str, Shape]:
    """Return a map: output of a Reshape -> its shape, if the shape is stored. Computed weights are often reshaped."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 1}
    views = [node for node in model.graph.node if node.op_type == "Reshape" and node.input[1] in stored]
    found = {node.output[0]: numpy_helper.to_array(stored[node.input[1]]).tolist() for node in views}
    return {name: tuple(shape) for name, shape in found.items() if min(shape, default=1) > 0}


class _Unfolded:
    """Creates the `nodes` that replace one convolution with a weight [M, C/group, *kernel]."""

    def __init__(self, model: ModelProto, node: NodeProto, weight: tuple[int, ...]) -> None:
        self.nodes: list[NodeProto] = []
        self._graph, self._name, given = model.graph, node.output[0], attributes_of(node)
        kernel, rank, groups = weight[2:], len(weight) - 2, given.get("group", 1)
        strides, dilations = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
        image, pads = node.input[0], given.get("pads") or [0] * 2 * rank
        if any(pads):
            image = self._add("Pad", image, self._ints(0, 0, *pads[:rank], 0, 0, *pads[rank:]))
        plain = set(kernel) == set(strides) == {1}
        taps = [image] if plain else [self._tap(image, at, kernel, strides, dilations) for at in np.ndindex(*kernel)]
        beside = [image] if plain else [self._add("Reshape", tap, self._ints(0, 0, 1, -1)) for tap in taps]
        patches = self._add("Concat", *beside, axis=2) if len(beside) > 1 else beside[0]
        head, tail = self._sizes(image, 0, 1), self._sizes(taps[0], 2, TO_THE_END)
        several = (groups,) if groups > 1 else ()
        columns = self._add("Reshape", patches, self._ints(0, *several, math.prod(weight[1:]), -1))
        rows = self._add("Reshape", node.input[1], self._ints(*several, weight[0] // groups, math.prod(weight[1:])))
        shape = self._add("Concat", head, self._ints(weight[0]), tail, axis=0)
        result = self._add("Reshape", self._add("MatMul", rows, columns), shape)
        if len(node.input) > 2 and node.input[2]:
            result = self._add("Add", result, self._add("Reshape", node.input[2], self._ints(-1, *[1] * rank)))
        self.nodes[-1].output[0] = node.output[0]

    def _tap(self, image: str, tap: Sequence[int], *windows: Sequence[int]) -> str:
        """Return the elements that one tap of the kernel multiplies, over all positions of the kernel: [N, C, *out].

        `windows` are the sizes, strides and dilations of the kernel along each axis.
        """
        bounds = []
        for axis, (t, size, stride, dilation) in enumerate(zip(tap, *windows, strict=True), 2):
            bounds.append((t * dilation, (t + 1 - size) * dilation or TO_THE_END, axis, stride))
        return self._add("Slice", image, *(self._ints(*each) for each in zip(*bounds, strict=True)))

    def _sizes(self, x: str, start: int, end: int) -> str:
        return self._add("Slice", self._add("Shape", x), self._ints(start), self._ints(end))

    def _ints(self, *values: int) -> str:
        name = f"{self._name}/constant/{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._name}/{op_type}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name
