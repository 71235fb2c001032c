"""`onnx_derivative` under its old name and with its old options: the gradient graph of a model.

It needs no training build of onnxruntime, and its results run on the stock onnxruntime. The only exception is a graph
that keeps the YieldOp. Such a graph is for a runtime that first runs the nodes before the YieldOp, and later the nodes
after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import STRICT, IntFlag
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Yield
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.derivatives.derivative_model import (
    DerivativeModel,
    float_initializers,
    float_inputs,
    float_weights,
    open_model,
    without,
)
from onnxgrad_cli.errors import conflict, missing_value, suggest, unknown_name, wrong_shape
from onnxgrad_cli.files import ModelSource, resolve_output, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.options import Options

Names = str | Sequence[str] | None
"""A name, several names, or None for the default."""


class DerivativeOptions(IntFlag, boundary=STRICT):
    """The options of the gradient graph of `onnx_derivative`.

    - Zero: the cotangent of each float output is an input.
    - KeepYieldOp: the graph keeps the YieldOp between its forward and its backward part.
    - KeepOutputs: the outputs of the model are also outputs of the gradient graph.
    - FillGrad, with KeepOutputs: the cotangents are ones, computed in the graph.
    - Loss: an output of the model is a loss; the graph returns the loss and its gradients.
    """

    Zero = 0
    KeepYieldOp = 1
    KeepOutputs = 2
    FillGrad = 4
    Loss = 8


def onnx_derivative(
    onx: ModelSource,
    weights: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | Sequence[str] | None = None,
    path_name: str | Path | None = None,
    verbose: int = 0,
) -> ModelProto:
    """Build the gradient graph of a model.

    The inputs of the result are the model's inputs, then the weights, which keep their values and may be fed. Without
    FillGrad, a cotangent `<output>_grad` follows for each float output. It is called `<output>_grad_external` if
    another output depends on this output, or if this output is itself an input or a weight. The outputs of the result
    are `<input>_grad`, then `<weight>_grad`, then, with KeepOutputs, the model's own outputs.

    With Loss, the outputs of the result are the loss, the model's other outputs, and the gradients. Weights stay
    constants unless they are named.

    Args:
        onx: a file, the bytes of a file, or a model, which is not changed.
        weights: the initializers (or inputs) to differentiate with respect to, in order. None selects every float
            initializer; with Loss, it selects none.
        inputs: the inputs to differentiate with respect to. None selects every float input; with Loss, all except the
            labels. With Loss, initializers may be named here too.
        options: see `DerivativeOptions`.
        loss: with Loss, the output that is the loss, which must have one element. By default it is the output 'loss'
            or, if there is no such output, the first output.
        label: with Loss, the inputs that are labels and get no gradient. If the name of the loss is among them, it is
            ignored.
        path_name: a file that the result is also written to.
        verbose: 1 prints a summary of the result to stderr.

    Raises:
        UsageError: the options can't be combined, or a name is not valid for its argument.
        UnsupportedError: the model can't be differentiated. The error lists all nodes that prevent it.
    """
    check(options)
    graph = open_model(onx, None)
    if options == DerivativeOptions.Loss:
        model = loss_gradient(graph, weights, inputs, loss, label, Options())
    else:
        if loss is not None or label is not None:
            raise conflict("`loss` and `label` require DerivativeOptions.Loss", "leave them out")
        model = _gradient(graph, weights, inputs, options)
    if path_name is not None:
        save_model(model, resolve_output(checks.path("path_name", path_name)), force=True)
    if verbose:
        names = [", ".join(value.name for value in values) for values in (model.graph.input, model.graph.output)]
        print(escaped(f"{len(model.graph.node)} nodes | inputs {names[0]} | outputs {names[1]}"), file=sys.stderr)
    return model


def check(options: DerivativeOptions) -> None:
    """Check that the options can be combined.

    Raises:
        UsageError: the options can't be combined, or are not `DerivativeOptions`.
    """
    hint = "pass one of DerivativeOptions, or several joined by |"
    checks.of_type("options", options, DerivativeOptions, "DerivativeOptions", hint)
    for single in (DerivativeOptions.KeepYieldOp, DerivativeOptions.Loss):
        if single in options and options != single:
            raise conflict(f"DerivativeOptions.{single.name} can't be combined with another", "use it alone")
    if options == DerivativeOptions.FillGrad:
        raise missing_value("DerivativeOptions.FillGrad requires KeepOutputs", "pass KeepOutputs | FillGrad")


def cotangents(options: DerivativeOptions) -> Yield:
    """Return the source of the cotangents for `DerivativeModel.vjp`: 'input', 'ones' or 'keep' (a YieldOp)."""
    if DerivativeOptions.KeepYieldOp in options:
        return "keep"
    return "ones" if DerivativeOptions.FillGrad in options else "input"


def _gradient(graph: Graph, weights: Names, inputs: Names, options: DerivativeOptions) -> ModelProto:
    fed, initializers = float_inputs(graph), float_initializers(graph)
    chosen = float_weights(graph) if weights is None else _chosen(weights, [*initializers, *fed], "weights", "weights")
    wanted = fed if inputs is None else _chosen(inputs, fed, "inputs", "float inputs")
    free = [name for name in fed if name in wanted and name not in chosen]
    derivative = DerivativeModel(graph, free, chosen, Options())
    derivative.prepare()
    own = graph.output_names
    gradients = derivative.vjp(cotangents(options))
    outputs = [*gradients, *(own if DerivativeOptions.KeepOutputs in options else ())]
    return derivative.described(derivative.finish(outputs), "vjp", gradients, outputs)


def loss_gradient(
    graph: Graph, weights: Names, inputs: Names, loss: str | None, label: Names, how: Options
) -> ModelProto:
    """Build the gradient graph of a loss: `onnx_derivative` with the option Loss, for a model that is already opened.

    The arguments from `weights` to `label` are those of `onnx_derivative`.

    Args:
        graph: the opened model, which is changed.
        how: the options of the build.
    """
    fed, initializers = float_inputs(graph), float_initializers(graph)
    outputs = graph.output_names
    loss = loss or ("loss" if "loss" in outputs else outputs[0])
    if loss not in outputs:
        raise unknown_name(f"the model has no output '{loss}'", suggest(loss, outputs, "outputs"))
    given = [label] if isinstance(label, str) else label or ()
    labels = _chosen(without(given, [loss]), graph.input_names, "label", "inputs")
    named = fed if inputs is None else _chosen(inputs, [*fed, *initializers], "inputs", "inputs or weights")
    more = _chosen(weights or [], initializers, "weights", "weights")
    differentiated = [name for name in fed if name in named and (inputs is not None or name not in labels)]
    trained = [*(name for name in initializers if name in named), *without(more, named)]
    derivative = DerivativeModel(graph, differentiated, trained, how)
    derivative.prepare()
    _check_is_number(loss, derivative)
    derivative.outputs = [loss]
    gradients = derivative.vjp("ones")
    results = [loss, *without(outputs, [loss]), *gradients]
    return derivative.described(derivative.finish(results, feed_weights=False), "vjp", gradients, results)


def _check_is_number(loss: str, derivative: DerivativeModel) -> None:
    """Raise an error unless the loss of a prepared model is a single float."""
    loss_type = derivative.graph.types.get(loss)
    shape = shape_of(loss_type)
    if loss not in derivative.outputs or shape is None or any(size != 1 for size in shape):
        message = f"the loss '{loss}' is not one float number: it is {in_words(loss_type) or 'of unknown type'}"
        raise wrong_shape(message, "choose another output, or declare its shape in the model")


def _chosen(given: str | Sequence[str], known: Sequence[str], argument: str, kind: str) -> list[str]:
    names = [given] if isinstance(given, str) else given
    for name in names:
        if name not in known:
            raise unknown_name(f"{argument}: '{name}' is not one of the model's {kind}", suggest(name, known, kind))
    return list(dict.fromkeys(names))
