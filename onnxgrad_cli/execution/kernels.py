"""Test which opsets and operators the installed onnxruntime supports, and parse its error messages.

A test opens a small model. A table of supported operators would be wrong for versions of onnxruntime that are newer
than the table.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import load_onnxruntime
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.types import dtype_of

ASSURED = 26
"""The newest opset that every supported onnxruntime loads (1.31 and newer, see pyproject.toml)."""

MAX_LENGTH = 500
"""Longer messages of onnxruntime are cut to this number of characters."""

NODE = re.compile(r"Non-zero status code returned while running (\S+) node\. Name:\s*'([^']*)' Status Message: ?(.*)")
PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")

MISSING_KERNEL = re.compile(
    r"NOT_IMPLEMENTED|implementation for|"
    r"\b(?:not|n't)(?: yet| be)* (?:support|implement)\w*\b[^.]*\b(?:double|\w*float\w*|u?int\d+|\w*type)",
    re.IGNORECASE,
)

_known: dict[tuple[object, ...], bool] = {}
"""Cache of the results of `has_kernel`, by operator and types, for the whole process."""


def loads(model: ModelProto) -> bool:
    """Return True if onnxruntime opens a session on a model."""
    with suppress(Exception):  # onnxruntime's exception classes are not public
        Executor(model, fallback=False)
        return True
    return False


def newest_loaded(limit: int) -> int:
    """Return the newest opset of the default domain, up to `limit`, that the installed onnxruntime loads.

    An opset up to `ASSURED` is returned without a test, so that onnxruntime need not be imported for it.
    """
    return next((opset for opset in range(limit, ASSURED, -1) if _loads_opset(opset)), min(limit, ASSURED))


@cache
def _loads_opset(opset: int) -> bool:
    """Return True if onnxruntime opens a model of this opset, which consists of one Identity.

    The test takes 0.5 ms, and the import of onnxruntime 30 ms (1.32, two threads). The proof of a training model
    imports onnxruntime anyway.
    """
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "opset", [x], [y])
    imports = [helper.make_opsetid("", opset)]
    return loads(helper.make_model(graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports)))


def has_kernel(graph: Graph, node: Node) -> bool:
    """Return True if onnxruntime has a kernel for a node's operator and types.

    The test opens a model with this node only.
    """
    opset = graph.opset(node.domain)
    types = tuple(dtype_of(graph.types.get(name)) if name else 0 for name in (*node.input, *node.output))
    key = (node.domain, node.op_type, opset, len(node.input), types)
    if key not in _known:
        _known[key] = _opens(graph, node)
    return _known[key]


def _opens(graph: Graph, node: Node) -> bool:
    no_kernel = load_onnxruntime().capi.onnxruntime_pybind11_state.NotImplemented
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
    except Exception as error:  # if it is another exception of onnxruntime, a kernel exists
        return not isinstance(error, no_kernel)
    return True


def in_short(error: Exception) -> str:
    """Return the text of an error in one line. If a node failed, the line begins with that node."""
    text = PREFIX.sub("", " ".join(str(error).split()))
    found = NODE.search(text)
    return (f"{found[1]} '{found[2]}': {found[3].strip()}" if found else text)[:MAX_LENGTH]


def lacks_kernel(error: Exception) -> bool:
    """Return True if an error says that onnxruntime has no kernel for an operator with its input types."""
    return MISSING_KERNEL.search(str(error)) is not None
