"""`onnxgrad ops --tags`: the standard's differentiability tags, and where the proofs say otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from onnxgrad_cli.cli.console import Console, markdown_table, table
from onnxgrad_cli.common.wording import in_flags

if TYPE_CHECKING:
    from onnxgrad_cli.verification.coverage import Coverage
    from onnxgrad_cli.verification.tags import Tag

HEAD = ("operator", "side", "operand", "tag", "proven", "verdict", "evidence")


def show_tags(console: Console, found: Iterable[Coverage], markdown: bool) -> int:
    """Print the tags of operators, and how many agree."""
    from onnxgrad_cli.verification.tags import tags

    rows = list(tags(found))
    if markdown and not console.json:
        console.print(document(rows), newline=False)
        return 0
    cells = [(_name(t), t.side, t.operand, t.tag or "none", t.found, t.verdict, t.evidence) for t in rows]
    console.result([asdict(tag) for tag in rows], table(HEAD, cells))
    console.say(f"{len(rows)} inputs and outputs: {_totals(rows)}")
    return 0


def document(rows: Sequence[Tag]) -> str:
    """The tags as a Markdown document: docs/differentiability.md is this, whole."""
    from onnxgrad_cli.verification.tags import VERDICTS

    kinds = [Counter(tag.verdict for tag in rows if tag.side == side) for side in ("input", "output")]
    lines = [
        "# Differentiability",
        "",
        "The standard tags the inputs and outputs of its operators as differentiable or not. This page holds each tag "
        "against the registry of rules and what the tests have proven: rows of their table, which compare a gradient "
        "with central differences in float64, and the published node tests. Written by `make docs`; "
        "`onnxgrad ops --tags` prints the same for any operator.",
        "",
        *markdown_table(
            ("verdict", "inputs", "outputs", ""), [(v, *(k[v] for k in kinds), text) for v, text in VERDICTS.items()]
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
    ]
    if any(tag.op_type == "Reshape" for tag in rows):
        lines += ["", *_worked_example()]
    return "\n".join(lines) + "\n"


def _name(tag: Tag) -> str:
    return f"{tag.domain}.{tag.op_type}" if tag.domain else tag.op_type


def _link(tag: Tag) -> str:
    return f"[{_name(tag)}]({tag.page})" if tag.page else _name(tag)


def _totals(rows: Iterable[Tag]) -> str:
    from onnxgrad_cli.verification.tags import VERDICTS

    kinds = Counter(tag.verdict for tag in rows)
    return ", ".join(f"{kinds[verdict]} {verdict}" for verdict in VERDICTS if kinds[verdict])


def _verdict(rows: Iterable[Tag], verdict: str) -> list[str]:
    cells = [
        (_link(t), f"{t.side} {t.operand}", t.tag or "none", t.should_be, t.evidence)
        for t in rows
        if t.verdict == verdict
    ]
    if verdict == "unproven":
        return markdown_table(("operator", "operand", "tag", "why"), [(*row[:3], row[4]) for row in cells])
    return markdown_table(("operator", "operand", "tag", "should be", "evidence"), cells)


def _agreeing(rows: Iterable[Tag]) -> list[str]:
    """A line for each operator: what is differentiable of it, and what is not."""
    operators: dict[str, dict[str, list[str]]] = {}
    for tag in rows:
        if tag.verdict == "agree":
            sides = operators.setdefault(_link(tag), {"differentiable": [], "non-differentiable": []})
            sides[tag.tag].append(f"{tag.operand}{' (output)' if tag.side == 'output' else ''}")
    cells = [(name, *map(", ".join, sides.values())) for name, sides in operators.items()]
    return markdown_table(("operator", "differentiable", "not differentiable"), cells)


EXAMPLE = "--input 2,2 --input =4,"
"""The example of the guide: a square of four numbers becomes a row."""


def _worked_example() -> list[str]:
    """Reshape, verified in both ways."""
    import numpy as np

    from onnxgrad_cli.cli.verify_op import page
    from onnxgrad_cli.errors import OnnxgradError
    from onnxgrad_cli.jobs.verify_op import Request, run_verify_op

    request = Request(((2, 2), np.array([4])))
    lines = [
        "## The two ways to verify an operator",
        "",
        "The [guide of the standard](https://github.com/onnx/onnx/blob/main/docs/DefineDifferentiability.md) asks for "
        "one of two: that a framework has the operator's backward, and how the operator is mapped to it; or that its "
        "Jacobian exists, with two numeric examples. `onnxgrad verify-op` does both, on the node tests that onnx "
        "publishes or on a node that is made, and compares our gradient with what it finds. The worked example is "
        "Reshape: its first input and its output are differentiable, the shape is not.",
    ]
    for title, against in (("By mathematics", "math"), ("By PyTorch", "torch")):
        option = "" if against == "math" else " --against torch"
        try:
            text = page(run_verify_op("Reshape", against=against, request=request))
        except OnnxgradError as error:  # PyTorch is an extra
            text = f"error: {in_flags(error.message)}"
        lines += ["", f"### {title}", "", "```", f"$ onnxgrad verify-op Reshape{option} {EXAMPLE}", text, "```"]
    return lines
