"""Convolutions as products of matrices, for float64: onnxruntime has convolutions of float32 alone.

The patches of an image under the kernel are cut out tap by tap and laid side by side ("im2col"), so that a convolution
is one product with them. Nothing of it is shared with the gradients, which are judged by what is computed here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import Shape, shape_of

WIDE = 16
"""Taps along one axis beyond which their positions are gathered at once, instead of slices tap by tap."""

TO_THE_END = np.iinfo(np.int64).max

OPSET = 11
"""The first opset that has the forms written here, of Pad and Slice among others."""


def unfold_convolutions(model: ModelProto) -> set[str]:
    """Write the convolutions of a model whose weights are of known shapes as products, in place; others stay.

    Returns:
        The names of the values that the new nodes compute. Those nodes require `OPSET`.
    """
    shapes: dict[str, Shape] = {value.name: shape_of(value.type) or () for value in model.graph.input}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes |= _given(model)
    if not any(_kernel(node, shapes) for node in model.graph.node):
        return set()
    nodes: list[NodeProto] = []
    written: set[str] = set()
    for node in model.graph.node:
        weight = _kernel(node, shapes)
        unfolded = _Unfolded(model, node, weight).nodes if weight else []
        written.update(name for each in unfolded for name in each.output)
        nodes += unfolded or [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return written


def _kernel(node: NodeProto, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """The shape of the weight of a convolution that is to be a product; () for any other node.

    Those are left whose weight or padding is known only in a run, and those of single channels and several taps, which
    are a sum of a few images rather than a product of matrices: onnx.reference adds them up, in a third of the time.
    """
    if node.op_type != "Conv" or not is_standard(node.domain):
        return ()
    padding = next((a.s for a in node.attribute if a.name == "auto_pad"), b"NOTSET")
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    shape = shapes.get(node.input[1], ()) if padding in (b"NOTSET", b"VALID") else ()
    sizes = tuple(size for size in shape if isinstance(size, int))
    several = math.prod(sizes[2:]) > 1
    return sizes if len(sizes) == len(shape) and not (sizes[:2] == (groups, 1) and several) else ()


def _given(model: ModelProto) -> dict[str, Shape]:
    """The shapes that are given to views by constants, as to weights that are computed."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 1}
    views = [node for node in model.graph.node if node.op_type == "Reshape" and node.input[1] in stored]
    found = {node.output[0]: numpy_helper.to_array(stored[node.input[1]]).tolist() for node in views}
    return {name: tuple(shape) for name, shape in found.items() if min(shape, default=1) > 0}


class _Unfolded:
    """The nodes of one convolution with a weight [M, C/group, *kernel]."""

    def __init__(self, model: ModelProto, node: NodeProto, weight: tuple[int, ...]) -> None:
        self.nodes: list[NodeProto] = []
        self._graph, self._name = model.graph, node.output[0]
        given = attributes_of(node)
        kernel, axes, self._rank = weight[2:], range(2, len(weight)), len(weight)
        groups, ones = given.get("group", 1), [1] * len(kernel)
        strides, dilations = given.get("strides") or ones, given.get("dilations") or ones
        pads = given.get("pads") or [0] * 2 * len(kernel)
        image = node.input[0]
        if any(pads):
            begin, end = pads[: len(kernel)], pads[len(kernel) :]
            image = self._add("Pad", image, self._ints(0, 0, *begin, 0, 0, *end))
        wide = [axis for axis, size in zip(axes, kernel, strict=True) if size > WIDE]
        if len(wide) == 1 and math.prod(kernel) == kernel[wide[0] - 2] and math.prod(strides) == strides[wide[0] - 2]:
            at = wide[0] - 2
            patches = self._gathered(image, wide[0], kernel[at], strides[at], dilations[at])
            tail = self._sizes(patches, 3, TO_THE_END)
        else:
            taps = [
                self._tap(image, at, kernel, strides, dilations, axes) for at in itertools.product(*map(range, kernel))
            ]
            patches = self._beside(taps)
            tail = self._sizes(taps[0], 2, TO_THE_END)
        product = self._product(patches, node.input[1], weight, groups)
        head = self._sizes(image, 0, 1)
        result = self._add("Reshape", product, self._add("Concat", head, self._ints(weight[0]), tail, axis=0))
        if len(node.input) > 2 and node.input[2]:
            bias = self._add("Reshape", node.input[2], self._ints(-1, *ones))
            result = self._add("Add", result, bias)
        self.nodes[-1].output[0] = node.output[0]

    def _tap(
        self, image: str, tap: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
        axes: Sequence[int],
    ) -> str:  # fmt: skip
        """What lies under one tap of the kernel, wherever that stands: [N, C, *out]."""
        if math.prod(kernel) == math.prod(strides) == 1:
            return image
        starts = [t * d for t, d in zip(tap, dilations, strict=True)]
        left = [(size - 1 - t) * d for t, size, d in zip(tap, kernel, dilations, strict=True)]
        ends = [-rest if rest else TO_THE_END for rest in left]
        return self._add("Slice", image, *(self._ints(*each) for each in (starts, ends, axes, strides)))

    def _beside(self, taps: Sequence[str]) -> str:
        """What lies under each tap, side by side: [N, C, taps, out]."""
        if len(taps) == 1:
            return taps[0]
        return self._add("Concat", *(self._add("Reshape", tap, self._ints(0, 0, 1, -1)) for tap in taps), axis=2)

    def _gathered(self, image: str, axis: int, size: int, stride: int, dilation: int) -> str:
        """The same where one axis of the kernel has taps, by their positions on that axis: [N, C, taps, *out]."""
        last = self._add("Sub", self._sizes(image, axis, axis + 1), self._ints((size - 1) * dilation))
        starts = self._add("Range", self._int(0), self._add("Reshape", last, self._ints()), self._int(stride))
        offsets = self._add("Reshape", self._ints(*range(0, size * dilation, dilation)), self._ints(size, 1))
        taken = self._add("Gather", image, self._add("Add", starts, offsets), axis=axis)
        rest = [other for other in range(2, self._rank + 1) if other != axis]
        return self._add("Transpose", taken, perm=[0, 1, axis, *rest])

    def _product(self, patches: str, weight: str, shape: Sequence[int], groups: int) -> str:
        """The weight times the patches, [N, groups, M/groups, out]; of one tap a channel, [N, M, *out].

        Taps lie beside each other within a channel, as they do in the weight, so that neither is transposed.
        """
        outputs, rows = shape[0] // groups, math.prod(shape[1:])
        if rows == outputs == 1:
            return self._add("Mul", patches, self._add("Reshape", weight, self._ints(-1, *[1] * (self._rank - 2))))
        several = (groups,) if groups > 1 else ()
        patches = self._add("Reshape", patches, self._ints(0, *several, rows, -1))
        return self._add("MatMul", self._add("Reshape", weight, self._ints(*several, outputs, rows)), patches)

    def _sizes(self, x: str, start: int, end: int) -> str:
        return self._add("Slice", self._add("Shape", x), self._ints(start), self._ints(end))

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _int(self, value: int) -> str:
        return self._constant(np.array(value, np.int64))

    def _constant(self, values: np.ndarray) -> str:
        name = f"{self._name}/ints/{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def _add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._name}/{op_type}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name
