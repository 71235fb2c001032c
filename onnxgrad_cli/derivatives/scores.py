"""The score of one class, as what is differentiated in place of the scores of all."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, shape_of, tensor_type

NEVER = 2**31 - 1
"""What a negative label becomes: an index that there is not, so that the runtime refuses it and counts from no end."""


@dataclass(frozen=True)
class ClassChoice:
    """Which class of an output is differentiated.

    Attributes:
        which: a number from 0, in digits; 'argmax', the best at run time; or 'label', an input.
        axis: the axis of the output that runs over the classes.
    """

    which: str
    axis: int = 1

    @classmethod
    def of(cls, which: int | str | None, axis: int = 1) -> ClassChoice | None:
        """From what a user says; None where nothing is.

        Raises:
            UsageError: it is none of these.
        """
        if which is None:
            return None
        if isinstance(which, bool) or not re.fullmatch(r"[0-9]{1,18}|argmax|label", str(which)):
            raise UsageError(f"there is no class '{which}'", "give a number from 0, 'argmax' or 'label'")
        return cls(str(which), axis)

    def score(self, graph: Graph, name: str, label: str) -> str:
        """Append the nodes of the score of an output, of its shape without the axis of classes; returns its name.

        Raises:
            UsageError: the output has no such axis, or not so many classes.
        """
        op = Op(graph)
        y = op.val(name)
        axis = self._axis(graph, name)
        if self.which.isdigit():
            score = op.Gather(y, op.const(np.array(int(self.which), np.int64)), axis=axis)
        else:
            score = op.squeeze(op.GatherElements(y, self._index(op, y, axis, label), axis=axis), [axis])
        op.rename(score, score_name := graph.fresh(f"{name}_score"))
        graph.nodes.extend(op.nodes)
        return score_name

    def add_label(self, graph: Graph, name: str) -> str:
        """Add the input for the labels of an output; returns its name.

        Raises:
            UsageError: the output has no such axis.
        """
        axis, shape = self._axis(graph, name), list(shape_of(graph.types[name]) or ())
        label = graph.fresh("label")
        graph.add_input(label, tensor_type(TensorProto.INT64, shape[:axis] + shape[axis + 1 :]))
        return label

    def _index(self, op: Op, y: Val, axis: int, label: str) -> Val:
        if self.which == "argmax":
            return op.ArgMax(y, axis=axis, keepdims=1)
        given = op.unsqueeze(op.val(label), [axis])
        return op.Where(op.Less(given, op.const(0)), op.const(NEVER), given)

    def _axis(self, graph: Graph, name: str) -> int:
        """The axis, from the front, of an output that has it and so many classes."""
        shape = shape_of(graph.types[name])
        if shape is None or not -len(shape) <= self.axis < len(shape):
            raise UsageError(
                f"'{name}' is {in_words(graph.types[name])}: it has no axis {self.axis} of classes",
                "name an output of scores with `of`, or their axis with `class_axis`",
            )
        axis = self.axis % len(shape)
        classes = shape[axis]
        if self.which.isdigit() and isinstance(classes, int) and int(self.which) >= classes:
            raise UsageError(
                f"'{name}' has {classes} classes along axis {axis}, and none of number {self.which}",
                f"they are 0 to {classes - 1}; `class_axis` names another axis",
            )
        return axis
