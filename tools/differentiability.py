"""Write docs/differentiability.md: the standard's differentiability tags, compared with the results of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from onnxgrad_cli.verification.coverage import coverage
from tools.operators import markdown_table
from tools.tags import VERDICTS, Tag, tags
from tools.verify_op.page import page
from tools.verify_op.verification import Request, run_verify_op

PAGE = Path(__file__).parents[1] / "docs" / "differentiability.md"


def document(rows: Sequence[Tag]) -> str:
    """Return the page of the tags."""
    kinds = [Counter(tag.verdict for tag in rows if tag.side == side) for side in ("input", "output")]
    lines = [
        "# Differentiability",
        "",
        "The standard tags the inputs and outputs of its operators as differentiable or not. This page compares "
        "each tag with the registry of rules and with the tests. The tests compare gradients with central differences "
        "in float64, for the rows of a table and for the published node tests. `make docs` writes this page.",
        "",
        *markdown_table(
            ("verdict", "inputs", "outputs", "meaning"),
            [(v, *(k[v] for k in kinds), text) for v, text in VERDICTS.items()],
        ),
        "",
        "## Tag wrong",
        "",
        *_verdict(rows, "tag wrong"),
        "",
        "## Tag missing",
        "",
        "*Should be* is the tag that follows from the proofs.",
        "",
        *_verdict(rows, "tag missing"),
        "",
        "## Unproven",
        "",
        *_verdict(rows, "unproven"),
        "",
        "## Agree",
        "",
        *_agreeing(rows),
        "",
        *_worked_example(),
    ]
    return "\n".join(lines) + "\n"


def _name(tag: Tag) -> str:
    return f"{tag.domain}.{tag.op_type}" if tag.domain else tag.op_type


def _link(tag: Tag) -> str:
    return f"[{_name(tag)}]({tag.page})" if tag.page else _name(tag)


def _verdict(rows: Iterable[Tag], verdict: str) -> list[str]:
    cells = [
        (_link(t), f"{t.side} {t.operand}", t.tag or "none", t.should_be, t.evidence)
        for t in rows
        if t.verdict == verdict
    ]
    if verdict == "unproven":
        return markdown_table(("operator", "operand", "tag", "reason"), [(*row[:3], row[4]) for row in cells])
    return markdown_table(("operator", "operand", "tag", "should be", "evidence"), cells)


def _agreeing(rows: Iterable[Tag]) -> list[str]:
    """Return a table with the differentiable and non-differentiable operands of each operator with agreeing tags."""
    operators: dict[str, dict[str, list[str]]] = {}
    for tag in rows:
        if tag.verdict == "agree":
            sides = operators.setdefault(_link(tag), {"differentiable": [], "non-differentiable": []})
            sides[tag.tag].append(f"{tag.operand}{' (output)' if tag.side == 'output' else ''}")
    cells = [(name, *map(", ".join, sides.values())) for name, sides in operators.items()]
    return markdown_table(("operator", "differentiable", "not differentiable"), cells)


EXAMPLE = "--input 2,2 --input =4,"
"""The arguments of the page's example: Reshape of a 2 x 2 matrix to a vector, as in the guide of the standard."""


def _worked_example() -> list[str]:
    """Return a section that verifies Reshape in both ways."""
    request = Request(((2, 2), np.array([4])))
    lines = [
        "## The two ways to verify an operator",
        "",
        "The [guide of the standard](https://github.com/onnx/onnx/blob/main/docs/DefineDifferentiability.md) accepts "
        "two kinds of proof. Either a framework has the operator's backward function and a mapping to the operator, or "
        "the Jacobian exists, with two numeric examples. `python -m tools.verify_op` does both and compares "
        "onnxgrad's gradient with the result. The examples are node tests that onnx publishes, or random "
        "numbers of given shapes. The operator below is Reshape: its first input and its output are differentiable, "
        "and its shape input is not.",
    ]
    for title, against in (("By mathematics", "math"), ("By PyTorch", "torch")):
        option = "" if against == "math" else " --against torch"
        text = page(run_verify_op("Reshape", against=against, request=request))
        lines += ["", f"### {title}", "", "```", f"$ python -m tools.verify_op Reshape{option} {EXAMPLE}", text, "```"]
    return lines


def files() -> dict[Path, str]:
    """Return the path of the page, and its text."""
    return {PAGE: document(list(tags(coverage())))}
