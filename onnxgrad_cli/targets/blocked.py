"""Convolutions in onnxruntime's blocked layout, whose kernels are faster: for weights that are trained, too.

onnxruntime's optimizer takes constant weights alone there, for it reorders them when it loads a model. These functions
reorder them at each run. How many channels a block has depends on the processor: 16 with AVX-512, 8 on others of its
kind. The functions see it at run time, by the shape that an image of few channels gets, so that one model is right on
all of them; where there is no such layout, onnxruntime has no kernels for it, and refuses the model when it loads it.
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
from onnxgrad_cli.ir.nodes import attributes_of, reads
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.targets.standard import DOMAIN, OWN, call

BLOCK = 16
"""Channels of the largest block that there is, a multiple of all others."""

CHANNELS, PADS = f"{OWN}channels", f"{OWN}pads"
"""The attributes with the channels of the result, and with the pads of the convolution that is a transposed one."""

DENSE, DEPTHWISE = f"{DOMAIN}blocked", f"{DOMAIN}blocked.depthwise"
"""The domains of the functions: of weights whose channels lie in blocks on both sides, or of those that have one."""

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
"""How each function computes y, in blocks, of x, in blocks, and W: it reorders the weight, and convolves.

As rows, all that an output channel's weights are lies together, and so in blocks of these; a transposed convolution is
one with the weight's channels exchanged and its kernel flipped.
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
    """The function that `BODIES` has for an operator."""
    return parser.parse_function(_WHOLE.format(domain=domain, name=name, body=BODIES[domain, name]))


def block_convolutions(graph: Graph) -> list[Node]:
    """Let the blocked layout have those convolutions that are faster there; returns them.

    Of the time of the standard's (one thread, AVX-512, batch 4, 3x3): 56x56 pixels and 64 channels 0.86, 28x28 and 128
    0.89, 14x14 and 256 0.88, 7x7 and 512 0.91, 128x128 and 16 0.67; of that of ConvTranspose 0.83, 0.82, 0.81, 0.75 and
    0.64. 1x1 takes 0.9-1.2, and stays as it is. Whole steps: MobileNetV2, whose kernels are depthwise, and U-Net 0.88,
    ResNet-18 0.93, ResNet-50 0.95, with 4-7 % more memory.
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
    """The form of a gradient that `block_convolutions` will have something faster for; None where there is none.

    Of the time of other forms, the transposed convolution takes less in blocks than a convolution there (0.75-1) and
    than the product of gathered columns outside (0.8-0.95).
    """
    node = op.node
    if node is None or (node.op_type, name) != ("Conv", "input gradient") or not op.wanted(node.input[1]):
        return None
    fits = _is_plain(_attributes(node)) and _fitting(op.graph, node)[0] == DENSE
    return "transposed convolution" if fits else None


_NONE: tuple[str, Mapping[str, Any]] = "", {}
"""What `_fitting` says of a convolution that no function computes faster."""


def _fitting(graph: Graph, node: Node) -> tuple[str, Mapping[str, Any]]:
    """The domain of the function that computes a convolution faster, and the attributes of its call; or ""."""
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
    """What `_fitting` says of a ConvTranspose, of its attributes and the sizes of its weight."""
    if not _is_plain(given) or "output_shape" in given or any(given.get("output_padding", ())):
        return _NONE
    reach = [(size - 1) * step for size, step in zip(sizes[2:], given["dilations"], strict=True)]
    pads = [each - pad for each, pad in zip(reach * 2, given["pads"], strict=True)]
    return (DENSE, {CHANNELS: sizes[1], PADS: pads}) if min(pads) >= 0 else _NONE


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether a convolution has no groups and no strides, and its pads are written out."""
    return given["auto_pad"] == b"NOTSET" and given["group"] == 1 and set(given["strides"]) == {1}


def _attributes(node: Node) -> dict[str, Any]:
    """Those of a two-dimensional convolution, with their defaults."""
    defaults = {"auto_pad": b"NOTSET", "dilations": (1, 1), "group": 1, "pads": (0,) * 4, "strides": (1, 1)}
    return defaults | attributes_of(node)
