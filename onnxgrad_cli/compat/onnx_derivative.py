"""`onnx_derivative` under its old name, with its old options: gradient graphs for those who have used it before.

It needs no training build of onnxruntime, and what it returns runs on the stock one, but for the graph that keeps the
YieldOp, which is there for a runtime that runs up to that node, and later from there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import STRICT, IntFlag
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Yield
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.derivatives.derivative_model import (
    DerivativeModel,
    float_initializers,
    float_inputs,
    float_weights,
    open_model,
    without,
)
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.files import ModelSource, followed, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.options import Options


class DerivativeOptions(IntFlag, boundary=STRICT):
    """What the gradient graph of `onnx_derivative` is like.

    Zero: the cotangent of each float output is an input. KeepYieldOp: the raw graph, with the YieldOp between forward
    and backward. KeepOutputs: the model's outputs are outputs too. FillGrad, with KeepOutputs: the cotangents are ones,
    filled in the graph. Loss: an output is a loss; the graph returns it with its gradients.
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

    Inputs of the result are the model's, then the weights, which keep their values and may be fed, then, without
    FillGrad, a cotangent `<output>_grad` for each float output (`<output>_grad_external` where another output
    depends on it, or where it is an input or a weight itself). Outputs are `<input>_grad`, then `<weight>_grad`, then
    with KeepOutputs the model's own. With Loss they are the loss, the other outputs, and the gradients, and the weights
    stay constants unless they are named.

    Args:
        onx: a file, the bytes of one, or a model, which is not changed.
        weights: the initializers (or inputs) to differentiate with respect to, in order; None is every float
            initializer, or none with Loss.
        inputs: the inputs to differentiate with respect to; None is every float input (with Loss: but the labels).
            With Loss, initializers may be named here too.
        options: see `DerivativeOptions`.
        loss: with Loss, the output that is the loss, of one element; by default 'loss' or else the first output.
        label: with Loss, the inputs that are labels and get no gradient. The loss's own name among them means nothing.
        path_name: a file that the result is written to, too.
        verbose: 1 says on stderr what was built.

    Raises:
        UsageError: the options exclude each other, or a name is not what it must be.
        UnsupportedError: the model can't be differentiated; all nodes in the way are listed.
    """
    check(options)
    graph = open_model(onx, None)
    if options == DerivativeOptions.Loss:
        model = loss_gradient(graph, weights, inputs, loss, label, Options())
    else:
        if loss is not None or label is not None:
            raise UsageError("'loss' and 'label' mean something with DerivativeOptions.Loss alone", "leave them out")
        model = _gradient(graph, weights, inputs, options)
    if path_name is not None:
        save_model(model, followed(checks.path("path_name", path_name)), force=True)
    if verbose:
        names = [", ".join(value.name for value in values) for values in (model.graph.input, model.graph.output)]
        said = f"{len(model.graph.node)} nodes | inputs {names[0]} | outputs {names[1]}"
        print(visible(said), file=sys.stderr)
    return model


def check(options: DerivativeOptions) -> None:
    """Make sure that the options go together.

    Raises:
        UsageError: they don't, or are of another type.
    """
    if not isinstance(options, DerivativeOptions):
        raise UsageError(
            f"options is {options!r}, of type {type(options).__name__}",
            "it is one of DerivativeOptions, or several | ed",
        )
    for single in (DerivativeOptions.KeepYieldOp, DerivativeOptions.Loss):
        if single in options and options != single:
            raise UsageError(f"DerivativeOptions.{single.name} can't be combined with another", "use it alone")
    if options == DerivativeOptions.FillGrad:
        raise UsageError("DerivativeOptions.FillGrad goes with KeepOutputs", "pass KeepOutputs | FillGrad")


def cotangents(options: DerivativeOptions) -> Yield:
    """What becomes of the cotangents of the outputs: 'input', 'ones' or 'keep', as in `derive`."""
    if DerivativeOptions.KeepYieldOp in options:
        return "keep"
    return "ones" if DerivativeOptions.FillGrad in options else "input"


def _gradient(
    graph: Graph, weights: str | Sequence[str] | None, inputs: str | Sequence[str] | None, options: DerivativeOptions
) -> ModelProto:
    fed, initializers = float_inputs(graph), float_initializers(graph)
    chosen = float_weights(graph) if weights is None else _chosen(weights, [*initializers, *fed], "weights", "weights")
    wanted = fed if inputs is None else _chosen(inputs, fed, "inputs", "float inputs")
    derivative = DerivativeModel(
        graph, [name for name in fed if name in wanted and name not in chosen], chosen, Options()
    )
    derivative.prepare()
    own = graph.output_names
    gradients = derivative.vjp(cotangents(options))
    outputs = [*gradients, *(own if DerivativeOptions.KeepOutputs in options else ())]
    return derivative.described(derivative.finish(outputs), "vjp", gradients, outputs)


def loss_gradient(
    graph: Graph,
    weights: str | Sequence[str] | None,
    inputs: str | Sequence[str] | None,
    loss: str | None,
    label: str | Sequence[str] | None,
    how: Options,
) -> ModelProto:
    """The model of option Loss, of an opened graph; see `onnx_derivative`."""
    fed, initializers = float_inputs(graph), float_initializers(graph)
    loss = _loss(loss, graph.output_names)
    given = [label] if isinstance(label, str) else label or ()
    labels = _chosen(without(given, [loss]), graph.input_names, "label", "inputs")
    named = fed if inputs is None else _chosen(inputs, [*fed, *initializers], "inputs", "inputs or weights")
    more = _chosen(weights or [], initializers, "weights", "weights")
    derivative = DerivativeModel(
        graph,
        [name for name in fed if name in named and (inputs is not None or name not in labels)],
        [*(name for name in initializers if name in named), *without(more, named)],
        how,
    )
    own = graph.output_names
    derivative.prepare()
    _check_is_number(loss, derivative)
    derivative.outputs = [loss]
    gradients = derivative.vjp("ones")
    results = [loss, *without(own, [loss]), *gradients]
    return derivative.described(derivative.finish(results, feed_weights=False), "vjp", gradients, results)


def _loss(asked: str | None, outputs: list[str]) -> str:
    """The output that is the loss: the one that is asked for, or else the one of that name, or else the first."""
    loss = asked or ("loss" if "loss" in outputs else outputs[0])
    if loss not in outputs:
        raise UsageError(f"the model has no output '{loss}'", suggest(loss, outputs, "outputs"))
    return loss


def _check_is_number(loss: str, derivative: DerivativeModel) -> None:
    """Make sure that the loss of a prepared model is one float number."""
    loss_type = derivative.graph.types.get(loss)
    shape = shape_of(loss_type)
    if loss not in derivative.outputs or shape is None or any(size != 1 for size in shape):
        raise UsageError(
            f"the loss '{loss}' is not one float number: it is {in_words(loss_type) or 'of unknown type'}",
            "name the output that is, as loss=..., or declare its shape in the model",
        )


def _chosen(given: str | Sequence[str], known: Sequence[str], argument: str, kind: str) -> list[str]:
    names = [given] if isinstance(given, str) else given
    for name in names:
        if name not in known:
            raise UsageError(f"{argument}: '{name}' is none of the model's {kind}", suggest(name, known, kind))
    return list(dict.fromkeys(names))
