"""The report at a glance: what each line is about, and the essence in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onnxgrad_cli.common.wording import in_flags
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.record import Recomputed, Targeted
from onnxgrad_cli.report.blocks import Inline, Name
from onnxgrad_cli.report.model import KINDS, Report, Tuned
from onnxgrad_cli.report.words import number, percent, pieces, quoted, scaled, seconds, several
from onnxgrad_cli.verification.verdict import Proof


def glance(report: Report) -> list[tuple[str, Inline]]:
    """The report in a few lines: what it is about -> the essence."""
    lines: dict[str, Inline] = {
        "loss": losses_in_words(report),
        "optimizer": Name(report.asked.optimizer),
        "trained": _trained_line(report),
        "adapters": adapters_in_words(report) if report.adapters else "",
        "nodes": _nodes_line(report),
        "backward": ("one Gradient node, which ", Name("onnxgrad expand"), " writes out for runtimes")
        if report.compact
        else "",
        "cost": _cost_line(report),
        "recomputed": recomputed_in_words(report.recomputed) if report.recomputed else "",
        "target": _targeted(report.targeted) if report.targeted else "",
        "lowerings": _tuned_line(report.tuned) if report.tuned else "",
        "cautions": _cautions_line(report.cautions),
        "proof": _proof_line(report.proof) if report.proof else "",
    }
    rows = [(label, words) for label, words in lines.items() if words]
    return rows + [("warning", in_flags(c.text)) for c in report.cautions if c.kind == UNTRAINED]


def _trained_line(report: Report) -> str:
    if not report.weights:
        return ""
    count = sum(weight.count for weight in report.weights)
    text = f"{several(len(report.weights), 'tensor')}, {several(count, 'number')}"
    text += f" ({scaled(report.cost.weight_bytes, 'B')})" if report.cost else ""
    return text + (f"; {several(len(report.not_trained), 'float tensor')} not trained" if report.not_trained else "")


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


def _tuned_line(tuned: Tuned) -> str:
    return f"{len(tuned.measured):,} of {tuned.choices:,} chosen as measured"


def _cautions_line(cautions: Sequence[Caution]) -> str:
    counts = Counter(caution.kind for caution in cautions)
    return ", ".join(several(counts[kind], kind) for kind in KINDS if counts[kind] and kind != UNTRAINED)


def _proof_line(proof: Proof) -> str:
    if not proof.steps:
        return f"{proof.verdict}: {proof.why}"
    passed = sum(step.status == "passed" for step in proof.steps)
    total = sum(step.seconds for step in proof.steps)
    at = f", with {in_words}" if (in_words := ", ".join(f"{s} = {n:,}" for s, n in proof.sizes.items())) else ""
    return f"{proof.verdict}: {passed} of {several(len(proof.steps), 'check')} in {seconds(total)}{at}"


def recomputed_in_words(done: Recomputed) -> str:
    """What is recomputed, what that frees, and what it costs."""
    return (
        f"{several(done.nodes, 'node')}: {scaled(done.kept, 'B')} kept instead of {scaled(done.kept_before, 'B')}, "
        f"for {scaled(done.flops, 'FLOP')}"
    )


def _targeted(done: Targeted) -> str:
    listed = ", ".join(f"{op} ({count:,})" for op, count in done.operators.items())
    return f"{done.name}: " + (f"{several(done.nodes, 'node')} by {listed}" if listed else "no operators of its own")


def has_backward(report: Report) -> bool:
    """Whether there is a backward part."""
    return "backward" in [step.name for step in report.passes]


def losses_in_words(report: Report) -> Inline:
    """The losses, with a plus between them."""
    found: tuple[str, ...] = ()
    for loss in report.asked.losses:
        found += (*((" + ",) if found else ()), *pieces(quoted(loss)))
    return found


def sizes_in_words(report: Report) -> str:
    """The size that each symbol was counted with."""
    assert report.cost is not None
    sizes = report.cost.sizes | report.cost.assumed
    return ", ".join(f"{symbol} = {size:,}" for symbol, size in sizes.items())


def adapters_in_words(report: Report) -> str:
    """How many adapters there are, and what they save."""
    factors = {name for adapter in report.adapters for name in adapter.names}
    counts = {weight.name: weight.count for weight in report.weights if weight.name in factors}
    count = sum(counts.values())
    whole = sum(counts[adapter.a] * counts[adapter.b] // adapter.rank**2 for adapter in report.adapters)
    rank = report.adapters[0].rank
    kind = ", with magnitudes" if report.adapters[0].magnitude else ""
    text = f"{len(report.adapters):,} of rank {rank}{kind}: {several(count, 'number')} instead of {number(whole)}"
    return text + f" ({percent(count / whole)})"
