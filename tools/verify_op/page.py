"""Show a verification as text and as JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxgrad_cli.cli.terminal.console import table
from tools.verify_op.torch_twins import Twin
from tools.verify_op.verification import Gradient, Trial, Verification

FINEST = 1e-9
"""Smallest difference that is shown. Smaller ones are rounding errors, which differ between machines."""

WHOLE = 600
"""Largest number of elements of an array that is shown as a whole. Only the ends of larger arrays are shown."""


def data(found: Verification) -> dict[str, Any]:
    """Return the verification as a tree of JSON values."""
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
    """Return an example as a tree of JSON values."""
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
    """Return an array as nested lists, with None in place of infinities and NaN."""
    if not x.shape:
        return x.item() if math.isfinite(x) else None
    return [_finite(each) for each in x]


def page(found: Verification, backward: bool = False) -> str:
    """Return the verification as text. With `backward`, it includes the nodes of onnxgrad's gradients."""
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
    """Return the lines about one example: its node, inputs, outputs, cotangents and gradients."""
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
    """Return the lines about one gradient: the Jacobian, both gradients, and their largest difference."""
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
    """Return a difference as an order of magnitude, so that the text is equal on all machines."""
    if difference == 0 or not math.isfinite(difference):
        return "none" if difference == 0 else "infinite"
    bound = 10.0 ** math.ceil(math.log10(max(difference, FINEST)))
    return f"below {bound:.0e}"
