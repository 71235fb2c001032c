"""Run convolutions with trained weights in onnxruntime's blocked channel layout, which has faster kernels.

onnxruntime's optimizer uses the layout only for constant weights, which it reorders when it loads a model. The ONNX
functions in this module reorder the weights at each run. The number of channels in a block depends on the processor: 16
with AVX-512, 8 on similar processors without it. The functions find this number at run time, from the shape that a
small image has after reordering. So the same model is valid on all these processors. On other processors, onnxruntime
has no kernels for the layout and refuses to load the model.

Source: onnxruntime, core/optimizer/nchwc_transformer.cc, core/mlas/lib/reorder.cpp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from onnx import FunctionProto, TensorProto, parser

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of, reads
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.targets.standard import DOMAIN, OWN, call

BLOCK = 16
"""The number of channels in the largest block of any processor. It is a multiple of all other block sizes."""

CHANNELS, PADS = f"{OWN}channels", f"{OWN}pads"
"""Attributes of the calls: number of channels of the result; pads of the convolution that computes a ConvTranspose."""

DENSE, DEPTHWISE = f"{DOMAIN}blocked", f"{DOMAIN}blocked.depthwise"
"""Function domains: one for weights that are blocked along input and output channels, one for depthwise weights."""

_SIZES = """
    shape = Shape (W)
    few = Constant <value = float[1, 4, 1, 1] {0.0, 0.0, 0.0, 0.0}> ()
    filled = com.microsoft.nchwc.ReorderInput (few)
    sizes = Shape (filled)
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    last = Constant <value_ints = [-1]> ()
    block = Slice (sizes, one, two)
    first = Slice (shape, zero, one)
    second = Slice (shape, one, two)
    first_blocks = Div (first, block)
    second_blocks = Div (second, block)
"""
_ROWS = """
    outer = Constant <value_ints = [0, 3]> ()
    as_rows = Constant <value_ints = [0, -1]> ()
    rows = Reshape (W, as_rows)
    image = Unsqueeze (rows, outer)
    in_rows = com.microsoft.nchwc.ReorderInput (image)
"""
_CONV = """
    y = com.microsoft.nchwc.Conv <
        auto_pad: string = @auto_pad, dilations: ints = @dilations, group: int = @group, pads: ints = @pads,
        strides: ints = @strides
    > (x, w, B)
"""
BODIES = {
    (DENSE, "Conv"): _SIZES + _ROWS + """
    split = Concat <axis = 0> (first_blocks, second_blocks, block, last, block)
    in_blocks = Reshape (in_rows, split)
    turned = Transpose <perm = [0, 1, 3, 2, 4]> (in_blocks)
    w = Reshape (turned, shape)
    """ + _CONV,
    (DEPTHWISE, "Conv"): _ROWS + """
    shape = Shape (W)
    w = Reshape (in_rows, shape)
    """ + _CONV,
    (DENSE, "ConvTranspose"): _SIZES + """
    in_rows = com.microsoft.nchwc.ReorderInput (W)
    split = Concat <axis = 0> (first_blocks, block, second_blocks, last, block)
    in_blocks = Reshape (in_rows, split)
    turned = Transpose <perm = [2, 0, 3, 1, 4]> (in_blocks)
    before = Constant <value_ints = [-10000]> ()
    flipped = Slice (turned, last, before, two, last)
    four = Constant <value_ints = [4]> ()
    kernel = Slice (shape, two, four)
    exchanged = Concat <axis = 0> (second, first, kernel)
    w = Reshape (flipped, exchanged)
    y = com.microsoft.nchwc.Conv <dilations: ints = @dilations, pads: ints = @target_pads> (x, w, B)
    """,
}  # fmt: skip
"""Map from (domain, operator) to the text of the nodes that compute y from x and W, with x and y in blocked layout.

The nodes reorder the weight W and convolve x with it. The weight is reshaped to one row per output channel, so that
ReorderInput puts the output channels into blocks. A transposed convolution is computed as a convolution whose weight
has the input and output channels exchanged and the kernel flipped.
"""
_WHOLE = """
<domain: "{domain}", opset_import: ["" : 13, "com.microsoft.nchwc" : 1]>
{name} <
    auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides, target_channels, target_pads
> (X, W, B) => (Y)
{{
    x = com.microsoft.nchwc.ReorderInput (X)
    {body}
    Y = com.microsoft.nchwc.ReorderOutput <channels: int = @target_channels> (y)
}}
"""


@cache
def function_of(domain: str, name: str) -> FunctionProto:
    """Return the function with the nodes in `BODIES` for a domain and an operator."""
    return parser.parse_function(_WHOLE.format(domain=domain, name=name, body=BODIES[domain, name]))


def block_convolutions(graph: Graph) -> list[Node]:
    """Turn convolutions with trained weights into calls that run in the blocked layout, if it is faster. Return them.

    Time relative to the standard layout, for kernels of 3x3, batches of 4, one thread, AVX-512:

    - 56x56 pixels, 64 channels: Conv 0.86, ConvTranspose 0.83
    - 28x28 pixels, 128 channels: Conv 0.89, ConvTranspose 0.82
    - 14x14 pixels, 256 channels: Conv 0.88, ConvTranspose 0.81
    - 7x7 pixels, 512 channels: Conv 0.91, ConvTranspose 0.75
    - 128x128 pixels, 16 channels: Conv 0.67, ConvTranspose 0.64

    Kernels of 1x1 would take 0.9 to 1.2 and keep the standard layout. Whole steps take 0.88 for MobileNetV2 (depthwise
    kernels) and for U-Net, 0.93 for ResNet-18 and 0.95 for ResNet-50, with 4 to 7 % more memory.
    """
    found = []
    varying = set(graph.input_names)
    for node in graph.nodes:
        if varying.isdisjoint(reads(node)):
            continue
        varying.update(node.output)
        if node.op_type in ("Conv", "ConvTranspose") and node.input[1] in varying:
            domain, attributes = _fitting(graph, node)
            if domain:
                call(graph, node, function_of(domain, node.op_type), attributes)
                found.append(node)
    return found


def suiting_form(op: Op, name: str, default: str) -> str | None:
    """Return the form of a gradient that can run in the blocked layout, or None for the default form.

    In blocked layout, a transposed convolution takes 0.75 to 1 times as long as a convolution. It takes 0.8 to 0.95
    times as long as a product of gathered columns in the standard layout.
    """
    node = op.node
    if node is None or (node.op_type, name) != ("Conv", "input gradient") or not op.wanted(node.input[1]):
        return None
    fits = _is_plain(_attributes(node)) and _fitting(op.graph, node)[0] == DENSE
    return "transposed convolution" if fits else None


_NONE: tuple[str, Mapping[str, Any]] = "", {}
"""The result of `_fitting` for a convolution that is not moved to the blocked layout."""


def _fitting(graph: Graph, node: Node) -> tuple[str, Mapping[str, Any]]:
    """Return the domain of the function for a convolution, and the additional attributes of its call, or `_NONE`."""
    shape = shape_of(graph.types.get(node.input[1])) or ()
    sizes = [size for size in shape if isinstance(size, int)]
    if not is_standard(node.domain) or dtype_of(graph.types.get(node.input[0])) != TensorProto.FLOAT:
        return _NONE
    if len(shape) != 4 or len(sizes) != 4:
        return _NONE
    given = _attributes(node)
    group = given["group"]
    if node.op_type == "Conv" and sizes[:2] == [group, 1]:
        return _NONE if group % BLOCK or sizes[2:] == [1, 1] else (DEPTHWISE, {CHANNELS: group})
    if (sizes[0] // group) % BLOCK or sizes[1] % BLOCK or sizes[2:] == [1, 1]:
        return _NONE
    return (DENSE, {CHANNELS: sizes[0]}) if node.op_type == "Conv" else _fitting_transposed(given, sizes)


def _fitting_transposed(given: Mapping[str, Any], sizes: Sequence[int]) -> tuple[str, Mapping[str, Any]]:
    """Return the result of `_fitting` for a ConvTranspose, given its attributes and the shape of its weight."""
    if not _is_plain(given) or "output_shape" in given or any(given.get("output_padding", ())):
        return _NONE
    reach = [(size - 1) * step for size, step in zip(sizes[2:], given["dilations"], strict=True)]
    pads = [each - pad for each, pad in zip(reach * 2, given["pads"], strict=True)]
    return (DENSE, {CHANNELS: sizes[1], PADS: pads}) if min(pads) >= 0 else _NONE


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Return True if a convolution has one group, strides of 1, and explicit pads."""
    return given["auto_pad"] == b"NOTSET" and given["group"] == 1 and set(given["strides"]) == {1}


def _attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of a two-dimensional convolution, including defaults."""
    defaults = {"auto_pad": b"NOTSET", "dilations": (1, 1), "group": 1, "pads": (0,) * 4, "strides": (1, 1)}
    return defaults | attributes_of(node)
