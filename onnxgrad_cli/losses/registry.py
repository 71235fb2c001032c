"""The table of losses: how each is called, what label it wants, and what options it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, chosen, declared, undocumented
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type

LABELS = {
    "same": "of the output's type and shape",
    "class": "the class of each sample (int64), of the output's shape without the axis of classes: 1, or class-axis",
    "token": "the token at each place (int64), of the output's shape without its last axis, that of the vocabulary",
    "none": "none",
}
"""The kinds of label, in words."""

RANKS = {"class": 2, "token": 3}
"""How many axes an output has at least, by the kind of label."""

AXES = {"class": ", the second the classes", "token": ", the second the places, the third the vocabulary"}
"""The axes of an output behind that of the batch, by the kind of label, in words."""


@dataclass(frozen=True)
class Loss(Documented):
    """A loss.

    Attributes:
        name: what it is called on the command line.
        function: `function(op, prediction, label, **options)`, without `label` where it takes none. It returns the
            losses, or the losses (weighted) and their weights: then the mean divides by the sum of the weights.
            The first axis of the losses is the batch.
        label: what label it wants, a key of `LABELS`.
        rank: how many axes the output has at least.
        options: what it takes besides.
        rather: operators that the output must not come from -> the loss that takes such an output.
    """

    name: str
    function: Callable[..., Any]
    label: str
    rank: int
    options: tuple[Option, ...]
    rather: Mapping[str, str]

    def class_axis(self, given: Mapping[str, object]) -> int | None:
        """The axis of the output that runs over the classes, as given or by default; None where labels are no classes.

        Raises:
            UsageError: a value is of another kind.
        """
        if self.label == "token":
            return -1
        asked = self._setting("class_axis", given)
        return 1 if asked is None and self.label == "class" else asked

    def label_type(self, prediction: Val, given: Mapping[str, object]) -> TypeProto | None:
        """The type of the label for an output, with the options `given`; None where there is no label.

        Raises:
            UsageError: the output's rank is unknown, or too low for this loss, or it has no such axis of classes.
        """
        if self.label == "none":
            return None
        shape = prediction.known_shape
        if shape is None:
            raise UsageError(
                f"the rank of output '{prediction.name}' is unknown, so its label can't be declared",
                prediction.op.graph.rank_hint(),
            )
        if len(shape) < self.rank:
            dims = ", ".join(map(str, shape))
            raise UsageError(
                f"{self.name} takes an output of at least {self.rank} axes, '{prediction.name}' is [{dims}]",
                f"the first axis is the batch{AXES.get(self.label, '')}",
            )
        axis = self.class_axis(given)
        if axis is None:
            return tensor_type(prediction.dtype, shape)
        if not -len(shape) < axis < len(shape) or axis == 0:
            raise UsageError(
                f"`loss_options=class-axis={axis}`: '{prediction.name}' has {len(shape)} axes; the first is the batch"
            )
        return tensor_type(TensorProto.INT64, np.delete(np.array(shape, object), axis).tolist())

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        """The options for `function`: of `given`, those it knows.

        Raises:
            UsageError: a value is of another kind.
        """
        return chosen(self.options, given)

    def ignored(self, given: Mapping[str, object]) -> int | None:
        """The label of samples that do not count, as given or by default; None where the loss has none.

        Raises:
            UsageError: a value is of another kind.
        """
        return self._setting("ignore_index", given)

    def _setting(self, name: str, given: Mapping[str, object]) -> Any:
        settings = {option.name: option.default for option in self.options} | self.settings(given)
        return settings.get(name)


LOSSES: Catalogue[Loss] = Catalogue(
    "loss",
    "losses",
    ["onnxgrad_cli.losses.classes", "onnxgrad_cli.losses.values"],
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
        name: what it is called on the command line.
        label: what label it wants, a key of `LABELS`.
        rank: how many axes the output has at least.
        options: option -> what it does. Kinds and defaults are read from the function's signature.
        rather: operators that the output must not come from -> the loss that takes such an output.
        override: replace a loss of this name instead of refusing.

    Raises:
        OnnxgradError: there is a loss of this name, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"loss '{name}'")
        LOSSES.add(name, Loss(name, function, label, rank, found, rather or {}), override)
        return function

    return register


def of_function(function: Callable[..., Any]) -> Loss:
    """The loss that a function is: the registered one, or one by its signature.

    The signature is that of the registered ones, `function(op, prediction, label, *, option=default)`. A loss without
    a label has two parameters. The label is of the output's type and shape, unless its annotation is another key of
    `LABELS`: `label: "class"`.

    Raises:
        UsageError: it has another signature.
    """
    known = next((each for each in LOSSES if each.function is function), None)
    if known is not None:
        return known
    what = f"the loss '{getattr(function, '__name__', function)}'"
    hint = "a loss is a function(op, prediction, label, *, option=default)"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(f"{what} is no Python function", hint) from None
    operands = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(operands) not in (2, 3) or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise UsageError(f"{what} takes {', '.join(map(str, parameters)) or 'nothing'}", hint)
    label = "none" if len(operands) == 2 else _label_of(operands[2], what)
    return Loss(function.__name__, function, label, RANKS.get(label, 0), undocumented(function, what), {})


def _label_of(parameter: inspect.Parameter, what: str) -> str:
    if parameter.annotation is parameter.empty:
        return "same"
    kind = str(getattr(parameter.annotation, "__name__", parameter.annotation)).strip("'\"")
    if kind == "Val":
        return "same"
    if kind not in LABELS or kind == "none":
        kinds = [kind for kind in LABELS if kind != "none"]
        raise UsageError(
            f"{what}: '{kind}' is no kind of label",
            f"annotate it with one of {', '.join(map(repr, kinds))}; the first is meant where nothing is said",
        )
    return kind
