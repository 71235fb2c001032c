"""From a model in a file to a model of its derivatives in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.onnx_derivative import DerivativeOptions, check, cotangents, loss_gradient
from onnxgrad_cli.derivatives.derivative_model import float_initializers, float_inputs, open_model
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import STREAM, ModelSource, check_external_data, check_target, own_model, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.verification.sizes import settle_sizes
from onnxgrad_cli.verification.written import check_opens


def run_derive(
    model: ModelSource,
    out: str | Path | None = None,
    kind: Derivative = "vjp",
    *,
    of: Sequence[str] = (),
    wrt: Sequence[str] = (),
    flags: DerivativeOptions = DerivativeOptions.Zero,
    loss_output: str | None = None,
    labels: Sequence[str] = (),
    options: Options | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> tuple[ModelProto, list[Path]]:
    """Write the model of a derivative of the model in a file.

    Args:
        model: the model; '-' is stdin.
        out: the model of its derivatives; '-' is stdout; by default `<model>.<kind>.onnx`, and stdout for stdin.
        kind, of, wrt: see `derive`.
        flags: see `DerivativeOptions`; for other kinds than vjp, KeepOutputs alone means something.
        loss_output, labels: with the flag Loss, the output that is the loss, and the inputs that get no gradient.
        options: shapes and modes, as for a build.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated: what the model says of its sizes and does not keep, or could not be tested.

    Returns:
        The model, and the files written, the model first.

    Raises:
        UsageError: the request does not fit the model, or a file would be replaced that must not be.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: the model can't be read, or a file can't be written.
        CheckFailed: onnxruntime does not open what would be written, and opens the model.
    """
    options = options or Options()
    check(flags)
    if kind != "vjp" and flags not in (DerivativeOptions.Zero, DerivativeOptions.KeepOutputs):
        raise UsageError(f"the option {flags.name} is for the kind vjp alone", "leave it out, or leave `kind` out")
    if (loss_output or labels) and DerivativeOptions.Loss not in flags:
        raise UsageError(
            "`loss_output` and `labels` mean something with `flags=loss` alone", "add it, or leave them out"
        )
    proto, path = own_model(model)
    target = target_of(model, out, kind)
    if target is not None:
        check_target(target, proto, path, force)
    check_external_data(proto, path)
    for caution in settle_sizes(Graph(proto, path), options).cautions():
        tell(f"note: {caution.text}", 0)
    if DerivativeOptions.Loss in flags:
        graph = open_model(proto, path, options)
        known = [*float_inputs(graph), *float_initializers(graph)]
        inputs = matching(wrt, known, "`wrt`", "float inputs and initializers") if wrt else None
        derived = loss_gradient(graph, None, inputs, loss_output, labels, options)
    else:
        derived = derive(
            proto, kind, of=of, wrt=wrt, keep_outputs=DerivativeOptions.KeepOutputs in flags,
            cotangents=cotangents(flags), path=path, options=options,
        )  # fmt: skip
    runs = DerivativeOptions.KeepYieldOp not in flags  # else onnxruntime-training alone does
    check_written = check_opens(derived, proto, path) if runs else None
    return derived, save_model(derived, STREAM if target is None else target, path, force, check=check_written)
