"""Functions inlined, constants held as initializers, every node named."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.dialects import fatal_node
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders
from onnxgrad_cli.passes.prepare.functions import inline
from onnxgrad_cli.passes.prepare.rnn_layout import to_time_major
from onnxgrad_cli.passes.prepare.subgraphs import check_depth, hoist, separate_outputs
from onnxgrad_cli.targets.standard import to_standard


def normalise(graph: Graph) -> None:
    """Inline functions, hold constants as initializers, and name every node.

    Raises:
        OnnxgradError: a node lacks an input, or has an equation that is none; a call of a function may make such.
    """
    to_standard(graph.proto, graph.nodes)
    inline_functions(graph)
    check_depth(graph.nodes)
    if fault := fatal_node(graph.nodes, graph.opset() or 0):
        raise OnnxgradError(f"the model is no valid ONNX model: {fault}", "export it again")
    forget_placeholders(graph)
    _hoist_constants(graph)
    separate_outputs(graph)
    name_nodes(graph)
    _write_defaults(graph)
    to_time_major(graph)


def inline_functions(graph: Graph) -> None:
    """Write out the functions that the model defines."""
    inline(graph, _constant_tensor)


def _hoist_constants(graph: Graph) -> None:
    """Constant nodes become initializers of the same name: weights are found there, and inference skips them."""
    hoist(graph, _constant_tensor)
    others = []
    for node in graph.nodes:
        tensor = _constant_tensor(node)
        if tensor is None or node.output[0] in graph.output_names:
            others.append(node)
            continue
        tensor.name = node.output[0]
        graph.proto.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = graph.proto.graph.initializer[-1]
    graph.nodes = others


def _constant_tensor(node: Node) -> onnx.TensorProto | None:
    if node.op_type != "Constant" or not is_standard(node.domain):
        return None
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name in dtypes:
        return numpy_helper.from_array(np.asarray(value, dtypes[attribute.name]))
    return None


def name_nodes(graph: Graph) -> None:
    """Backward nodes are named after forward nodes, so each of these needs a name, and onnxruntime wants one owner.

    It wants every output of Split named too: else it dies.
    """
    taken: set[str] = set()
    for node in graph.nodes:
        if not node.name or node.name in taken:
            node.name = graph.fresh(node.name or f"{node.op_type}_{next(iter(node.output), '')}")
        taken.add(node.name)
        if node.op_type == "Split":
            node.output[:] = [name or graph.fresh(f"{node.name}_unread") for name in node.output]


_UNKNOWN_DEFAULTS = {"MeanVarianceNormalization": ("axes", [0, 2, 3]), "STFT": ("onesided", 1)}
"""Attributes whose default the inference of shapes does not know: it follows the operator's body, or takes another."""


def _write_defaults(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op_type in _UNKNOWN_DEFAULTS and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute(*_UNKNOWN_DEFAULTS[node.op_type]))
