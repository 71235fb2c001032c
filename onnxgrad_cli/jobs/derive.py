"""From a model in a file to a model of its derivatives in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Derivative, DerivativeNames
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.onnx_derivative import DerivativeOptions, check, cotangents, loss_gradient
from onnxgrad_cli.derivatives.derivative_model import float_initializers, float_inputs, open_model
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, UnsupportedError, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.execution.observation import given_samples
from onnxgrad_cli.files import STREAM, ModelSource, check_external_data, check_target, own_model, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.training.class_names import class_names, number_of
from onnxgrad_cli.verification.derived import prove_derived, roles_of
from onnxgrad_cli.verification.sizes import settle_sizes
from onnxgrad_cli.verification.verdict import PROVED, Proof
from onnxgrad_cli.verification.written import check_opens

MAX_INPUTS_TRIED = 4
"""Inputs that a hint is sought among when a model can't be differentiated by all of them."""


class Derivation(NamedTuple):
    """A model of derivatives, the files written, and what became of the proof; None where there was to be none."""

    model: ModelProto
    files: list[Path]
    proof: Proof | None


@judged
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
    """Write the model of a derivative of the model in a file, once it is proved, or can't be.

    Args:
        model: the model; '-' is stdin.
        out: the model of its derivatives; '-' is stdout; by default `<model>.<kind>.onnx`, and stdout for stdin.
        kind, of, wrt, class_axis, per_sample, names: see `derive`.
        class_: see `derive`; or the name of a class that the model stores.
        flags: see `DerivativeOptions`; for other kinds than vjp, KeepOutputs alone means something.
        loss_output, labels: with the flag Loss, the output that is the loss, and the inputs that get no gradient.
        options: shapes and modes, as for a build.
        verify: prove the derivatives; by default where that takes a few seconds.
        test_data: an .npz with arrays to prove them on, by input name, or data to train on, of which the first samples
            are taken; what is missing is drawn at random.
        tokenizer: what makes tokens of text in these data: a tokenizer.json, or the folder that it is in.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated: what the model says of its sizes and does not keep, or could not be tested.

    Returns:
        The model, the files written, the model first, and what became of the proof.

    Raises:
        CheckFailed: a derivative is wrong, `verify` asks for a proof that there is none of, or onnxruntime opens the
            model and not what would be written; nothing is written.
        UsageError: the request does not fit the model, or a file would be replaced that must not be.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    keep(test_data, tokenizer)
    options = options or Options()
    check(flags)
    if kind != "vjp" and flags not in (DerivativeOptions.Zero, DerivativeOptions.KeepOutputs):
        raise UsageError(f"the option {flags.name} is for the kind vjp alone", "leave it out, or leave `kind` out")
    if (loss_output or labels) and DerivativeOptions.Loss not in flags:
        raise UsageError(
            "`loss_output` and `labels` mean something with `flags=loss` alone", "add it, or leave them out"
        )
    if DerivativeOptions.Loss in flags and (class_ is not None or per_sample or names != "plain"):
        raise UsageError(
            "a class, per-sample derivatives and other names are not for `flags=loss`", "leave them, or the flag, out"
        )
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
                derive, proto, kind, of=of, class_=class_, class_axis=class_axis, per_sample=per_sample, names=names,
                keep_outputs=DerivativeOptions.KeepOutputs in flags, path=path, options=options, cotangents=seeds,
            )  # fmt: skip
            try:
                derived = derive_by(wrt=wrt)
            except UnsupportedError as error:
                hint = None if wrt else _hint_at_input(proto, derive_by)
                if hint is None:
                    raise
                raise UnsupportedError(error.message, error.refusals, hint) from error
    runs = DerivativeOptions.KeepYieldOp not in flags  # else onnxruntime-training alone runs it
    judged = runs if verify is None else verify
    proof = proof_of(derived, proto, path, data, options, verify is True, tell) if judged else None
    check_written = check_opens(derived, proto, path) if judged and runs else None
    files = save_model(derived, STREAM if target is None else target, path, force, check=check_written)
    return Derivation(derived, files, proof)


def _hint_at_input(model: ModelProto, derive_by: Callable[..., ModelProto]) -> str | None:
    """Return a hint that names an input by which alone the model can be differentiated, if there is one."""
    for name in float_inputs(Graph(model))[:MAX_INPUTS_TRIED]:
        try:
            derive_by(wrt=[name])
        except OnnxgradError:
            continue
        return f"`wrt={name!r}` differentiates by that input alone"
    return None


def _names(model: ModelProto, class_: int | str) -> Sequence[str]:
    """The names of classes that a model stores; of several outputs' those of which one is called so."""
    stored = list(class_names(model).values())
    holding = [names for names in stored if class_ in names]
    if len({names.index(str(class_)) for names in holding}) > 1:
        raise UsageError(f"'{class_}' is the name of several classes", "give the number of one")
    return next(iter(holding or stored), ())


def proof_of(
    model: ModelProto, original: ModelProto, path: Path | None, data: ProofData, options: Options,
    demanded: bool, tell: Tell,
) -> Proof:  # fmt: skip
    """What became of the proof of a model of derivatives.

    Raises:
        CheckFailed: a derivative is wrong, or a proof is demanded and there is none.
        UsageError: the data do not fit the model.
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
            "nothing was written; `verify=False` goes on all the same",
        )
    if demanded and proof.verdict != PROVED:
        raise CheckFailed(
            f"the model of derivatives is not proved, as was asked for: {proof.why}",
            "nothing was written; without `verify=True` it is",
        )
    return proof
