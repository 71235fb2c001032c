"""Inline functions, turn constants into initializers, and name every node."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.files import check_structure
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders
from onnxgrad_cli.passes.prepare.safe_forms import to_time_major
from onnxgrad_cli.passes.prepare.subgraphs import check_depth, hoist, separate_outputs
from onnxgrad_cli.targets.standard import to_standard


def normalise(graph: Graph) -> None:
    """Inline functions, turn constants into initializers, and name every node.

    Raises:
        OnnxgradError: inlining a function gives a node that is not valid: the call lacks an input that the node needs,
            or sets an attribute to an invalid value.
    """
    to_standard(graph.proto, graph.nodes)
    if graph.proto.functions:
        inline_functions(graph)
        check_structure(graph.commit())
    bodies = any(map(subgraphs, graph.nodes))
    if bodies:
        check_depth(graph.nodes)
    forget_placeholders(graph)
    if bodies:
        hoist(graph, _constant_tensor)
    _hoist_constants(graph)
    if bodies:
        separate_outputs(graph)
    name_nodes(graph)
    for node in graph.nodes:
        if node.op_type in _UNKNOWN_DEFAULTS and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute(*_UNKNOWN_DEFAULTS[node.op_type]))
    to_time_major(graph)


def inline_functions(graph: Graph) -> None:
    """Inline the functions that the model defines."""
    from onnxgrad_cli.passes.prepare.inline_functions import inline  # few models define functions

    inline(graph, _constant_tensor)


def _hoist_constants(graph: Graph) -> None:
    """Replace Constant nodes by initializers with the same names, so that weights among them are found."""

    def stored(node: Node) -> list[Node] | None:
        tensor = _constant_tensor(node)
        if tensor is None or node.output[0] in graph.output_names:
            return None
        graph.store_tensor(node.output[0], tensor)
        return []

    graph.rewrite(stored, {"Constant"})


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
    """Give every node a unique name. onnxruntime requires that, and backward nodes are named after forward nodes.

    Every output of Split gets a name too, because onnxruntime crashes without one.
    """
    taken: set[str] = set()
    for node in graph.nodes:
        if not node.name or node.name in taken:
            node.name = graph.fresh(node.name or f"{node.op_type}_{next(iter(node.output), '')}")
        taken.add(node.name)
        if node.op_type == "Split":
            node.output[:] = [name or graph.fresh(f"{node.name}_unread") for name in node.output]


_UNKNOWN_DEFAULTS = {"MeanVarianceNormalization": ("axes", [0, 2, 3]), "STFT": ("onesided", 1)}
"""Map: operator for which shape inference assumes another default of an attribute -> (attribute, right default)."""
