"""`onnxgrad verify-op`: the gradient of one operator, in the two ways of the standard's guide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import SETTING
from onnxgrad_cli.common.checks import number_in

if TYPE_CHECKING:
    import numpy as np

    from onnxgrad_cli.jobs.verify_op import Gradient, Trial, Verification
    from onnxgrad_cli.verification.torch_twins import Twin

FINEST = 1e-9
"""Differences below it are told as it: they are rounding, which is not the same everywhere."""

WHOLE = 600
"""Entries of an array that are shown; of a larger one only the ends."""


class Input(click.ParamType[Any]):
    """2,3 is a shape of random numbers, =2,3 are the values of a constant, - is an absent input."""

    name = "input"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help shows."""
        return "SHAPE|=VALUES|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A shape, an array, or None."""
        if not isinstance(value, str) or value == "-":
            return None if value == "-" else value
        if not value.startswith("="):
            sizes = [number_in(part.strip()) for part in value.split(",") if part.strip()]
            if None in sizes:
                self.fail(f"'{value}' is no shape: write 2,3, or =2,3 for values", param, ctx)
            return tuple(sizes)
        import numpy as np

        array = np.asarray(SETTING.parse(value[1:]))
        if array.dtype.kind not in "bif":
            self.fail(f"'{value}' are no numbers", param, ctx)
        return array.astype({"b": bool, "i": np.int64, "f": np.float32}[array.dtype.kind])


@click.command("verify-op", short_help="Verify the gradient of an operator on examples.")
@click.argument("op", metavar="OP")
@click.option(
    "--against",
    type=click.Choice(["math", "torch"]),
    default="math",
    show_default=True,
    help="The Jacobian by differences, or the backward of PyTorch.",
)
@click.option(
    "--case", type=int, metavar="N", help="Take the N-th example that onnx publishes.  [default: the smallest]"
)
@click.option(
    "--input",
    "inputs",
    type=Input(),
    multiple=True,
    help="Make the example instead: for each input a shape of random numbers, values, or - if it is absent.",
)
@click.option("--attribute", "attributes", type=SETTING, multiple=True, help="An attribute, with --input.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all that is random.")
@speaks
@click.pass_obj
def verify_op(
    console: Console,
    op: str,
    against: str,
    case: int | None,
    inputs: tuple[Any, ...],
    attributes: tuple[tuple[str, Any], ...],
    seed: int,
) -> int:
    """Verify the gradient of an operator on two examples: show what goes in, both gradients, and how they differ.

    The examples are node tests that the onnx package publishes, or are made with --input. Exit code 4: they differ.
    """  # fmt: skip
    console.done = "passed"
    from onnxgrad_cli.jobs.verify_op import Request, run_verify_op

    if case is not None and inputs:
        raise click.UsageError("--case and --input: an example is published or made, not both")
    request = Request(inputs, dict(attributes))
    found = run_verify_op(op, against=against, case=case, request=request, seed=seed)
    console.result(data(found), page(found, backward=console.level > 0))
    if not found.passed:
        console.failed(f"{found.covered.op_type}: our gradient differs")
    return 0 if found.passed else 4


def data(found: Verification) -> dict[str, Any]:
    """The verification as JSON takes it."""
    return {
        "op": found.covered.op_type,
        "domain": found.covered.domain or "ai.onnx",
        "against": found.against,
        "passed": found.passed,
        "published": found.published,
        "operands": [dict(zip(("operand", "tag", "found"), row, strict=True)) for row in _operands(found)],
        "left_out": [{"case": number, "reason": reason} for number, reason in found.left_out],
        "examples": [_example(trial) for trial in found.trials],
    }


def _example(trial: Trial) -> dict[str, Any]:
    """An example as the JSON output has it."""
    return {
        "case": trial.number,
        "name": trial.example.name,
        "node": trial.node,
        "executor": trial.executor,
        "inputs": {name: x.tolist() for name, x in trial.example.values.items()},
        "outputs": {name: _finite(y) for name, y in trial.outputs.items()},
        "cotangents": {name: c.tolist() for name, c in trial.cotangents.items()},
        "mapping": trial.twin and {"expression": trial.twin.expression, "tensors": trial.twin.tensors},
        "gradients": [
            {
                "input": g.operand,
                "state": g.state,
                "ours": None if g.ours is None else _finite(g.ours),
                "other": None if g.other is None else _finite(g.other),
                "jacobian": g.jacobian and g.jacobian.entries.tolist(),
                "kinks": g.jacobian and g.jacobian.kinks.nonzero()[0].tolist(),
                "difference": g.difference if math.isfinite(g.difference) else None,
                "reason": g.reason,
            }
            for g in trial.gradients
        ],
        "tolerance": trial.tolerance,
        "backward": list(trial.backward),
    }


def _finite(x: np.ndarray) -> Any:
    """The array as lists, with None for what JSON has no number for."""
    if not x.shape:
        return x.item() if math.isfinite(x) else None
    return [_finite(each) for each in x]


# -- the page -----------------------------------------------------------------------------------------------


def page(found: Verification, backward: bool = False) -> str:
    """The verification as text; with `backward`, the nodes of our gradients too."""
    lines: list[str] = []
    for i, trial in enumerate(found.trials, 1):
        lines += _trial(i, trial, found)
        if backward:
            lines += ["  backward:", *_indented(trial.backward, 4), ""]
    for number, reason in found.left_out:
        lines += [f"left out: published example {number}: {reason}", ""]
    lines += [table(("operand", "tag of the standard", "found"), _operands(found)), ""]
    if found.covered.kink:
        lines += [f"at kinks: {found.covered.kink}"]
    differ = max(trial.difference for trial in found.trials)
    how = {"math": "the Jacobian times the cotangent", "torch": "PyTorch's backward"}[found.against]
    verdict = "agrees with" if found.passed else "DIFFERS from"
    lines.append(f"{found.covered.op_type}: our gradient {verdict} {how}; largest difference: {_about(differ)}")
    return "\n".join(lines)


def _trial(i: int, trial: Trial, found: Verification) -> list[str]:
    """The lines on one example: its node, inputs, outputs, cotangents and gradients."""
    origin = f"published example {trial.number} of {found.published}, " if trial.number else ""
    lines = [f"Example {i}: {origin}{trial.example.name} ({trial.executor})", "", f"  {trial.node}", ""]
    if trial.twin is not None:
        lines += [*_mapping(trial.twin), ""]
    for name, x in trial.example.values.items():
        constant = "" if name in trial.example.point else ", constant"
        lines += _array(f"{name}{constant}", x)
    for name, y in trial.outputs.items():
        lines += _array(name, y)
    for name, c in trial.cotangents.items():
        lines += _array(f"dL/d{name}", c)
    lines.append("")
    for gradient in trial.gradients:
        lines += _gradient(gradient, trial)
    return lines


def _mapping(twin: Twin) -> list[str]:
    named = {n: "[" + ", ".join(map(str, x)) + "]" if isinstance(x, list) else str(x) for n, x in twin.tensors.items()}
    where = {n: x for n, x in named.items() if n != x} | {n: repr(x) for n, x in twin.values.items()}
    lines = [f"  in PyTorch: {twin.expression}"]
    return [*lines, f"  with {', '.join(f'{name} = {x}' for name, x in where.items())}"] if where else lines


def _gradient(gradient: Gradient, trial: Trial) -> list[str]:
    """The lines on one gradient: the Jacobian, the gradient by either side, and how far they are apart."""
    name = gradient.operand
    if gradient.ours is None or gradient.other is None:
        return [f"  dL/d{name} is refused: {gradient.reason}", ""]
    lines: list[str] = []
    if gradient.jacobian is not None:
        outputs = ", ".join(trial.cotangents)
        lines += _array(f"J = d({outputs})/d{name}, a row for each entry of {name},", gradient.jacobian.entries)
        if kinks := gradient.jacobian.kinks.nonzero()[0].tolist():
            lines.append(f"  no derivative in entries {', '.join(map(str, kinks))} of {name}: they are left out")
        other = f"J · dL/d({outputs})"
    else:
        other = f"PyTorch's {name}.grad"
    lines += _array(f"dL/d{name}, ours", gradient.ours) + _array(f"dL/d{name}, {other}", gradient.other)
    allowed = f"allowed: {trial.tolerance:.0e}"
    return [*lines, f"  largest difference: {_about(gradient.difference)} ({allowed})", ""]


def _operands(found: Verification) -> list[tuple[str, str, str]]:
    words = {"gradient": "differentiable", "zero": "derivative 0 in these examples", "refused": "refused"}
    covered, states = found.covered, found.states
    rows = []
    for operand in (*covered.operands, *covered.outputs):
        state = states.get(operand.name)
        absent = "no float" if operand.state == "no float" else "not in these examples"
        rows.append((operand.name, operand.tag or "none", words[state] if state else absent))
    return rows


def _array(title: str, x: np.ndarray) -> list[str]:
    import numpy as np

    with np.errstate(all="ignore"):
        shown = np.round(x, 6) + 0.0 if x.dtype.kind == "f" else x
    text = np.array2string(shown, max_line_width=100, precision=6, suppress_small=True, threshold=WHOLE, edgeitems=3)
    lines = text.splitlines() or [""]
    shape = f"[{', '.join(map(str, x.shape))}]"
    return [f"  {title} {shape} = {lines[0]}"] if len(lines) == 1 else [f"  {title} {shape} =", *_indented(lines, 4)]


def _indented(lines: Any, spaces: int) -> list[str]:
    return [" " * spaces + line if line.strip() else "" for line in lines]


def _about(difference: float) -> str:
    """A difference as an order of magnitude, so that the same page comes out everywhere."""
    if difference == 0 or not math.isfinite(difference):
        return "none" if difference == 0 else "infinite"
    bound = 10.0 ** math.ceil(math.log10(max(difference, FINEST)))
    return f"below {bound:.0e}"
