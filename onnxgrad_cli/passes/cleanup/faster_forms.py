"""Rewrite products and scaled channels in forms that onnxruntime computes faster.

- (Aᵀ B)ᵀ is written as Bᵀ A. Exporters transpose a layer's weight before multiplying by it, so the gradient of the
  weight is a product that is transposed at the end, which takes a pass over memory. A transposed factor costs nothing,
  because onnxruntime fuses a Transpose into the product that reads it.
- Scaling and shifting the channels of images is a 1 x 1 convolution with a group for each channel. A product and a sum
  are two passes over memory. The convolution is one, rounds in the same way, and onnxruntime fuses a following Relu or
  Clip into its kernel. The convolution takes 0.3 to 0.46 times as long as a product, a sum and a Relu (8x144x56x56,
  4x64x56x56, 4x16x128x128), and 0.5 to 0.6 times as long as a product, a sum and a difference. The kernel would also
  fuse the sum with another image, but this is not used, because both images then stay in memory: a step of a U-Net took
  179 MB instead of 165 MB, and the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.node_values import read_by
from onnxgrad_cli.ir.types import Shape, dtype_of, known_sizes, shape_of, tensor_type
from onnxgrad_cli.passes.stored_integers import is_transpose

MAX_ROWS_PER_COLUMN = 2
"""Largest ratio of rows to columns of a result whose final transpose is moved to the factors.

For taller results, products with a transposed first factor are slow. Times relative to PyTorch's product, for 512
tokens on one thread, with transposed factors and with the final transpose: 1.04 and 1.13 for a result of 768 x 768,
1.00 and 1.20 for 768 x 3072, but 1.20 and 1.11 for 3072 x 768, and 1.37 and 1.15 for 50257 x 768.
"""


def turn_products(graph: Graph) -> None:
    """Write (Aᵀ B)ᵀ as Bᵀ A in the backward part if nothing else reads the product."""
    turns = (node for node in graph.nodes if is_transpose(node) and is_standard(node.domain))
    transposes = {n.output[0]: n for n in turns if len(shape_of(graph.types.get(n.input[0])) or ()) == 2}
    last = _last_transposes(graph, transposes)
    turned = {node.output[0] for node in last.values()}
    factors = {name: node for name, node in transposes.items() if name not in turned}

    def turn(node: Node) -> list[Node] | None:
        if node.output[0] in turned:
            return []
        product = node.op_type == "MatMul" and node.output[0] in last
        return [*_turn(graph, node, last[node.output[0]].output[0], factors), node] if product else None

    if last:
        graph.rewrite(turn, {"MatMul", "Transpose"})


def _last_transposes(graph: Graph, transposes: Mapping[str, Node]) -> dict[str, Node]:
    """Return a map: product with a transposed factor -> the Transpose that is the product's only reader."""
    backward = (node for node in graph.nodes if node.op_type == "MatMul" and metadata_of(node, ROLE) == "backward")
    products = {node.output[0] for node in backward if not transposes.keys().isdisjoint(node.input)}
    wide = [node for node in transposes.values() if node.input[0] in products and _is_wide(graph, node.output[0])]
    if not wide:
        return {}
    uses, outputs = graph.uses(), set(graph.output_names)
    return {node.input[0]: node for node in wide if len(uses[node.input[0]]) == 1 and node.input[0] not in outputs}


def _turn(graph: Graph, product: Node, result: str, transposes: Mapping[str, Node]) -> list[Node]:
    """Change `product` to compute its transpose `result` from its transposed factors in the opposite order.

    Returns:
        Nodes that transpose the factors that are not transposes already. They belong before the product.
    """
    added: list[Node] = []
    factors: list[str] = []
    for name in reversed(product.input):
        if name not in transposes:
            shape = shape_of(graph.types[name])
            added.append(_beside(graph, product, "Transpose", [name], shape and shape[::-1], perm=[1, 0]))
        factors.append(transposes[name].input[0] if name in transposes else added[-1].output[0])
    product.input[:] = factors
    product.output[0] = result
    return added


def _beside(graph: Graph, node: Node, op_type: str, inputs: list[str], shape: Shape | None, **attributes: Any) -> Node:
    """Return a node with a result of this shape, and with the metadata of `node`."""
    result = graph.fresh(f"{node.name}/{op_type}_out")
    graph.types[result] = tensor_type(dtype_of(graph.types[inputs[0]]), shape)
    beside = make_node(op_type, inputs, [result], graph.fresh(f"{node.name}/{op_type}"), **attributes)
    beside.metadata = node.metadata
    return beside


def _is_wide(graph: Graph, name: str) -> bool:
    """Return True if a matrix is known to have at most `MAX_ROWS_PER_COLUMN` times as many rows as columns."""
    rows, columns = known_sizes(shape_of(graph.types.get(name))) or (1, 0)
    return rows <= MAX_ROWS_PER_COLUMN * columns


MAX_SMALL_IMAGE = 64
"""Images with at most this many pixels are small: their products and sums are not replaced by a convolution.

For small images, the convolution is not faster, because its kernel is called for each channel of each sample. For
4x512x7x7, the nodes take 1.1 times as long with the convolution as without it.
"""


def convolve_channels(graph: Graph) -> None:
    """Write x * a + b, with a and b per channel, as a convolution, unless a is constant.

    If a is constant, onnxruntime multiplies it into the weight of the preceding convolution.
    """
    images = {id(value_type) for value_type in graph.distinct_types() if _are_images(shape_of(value_type) or ())}
    if not images:
        return
    products = {
        node.output[0]: found
        for node in graph.nodes
        if node.op_type == "Mul" and (found := _scaled(graph, node, images))
    }
    if not products:
        return
    readers = Counter(name for name in read_by(graph.nodes) if name in products)
    private = {name for name, count in readers.items() if count == 1}.difference(graph.output_names)
    constant, gone = cache(lambda shape: graph.add_constant(np.array(shape, np.int64))), set[str]()

    def convolution(node: Node) -> list[Node] | None:
        product, shift = ("", "") if node.domain else _sum(graph, node, private)
        if not product:
            return None
        gone.add(product)
        return _convolution(graph, node, *products[product], shift, constant)

    graph.rewrite(convolution, {"Add"})
    graph.nodes = [node for node in graph.nodes if node.op_type != "Mul" or node.output[0] not in gone]


def _scaled(graph: Graph, product: Node, types: Collection[int]) -> tuple[str, str] | None:
    """Return (images, factors) if a Mul multiplies images by a factor per channel, otherwise None.

    Args:
        graph: the graph.
        product: a Mul.
        types: the types of images, by `id`.
    """
    if product.domain or dtype_of(graph.types.get(product.output[0])) != TensorProto.FLOAT:
        return None
    for images, factors in (product.input, reversed(product.input)):
        if id(graph.types.get(images)) not in types:
            continue
        shape = shape_of(graph.types[images]) or ()
        if _is_vector(graph, factors, shape) and graph.constant(factors) is None:
            return images, factors
    return None


def _sum(graph: Graph, node: Node, products: Collection[str]) -> tuple[str, str]:
    """Return (product, shift) if an Add adds a shift per channel to one of `products`, otherwise ("", "")."""
    for product, shift in (node.input, reversed(node.input)):
        if product in products and _is_vector(graph, shift, shape_of(graph.types[product]) or ()):
            return product, shift
    return "", ""


def _are_images(shape: Shape) -> bool:
    """Return True if a shape is that of images, not too small, with a known number of channels above 1."""
    sizes = known_sizes(shape[2:])
    small = sizes is not None and math.prod(sizes) <= MAX_SMALL_IMAGE
    return 3 <= len(shape) <= 5 and isinstance(shape[1], int) and shape[1] > 1 and not small


def _is_vector(graph: Graph, name: str, images: Shape) -> bool:
    """Return True if a value has one number for each channel of images."""
    shape = shape_of(graph.types.get(name))
    ones = (1,) * (len(images) - 2)
    return shape in ((1, images[1], *ones), (images[1], *ones)) if len(images) > 1 else False


def _convolution(
    graph: Graph, node: Node, images: str, factors: str, shift: str, constant: Callable[[Shape], str]
) -> list[Node]:
    """Return the nodes that compute images * factors + shift as a convolution, in place of the Add `node`.

    `constant` returns the name of a shape vector. The nodes share these vectors.
    """
    shape = shape_of(graph.types[images]) or ()
    channels, pixel = int(shape[1]), (1,) * (len(shape) - 2)
    views = [
        _beside(graph, node, "Reshape", [name, constant(sizes)], sizes)
        for name, sizes in ((factors, (channels, 1, *pixel)), (shift, (channels,)))
    ]
    inputs = [images, *(view.output[0] for view in views)]
    name = graph.fresh(f"{node.name}/Conv")
    conv = make_node("Conv", inputs, node.output[:], name, group=channels, kernel_shape=pixel)
    conv.metadata = node.metadata
    return [*views, conv]
