"""Write the update of a vector as a Scan over its slices: one run for all of them.

Between slices onnxruntime then neither leaves its kernels nor wakes threads, so that slices can be short enough for
the cache nearest to the processor's core. A Scan reads and writes slices where they lie, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto, NodeProto, ValueInfoProto, helper


def scan_slices(model: ModelProto, vectors: Collection[str], length: int, backwards: bool) -> ModelProto:
    """A model that updates a matrix, row by row.

    Source: https://onnx.ai/onnx/operators/onnx__Scan.html

    Args:
        model: an `Update`'s, from vectors of one length and scalars to vectors; not changed.
        vectors: the inputs that are vectors.
        length: of a row.
        backwards: whether the last row comes first.

    Returns:
        A model whose inputs and outputs have the names and types of those of `model`, matrices in place of vectors.
    """
    graph = model.graph
    inner = {value.name: f"row/{value.name}" for value in graph.input if value.name in vectors}
    inner |= {name: f"row/{name}" for node in graph.node for name in node.output}
    nodes = [_renamed(node, inner) for node in graph.node]
    read = [value for value in graph.input if value.name in vectors]
    given = [_shaped(value, [length], inner[value.name]) for value in read]
    made = [_shaped(value, [length], inner[value.name]) for value in graph.output]
    body = helper.make_graph(nodes, "row", given, made)
    scan = helper.make_node(
        "Scan",
        [value.name for value in read],
        [value.name for value in graph.output],
        "optimizer/Scan",
        body=body,
        num_scan_inputs=len(read),
        scan_input_directions=[int(backwards)] * len(read),
        scan_output_directions=[int(backwards)] * len(graph.output),
    )
    inputs = [_shaped(v, ["rows", length]) if v.name in vectors else v for v in graph.input]
    outputs = [_shaped(value, ["rows", length]) for value in graph.output]
    whole = helper.make_graph([scan], graph.name, inputs, outputs, graph.initializer)
    return helper.make_model(whole, opset_imports=model.opset_import, ir_version=model.ir_version)


def _renamed(node: NodeProto, names: dict[str, str]) -> NodeProto:
    copy = NodeProto(name=node.name, op_type=node.op_type, domain=node.domain, attribute=node.attribute)
    copy.input.extend(names.get(name, name) for name in node.input)
    copy.output.extend(names.get(name, name) for name in node.output)
    return copy


def _shaped(value: ValueInfoProto, shape: list[int | str], name: str = "") -> ValueInfoProto:
    return helper.make_tensor_value_info(name or value.name, value.type.tensor_type.elem_type, shape)
