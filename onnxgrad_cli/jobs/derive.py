"""Build a model of the derivatives of a model, and write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Derivative, DerivativeNames
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.derivative_options import DerivativeOptions, check, cotangents, loss_gradient
from onnxgrad_cli.data.class_names import class_names, number_of
from onnxgrad_cli.derivatives.derivative_model import float_initializers, float_inputs, open_model
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, UnsupportedError, ambiguous, conflict
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.observation import given_samples
from onnxgrad_cli.files import STREAM, ModelSource, check_external_data, check_target, own_model, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.output_plan import target_of
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.verification.checks.size_promises import settle_sizes
from onnxgrad_cli.verification.derivative_proof import prove_derived, roles_of
from onnxgrad_cli.verification.verdict import PROVED, Proof
from onnxgrad_cli.verification.written_file import check_opens

MAX_INPUTS_TRIED = 4
"""Maximum number of inputs to try one by one, if differentiating by all inputs fails, to give a hint."""


class Derivation(NamedTuple):
    """A model of derivatives, the files written, and the result of checking the derivatives (None if not checked)."""

    model: ModelProto
    files: list[Path]
    proof: Proof | None


@attribute_failures
@job
def run_derive(
    model: ModelSource,
    out: str | Path | None = None,
    kind: Derivative = "vjp",
    *,
    of: Sequence[str] = (),
    wrt: Sequence[str] = (),
    class_: int | str | None = None,
    class_axis: int = 1,
    per_sample: bool = False,
    weighted: bool = False,
    names: DerivativeNames = "plain",
    flags: DerivativeOptions = DerivativeOptions.Zero,
    loss_output: str | None = None,
    labels: Sequence[str] = (),
    options: Options | None = None,
    verify: bool | None = None,
    test_data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> Derivation:
    """Write a model that computes derivatives of a model.

    A wrong derivative raises an error; an inconclusive check does not.

    The arguments that are not described here are those of `derive`.

    Args:
        model: the model; '-' is stdin.
        out: the file for the model of derivatives; '-' is stdout. By default `<model>.<kind>.onnx`, or stdout if the
            model comes from stdin.
        class_: see `derive`. The name of a class is also accepted, if the model stores it.
        flags: see `DerivativeOptions`. For kinds other than vjp, only KeepOutputs is allowed.
        loss_output: with the flag Loss, the output that is the loss.
        labels: with the flag Loss, the inputs that get no gradient.
        options: shapes and modes, as for a build.
        verify: check the derivatives numerically. By default they are checked if that takes only a few seconds.
        test_data: data on which the derivatives are checked: an .npz with arrays by input name, or training data, of
            which the first samples are used. The values of other inputs are drawn at random.
        tokenizer: the tokenizer for text in these data: a tokenizer.json, or the folder that holds it.
        force: replace a file that onnxgrad did not write.
        tell: receives progress messages, and notes about kinks in second derivatives and about declared sizes that are
            wrong or could not be checked.

    Returns:
        The model, the files written (the model first), and the result of the check.

    Raises:
        CheckFailed: a derivative is wrong; `verify` is True and the derivatives could not be checked; or onnxruntime
            opens the original model but not the model to be written. Nothing is written.
        UsageError: the arguments don't fit the model, or an existing file would be replaced.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    protect_inputs(test_data, tokenizer)
    options = options or Options()
    others = class_ is not None or per_sample or weighted or names != "plain"
    _check_flags(flags, kind, bool(loss_output or labels), others)
    proto, path = own_model(model)
    target = target_of(model, out, kind)
    if target is not None:
        check_target(target, proto, path, force)
    check_external_data(proto, path)
    class_ = None if class_ is None else number_of(class_, _names(proto, class_))
    for caution in settle_sizes(Graph(proto, path), options).cautions():
        tell(f"note: {caution.text}", 0)
    data = ProofData.of(checks.path_or_none("test_data", test_data), checks.path_or_none("tokenizer", tokenizer))
    seeds = None if flags in (DerivativeOptions.Zero, DerivativeOptions.KeepOutputs) else cotangents(flags)
    with given_samples(data.whole):
        if DerivativeOptions.Loss in flags:
            graph = open_model(proto, path, options)
            known = [*float_inputs(graph), *float_initializers(graph)]
            inputs = matching(wrt, known, "`wrt`", "float inputs and initializers") if wrt else None
            derived = loss_gradient(graph, None, inputs, loss_output, labels, options)
        else:
            derive_by = partial(
                derive, proto, kind, of=of, class_=class_, class_axis=class_axis, per_sample=per_sample,
                weighted=weighted, names=names, keep_outputs=DerivativeOptions.KeepOutputs in flags, path=path,
                options=options, cotangents=seeds,
            )  # fmt: skip
            try:
                derived = derive_by(wrt=wrt)
            except UnsupportedError as error:
                hint = None if wrt else _hint_at_input(proto, derive_by)
                if hint is None:
                    raise
                raise UnsupportedError(error.message, error.refusals, hint) from error
    said = read_derived(derived)
    if said is not None and said.kinks:
        operators = ", ".join(said.kinks)
        tell(f"note: second derivatives ignore the kinks of {operators}, at which first derivatives may jump", 0)
    runs = DerivativeOptions.KeepYieldOp not in flags  # otherwise only onnxruntime-training can run it
    judged = runs if verify is None else verify
    proof = proof_of(derived, proto, path, data, options, verify is True, tell) if judged else None
    check_written = check_opens(derived, proto, path) if judged and runs else None
    files = save_model(derived, STREAM if target is None else target, path, force, check=check_written)
    return Derivation(derived, files, proof)


def _check_flags(flags: DerivativeOptions, kind: Derivative, of_loss: bool, others: bool) -> None:
    """Check that the flags can be combined with the other arguments.

    Args:
        flags: the flags.
        kind: the kind of derivative.
        of_loss: True if an argument is set that requires the flag Loss.
        others: True if an argument is set that can't be combined with the flag Loss.

    Raises:
        UsageError: they can't be combined.
    """
    check(flags)
    if kind != "vjp" and flags not in (DerivativeOptions.Zero, DerivativeOptions.KeepOutputs):
        raise conflict(
            f"the option {flags.name} is only available for the kind vjp", "leave it out, or leave `kind` out"
        )
    if of_loss and DerivativeOptions.Loss not in flags:
        raise conflict("`loss_output` and `labels` require `flags=loss`", "add it, or leave them out")
    if DerivativeOptions.Loss in flags and others:
        raise conflict(
            "`flags=loss` can't be combined with a class, per-sample derivatives, weights or the names of CasADi",
            "leave out the one or the others",
        )


def _hint_at_input(model: ModelProto, derive_by: Callable[..., ModelProto]) -> str | None:
    """Return a hint that names an input by which the model can be differentiated, or None if there is none."""
    for name in float_inputs(Graph(model))[:MAX_INPUTS_TRIED]:
        try:
            derive_by(wrt=[name])
        except OnnxgradError:
            continue
        return f"differentiate by a single input: `wrt={name!r}`"
    return None


def _names(model: ModelProto, class_: int | str) -> Sequence[str]:
    """Return the class names that a model stores. If several outputs have class names, prefer those with `class_`."""
    stored = list(class_names(model).values())
    holding = [names for names in stored if class_ in names]
    if len({names.index(str(class_)) for names in holding}) > 1:
        raise ambiguous(f"'{class_}' is the name of several classes", "give the number of one of them")
    return next(iter(holding or stored), ())


def proof_of(
    model: ModelProto, original: ModelProto, path: Path | None, data: ProofData, options: Options,
    demanded: bool, tell: Tell,
) -> Proof:  # fmt: skip
    """Check the results of a model of derivatives, and return the verdict.

    Raises:
        CheckFailed: a derivative is wrong, or `demanded` is True and the derivatives could not be checked.
        UsageError: the data don't fit the model.
    """
    tell("verifying the derivatives", 1)
    said = read_derived(model)
    assert said is not None
    arrays, sizes = fit(data, model, roles_of(model, said), tell, said.inputs)
    sizes = {**{symbol: size for symbol, size in options.dims.items() if size}, **sizes}
    proof = prove_derived(
        model, said, path, original, arrays, sizes, force=demanded, note=lambda check: tell(f"checking: {check}", 1)
    )
    if proof.failed:
        raise CheckFailed(
            f"the model of derivatives does not pass its checks: {proof.why}",
            "nothing was written; `verify=False` skips the checks",
        )
    if demanded and proof.verdict != PROVED:
        raise CheckFailed(
            f"the requested proof of the derivatives was not possible: {proof.why}",
            "nothing was written; to continue without a proof, leave `verify=True` out",
        )
    return proof
