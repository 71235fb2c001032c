"""The summary of a report: labeled lines of a few words each, for the terminal and the head of the document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from onnxgrad_cli.common.flags import as_cli_flags, status_text
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.record import Recomputed, Targeted
from onnxgrad_cli.report.blocks import Inline, Name
from onnxgrad_cli.report.formatting import number, percent, pieces, plain, quoted, scaled, several
from onnxgrad_cli.report.model import CONVENTIONS, KINDS, WARNINGS, Report
from onnxgrad_cli.verification.verdict import Proof

MOST_WARNINGS = 8
"""Largest number of warnings that are printed in full."""

LONGEST_REASONS = 120
"""If the reasons why tensors are frozen have more characters than this, the summary omits them."""


def glance(report: Report) -> list[tuple[str, Inline]]:
    """Return the lines of the summary as (label, text)."""
    tuned = report.tuned
    lines: dict[str, Inline] = {
        "loss": losses_in_words(report),
        "optimizer": Name(report.asked.optimizer),
        "trained": _trained_line(report),
        "frozen": _frozen_line(report),
        "adapters": adapters_in_words(report) if report.adapters else "",
        "nodes": _nodes_line(report),
        "backward": ("one Gradient node, which ", Name("onnxgrad expand"), "expands into standard operators")
        if report.compact
        else "",
        "cost": _cost_line(report),
        "recomputed": recomputed_in_words(report.recomputed) if report.recomputed else "",
        "target": _targeted(report.targeted) if report.targeted else "",
        "lowerings": f"{len(tuned.measured):,} of {tuned.choices:,} chosen by measurements" if tuned else "",
        "cautions": _cautions_line(report),
        "proof": _proof_line(report.proof) if report.proof else "",
    }
    rows = [(label, words) for label, words in lines.items() if words]
    kinds = (UNTRAINED,) if report.diagnosis else WARNINGS  # an inspection lists the others itself
    warnings = [as_cli_flags(caution.text) for caution in report.cautions if caution.kind in kinds]
    return rows + [("warning", text) for text in first_warnings(warnings, "the report")]


def first_warnings(texts: Sequence[str], place: str) -> list[str]:
    """Return the first `MOST_WARNINGS` texts, and if there are more, their number and the place that lists them."""
    more = [f"{len(texts) - MOST_WARNINGS:,} more, see {place}"] if len(texts) > MOST_WARNINGS else []
    return [*texts[:MOST_WARNINGS], *more]


def _trained_line(report: Report) -> str:
    if not report.weights:
        return ""
    count = sum(weight.count for weight in report.weights)
    size = f" ({scaled(report.cost.weight_bytes, 'B')})" if report.cost else ""
    return f"{several(len(report.weights), 'tensor')}, {several(count, 'parameter')}{size}"


def _frozen_line(report: Report) -> str:
    """Return the number of float tensors without gradient, and the reasons; "" for an inspection, which lists them."""
    if not report.not_trained or report.diagnosis:
        return ""
    reasons = ", ".join(dict.fromkeys(plain(quoted(tensor.reason)) for tensor in report.not_trained))
    text = several(len(report.not_trained), "tensor")
    return f"{text}: {reasons}" if len(reasons) <= LONGEST_REASONS else text


def _nodes_line(report: Report) -> str:
    if not report.cost or not report.passes:
        return ""
    counts = report.cost.nodes if has_backward(report) or report.compact else {"model": report.cost.nodes["model"]}
    return " + ".join(f"{count:,} {part}" for part, count in counts.items() if count)


def _cost_line(report: Report) -> str:
    if not report.cost or not has_backward(report):
        return ""
    forward, backward, kept = report.cost.flops_forward, report.cost.flops_backward, report.cost.kept_bytes
    text = f"{scaled(forward, 'FLOP')} forward, {scaled(backward, 'FLOP')} backward, {scaled(kept, 'B')} kept"
    return text + (f", with {sizes}" if (sizes := sizes_in_words(report)) else "")


def _cautions_line(report: Report) -> str:
    """Return a line with the number of cautions of each kind whose text is not printed.

    For a build, these are all kinds but those in `WARNINGS`. For an inspection, these are the kinds in `CONVENTIONS`,
    because it prints the other kinds in full.
    """
    counts = Counter(caution.kind for caution in report.cautions)
    kinds = CONVENTIONS if report.diagnosis else [kind for kind in KINDS if kind not in WARNINGS]
    return ", ".join(several(counts[kind], kind) for kind in kinds if counts[kind])


def _proof_line(proof: Proof) -> str:
    if not proof.steps:
        return f"{status_text(proof.verdict)}: {proof.why}"
    passed = sum(step.status == "passed" for step in proof.steps)
    at = f", with {with_sizes(proof.sizes)}" if proof.sizes else ""
    return f"{status_text(proof.verdict)}: {passed} of {several(len(proof.steps), 'check')} passed{at}"


def recomputed_in_words(done: Recomputed) -> str:
    """Return the number of recomputed nodes, the bytes kept with and without recomputation, and the added FLOPs."""
    return (
        f"{several(done.nodes, 'node')}: {scaled(done.kept, 'B')} kept instead of "
        f"{scaled(done.kept_before, 'B')}, at a cost of {scaled(done.flops, 'FLOP')}"
    )


def _targeted(done: Targeted) -> str:
    listed = ", ".join(f"{op} ({count:,})" for op, count in done.operators.items())
    return f"{done.name}: " + (
        f"{several(done.nodes, 'node')} by {listed}" if listed else "no operators of this target"
    )


def has_backward(report: Report) -> bool:
    """Return True if the model has a backward part."""
    return "backward" in [step.name for step in report.passes]


def losses_in_words(report: Report) -> Inline:
    """Return the losses, with a plus between them."""
    return tuple(piece for loss in report.asked.losses for piece in (" + ", *pieces(quoted(loss))))[1:]


def sizes_in_words(report: Report) -> str:
    """Return the size of each symbol with which the cost was computed, as a text."""
    assert report.cost is not None
    return with_sizes(report.cost.sizes | report.cost.assumed)


def with_sizes(sizes: Mapping[str, int]) -> str:
    """Return the sizes of symbols as a text: 'N = 2, T = 1,024'."""
    return ", ".join(f"{symbol} = {size:,}" for symbol, size in sizes.items())


def adapters_in_words(report: Report) -> str:
    """Return the number of adapters, their rank, and their number of parameters compared with the frozen weights."""
    factors = {name for adapter in report.adapters for name in adapter.names}
    counts = {weight.name: weight.count for weight in report.weights if weight.name in factors}
    count = sum(counts.values())
    whole = sum(counts[adapter.a] * counts[adapter.b] // adapter.rank**2 for adapter in report.adapters)
    rank = report.adapters[0].rank
    kind = ", with magnitudes" if report.adapters[0].magnitude else ""
    text = f"{len(report.adapters):,} of rank {rank}{kind}: {several(count, 'parameter')}"
    return f"{text} instead of {number(whole)} ({percent(count / whole)})"
