"""Select the score of one class from an output, so that the score is differentiated instead of the whole output."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import wrong_shape, wrong_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, shape_of, tensor_type

NEVER = 2**31 - 1
"""Replaces negative labels. It is out of range, so the runtime fails instead of counting classes from the end."""


@dataclass(frozen=True)
class ClassChoice:
    """The class of an output whose score is differentiated.

    Attributes:
        which: the number of the class, counted from 0, as a string of digits. Or 'argmax', the class with the highest
            score at run time. Or 'label', the class that an input gives.
        axis: the axis of the classes in the output.
    """

    which: str
    axis: int = 1

    @classmethod
    def of(cls, which: int | str | None, axis: int = 1) -> ClassChoice | None:
        """Return the choice for the user's options, or None if `which` is None.

        Raises:
            UsageError: `which` is not a number from 0 on, 'argmax' or 'label'.
        """
        if which is None:
            return None
        if isinstance(which, bool) or not re.fullmatch(r"[0-9]{1,18}|argmax|label", str(which)):
            raise wrong_value(f"`class_`: '{which}' is not a class", "use a number from 0, 'argmax' or 'label'")
        return cls(str(which), axis)

    def score(self, graph: Graph, name: str, label: str) -> str:
        """Append the nodes that compute the score of the chosen class of an output, and return the name of the score.

        The score has the shape of the output without the axis of the classes.

        Raises:
            UsageError: the output doesn't have that axis, or has fewer classes than the chosen number requires.
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
        """Add an input for the labels of an output and return its name.

        Raises:
            UsageError: the output doesn't have the axis of the classes.
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
        """Return the axis of the classes, counted from the front.

        Raises:
            UsageError: the output doesn't have that axis, or has fewer classes than the chosen number requires.
        """
        shape = shape_of(graph.types[name])
        if shape is None or not -len(shape) <= self.axis < len(shape):
            raise wrong_shape(
                f"`class_axis`: '{name}' is {in_words(graph.types[name])}, so it has no axis {self.axis} of classes",
                "choose an output of scores with `of`, or set the axis of classes with `class_axis`",
            )
        axis = self.axis % len(shape)
        classes = shape[axis]
        if self.which.isdigit() and isinstance(classes, int) and int(self.which) >= classes:
            raise wrong_value(
                f"`class_`: '{name}' has {classes} classes along axis {axis}, but class {self.which} was chosen",
                f"choose a class from 0 to {classes - 1}, or set another axis with `class_axis`",
            )
        return axis
