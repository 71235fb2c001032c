"""Kernels of the installed onnxruntime on the processor for bfloat16, for which it has few.

The runtime is asked: a table of versions would be wrong for those that are newer than the table.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import load_onnxruntime
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.types import dtype_of

_known: dict[tuple[object, ...], bool] = {}
"""What the runtime has answered, by operator and types; for good, in this process."""


def loads(model: ModelProto) -> bool:
    """Return True if onnxruntime opens a session on a model."""
    try:
        Executor(model, fallback=False)
    except Exception:  # of many kinds, none of them public
        return False
    return True


def has_kernel(graph: Graph, node: Node) -> bool:
    """Return True if onnxruntime has a kernel for a node's operator and types; a model of that node tells."""
    opset = graph.opset(node.domain)
    types = tuple(dtype_of(graph.types.get(name)) if name else 0 for name in (*node.input, *node.output))
    key = (node.domain, node.op_type, opset, len(node.input), types)
    if key not in _known:
        _known[key] = _opens(graph, node)
    return _known[key]


def _opens(graph: Graph, node: Node) -> bool:
    runtime = load_onnxruntime()
    constants = {name: array for name in node.input if (array := graph.constant(name)) is not None}
    fed = [name for name in dict.fromkeys(node.input) if name and name not in constants]
    alone = helper.make_graph(
        [as_message(node)],
        "kernel",
        [ValueInfoProto(name=name, type=graph.types[name]) for name in fed],
        [ValueInfoProto(name=name, type=graph.types[name]) for name in node.output if name],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(alone, opset_imports=graph.proto.opset_import, ir_version=graph.proto.ir_version)
    try:
        Executor(model, fallback=False)
    except runtime.capi.onnxruntime_pybind11_state.NotImplemented:
        return False
    except Exception:  # of many kinds, none of them public: not for want of a kernel
        return True
    return True
