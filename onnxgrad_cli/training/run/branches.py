"""Low-rank adapters of matrices that a model stores as integers: they stay beside the products that read these.

What a matrix of a few bits and its adapter come to can't be stored in a few bits, so that nothing is merged: in the
inference model y = x W becomes y = x W + (x A) B, where B has been multiplied with alpha / rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, helper

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.adapters import Reader, Uses, views_of
from onnxgrad_cli.passes.quantized_matrices import is_integer
from onnxgrad_cli.training.run.export import stored_tensors

PRODUCTS = frozenset({"Gemm", "MatMul"})


def of_integers(model: ModelProto, adapters: Sequence[Adapter]) -> list[Adapter]:
    """Those of adapters whose weights the model stores as integers."""
    stored = {name for tensor, name in stored_tensors(model.graph) if is_integer(tensor)}
    return [adapter for adapter in adapters if adapter.weight in stored]


def check_branches(model: ModelProto, adapters: Sequence[Adapter]) -> None:
    """Make sure that `add_branches` finds the products that read what adapters add to.

    Raises:
        UsageError: it does not.
    """
    uses = Graph(model).uses() if of_integers(model, adapters) else {}
    for adapter in of_integers(model, adapters):
        _products(uses, adapter)


def add_branches(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Add adapters to a model that stores what they adapt as integers.

    Args:
        model: the inference model; it is changed.
        adapters: as `of_integers` has them.
        values: their factors, by name.

    Raises:
        UsageError: no product of the model reads such a matrix in a form that is known.
    """
    graph = Graph(model)
    uses, after = graph.uses(), dict[int, list[NodeProto]]()
    for adapter in adapters:
        for reader in _products(uses, adapter):
            after[id(reader.node)] = _branch(graph, reader, adapter, values)
    graph.set_nodes([each for node in graph.nodes for each in (node, *after.get(id(node), ()))])
    graph.commit()


def _products(uses: Uses, adapter: Adapter) -> list[Reader]:
    """What multiplies with the matrix that an adapter adds to."""
    found = list(_readers(uses, adapter.weight))
    strange = [reader.node for reader in found if reader.node.op_type not in {*PRODUCTS, "MatMulNBits"}]
    if not found or strange:
        label = strange and (strange[0].name or strange[0].output[0])
        by = f"'{label}' ({strange[0].op_type})" if strange else "nothing in the model's own graph"
        raise UsageError(
            f"'{adapter.weight}' has an adapter that can't be written back: {by} reads it",
            "name others with `lora_target`, or let onnx.inliner.inline_local_functions bring functions into the graph",
        )
    return found


def _readers(uses: Uses, stored: str) -> Iterator[Reader]:
    """What reads a matrix, but where rows of it are looked up: the adapter adds to products alone."""
    for node, position in uses.get(stored, ()):
        if node.op_type == "DequantizeLinear" and position == 0:
            found = [reader for _, readers in views_of(uses, node.output[0]) for reader in readers]
            yield from found if any(reader.node.op_type in PRODUCTS for reader in found) else ()
        elif node.op_type != "GatherBlockQuantized":
            yield Reader(node, position, transposed=True)  # MatMulNBits stores one row an output


def _branch(graph: Graph, reader: Reader, adapter: Adapter, values: Mapping[str, np.ndarray]) -> list[NodeProto]:
    """The nodes of one product's adapter, behind it."""
    node, settings = reader.node, reader.settings
    left, right = values[adapter.a], values[adapter.b]
    if left.shape[1] != adapter.rank:
        left, right = right, left
    second = reader.position == 1 or node.op_type == "MatMulNBits"
    if reader.transposed != bool(settings.get("transB" if second else "transA", 0)):
        left, right = right.T, left.T
    scale = adapter.scale * settings.get("alpha", 1.0)
    nodes: list[NodeProto] = []

    def write(op_type: str, *inputs: str) -> str:
        y = graph.fresh(f"{node.output[0]}/adapter/{op_type}")
        nodes.append(helper.make_node(op_type, inputs, [y], name=y))
        return y

    def store(name: str, factor: np.ndarray) -> str:
        name = graph.fresh(name)
        graph.add_initializer(name, np.ascontiguousarray(factor))
        return name

    x = node.input[0 if second else 1]
    if settings.get("transA" if second else "transB", 0):
        x = write("Transpose", x)
    first, last = (left, right) if second else (right, left)
    scaled = (last.astype(np.float64) * scale).astype(last.dtype)
    names = store(f"{adapter.weight}_lora_A", first), store(f"{adapter.weight}_lora_B", scaled)
    thin = write("MatMul", *((x, names[0]) if second else (names[0], x)))
    wide = write("MatMul", *((thin, names[1]) if second else (names[1], thin)))
    base = graph.fresh(f"{node.output[0]}_base")
    nodes.append(helper.make_node("Add", [base, wide], [node.output[0]], name=graph.fresh(f"{node.output[0]}/adapter")))
    node.output[0] = base
    return nodes
