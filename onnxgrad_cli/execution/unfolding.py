"""Write convolutions and averages over windows with other operators: onnxruntime has no float64 kernels for them.

The patches of an image under the kernel are cut out tap by tap and laid side by side ("im2col"), so that a convolution
is one product with them. An average over windows is a sum of shifted images along each axis, divided by their number.
Nothing of it is shared with the gradients, which are judged by what is computed here.
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

MAX_TAPS = 256
"""Taps of a window, added up over its axes, up to which its average is a sum of slices."""

FIRST_OPSET = 11
"""The opset from which Pad and Slice take their sizes as inputs."""

TO_THE_END = np.iinfo(np.int64).max


def unfold_windows(model: ModelProto) -> set[str]:
    """Write convolutions with weights of known shapes as products, and averages as sums, in place; others stay.

    Returns:
        The names of the values that the new nodes compute. Those nodes require `FIRST_OPSET`.
    """
    shapes: dict[str, Shape] = {value.name: shape_of(value.type) or () for value in model.graph.input}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes |= _given(model)
    nodes: list[NodeProto] = []
    written: set[str] = set()
    for node in model.graph.node:
        if weight := _kernel(node, shapes):
            unfolded = _Unfolded(model, node, weight).nodes
        elif _is_average(node):
            unfolded = _Averaged(model, node).nodes
        else:
            unfolded = []
        written.update(name for each in unfolded for name in each.output)
        nodes += unfolded or [node]
    if written:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return written


def _is_average(node: NodeProto) -> bool:
    """Return True if a node averages over windows that do not hang over at the end and are not too large."""
    if node.op_type != "AveragePool" or not is_standard(node.domain):
        return False
    given = attributes_of(node)
    plain = given.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID", "NOTSET", "VALID") and not given.get("ceil_mode")
    return plain and sum(given.get("kernel_shape", [])) <= MAX_TAPS


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


class _Nodes:
    """The nodes that take the place of one."""

    def __init__(self, model: ModelProto, node: NodeProto) -> None:
        self.nodes: list[NodeProto] = []
        self._graph, self._name = model.graph, node.output[0]

    def _sizes(self, x: str, start: int, end: int) -> str:
        return self._add("Slice", self._add("Shape", x), self._ints(start), self._ints(end))

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _int(self, value: int) -> str:
        return self._constant(np.array(value, np.int64))

    def _constant(self, values: np.ndarray) -> str:
        name = f"{self._name}/constant/{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def _add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._name}/{op_type}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def _padded(self, image: str, pads: Sequence[int]) -> str:
        """Return an image with zeros at its borders; `pads` counts them at the begin of each axis, then at the end."""
        begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
        return self._add("Pad", image, self._ints(0, 0, *begin, 0, 0, *end)) if any(pads) else image


class _Averaged(_Nodes):
    """The nodes of one average over windows."""

    def __init__(self, model: ModelProto, node: NodeProto) -> None:
        super().__init__(model, node)
        given = attributes_of(node)
        kernel, pads = given["kernel_shape"], given.get("pads") or []
        ones = [1] * len(kernel)
        windows = list(zip(kernel, given.get("strides") or ones, given.get("dilations") or ones, strict=True))
        total = self._summed(self._padded(node.input[0], pads), windows)
        if any(pads) and not given.get("count_include_pad"):
            shape = self._add("Concat", self._ints(1, 1), self._sizes(node.input[0], 2, TO_THE_END), axis=0)
            one = self._add("ConstantOfShape", shape, value=numpy_helper.from_array(np.ones(1)))
            count = self._summed(self._padded(one, pads), windows)
        else:
            count = self._constant(np.array(float(math.prod(kernel))))
        self._add("Div", total, count)
        self.nodes[-1].output[0] = node.output[0]

    def _summed(self, image: str, windows: Sequence[tuple[int, int, int]]) -> str:
        """Return the sum over each window; `windows` has the size, stride and dilation of each axis."""
        for axis, (size, stride, dilation) in enumerate(windows, 2):
            taps = []
            for tap in range(size):
                left = (size - 1 - tap) * dilation
                ends = self._ints(-left if left else TO_THE_END)
                at = self._ints(tap * dilation), ends, self._ints(axis), self._ints(stride)
                taps.append(self._add("Slice", image, *at))
            image = self._add("Sum", *taps) if size > 1 else taps[0]
        return image


class _Unfolded(_Nodes):
    """The nodes of one convolution with a weight [M, C/group, *kernel]."""

    def __init__(self, model: ModelProto, node: NodeProto, weight: tuple[int, ...]) -> None:
        super().__init__(model, node)
        given = attributes_of(node)
        kernel, axes, self._rank = weight[2:], range(2, len(weight)), len(weight)
        groups, ones = given.get("group", 1), [1] * len(kernel)
        strides, dilations = given.get("strides") or ones, given.get("dilations") or ones
        pads = given.get("pads") or [0] * 2 * len(kernel)
        image = self._padded(node.input[0], pads)
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
