"""Print a summary of a report, or the findings of an inspection, on a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.report.blocks import Inline
from onnxgrad_cli.report.formatting import names, number, plain, several
from onnxgrad_cli.report.model import CONVENTIONS, Diagnosis, Origin, Report
from onnxgrad_cli.report.summary import glance

if TYPE_CHECKING:
    from rich.console import RenderableType

COLORS = {"good": "green", "warn": "yellow", "bad": "red"}

MOST_REFUSALS = 25

MOST_NAMES = 4
"""Largest number of names per group that an inspection prints. The JSON report has all names."""


def summary(report: Report) -> RenderableType:
    """Return the summary of a report, for `rich.console.Console.print`."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    lines = _inspection(report, report.diagnosis) if report.diagnosis else _summary(report)
    for label, words in lines:
        grid.add_row(label, Text(plain(words)))
    return Group(Text(plain(report.verdict), style=f"bold {COLORS[report.tone]}"), grid)


def _summary(report: Report) -> Iterator[tuple[str, Inline]]:
    """Yield the lines of the summary of a build as (label, text)."""
    if report.error:
        yield "error", report.error.partition("\n")[0]
    for refusal in report.refusals[:MOST_REFUSALS]:
        yield "node", str(refusal) + (f"; {refusal.hint}" if refusal.hint else "")
    if len(report.refusals) > MOST_REFUSALS:
        yield "", f"... and {len(report.refusals) - MOST_REFUSALS:,} more"
    if report.hint:
        yield "hint", report.hint
    yield from glance(report)
    steps = report.proof.steps if report.proof else ()
    yield from (("failed", f"{step.name}: {step.detail}") for step in steps if step.status == "failed")
    written = [file.path for file in report.files if file.role != "source model"]
    if written:
        yield "wrote", names(written)
    yield from (("next", todo.text) for todo in report.next if todo.language == "sh")


# -- inspection -------------------------------------------------------------------------------------------------------


def _inspection(report: Report, found: Diagnosis) -> Iterator[tuple[str, Inline]]:
    """Yield the lines of an inspection as (label, text). If several lines share a label, only the first has it."""
    for label, texts in _inspection_parts(report, found):
        yield from ((label if i == 0 else "", text) for i, text in enumerate(texts))
    yield from (("next", todo.text) for todo in report.next)


def _inspection_parts(report: Report, found: Diagnosis) -> Iterator[tuple[str, list[Inline]]]:
    yield from _file(found.origin)
    yield "read as", [*found.repaired]
    lines: dict[str, list[Inline]] = defaultdict(list)
    for label, words in glance(report):
        lines[label].append(words)
    for label in ("loss", "optimizer", "trained", "adapters", "warning"):
        yield label, lines.pop(label, [])
    yield "not trained", [*_not_trained(report)]
    yield "in doubt", [*found.doubts]
    yield "names", [_unnamed(report, found)] if report.weights else []
    equal = [plain(names(each, MOST_NAMES)) for each in found.equal]
    yield "equal", [f"{each}: have equal values and are trained separately" for each in equal]
    yield "modes", [*found.normalization]
    shown = {*found.repaired, *found.doubts}
    others = [c for c in report.cautions if c.kind not in (UNTRAINED, *CONVENTIONS) and c.text not in shown]
    yield "caution", [caution.text for caution in others]
    yield from lines.items()
    yield "proof", [*found.proof]
    yield "better export", [*found.advice]


def _file(origin: Origin) -> Iterator[tuple[str, list[Inline]]]:
    nodes = sum(origin.operators.values())
    versions = ", ".join(f"{domain or 'opset'} {version}" for domain, version in origin.domains.items())
    named = origin.producer.startswith(origin.exporter)
    by = origin.producer if named else origin.exporter + f" ({origin.producer})" * bool(origin.producer)
    yield "written by", [f"{by}, {versions}, {several(nodes, 'node')}"]
    yield "inputs", [f"{name}: {kind}" for name, kind in origin.inputs.items()]
    yield "outputs", [f"{name}: {kind}" for name, kind in origin.outputs.items()]
    yield "may vary", [", ".join(origin.sizes) or "no size"]


def _not_trained(report: Report) -> Iterator[str]:
    """Yield a line for each reason why float tensors are not trained, with the tensors."""
    for reason, tensors in report.untrained_by_reason.items():
        count = number(sum(tensor.count for tensor in tensors))
        yield f"{plain(names([tensor.name for tensor in tensors], MOST_NAMES))} ({count}): {reason}"


def _unnamed(report: Report, found: Diagnosis) -> str:
    if not found.unnamed:
        return "every weight has its original name"
    count = f"{number(len(found.unnamed))} of {several(len(report.weights), 'weight')}"
    return f"the exporter invented the names of {count}: {plain(names(found.unnamed, MOST_NAMES))}"
