"""The logarithm of the probability of each class, as an output of a model: the negative of what attacks raise."""

from __future__ import annotations

import onnx
from onnx import ModelProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.explanations.samples import Scored
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, in_words, shape_of, tensor_type


def with_log_probabilities(model: ModelProto, graph: Graph, what: Scored) -> tuple[ModelProto, str]:
    """A copy of a model with the logarithms of a softmax of its scores, and what they are called.

    Where the model ends with a Softmax the scores before it are taken, whose logarithm never overflows.

    Args:
        model: the model, which is not changed.
        graph: it, typed.
        what: the output of scores, [batch, classes].

    Raises:
        UsageError: the output is of another rank, or of one class.
    """
    kind = graph.types[what.output]
    shape = shape_of(kind) or ()
    if len(shape) != 2 or what.classes == 1:
        raise UsageError(
            f"'{what.output}' is {in_words(kind)}: an attack is on [batch, classes], of two classes or more",
            "name another output with `output`",
        )
    copy = ModelProto()
    copy.CopyFrom(model)
    last = next((node for node in copy.graph.node if what.output in node.output), None)
    scores = what.output
    if last is not None and last.op_type == "Softmax" and last.domain in ("", "ai.onnx"):
        scores = last.input[0]
    name = Graph(model).fresh(f"{what.output}_log_probability")
    copy.graph.node.append(onnx.helper.make_node("LogSoftmax", [scores], [name], name=name, axis=1))
    copy.graph.output.append(onnx.helper.make_value_info(name, tensor_type(dtype_of(kind), list(shape))))
    return copy, name
