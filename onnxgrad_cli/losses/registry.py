"""The registry of losses: their names, the kinds of their labels, and their options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, chosen, declared, undocumented
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.ir.types import tensor_type

LABELS = {
    "same": "of the output's type and shape",
    "class": (
        "the class of each sample (int64), with the shape of the output without the axis of classes (axis 1, or "
        "class-axis)"
    ),
    "token": "the token at each position (int64), with the shape of the output without the last axis, the vocabulary",
    "none": "none",
}
"""Map from a kind of label to the description that users see."""

OTHERS = ("input", "output", "label", "mask")
"""The kinds of parameters that a loss function may have in addition to prediction and label; see `of_function`."""

RANKS = {"class": 2, "token": 3}
"""Map from a kind of label to the smallest number of axes that the output must have."""

AXES = {
    "class": ", and the second axis has the classes",
    "token": ", the second axis the positions, and the third axis the vocabulary",
}
"""Map from a kind of label to a description of the axes of the output after the batch axis, for error messages."""


FOR_OUTPUTS = {"Softmax": "log", "LogSoftmax": "nll", "Sigmoid": "bce"}
"""Operator that computes an output -> the loss of a classifier for this output."""


@dataclass(frozen=True)
class Loss(Documented):
    """A loss.

    Attributes:
        name: the name on the command line.
        function: `function(op, prediction, label, **options)`, without `label` if the loss has no label. It returns
            the losses, or a pair of the weighted losses and their weights. In the second case, the mean divides by the
            sum of the weights. The first axis of the losses is the batch.
        label: the kind of label, a key of `LABELS`.
        rank: the smallest number of axes of the output.
        options: the options of `function`.
        rather: map from an operator to the name of a different loss. If this operator computes the output, this loss is
            wrong, and an error suggests the other loss.
        operands: map from each parameter of `function` after the prediction, in order, to a pair (kind, name). The kind
            is in `OTHERS`. For "input" and "output", the name is that of the value to pass. For "label" and "mask", it
            is the name of the value that determines the label's type. ("label", "") is the usual label of the loss.
            None if the label is the only such parameter.
    """

    name: str
    function: Callable[..., Any]
    label: str
    rank: int
    options: tuple[Option, ...]
    rather: Mapping[str, str]
    operands: Mapping[str, tuple[str, str]] | None = None

    def class_axis(self, given: Mapping[str, object]) -> int | None:
        """Return the axis of the output that runs over the classes, or None if labels are not classes.

        Args:
            given: the options of the loss.

        Raises:
            UsageError: an option has a value of the wrong type.
        """
        if self.label == "token":
            return -1
        asked = self._setting("class_axis", given)
        return 1 if asked is None and self.label == "class" else asked

    def label_type(self, prediction: Val, given: Mapping[str, object]) -> TypeProto | None:
        """Return the type of the label for an output, or None if the loss has no label.

        Args:
            prediction: the output.
            given: the options of the loss.

        Raises:
            UsageError: the output's rank is unknown or too low for this loss, or the axis of classes doesn't exist.
        """
        if self.label == "none":
            return None
        shape = prediction.known_shape
        name = prediction.name
        if shape is None:
            message = f"the rank of output '{name}' is unknown, so its label can't be declared"
            raise wrong_shape(message, prediction.op.graph.rank_hint())
        if len(shape) < self.rank:
            message = f"{self.name} requires an output with at least {self.rank} axes, but '{name}' is"
            hint = f"choose an output whose first axis is the batch{AXES.get(self.label, '')}"
            raise wrong_shape(f"{message} [{', '.join(map(str, shape))}]", hint)
        axis = self.class_axis(given)
        if axis is None:
            return tensor_type(prediction.dtype, shape)
        if not -len(shape) < axis < len(shape) or axis == 0:
            message = f"`loss_options=class-axis={axis}` is not an axis of classes"
            raise wrong_value(f"{message}: '{name}' has {len(shape)} axes, and the first is the batch")
        return tensor_type(TensorProto.INT64, np.delete(np.array(shape, object), axis).tolist())

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        """Return those options in `given` that the loss has, with their values checked.

        Raises:
            UsageError: an option has a value of the wrong type.
        """
        return chosen(self.options, given)

    def ignored(self, given: Mapping[str, object]) -> int | None:
        """Return the label of samples that the loss ignores, or None if it ignores no label.

        Args:
            given: the options of the loss.

        Raises:
            UsageError: an option has a value of the wrong type.
        """
        return self._setting("ignore_index", given)

    def _setting(self, name: str, given: Mapping[str, object]) -> Any:
        settings = {option.name: option.default for option in self.options} | self.settings(given)
        return settings.get(name)


LOSSES: Catalogue[Loss] = Catalogue(
    "loss",
    "losses",
    ["onnxgrad_cli.losses.classification", "onnxgrad_cli.losses.same_shape"],
    "any other loss can be given as a file, NAME.onnx",
)


def loss(
    name: str,
    *,
    label: str = "same",
    rank: int = 0,
    options: Mapping[str, str] | None = None,
    rather: Mapping[str, str] | None = None,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a loss; its keyword-only parameters are its options.

    Args:
        name: the name on the command line.
        label: the kind of label, a key of `LABELS`.
        rank: the smallest number of axes of the output.
        options: map from an option to its description. Types and defaults are read from the function's signature.
        rather: map from an operator that must not compute the output to the name of the right loss for such an output.
        override: replace a loss with the same name instead of raising.

    Raises:
        OnnxgradError: the name is already used, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"loss '{name}'")
        LOSSES.add(name, Loss(name, function, label, rank, found, rather or {}), override)
        return function

    return register


def of_function(function: Callable[..., Any]) -> Loss:
    """Return the registered loss that uses this function, or a new loss described by the function's signature.

    The signature is `function(op, prediction, label, *, option=default)`. Parameters after the prediction may have an
    annotation:

    ================= ==================================================================================
    annotation        parameter
    ================= ==================================================================================
    none or "same"    the label of the loss, with the type and shape of the output
    "class", "token"  the label of the loss, see `LABELS`
    "input"           the model input with the name of the parameter; "input NAME" for another name
    "output"          the model output with the name of the parameter; "output NAME" for another name
    "label NAME"      a further label, named like the parameter, with the type and shape of the input or
                      output NAME
    "mask NAME"       a mask, a label of floats named like the parameter, with the first two axes of the input or
                      output NAME: 1 for real entries of the second axis, 0 for padding. The data need not have it
    ================= ==================================================================================

    Raises:
        UsageError: the function has a different signature.
    """
    known = next((each for each in LOSSES if each.function is function), None)
    if known is not None:
        return known
    name = getattr(function, "__name__", written_function(function).__qualname__.partition(".")[0])
    what = f"the loss '{name}'"
    hint = (
        "write the loss as function(op, prediction, label, *, option=default); annotate an input of the model as "
        "x: 'input'"
    )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise wrong_type(f"{what} is not a Python function", hint) from None
    operands = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][2:]
    kinds = {p.name: _kind_of(p, what) for p in operands}
    labels = [kind for kind in kinds.values() if not isinstance(kind, tuple)]
    fixed = len(parameters) < 2 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if fixed or len(labels) > 1 or any(p.kind is p.KEYWORD_ONLY for p in parameters[:2]):
        raise wrong_value(f"{what} has the parameters {', '.join(map(str, parameters)) or '(none)'}", hint)
    label = labels[0] if labels else "none"
    values = {name: kind if isinstance(kind, tuple) else ("label", "") for name, kind in kinds.items()}
    return Loss(name, function, label, RANKS.get(label, 0), undocumented(function, what), {}, values)


def written_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a `functools.partial`, or the method `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__code__") else type(function).__call__


def _kind_of(parameter: inspect.Parameter, what: str) -> str | tuple[str, str]:
    """Return the kind of label (a key of `LABELS`) for a label; otherwise the parameter's kind and value name."""
    if parameter.annotation is parameter.empty:
        return "same"
    text = str(getattr(parameter.annotation, "__name__", parameter.annotation)).strip("'\"")
    kind, _, name = text.partition(" ")
    name = name.strip()
    if kind in OTHERS and (name or kind in ("input", "output")):
        return kind, name or parameter.name
    if text == "Val":
        return "same"
    if text not in LABELS or text == "none":
        hint = "without an annotation, the parameter is a label like the output; other annotations are"
        kinds = "'same', 'class', 'token', 'input', 'output', 'label NAME' and 'mask NAME'"
        raise wrong_value(f"{what}: the annotation '{text}' is not a kind of parameter", f"{hint} {kinds}")
    return text
