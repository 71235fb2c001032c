"""`onnxgrad ops`: every operator, and what is known of its derivative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxgrad_cli.cli.code import load_rules
from onnxgrad_cli.cli.console import Console, markdown_table, speaks, table
from onnxgrad_cli.cli.options import rules as rules_option
from onnxgrad_cli.errors import UsageError, suggest

if TYPE_CHECKING:
    from onnxgrad_cli.verification.coverage import Coverage

KINDS = {
    "rule": "a rule of its own",
    "definition": "replaced by operators that have rules, before it is differentiated",
    "function": "replaced by the function body that the standard gives it",
    "converted": "deprecated: written as another operator first",
    "straight-through": "on integers: refused, but with `--quantization ste` float operators between quantizers",
    "zero": "its derivative is zero by mathematics",
    "no float": "no floating-point value goes in, or none comes out",
    "refused": "refused, with the reason",
}


PLAIN = ("zero", "no float", "straight-through", "refused")
"""Kinds that say of each operand what there is to say."""

HEAD = ("operator", "versions", "how", "operands", "zero", "at kinks and ties", "proof")


@click.command(short_help="List the operators and their derivatives.")
@click.argument("pattern", default="*", metavar="[GLOB]")
@rules_option("Count these too.")
@click.option("--markdown", is_flag=True, help="Print the whole table as Markdown, with the refusals.")
@click.option("--tags", is_flag=True, help="Hold the standard's differentiability tags against what is proven.")
@speaks
@click.pass_obj
def ops(console: Console, pattern: str, rules: tuple[str, ...], markdown: bool, tags: bool) -> int:
    """List the operators: what has a gradient, the convention where a derivative does not exist, what is refused."""
    from onnxgrad_cli.verification.coverage import coverage

    for file in rules:
        load_rules(Path(file))
    every = list(coverage())
    found = [each for each in every if fnmatchcase(each.op_type.lower(), pattern.lower())]
    if not found:
        names = {each.op_type for each in every}
        raise UsageError(f"no operator is called '{pattern}'", suggest(pattern, names, "operators"))
    if tags:
        from onnxgrad_cli.cli.tags import show_tags

        return show_tags(console, found, markdown)
    if markdown and not console.json:
        console.print(document(found), newline=False)
        return 0
    rows = [(c.op_type, c.domain or "ai.onnx", c.kind, _operands(c), _remark(c)) for c in found]
    console.result([_data(c) for c in found], table(("operator", "domain", "derivative", "operands", "at kinks"), rows))
    kinds = Counter(c.kind for c in found)
    console.say(f"{len(found)} operators: {', '.join(f'{kinds[kind]} {kind}' for kind in KINDS if kinds[kind])}")
    return 0


def _remark(c: Coverage) -> str:
    """The convention at kinks, or why there is no derivative."""
    return f"{c.reason}, but by --quantization ste" if c.kind == "straight-through" else c.kink or c.reason


def _data(c: Coverage) -> dict[str, object]:
    data = asdict(c)
    data["operands"] = [{**asdict(operand), "agrees": operand.agrees} for operand in c.operands]
    op_type, domain, kind = data.pop("op_type"), data.pop("domain"), data.pop("kind")
    return {"op": op_type, "domain": domain or "ai.onnx", "derivative": kind, **data}


def _operands(c: Coverage) -> str:
    """The operands with a gradient, then what becomes of the others."""
    with_gradient = [operand.name for operand in c.operands if operand.state == "gradient"]
    others = [f"{o.name}: {o.state}" for o in c.operands if o.state not in ("gradient", "no float")]
    return ", ".join(with_gradient + others if c.kind not in PLAIN else with_gradient)


def document(found: Sequence[Coverage]) -> str:
    """The table as a Markdown document: docs/operators.md is this, whole."""
    from onnxgrad_cli.autodiff.registry import NEWEST_OPSET

    kinds = Counter(c.kind for c in found)
    lines = [
        "# Operators",
        "",
        f"Every operator of ai.onnx up to opset {NEWEST_OPSET}, what is newer as far as it is defined by older ones, "
        "and every operator of another domain that is known. Written by `make docs`.",
        "",
        *markdown_table(("how", "operators", ""), [(kind, kinds[kind], text) for kind, text in KINDS.items()]),
        "",
        "*Versions* are those of the operator's schema; older ones, in brackets, are converted first. *Operands* are "
        "the inputs with a gradient; *zero* are those whose derivative vanishes. *Proof* counts the rows of the tests' "
        "table (each against central differences in float64, in first and second order, with static and symbolic "
        "axes) and the published node tests that came out right. Rows in definitions/, and tests named without rows, "
        "hold an operator to the values of onnxruntime's kernel, and its gradients to differences or PyTorch's.",
        "",
        *markdown_table(
            ("operator", "versions", "how", "operands", "zero", "at kinks and ties", "proof"), map(_row, found)
        ),
        "",
        "## Where the standard's tag says otherwise",
        "",
        "The standard tags the inputs of its operators as differentiable or not. Where that is not what we do:",
        "",
        *markdown_table(("operator", "input", "tag", "we"), _differing(found)),
        "",
        "## Refused",
        "",
        "An error names the node and the reason, before anything is written. Operators:",
        "",
        *markdown_table(("operator", "why"), [(_link(c), c.reason) for c in found if c.kind == "refused"]),
        "",
        "Operands:",
        "",
        *markdown_table(("operator", "input", "why"), _refused(found)),
        "",
        "Cases among the published node tests (how many of their forms):",
        "",
        *markdown_table(
            ("operator", "why", "forms"), [(_link(c), why, n) for c in found for why, n in c.refusals.items()]
        ),
    ]
    return "\n".join(lines) + "\n"


def _link(c: Coverage) -> str:
    name = c.op_type if not c.domain else f"{c.domain}.{c.op_type}"
    return f"[{name}]({c.page})" if c.page else name


def _row(c: Coverage) -> tuple[str, ...]:
    how = f"{c.kind}: `{c.source.removeprefix('onnxgrad_cli.')}`" if c.source else c.kind
    gradient = ", ".join(o.name for o in c.operands if o.state == "gradient")
    zero = ", ".join(o.name for o in c.operands if o.state == "zero" and c.kind not in ("zero", "no float"))
    return _link(c), _versions(c), how, gradient, zero, c.kink, _proof(c)


def _versions(c: Coverage) -> str:
    """The versions of the operator, and in brackets before them those that are converted first."""
    older = " ".join(str(version) for version, kind in c.versions.items() if kind == "converted")
    own = [str(version) for version, kind in c.versions.items() if kind != "converted"]
    return " ".join([f"({older})"] * bool(older) + own)


def _proof(c: Coverage) -> str:
    """The rows and files that test the operator, and the published node tests."""
    own = [file for file in c.files if c.rows or "/definitions/" in file or "/prepare/" in file]  # others touch on it
    files = ", ".join(file.removeprefix("tests/") for file in own or c.files)
    proof = [f"{c.rows} rows in {files}" if c.rows else files] if files else []
    if c.cases:
        proof.append(f"{c.cases.get('right', 0)} of {sum(c.cases.values())} node tests")
    return "; ".join(proof)


def _differing(found: Sequence[Coverage]) -> list[tuple[str, ...]]:
    return [(_link(c), o.name, o.tag, o.word or o.state) for c in found for o in c.operands if o.agrees is False]


def _refused(found: Sequence[Coverage]) -> list[tuple[str, ...]]:
    return [
        (_link(c), o.name, o.word) for c in found if c.kind not in PLAIN for o in c.operands if o.state == "refused"
    ]
