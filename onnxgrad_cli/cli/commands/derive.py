"""`onnxgrad derive`: build a model that computes derivatives of a model, without a loss."""

from __future__ import annotations

from typing import Any, get_args

import click

from onnxgrad_cli.cli.parsing.click_option import option
from onnxgrad_cli.cli.parsing.shared_options import (
    FORCE,
    MODEL,
    declared_options,
    how_to_read,
    options,
    output_option,
    proof_data,
    verify_option,
)
from onnxgrad_cli.cli.terminal.console import Console, speaks, table
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.choices import SECOND_DERIVATIVES, Derivative, DerivativeNames
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import status_text
from onnxgrad_cli.options import Options

FLAGS = {"keep-yield-op": "KeepYieldOp", "keep-outputs": "KeepOutputs", "fill-grad": "FillGrad", "loss": "Loss"}

UNASKED = "no proof was requested"


@click.command()
@MODEL
@output_option("Output file; - is stdout.  [default: MODEL.KIND.onnx]")
@option(
    "--kind",
    type=click.Choice(get_args(Derivative)),
    default="vjp",
    help="Kind of derivative. vjp, jvp: product of the Jacobian with a cotangent or a tangent. hvp, gnvp: product of "
    "the Hessian or of the Gauss-Newton matrix with a vector. jacobian, hessian: the whole matrix. hessian-diagonal, "
    "laplacian: the diagonal of the Hessian, or its sum. A Hessian refers to the sum of all differentiated outputs.",
)
@option(
    "--of",
    multiple=True,
    metavar="GLOB",
    help="Outputs to differentiate, or values inside the model.  [default: all float outputs]",
)
@option(
    "--wrt",
    multiple=True,
    metavar="GLOB",
    help="Inputs and weights to differentiate by, or values inside the model.  "
    "[default: all float inputs; for vjp weights too]",
)
@option(
    "--class",
    "class_",
    metavar="N|NAME|argmax|label",
    help="Differentiate the score of one class: a given class, the class with the highest score, or the class in an "
    "added input `label`.",
    common=True,
)
@option("--class-axis", type=int, default=1, help="Axis of the classes in the output.")
@option(
    "--per-sample",
    is_flag=True,
    help="Compute the derivatives of each sample separately. A model whose samples might affect each other is refused.",
)
@option(
    "--weighted",
    is_flag=True,
    help="For each differentiated output, add an input with one weight per element of the output. A Hessian is then "
    "the second derivative of the weighted sum of the outputs.",
)
@option(
    "--names",
    type=click.Choice(get_args(DerivativeNames)),
    default="plain",
    help="Names of derivatives: y_jacobian_x, or jac_y_x as in CasADi.",
)
@option(
    "--option",
    "flags",
    multiple=True,
    type=click.Choice(list(FLAGS)),
    help="Further options. keep-yield-op: take the cotangents from a YieldOp, which only onnxruntime-training can "
    "run. keep-outputs: return the model's outputs too. fill-grad: use ones as cotangents; requires keep-outputs. "
    "loss: treat an output of the model as the loss.",
)
@option("--loss-output", metavar="NAME", help="With --option loss: name of the output that is the loss.")
@option(
    "--label-input",
    "labels",
    multiple=True,
    metavar="NAME",
    help="With --option loss: name of an input that gets no gradient.",
)
@verify_option("Check the derivatives numerically; if the check fails, nothing is written.")
@proof_data(
    "--test-data",
    "Inputs on which the derivatives are checked: the arrays of an .npz, or the first samples of data that `onnxgrad "
    "train` reads.  [default: random inputs]",
)
@how_to_read
@declared_options(Options, only=("identifiers",))
@FORCE
@speaks
@click.pass_obj
def derive(console: Console, /, model: str, out: str | None, flags: tuple[str, ...], **values: Any) -> int:
    """Build a model that computes derivatives of the outputs of MODEL (- is stdin)."""
    to_stdout = console.writes_to_stdout(out, model)
    console.done = "derived"
    from functools import reduce
    from operator import or_

    from onnxgrad_cli.compat.derivative_options import DerivativeOptions
    from onnxgrad_cli.jobs.derive import run_derive
    from onnxgrad_cli.verification.verdict import NOT_PROVED

    flag = reduce(or_, (DerivativeOptions[FLAGS[name]] for name in flags), DerivativeOptions.Zero)
    with working(console) as tell:
        derived, files, proof = run_derive(model, out, flags=flag, options=options(values), tell=tell, **values)
    if not to_stdout:
        ports = _ports(derived)
        rows = [(kind, name, of) for kind, each in ports.items() for name, of in each.items()]
        verdict, why = (proof.verdict, proof.why) if proof else (NOT_PROVED, UNASKED)
        lines = [table(("", "name", "type"), rows), *(f"file    {escaped(str(file))}" for file in files)]
        lines += [f"proof   {'  '.join(filter(None, map(escaped, (status_text(verdict), why))))}"]
        lines += [f"what    {escaped(_of_what(derived, MAX_NAMED_VALUES))}"]
        result = {
            **ports,
            "of": _of_what(derived, most=None),
            "files": [str(file) for file in files],
            "proof": {"verdict": verdict, "why": why},
        }
        console.result(result, "\n".join(lines), asked=False)
    return 0


MAX_NAMED_VALUES = 8
"""Maximum number of inputs and weights that the description of the derivatives names. The table lists all."""


def _of_what(model: Any, most: int | None) -> str:
    """Return a description of a model's derivatives. It names at most `most` of the values to differentiate by."""
    from onnxgrad_cli.metadata import read_derived

    said = read_derived(model)
    assert said is not None
    of = ", ".join(said.of)
    classes = {"argmax": "the predicted class", "label": "the labelled class"}
    score = f"the score of {classes.get(said.pick, f'class {said.pick}')} in " if said.pick else ""
    weighted = "weighted " if said.weights else ""
    total = f"the {weighted}sum of " if said.kind in SECOND_DERIVATIVES or weighted else ""
    each = ", of each sample" if said.per_sample is not None else ""
    more = f" and {len(said.wrt) - most} more" if most is not None and len(said.wrt) > most else ""
    return f"{said.kind} of {total}{score}{of} with respect to {', '.join(said.wrt[:most])}{more}{each}"


def _ports(model: Any) -> dict[str, dict[str, str]]:
    """Return {'input': ..., 'output': ...}; each is a map from the name of a value to its type, as text."""
    from onnxgrad_cli.ir.types import in_words

    return {
        "input": {value.name: in_words(value.type) for value in model.graph.input},
        "output": {value.name: in_words(value.type) for value in model.graph.output},
    }
