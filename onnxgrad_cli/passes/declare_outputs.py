"""Replace the YieldOp by standard operators, and declare the inputs and outputs of the training model.

The YieldOp marks the end of the forward part and returns the cotangent of the loss. This becomes a tensor of ones
(Shape and ConstantOfShape) or an input, or the YieldOp is kept. Trained weights become initializers that can be
overridden by inputs. The outputs are the loss, one gradient per trained weight, and the next values of the state.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, make_node
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import dtype_of, shape_of, tensor_type
from onnxgrad_cli.options import SignatureOptions
from onnxgrad_cli.passes.tensor_roles import write_roles
from onnxgrad_cli.record import StepRecord


def declare_outputs(graph: Graph, options: SignatureOptions, training: StepRecord) -> None:
    """Replace the YieldOp by ones or inputs, or keep it; declare inputs and outputs."""
    if training.yielded:
        settle_yield(graph, options.yield_, training.yielded)
    declared = set(graph.input_names)
    for name in (*training.trained, *training.state):
        if name not in declared:
            graph.add_input(name, graph.types[name])
    own = list(graph.proto.graph.output)
    del graph.proto.graph.output[:]
    wanted = [training.loss, *training.gradients.values(), *training.state.values()]
    for name in wanted:
        graph.add_output(name)
    others = [value for value in own if value.name not in wanted]
    if options.keep_outputs:
        graph.proto.graph.output.extend(others)
    else:  # keep the declared shapes, because inference may not find them
        known = {value.name for value in graph.proto.graph.value_info}
        fed = {*graph.input_names, *graph.initializers}
        graph.proto.graph.value_info.extend(value for value in others if value.name not in known | fed)
    write_roles(graph, options, training)


def settle_yield(graph: Graph, how: str, yielded: Mapping[str, str]) -> None:
    """Replace the cotangents that the YieldOp returns by ones or by inputs, or keep the YieldOp.

    Args:
        graph: the graph; changed in place.
        how: 'ones', 'input' or 'keep'.
        yielded: map from a value to the name of its cotangent.
    """
    if how == "keep":  # the types of a YieldOp's outputs can't be inferred
        declare = onnx.helper.make_value_info
        graph.proto.graph.value_info.extend(declare(name, graph.types[name]) for name in yielded.values())
        return
    position = next(i for i, node in enumerate(graph.nodes) if node.op_type == "YieldOp")
    domain = graph.nodes[position].domain
    graph.nodes[position : position + 1] = _ones(graph, yielded) if how == "ones" else []
    forget_domain(graph, domain)
    if how == "input":
        for name in yielded.values():
            graph.add_input(name, graph.types[name])


def _ones(graph: Graph, yielded: Mapping[str, str]) -> list[Node]:
    """Return the nodes that fill each cotangent with ones in the shape of its value."""
    nodes = []
    for name, cotangent in yielded.items():
        shape = graph.fresh(f"{name}_shape")
        known = shape_of(graph.types[name])
        graph.types[shape] = tensor_type(TensorProto.INT64, [None if known is None else len(known)])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype_of(graph.types[name]))
        one = onnx.numpy_helper.from_array(np.ones(1, dtype))
        nodes.append(make_node("Shape", [name], [shape], graph.fresh(f"{cotangent}/Shape")))
        fill = graph.fresh(f"{cotangent}/ConstantOfShape")
        nodes.append(make_node("ConstantOfShape", [shape], [cotangent], fill, value=one))
    for node in nodes:
        node.metadata = {ROLE: "seed"}
    return nodes


def forget_domain(graph: Graph, domain: str) -> None:
    """Remove the import of a domain if no node of the graph uses it."""
    imports = graph.proto.opset_import
    if not any(node.domain == domain for node in with_bodies(graph.nodes)):
        for entry in [e for e in imports if e.domain == domain]:
            imports.remove(entry)
