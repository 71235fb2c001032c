"""The report as a document, section by section: what is said, and in which order, in every format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from onnxgrad_cli.cost.training_cost import Cost
from onnxgrad_cli.record import Recomputed
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    Course,
    Inline,
    Listing,
    Name,
    Page,
    Paragraph,
    Place,
    Section,
    Table,
    Trade,
)
from onnxgrad_cli.report.glance import (
    adapters_in_words,
    glance,
    has_backward,
    losses_in_words,
    recomputed_in_words,
    sizes_in_words,
)
from onnxgrad_cli.report.model import KINDS, Operator, Report
from onnxgrad_cli.report.words import names, number, percent, pieces, quoted, scaled, seconds, several, shape
from onnxgrad_cli.verification.verdict import FAILED, NOT_PROVED, PROVED

MOST = 300
"""Rows of a table in a format for people; the JSON report has all."""


def page(report: Report) -> Page:
    """The report as a document."""
    return Page(title(report), report.verdict, report.tone, list(glance(report)), list(sections(report)))


def title(report: Report) -> Inline:
    """The document's heading."""
    kind = "Training model" if report.status in ("built", "check failed") else "Report"
    source = report.asked.model.replace("\\", "/").rsplit("/", 1)[-1]
    return (f"{kind} of ", Name(source)) if source else kind


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
        blocks += [Paragraph(quoted(line)) for line in report.error.split("\n") if line.strip()]
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
    rows += [("loss", losses_in_words(report))] if asked.losses else []
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
        (Place(w.name), w.dtype, shape(w.shape), number(w.count), percent(w.share), Name(w.gradient))
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
    text = f"{adapters_in_words(report)}. What the factors multiply to is added to the weight {scale:g} times."
    if report.adapters[0].magnitude:
        text += " The weights of each output are then brought to a trained length; their norms count as constants."
    head = ("frozen weight", "shape", "A", "shape", "B", "shape")
    return Section("Adapters", [Paragraph(text), Table(head, _short(rows, 6))])


def _short(rows: list[tuple[Inline, ...]], columns: int) -> list[tuple[Inline, ...]]:
    if len(rows) <= MOST:
        return rows
    more = f"... and {len(rows) - MOST:,} more (the JSON report lists all)"
    return [*rows[:MOST], (more, *[""] * (columns - 1))]


def _not_trained(report: Report) -> Section:
    """The float tensors without gradient, grouped by the reason why."""
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
    """The inputs and outputs; trained weights and their gradients in one row each."""
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
    """How often each operator stands in each part, and the rules that differentiated it."""
    if not report.operators:
        return Section("Operators", [])
    refused = {refusal.op_type for refusal in report.refusals}
    parts = ["model", "loss", "backward"]
    parts += ["optimizer"] if any(row.optimizer for row in report.operators) else []
    rows: list[tuple[Inline, ...]] = []
    for row in report.operators:
        counts = [number(getattr(row, part)) if getattr(row, part) else "" for part in parts]
        rows.append((Name(row.op), *counts, "refused, see above" if row.op in refused else _derivative(row)))
    totals = [sum(getattr(row, part) for row in report.operators) for part in parts]
    rows.append(("all of them", *map(number, totals), ""))
    text = (
        "How many nodes of each operator there are, and the rule that differentiated those of the model and the loss. "
        "'Not needed' means that no gradient that was asked for passes through it."
    )
    head = ("operator", *parts, "derivative by")
    return Section("Operators", [Paragraph(text), Table(head, rows, frozenset(range(1, len(parts) + 1)))])


def _derivative(row: Operator) -> Inline:
    """The rules of an operator, and how many of its nodes they were applied to where these are not all."""
    if not row.rules:
        return _DERIVATIVES.get(row.derivative, "")
    rules = names([source.removeprefix("onnxgrad_cli.autodiff.rules.") for source in row.rules])
    inside = row.model + row.loss
    return (*pieces(rules), f" ({row.differentiated:,} of {inside:,})") if row.differentiated != inside else rules


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
    if cost is None or not has_backward(report):
        return Section("Cost", [])
    nodes = cost.nodes
    rows: list[tuple[Inline, ...]] = [
        ("nodes", number(nodes["model"] + nodes["loss"]), number(nodes["backward"])),
        ("floating-point operations", number(cost.flops_forward), number(cost.flops_backward)),
    ]
    table = Table(("", "forward", "backward"), rows, frozenset({1, 2}))
    blocks = [Paragraph(_how_counted(report, cost)), table, *_operations(cost), *_modules(cost), *_memory(report, cost)]
    return Section("Cost", blocks)


def _how_counted(report: Report, cost: Cost) -> str:
    """How operations are counted, and with which sizes."""
    sizes = f", counted with {sizes_in_words(report)}" if cost.sizes or cost.assumed else ""
    text = f"One run of the training model{sizes}."
    if cost.assumed:
        least = " or as the least that the network takes" if max(cost.assumed.values()) > 1 else ""
        text += f" A size that nobody gave counts as 1{least}; --dim NAME=SIZE gives one."
    if cost.at_run_time:
        text += f" Sizes known only at run time count as 1 ({several(cost.at_run_time, 'value')})."
    text += " A multiply-add is two operations; a function such as Exp counts as one."
    if cost.branches:
        text += f" Of {several(cost.branches, 'If')} the dearer branch counts, as if it ran each time."
    if cost.nodes["optimizer"]:
        text += f" The optimizer takes {number(cost.flops_optimizer)} operations in "
        text += f"{several(cost.nodes['optimizer'], 'node')} besides."
    return text


def _operations(cost: Cost) -> Iterator[Block]:
    """The operators that are not counted, and those that take most operations."""
    if cost.uncounted:
        listed = ", ".join(f"{op} ({n:,})" for op, n in cost.uncounted.items())
        yield Paragraph(f"Not counted, for their size or how often they run is unknown: {listed}.")
    total = cost.flops_forward + cost.flops_backward
    rows: list[tuple[Inline, ...]] = [
        (Name(c.op), number(c.forward), number(c.backward), percent((c.forward + c.backward) / total))
        for c in cost.operators[:8]
    ]
    if rows:
        yield Table(("operations by operator", "forward", "backward", "share"), rows, frozenset({1, 2, 3}))


def _modules(cost: Cost) -> Iterator[Block]:
    """What each module takes, with its gradient."""
    total = cost.flops_forward + cost.flops_backward
    rows: list[tuple[Inline, ...]] = [
        (Place(m.module) if m.module else "in no module", number(m.forward), number(m.backward),
         percent((m.forward + m.backward) / total)) for m in cost.modules
    ]  # fmt: skip
    if rows:
        yield Table(("operations by module", "forward", "backward", "share"), rows, frozenset({1, 2, 3}))


def _memory(report: Report, cost: Cost) -> Iterator[Block]:
    """The bytes of weights, gradients and stored forward values, and the largest of these."""
    rows: list[tuple[Inline, ...]] = [
        ("trained weights", number(cost.weight_bytes), scaled(cost.weight_bytes, "B")),
        ("gradients", number(cost.gradient_bytes), scaled(cost.gradient_bytes, "B")),
        ("kept for the backward part", number(cost.kept_bytes), scaled(cost.kept_bytes, "B")),
    ]
    if cost.memory:
        rows.append(("values at their most", number(max(cost.memory)), scaled(max(cost.memory), "B")))
    yield Table(("memory", "bytes", ""), rows, frozenset({1, 2}))
    if len(cost.memory) > 1:
        words = (
            f"Bytes of the values in memory, from the first node to the last: {scaled(max(cost.memory), 'B')} at most"
        )
        yield Course(cost.memory, words)
    if report.recomputed:
        yield Paragraph(f"Computed again in the backward part: {recomputed_in_words(report.recomputed)}.")
        if len(report.recomputed.trade) > 1:
            yield _trade(report.recomputed)
    rows = [(Place(k.name), Name(k.op), shape(k.shape), number(k.bytes)) for k in cost.kept]
    if rows:
        yield Paragraph("Kept are results of the forward part that the backward part reads. The largest of them:")
        yield Table(("value", "made by", "shape", "bytes"), rows, frozenset({3}))


def _trade(done: Recomputed) -> Trade:
    """What memory costs in operations, and where the plan that was taken stands."""
    every = -(-len(done.trade) // 6)
    few = dict.fromkeys((*done.trade[::every], done.trade[-1]))
    rows: list[tuple[Inline, ...]] = [(scaled(kept, "B"), scaled(flops, "FLOP")) for kept, flops in few]
    words = "What memory costs: the bytes kept, and the operations added for that by `budget`"
    table = Table(("kept, by `budget`", "operations added"), rows, frozenset({0, 1}))
    return Trade(("bytes kept", "operations added"), done.trade, (done.kept, done.flops), words, table)


def _proof(report: Report) -> Section:
    """What was checked, with which result."""
    proof = report.proof
    if proof is None:
        words = ("Nothing was checked. ", Name("onnxgrad check"), " does it on the written model.")
        return Section("Proof", [Paragraph(words)] if report.status == "built" else [])
    blocks: list[Block] = []
    text = {
        PROVED: "Every check passed.",
        FAILED: "A check failed. Do not train with this model.",
        NOT_PROVED: "Nothing is wrong as far as it was checked, but the gradients are not proved.",
    }[proof.verdict]
    why = proof.why if proof.verdict == NOT_PROVED else ""
    blocks.append(Paragraph((text, " Reason: ", *pieces(quoted(why)), ".") if why else text))
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
    if proof.sizes:
        sizes = ", ".join(f"{symbol} = {size:,}" for symbol, size in proof.sizes.items())
        blocks.append(Paragraph(quoted(f"The data were drawn at random, with {sizes}.")))
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
