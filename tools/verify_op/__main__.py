"""The command `python -m tools.verify_op OP`: verify a gradient in the two ways of the standard's guide."""

from __future__ import annotations

import json
from typing import Any

import click
import numpy as np

from onnxgrad_cli.cli.parsing.shared_options import SETTING
from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.errors import OnnxgradError
from tools.verify_op.page import data, page
from tools.verify_op.verification import Request, run_verify_op


class Input(click.ParamType[Any]):
    """An input of the node: `2,3` is a shape of random numbers, `=2,3` are constant values, `-` is an absent input."""

    name = "input"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder for the value in the help."""
        return "SHAPE|=VALUES|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a shape, an array, or None."""
        if not isinstance(value, str) or value == "-":
            return None if value == "-" else value
        if not value.startswith("="):
            sizes = [number_in(part.strip()) for part in value.split(",") if part.strip()]
            if None in sizes:
                self.fail(f"'{value}' is not a shape: write 2,3, or =2,3 for values", param, ctx)
            return tuple(sizes)
        array = np.asarray(SETTING.parse(value[1:]))
        if array.dtype.kind not in "bif":
            self.fail(f"'{value}' must be numbers", param, ctx)
        return array.astype({"b": bool, "i": np.int64, "f": np.float32}[array.dtype.kind])


@click.command("python -m tools.verify_op")
@click.argument("op", metavar="OP")
@click.option(
    "--against",
    type=click.Choice(["math", "torch"]),
    default="math",
    show_default=True,
    help="Compare the gradients with the Jacobian, measured by finite differences, or with PyTorch's backward.",
)
@click.option(
    "--case", type=int, metavar="N", help="Use example N that onnx publishes, from 1.  [default: the two smallest]"
)
@click.option(
    "--input",
    "inputs",
    type=Input(),
    multiple=True,
    help="Make examples instead: for each input of OP, a shape of random numbers, =VALUES, or - if it is absent.",
)
@click.option("--attribute", "attributes", type=SETTING, multiple=True, help="With --input: attribute of the node.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--backward", is_flag=True, help="Also show the nodes that compute onnxgrad's gradients.")
@click.option("--json", "as_json", is_flag=True, help="Print the verification as JSON.")
@click.pass_context
def verify_op(
    ctx: click.Context,
    /,
    op: str,
    against: str,
    case: int | None,
    inputs: tuple[Any, ...],
    attributes: tuple[tuple[str, Any], ...],
    seed: int,
    backward: bool,
    as_json: bool,
) -> None:
    """Verify the gradient of operator OP on two examples: show inputs, both gradients, and their difference.

    The examples are node tests that the onnx package publishes, or are made from --input. The exit code is 4 if the
    gradients differ.
    """
    if case is not None and inputs:
        raise click.UsageError("--case can't be combined with --input: it selects a published example")
    try:
        found = run_verify_op(op, against=against, case=case, request=Request(inputs, dict(attributes)), seed=seed)
    except OnnxgradError as error:
        click.echo(f"Error: {error}\nfix: {error.hint}" if error.hint else f"Error: {error}", err=True)
        ctx.exit(error.exit_code)
    click.echo(json.dumps(data(found), indent=2) if as_json else page(found, backward))
    ctx.exit(0 if found.passed else 4)


if __name__ == "__main__":
    verify_op()
