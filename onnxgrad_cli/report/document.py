"""The report as a document: headings, sentences, tables and listings, in the words that every format shares.

A format only decides how these few blocks look; what is said, and in which order, is decided here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.record import Recomputed, Targeted
from onnxgrad_cli.report.model import GOOD, KINDS, Report

MOST = 300
"""Rows of a table in a format for people; the JSON report has all."""


class Name(str):
    """A word of the user's (a tensor, a file, a command), to be shown as it is."""


Inline = str | tuple[str, ...]
"""A run of text: plain words and `Name`s."""


@dataclass(frozen=True)
class Paragraph:
    """One or several sentences."""

    text: Inline


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns in `right` hold numbers and stand flush right."""

    head: tuple[str, ...]
    rows: list[tuple[Inline, ...]]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: list[Inline]


@dataclass(frozen=True)
class Listing:
    """Something to type or to run, in `language`."""

    language: str
    text: str


@dataclass(frozen=True)
class Picture:
    """An `svg` element that also stands in `file`, beside the document; `words` say what it shows."""

    svg: str
    file: str
    words: str


Block = Paragraph | Table | Bullets | Listing | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    """A whole document; `tone` is 'good', 'warn' or 'bad'."""

    title: Inline
    verdict: Inline
    tone: str
    glance: list[tuple[str, Inline]]
    sections: list[Section]


# -- words ----------------------------------------------------------------------------------------------------------


def pieces(text: Inline) -> tuple[str, ...]:
    """The words and names of a run of text."""
    return text if isinstance(text, tuple) else (text,)


def visible(text: str) -> str:
    """The text on one line: line breaks and control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(text: Inline) -> str:
    """A run of text as one line of plain text."""
    return visible("".join(pieces(text)))


def quoted(text: str) -> Inline:
    """A message whose quoted 'names' become names."""
    return tuple(Name(p) if i % 2 else p for i, p in enumerate(re.split(r"(?<!\w)'([^']+)'(?!\w)", text)) if p)


def names(items: Sequence[str], most: int = 5) -> Inline:
    """A list of names: the first `most`, and how many more there are."""
    found: list[str] = []
    for item in items[:most]:
        found += [", ", Name(item)] if found else [Name(item)]
    return (*found, f" and {len(items) - most:,} more") if len(items) > most else tuple(found)


def number(value: int) -> str:
    """A count with thousands separators."""
    return f"{value:,}"


def several(count: int, noun: str) -> str:
    """A count and its noun: '1 node', '2 nodes'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def scaled(value: float, unit: str) -> str:
    """A quantity in the prefix that suits it: '1.23 GFLOP', '45.6 kB'."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{value:,.0f} {unit}"


def seconds(value: float) -> str:
    """A duration: '12.3 ms', '4.56 s'."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def percent(share: float) -> str:
    """A share: '12.3 %'."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def shape(dims: Shape | None) -> str:
    """A shape: 'batch × 3 × 224 × 224'."""
    return "any rank" if dims is None else " × ".join(map(str, dims)) or "scalar"


# -- the document -----------------------------------------------------------------------------------------------------


def page(report: Report) -> Page:
    """The report as a document."""
    tone = "good" if report.status in GOOD else "warn" if report.status == "stopped" else "bad"
    return Page(title(report), report.verdict, tone, list(glance(report)), list(sections(report)))


def title(report: Report) -> Inline:
    """The document's heading."""
    kind = "Training model" if report.status in ("built", "check failed") else "Report"
    source = report.asked.model.replace("\\", "/").rsplit("/", 1)[-1]
    return (f"{kind} of ", Name(source)) if source else kind


def glance(report: Report) -> list[tuple[str, Inline]]:
    """The report in a few lines: what it is about -> the essence."""
    found: list[tuple[str, Inline]] = []
    if report.asked.losses:
        found.append(("loss", _losses(report)))
    if report.asked.optimizer:
        found.append(("optimizer", Name(report.asked.optimizer)))
    if report.weights:
        count = sum(weight.count for weight in report.weights)
        text = f"{several(len(report.weights), 'tensor')}, {several(count, 'number')}"
        text += f" ({scaled(report.cost.weight_bytes, 'B')})" if report.cost else ""
        text += f"; {several(len(report.not_trained), 'float tensor')} not trained" if report.not_trained else ""
        found.append(("trained", text))
    if report.adapters:
        found.append(("adapters", _adapted(report)))
    if report.cost and report.passes:
        counts = report.cost.nodes if _ran(report) or report.compact else {"model": report.cost.nodes["model"]}
        found.append(("nodes", " + ".join(f"{n:,} {part}" for part, n in counts.items() if n)))
    if report.compact:
        found.append(("backward", ("one Gradient node, which ", Name("onnxgrad expand"), " writes out for runtimes")))
    if report.cost and _ran(report):
        forward, backward, kept = report.cost.flops_forward, report.cost.flops_backward, report.cost.kept_bytes
        text = f"{scaled(forward, 'FLOP')} forward, {scaled(backward, 'FLOP')} backward, {scaled(kept, 'B')} kept"
        found.append(("cost", text + (f", with {sizes}" if (sizes := _sizes(report)) else "")))
    if report.recomputed:
        found.append(("recomputed", _recomputed(report.recomputed)))
    if report.targeted:
        found.append(("target", _targeted(report.targeted)))
    if report.tuned:
        found.append(("lowerings", f"{len(report.tuned.measured):,} of {report.tuned.choices:,} chosen as measured"))
    if report.cautions:
        counted = {kind: sum(c.kind == kind for c in report.cautions) for kind in KINDS}
        found.append(("cautions", ", ".join(several(n, kind) for kind, n in counted.items() if n)))
    if report.proof:
        done = [step for step in report.proof.steps if step.status == "passed"]
        total = sum(step.seconds for step in report.proof.steps)
        text = f"{report.proof.status}: {len(done)} of {several(len(report.proof.steps), 'check')} in {seconds(total)}"
        found.append(("proof", text if report.proof.steps else f"{report.proof.status}: {report.proof.reason}"))
    return found


def _recomputed(done: Recomputed) -> str:
    return (
        f"{several(done.nodes, 'node')}: {scaled(done.kept, 'B')} kept instead of {scaled(done.kept_before, 'B')}, "
        f"for {scaled(done.flops, 'FLOP')}"
    )


def _targeted(done: Targeted) -> str:
    listed = ", ".join(f"{op} ({count:,})" for op, count in done.operators.items())
    return f"{done.name}: " + (f"{several(done.nodes, 'node')} by {listed}" if listed else "no operators of its own")


def _ran(report: Report) -> bool:
    """Whether there is a backward part."""
    return "backward" in [step.name for step in report.passes]


def _losses(report: Report) -> Inline:
    found: tuple[str, ...] = ()
    for loss in report.asked.losses:
        found += (*((" + ",) if found else ()), *pieces(quoted(loss)))
    return found


def _sizes(report: Report) -> str:
    assert report.cost is not None
    given = [f"{symbol} = {size:,}" for symbol, size in report.cost.sizes.items()]
    return ", ".join([*given, *(f"{symbol} = 1" for symbol in report.cost.assumed)])


def sections(report: Report) -> Iterator[Section]:
    """The document's sections; those with nothing to say are left out."""
    makers = (
        _obstacles, _asked, _weights, _adapters, _not_trained, _ports, _passes, _operators, _cautions, _cost, _proof,
        _files, _versions, _next,
    )  # fmt: skip
    for make in makers:
        section = make(report)
        if section.blocks:
            yield section


def _obstacles(report: Report) -> Section:
    blocks: list[Block] = []
    if report.error:
        blocks += [Paragraph(quoted(line)) for line in report.error.splitlines() if line.strip()]
    if report.hint:
        blocks.append(Paragraph(("What to do: ", *pieces(quoted(report.hint)), ".")))
    if report.refusals:
        rows: list[tuple[Inline, ...]] = [
            (Name(r.node), Name(r.op_type), quoted(r.reason), quoted(r.hint)) for r in report.refusals
        ]
        blocks.append(Table(("node", "operator", "why not", "what to do"), rows))
    return Section("What stands in the way", blocks)


def _asked(report: Report) -> Section:
    asked = report.asked
    rows: list[tuple[Inline, ...]] = [("model", Name(asked.model))] if asked.model else []
    rows += [("operator set", f"opset {asked.opset}")] if asked.opset else []
    rows += [("loss", _losses(report))] if asked.losses else []
    rows += [(Name(option), Name(value)) for option, value in asked.options.items()]
    blocks: list[Block] = [Listing("sh", asked.command)] if asked.command else []
    blocks += [Table(("", "asked for"), rows)] if rows else []
    if blocks and not asked.options:
        blocks.append(Paragraph("Every option stands at its default."))
    return Section("What was asked", blocks)


def _weights(report: Report) -> Section:
    if not report.weights:
        return Section("Trained weights", [])
    done = any(weight.gradient for weight in report.weights)
    rows: list[tuple[Inline, ...]] = [
        (Name(w.name), w.dtype, shape(w.shape), number(w.count), percent(w.share), Name(w.gradient))
        for w in report.weights
    ]
    total = sum(weight.count for weight in report.weights)
    rows = [*_short(rows, 6), ("all of them", "", "", number(total), percent(1.0), "")]
    head: tuple[str, ...] = ("weight", "type", "shape", "numbers", "share", "gradient")
    if not done:
        rows, head = [row[:-1] for row in rows], head[:-1]
    return Section("Trained weights", [Table(head, rows, frozenset({3, 4}))])


def _adapters(report: Report) -> Section:
    if not report.adapters:
        return Section("Adapters", [])
    shapes = {weight.name: shape(weight.shape) for weight in report.weights}
    shapes |= {tensor.name: shape(tensor.shape) for tensor in report.not_trained}
    rows: list[tuple[Inline, ...]] = [
        (Name(a.weight), shapes[a.weight], Name(a.a), shapes[a.a], Name(a.b), shapes[a.b]) for a in report.adapters
    ]
    scale = report.adapters[0].scale
    text = f"{_adapted(report)}. What the factors multiply to is added to the weight {scale:g} times."
    head = ("frozen weight", "shape", "A", "shape", "B", "shape")
    return Section("Adapters", [Paragraph(text), Table(head, _short(rows, 6))])


def _adapted(report: Report) -> str:
    """How many adapters there are, and what they save."""
    factors = {name for adapter in report.adapters for name in (adapter.a, adapter.b)}
    adapted = {adapter.weight for adapter in report.adapters}
    count = sum(weight.count for weight in report.weights if weight.name in factors)
    whole = sum(tensor.count for tensor in report.not_trained if tensor.name in adapted)
    text = f"{len(adapted):,} of rank {report.adapters[0].rank}: {several(count, 'number')} instead of {number(whole)}"
    return text + f" ({percent(count / whole)})"


def _short(rows: list[tuple[Inline, ...]], columns: int) -> list[tuple[Inline, ...]]:
    if len(rows) <= MOST:
        return rows
    more = f"... and {len(rows) - MOST:,} more (the JSON report lists all)"
    return [*rows[:MOST], (more, *[""] * (columns - 1))]


def _not_trained(report: Report) -> Section:
    if not report.not_trained:
        return Section("Not trained", [])
    reasons: dict[str, list[str]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for tensor in report.not_trained:
        reasons[tensor.reason].append(tensor.name)
        counts[tensor.reason] += tensor.count
    rows: list[tuple[Inline, ...]] = [
        (reason, number(len(tensors)), number(counts[reason]), names(tensors)) for reason, tensors in reasons.items()
    ]
    text = (
        "These float tensors of the model get no gradient. ",
        Name("--train GLOB"),
        " and ",
        Name("--freeze GLOB"),
        " change the choice.",
    )
    head = ("because", "tensors", "numbers", "which")
    return Section("Not trained, and why", [Paragraph(text), Table(head, rows, frozenset({1, 2}))])


_MEANING = {
    "model input": "the model's own: feed it",
    "label": "what the loss compares with: feed it",
    "sample weight": "one weight per sample: feed it",
    "learning rate": "how far a step goes: feed it",
    "weight": "trained; it has a value, and feeding it overrides that",
    "state": "changes from step to step; it has a value, and feeding it overrides that",
    "loss gradient": "where backpropagation starts: feed it, 1 as a rule",
    "constant": "not trained; it has a value, and feeding it overrides that",
}


def _ports(report: Report) -> Section:
    blocks: list[Block] = []
    weights = {weight.name for weight in report.weights}
    rows: list[tuple[Inline, ...]] = [
        (Name(v.name), v.role, v.dtype, shape(v.shape), _MEANING.get(v.role, ""))
        for v in report.inputs
        if v.role != "weight"
    ]
    if len(rows) < len(report.inputs):
        rows.append((f"the {several(len(weights), 'trained weight')}", "weight", "", "see above", _MEANING["weight"]))
    if rows:
        blocks.append(Table(("input", "role", "type", "shape", "meaning"), _short(rows, 5)))
    rows = [
        (Name(v.name), (f"{v.role} of ", Name(v.of)) if v.of else v.role, v.dtype, shape(v.shape))
        for v in report.outputs
        if v.role != "gradient" or v.of not in weights
    ]
    if len(rows) < len(report.outputs):
        rows.append((f"the {several(len(weights), 'gradient')} of the trained weights", "gradient", "", "see above"))
    if rows:
        blocks.append(Table(("output", "role", "type", "shape"), _short(rows, 4)))
    return Section("Inputs and outputs", blocks)


def _passes(report: Report) -> Section:
    if not report.passes:
        return Section("Passes", [])
    rows: list[tuple[Inline, ...]] = [
        (p.name, p.summary, seconds(p.seconds), number(p.nodes_before), number(p.nodes_after)) for p in report.passes
    ]
    total = sum(p.seconds for p in report.passes)
    first, last = report.passes[0].nodes_before, report.passes[-1].nodes_after
    rows.append(("all of them", "", seconds(total), number(first), number(last)))
    head = ("pass", "what it did", "time", "nodes before", "after")
    return Section("Passes", [Table(head, rows, frozenset({2, 3, 4}))])


_DERIVATIVES = {"zero": "zero by mathematics", "not needed": "not needed", "none": "no rule, and none needed", "": ""}


def _operators(report: Report) -> Section:
    if not report.operators:
        return Section("Operators", [])
    refused = {refusal.op_type for refusal in report.refusals}
    rows: list[tuple[Inline, ...]] = []
    parts = ["model", "loss", "backward"]
    parts += ["optimizer"] if any(row.optimizer for row in report.operators) else []
    for row in report.operators:
        rule: Inline = _DERIVATIVES.get(row.derivative, "")
        if row.op in refused:
            rule = "refused, see above"
        elif row.rules:
            own = "onnxgrad_cli.autodiff.rules."
            rule = names([source.removeprefix(own) for source in row.rules])
            inside = row.model + row.loss
            rule = (*pieces(rule), f" ({row.differentiated:,} of {inside:,})") if row.differentiated != inside else rule
        rows.append((Name(row.op), *(number(getattr(row, part)) if getattr(row, part) else "" for part in parts), rule))
    totals = [sum(getattr(row, part) for row in report.operators) for part in parts]
    rows.append(("all of them", *map(number, totals), ""))
    text = (
        "How many nodes of each operator there are, and the rule that differentiated those of the model and the loss. "
        "'Not needed' means that no gradient that was asked for passes through it."
    )
    head = ("operator", *parts, "derivative by")
    return Section("Operators", [Paragraph(text), Table(head, rows, frozenset(range(1, len(parts) + 1)))])


def _cautions(report: Report) -> Section:
    blocks: list[Block] = []
    for kind, heading in KINDS.items():
        found = [caution for caution in report.cautions if caution.kind == kind]
        if not found:
            continue
        items = [quoted(caution.text) for caution in found[:20]]
        if len(found) > 20:
            items.append(f"... and {len(found) - 20:,} more (the JSON report lists all)")
        blocks += [Paragraph(f"{heading}."), Bullets(items)]
    if not blocks and report.status == "built":
        blocks.append(Paragraph("None."))
    return Section("Cautions", blocks)


def _cost(report: Report) -> Section:
    cost = report.cost
    if cost is None or not _ran(report):
        return Section("Cost", [])
    nodes = cost.nodes
    rows: list[tuple[Inline, ...]] = [
        ("nodes", number(nodes["model"] + nodes["loss"]), number(nodes["backward"])),
        ("floating-point operations", number(cost.flops_forward), number(cost.flops_backward)),
    ]
    text = "One run of the training model"
    text += f", counted with {_sizes(report)}." if cost.sizes or cost.assumed else "."
    if cost.assumed:
        text += " A size that nobody gave counts as 1; --dim NAME=SIZE gives one."
    if cost.at_run_time:
        text += f" Sizes known only at run time count as 1 ({several(cost.at_run_time, 'value')})."
    text += " A multiply-add is two operations; a function such as Exp counts as one."
    if cost.branches:
        text += f" Of {several(cost.branches, 'If')} the dearer branch counts, as if it ran each time."
    if nodes["optimizer"]:
        text += f" The optimizer takes {number(cost.flops_optimizer)} operations in "
        text += f"{several(nodes['optimizer'], 'node')} besides."
    blocks: list[Block] = [Paragraph(text), Table(("", "forward", "backward"), rows, frozenset({1, 2}))]
    if cost.uncounted:
        listed = ", ".join(f"{op} ({n:,})" for op, n in cost.uncounted.items())
        blocks.append(Paragraph(f"Not counted, for their size or how often they run is unknown: {listed}."))
    total = cost.flops_forward + cost.flops_backward
    rows = [
        (Name(c.op), number(c.forward), number(c.backward), percent((c.forward + c.backward) / total))
        for c in cost.operators[:8]
    ]
    if rows:
        head = ("operations by operator", "forward", "backward", "share")
        blocks.append(Table(head, rows, frozenset({1, 2, 3})))
    rows = [
        ("trained weights", number(cost.weight_bytes), scaled(cost.weight_bytes, "B")),
        ("gradients", number(cost.gradient_bytes), scaled(cost.gradient_bytes, "B")),
        ("kept for the backward part", number(cost.kept_bytes), scaled(cost.kept_bytes, "B")),
    ]
    blocks.append(Table(("memory", "bytes", ""), rows, frozenset({1, 2})))
    if report.recomputed:
        blocks.append(Paragraph(f"Computed again in the backward part: {_recomputed(report.recomputed)}."))
    rows = [(Name(k.name), Name(k.op), shape(k.shape), number(k.bytes)) for k in cost.kept]
    if rows:
        text = "Kept are results of the forward part that the backward part reads. The largest of them:"
        blocks += [Paragraph(text), Table(("value", "made by", "shape", "bytes"), rows, frozenset({3}))]
    return Section("Cost", blocks)


def _proof(report: Report) -> Section:
    proof = report.proof
    if proof is None:
        words = ("Nothing was checked. ", Name("onnxgrad check"), " does it on the written model.")
        return Section("Proof", [Paragraph(words)] if report.status == "built" else [])
    blocks: list[Block] = []
    text = {
        "passed": "Every check that was made passed.",
        "failed": "A check failed. Do not train with this model.",
        "skipped": "The proof was left out.",
    }.get(proof.status, proof.status)
    blocks.append(Paragraph((text, " Reason: ", *pieces(quoted(proof.reason)), ".") if proof.reason else text))
    rows: list[tuple[Inline, ...]] = [
        (
            step.name,
            step.status.upper() if step.status == "failed" else step.status,
            quoted(step.detail),
            seconds(step.seconds),
        )
        for step in proof.steps
    ]
    if rows:
        blocks.append(Table(("check", "result", "detail", "time"), rows, frozenset({3})))
    if proof.executor:
        blocks.append(
            Paragraph(
                f"Differences by {proof.executor}: the loss at two points on either side, along a random direction, "
                "against what the gradients say."
            )
        )
    return Section("Proof", blocks)


def _files(report: Report) -> Section:
    rows: list[tuple[Inline, ...]] = [
        (Name(f.path), f.role, number(f.bytes), Name(f.sha256) if f.sha256 else "not read") for f in report.files
    ]
    head = ("file", "what it is", "bytes", "sha256")
    return Section("Files", [Table(head, rows, frozenset({2}))] if rows else [])


def _versions(report: Report) -> Section:
    rows: list[tuple[Inline, ...]] = [(name, version) for name, version in report.versions.items()]
    return Section("Versions", [Table(("made with", "version"), rows)] if rows else [])


def _next(report: Report) -> Section:
    blocks: list[Block] = []
    for step in report.next:
        blocks += [Paragraph(f"{step.why}:"), Listing(step.language, step.text)]
    return Section("What to do next", blocks)
