"""`onnxgrad derive`: a model of a model's derivatives, without a loss."""

from __future__ import annotations

from typing import Any, get_args

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import MODEL, complete_files, how_to_read, options, proof_data
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.common.choices import Derivative, DerivativeNames
from onnxgrad_cli.common.visible import visible

FLAGS = {"keep-yield-op": "KeepYieldOp", "keep-outputs": "KeepOutputs", "fill-grad": "FillGrad", "loss": "Loss"}

UNASKED = "a proof was not to be made"


@click.command(short_help="Make a model of a model's derivatives.")
@MODEL
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE",
    help="Where it goes; - is stdout.  [default: MODEL.KIND.onnx]",
)
@click.option(
    "--kind",
    type=click.Choice(get_args(Derivative)),
    default="vjp",
    show_default=True,
    help="Products of the Jacobian with a cotangent or a tangent, or of the Hessian with a vector; or the "
    "whole of either. The Hessian is that of the sum of all that is differentiated.",
)
@click.option(
    "--of",
    multiple=True,
    metavar="GLOB",
    help="The outputs to differentiate, or values in between.  [default: all outputs of floats]",
)
@click.option(
    "--wrt",
    multiple=True,
    metavar="GLOB",
    help="The inputs and weights to differentiate by, or values in between.  "
    "[default: all float inputs; for vjp weights too]",
)
@click.option(
    "--class",
    "class_",
    metavar="N|NAME|argmax|label",
    help="Differentiate one score of many: of a class, of the best one, or of that in an input `label`.",
)
@click.option("--class-axis", type=int, default=1, show_default=True, help="The axis of the classes.")
@click.option("--per-sample", is_flag=True, help="Derivatives of each sample alone, which is proven to be independent.")
@click.option(
    "--names",
    type=click.Choice(get_args(DerivativeNames)),
    default="plain",
    show_default=True,
    help="What derivatives are called: y_jacobian_x, or jac_y_x as CasADi does.",
)
@click.option(
    "--option",
    "flags",
    multiple=True,
    type=click.Choice(list(FLAGS)),
    help="As DerivativeOptions in Python: keep the YieldOp; return the model's outputs too; fill the "
    "cotangents with ones; or take an output of the model for its loss.",
)
@click.option("--loss-output", metavar="NAME", help="With --option loss: the output that is it.")
@click.option(
    "--label-input", "labels", multiple=True, metavar="NAME", help="With --option loss: an input that gets no gradient."
)
@click.option("--verify/--no-verify", default=None, help="Prove the derivatives.  [default: where it takes seconds]")
@proof_data(
    "--test-data",
    "Prove them on these inputs: the arrays of an .npz, or the first samples of data that `onnxgrad train` reads.  "
    "[default: random ones]",
)
@how_to_read
@click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write.")
@speaks
@click.pass_obj
def derive(console: Console, /, model: str, out: str | None, flags: tuple[str, ...], **values: Any) -> int:
    """Make a model that computes derivatives of the outputs of MODEL (- is stdin)."""
    to_stdout = out == "-" or (out is None and model == "-")
    if to_stdout and console.json:
        raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
    console.done = "derived"
    from functools import reduce
    from operator import or_

    from onnxgrad_cli.compat.onnx_derivative import DerivativeOptions
    from onnxgrad_cli.jobs.derive import run_derive

    flag = reduce(or_, (DerivativeOptions[FLAGS[name]] for name in flags), DerivativeOptions.Zero)
    with working(console) as tell:
        derived, files, proof = run_derive(model, out, flags=flag, options=options(values), tell=tell, **values)
    if not to_stdout:
        ports = _ports(derived)
        rows = [(kind, name, of) for kind, each in ports.items() for name, of in each.items()]
        verdict = {"verdict": proof.verdict, "why": proof.why} if proof else {"verdict": "not proved", "why": UNASKED}
        lines = [table(("", "name", "type"), rows), *(f"file    {visible(str(file))}" for file in files)]
        lines += [f"proof   {'  '.join(filter(None, map(visible, verdict.values())))}"]
        lines += [f"what    {visible(_of_what(derived, MOST))}"]
        result = {**ports, "of": _of_what(derived, most=None), "files": [str(file) for file in files], "proof": verdict}
        console.result(result, "\n".join(lines), asked=False)
    return 0


MOST = 8
"""Names that are told of what is differentiated by; the table has them all."""


def _of_what(model: Any, most: int | None) -> str:
    """What is differentiated by what, in words, with so many names."""
    from onnxgrad_cli.metadata import read_derived

    said = read_derived(model)
    assert said is not None
    of = ", ".join(said.of)
    classes = {"argmax": "the best class", "label": "the labelled class"}
    score = f"the score of {classes.get(said.pick, f'class {said.pick}')} of " if said.pick else ""
    total = "the sum of " if said.kind in ("hvp", "hessian") else ""
    each = ", of each sample alone" if said.per_sample is not None else ""
    more = f" and {len(said.wrt) - most} more" if most is not None and len(said.wrt) > most else ""
    return f"{said.kind} of {total}{score}{of} by {', '.join(said.wrt[:most])}{more}{each}"


def _ports(model: Any) -> dict[str, dict[str, str]]:
    """What goes in and out of a model: name -> type."""
    from onnxgrad_cli.ir.types import in_words

    return {
        "input": {value.name: in_words(value.type) for value in model.graph.input},
        "output": {value.name: in_words(value.type) for value in model.graph.output},
    }
