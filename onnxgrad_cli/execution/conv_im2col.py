"""Replace convolutions and average pooling by operators for which onnxruntime has float64 kernels.

For a convolution, one slice of the image per kernel tap is taken, and the slices are laid side by side ("im2col"). One
matrix product with the weight then computes the convolution. Average pooling becomes a sum of shifted images along each
axis, divided by the number of elements. The rules for gradients share no code with this module, because its results are
used to check them.
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

MAX_SLICED_TAPS = 16
"""If a kernel has more taps along one axis than this, they are taken with one Gather instead of one Slice each."""

MAX_TAPS = 256
"""Average pooling is replaced by sums of slices only if its window sizes add up to at most this number of taps."""

FIRST_OPSET = 11
"""The first opset in which Pad and Slice take their sizes as inputs, not as attributes."""

TO_THE_END = np.iinfo(np.int64).max


def unfold_windows(model: ModelProto) -> set[str]:
    """Rewrite, in place, convolutions as matrix products and average pooling as sums.

    A convolution is rewritten only if the shape of its weight is known.

    Returns:
        The names of the values that the new nodes compute. Those nodes require opset `FIRST_OPSET`.
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
    """Return True if a node is an AveragePool whose windows stay within the padded input and are not too large."""
    if node.op_type != "AveragePool" or not is_standard(node.domain):
        return False
    given = attributes_of(node)
    plain = given.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID", "NOTSET", "VALID") and not given.get("ceil_mode")
    return plain and sum(given.get("kernel_shape", [])) <= MAX_TAPS


def _kernel(node: NodeProto, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return the shape of a convolution's weight if the convolution is to become a matrix product, otherwise ().

    A convolution stays as it is if the shape of its weight or its padding is known only at run time. A depthwise
    convolution with several taps also stays: it is a sum of a few images rather than a matrix product, and
    onnx.reference computes it in a third of the time.
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
    """Return a map: output of a Reshape -> its shape, if the shape is stored. Computed weights are often reshaped."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 1}
    views = [node for node in model.graph.node if node.op_type == "Reshape" and node.input[1] in stored]
    found = {node.output[0]: numpy_helper.to_array(stored[node.input[1]]).tolist() for node in views}
    return {name: tuple(shape) for name, shape in found.items() if min(shape, default=1) > 0}


class _Nodes:
    """Creates the nodes that replace one node with a kernel of the given size."""

    def __init__(self, model: ModelProto, node: NodeProto, kernel: Sequence[int]) -> None:
        self.nodes: list[NodeProto] = []
        self._graph, self._name, self._given = model.graph, node.output[0], attributes_of(node)
        strides, dilations = (self._given.get(name) or [1] * len(kernel) for name in ("strides", "dilations"))
        self._windows = list(zip(kernel, strides, dilations, strict=True))
        self._pads = self._given.get("pads") or [0] * 2 * len(kernel)

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

    def _padded(self, image: str) -> str:
        """Return the name of an image padded with zeros."""
        begin, end = self._pads[: len(self._windows)], self._pads[len(self._windows) :]
        return self._add("Pad", image, self._ints(0, 0, *begin, 0, 0, *end)) if any(self._pads) else image


class _Averaged(_Nodes):
    """Creates the nodes that replace one AveragePool."""

    def __init__(self, model: ModelProto, node: NodeProto) -> None:
        kernel = attributes_of(node)["kernel_shape"]
        super().__init__(model, node, kernel)
        total = self._summed(self._padded(node.input[0]))
        if any(self._pads) and not self._given.get("count_include_pad"):
            shape = self._add("Concat", self._ints(1, 1), self._sizes(node.input[0], 2, TO_THE_END), axis=0)
            one = self._add("ConstantOfShape", shape, value=numpy_helper.from_array(np.ones(1)))
            count = self._summed(self._padded(one))
        else:
            count = self._constant(np.array(float(math.prod(kernel))))
        self._add("Div", total, count)
        self.nodes[-1].output[0] = node.output[0]

    def _summed(self, image: str) -> str:
        """Return the name of the sums over the windows."""
        for axis, (size, stride, dilation) in enumerate(self._windows, 2):
            taps = []
            for tap in range(size):
                left = (size - 1 - tap) * dilation
                ends = self._ints(-left if left else TO_THE_END)
                at = self._ints(tap * dilation), ends, self._ints(axis), self._ints(stride)
                taps.append(self._add("Slice", image, *at))
            image = self._add("Sum", *taps) if size > 1 else taps[0]
        return image


class _Unfolded(_Nodes):
    """Creates the nodes that replace one convolution with a weight [M, C/group, *kernel]."""

    def __init__(self, model: ModelProto, node: NodeProto, weight: tuple[int, ...]) -> None:
        kernel, self._rank = weight[2:], len(weight)
        super().__init__(model, node, kernel)
        image = self._padded(node.input[0])
        wide = [axis for axis, size in enumerate(kernel) if size > MAX_SLICED_TAPS]
        if len(wide) == 1 and all(axis in wide or window[:2] == (1, 1) for axis, window in enumerate(self._windows)):
            patches = self._gathered(image, wide[0] + 2, *self._windows[wide[0]])
            tail = self._sizes(patches, 3, TO_THE_END)
        else:
            taps = [self._tap(image, at) for at in itertools.product(*map(range, kernel))]
            patches = self._beside(taps)
            tail = self._sizes(taps[0], 2, TO_THE_END)
        product = self._product(patches, node.input[1], weight, self._given.get("group", 1))
        head = self._sizes(image, 0, 1)
        result = self._add("Reshape", product, self._add("Concat", head, self._ints(weight[0]), tail, axis=0))
        if len(node.input) > 2 and node.input[2]:
            bias = self._add("Reshape", node.input[2], self._ints(-1, *[1] * len(kernel)))
            result = self._add("Add", result, bias)
        self.nodes[-1].output[0] = node.output[0]

    def _tap(self, image: str, tap: Sequence[int]) -> str:
        """Return the elements that one tap of the kernel multiplies, over all positions of the kernel: [N, C, *out]."""
        if all(size == stride == 1 for size, stride, _ in self._windows):
            return image
        bounds = []
        for axis, (t, (size, stride, dilation)) in enumerate(zip(tap, self._windows, strict=True), 2):
            bounds.append((t * dilation, (t + 1 - size) * dilation or TO_THE_END, axis, stride))
        return self._add("Slice", image, *(self._ints(*each) for each in zip(*bounds, strict=True)))

    def _beside(self, taps: Sequence[str]) -> str:
        """Concatenate the elements of all taps along a new axis: [N, C, taps, out]."""
        if len(taps) == 1:
            return taps[0]
        return self._add("Concat", *(self._add("Reshape", tap, self._ints(0, 0, 1, -1)) for tap in taps), axis=2)

    def _gathered(self, image: str, axis: int, size: int, stride: int, dilation: int) -> str:
        """Gather the elements of all taps, for a kernel with several taps along one axis only: [N, C, taps, *out]."""
        last = self._add("Sub", self._sizes(image, axis, axis + 1), self._ints((size - 1) * dilation))
        starts = self._add("Range", self._int(0), self._add("Reshape", last, self._ints()), self._int(stride))
        offsets = self._add("Reshape", self._ints(*range(0, size * dilation, dilation)), self._ints(size, 1))
        taken = self._add("Gather", image, self._add("Add", starts, offsets), axis=axis)
        rest = [other for other in range(2, self._rank + 1) if other != axis]
        return self._add("Transpose", taken, perm=[0, 1, axis, *rest])

    def _product(self, patches: str, weight: str, shape: Sequence[int], groups: int) -> str:
        """Return the matrix product of the weight and the patches.

        The taps of a channel are adjacent in the patches, as in the weight, so neither factor is transposed.

        Returns:
            [N, groups, M/groups, out]. Or [N, M, *out] if each channel is a group of its own with a single tap.
        """
        outputs, rows = shape[0] // groups, math.prod(shape[1:])
        if rows == outputs == 1:
            return self._add("Mul", patches, self._add("Reshape", weight, self._ints(-1, *[1] * (self._rank - 2))))
        several = (groups,) if groups > 1 else ()
        patches = self._add("Reshape", patches, self._ints(0, *several, rows, -1))
        return self._add("MatMul", self._add("Reshape", weight, self._ints(*several, outputs, rows)), patches)
