"""The sections of a report, in the order in which every format shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from onnxgrad_cli.cost.training_cost import Cost
from onnxgrad_cli.record import Recomputed
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    CodeBlock,
    Inline,
    ModelName,
    Name,
    Page,
    Paragraph,
    Picture,
    Row,
    Section,
    Table,
)
from onnxgrad_cli.report.curve import area, bars, trade
from onnxgrad_cli.report.formatting import names, number, percent, pieces, quoted, scaled, several, shape
from onnxgrad_cli.report.model import KINDS, Operator, Report, Value
from onnxgrad_cli.report.summary import (
    adapters_in_words,
    glance,
    has_backward,
    losses_in_words,
    recomputed_in_words,
    sizes_in_words,
    with_sizes,
)
from onnxgrad_cli.verification.verdict import FAILED, NOT_PROVED, PROVED

MAX_ROWS = 300
"""Largest number of rows of a table in Markdown and HTML. The JSON report has all rows."""


def page(report: Report) -> Page:
    """Return the report as a document."""
    return Page(
        title(report), report.verdict, report.tone, list(glance(report)), list(sections(report)),
        list(_with_blocks(report, APPENDIX)),
    )  # fmt: skip


def title(report: Report) -> Inline:
    """Return the heading of the document."""
    kind = "Training model" if report.status in ("built", "check_failed") else "Report"
    source = report.asked.model.replace("\\", "/").rsplit("/", 1)[-1]
    return (f"{kind} of ", Name(source)) if source else kind


def sections(report: Report) -> Iterator[Section]:
    """Yield the sections of the document, except empty ones."""
    yield from _with_blocks(report, SECTIONS)


def _with_blocks(report: Report, makers: Mapping[str, Callable[[Report], Iterator[Block]]]) -> Iterator[Section]:
    for heading, make in makers.items():
        if blocks := list(make(report)):
            yield Section(heading, blocks)


def _obstacles(report: Report) -> Iterator[Block]:
    yield from (Paragraph(quoted(line)) for line in report.error.split("\n") if line.strip())
    if report.hint:
        yield Paragraph(("Fix: ", *pieces(quoted(report.hint)), "."))
    rows: list[Row] = [(Name(r.node), Name(r.op_type), quoted(r.reason), quoted(r.hint)) for r in report.refusals]
    yield from _table(("node", "operator", "reason", "fix"), rows)


def _table(head: tuple[str, ...], rows: list[Row], *right: int) -> Iterator[Block]:
    """Yield a table, unless it has no rows. `right` has the positions of the columns with numbers."""
    if rows:
        yield Table(head, rows, frozenset(right))


def _asked(report: Report) -> Iterator[Block]:
    """Yield the command line of the build or, if it was called from Python, a table of its options."""
    asked = report.asked
    if asked.command:
        yield CodeBlock("sh", asked.command)
        return
    rows: list[Row] = [("model", Name(asked.model))] if asked.model else []
    rows += [("loss", losses_in_words(report))] if asked.losses else []
    rows += [(Name(option), Name(value)) for option, value in asked.options.items()]
    yield from _table(("option", "value"), rows)


def _weights(report: Report) -> Iterator[Block]:
    if not report.weights:
        return
    rows: list[Row] = [
        (ModelName(w.name), w.dtype, shape(w.shape), number(w.count), percent(w.share), Name(w.gradient))
        for w in report.weights
    ]
    total = sum(weight.count for weight in report.weights)
    rows = [*_short(rows), ("all of them", "", "", number(total), percent(1.0), "")]
    head = ("weight", "type", "shape", "parameters", "share", "gradient")
    shown = len(head) if any(weight.gradient for weight in report.weights) else len(head) - 1
    yield Table(head[:shown], [row[:shown] for row in rows], frozenset({3, 4}))


def _adapters(report: Report) -> Iterator[Block]:
    if not report.adapters:
        return
    shapes = {weight.name: shape(weight.shape) for weight in report.weights}
    shapes |= {tensor.name: shape(tensor.shape) for tensor in report.not_trained}
    rows: list[Row] = [
        (Name(a.weight), shapes[a.weight], Name(a.a), shapes[a.a], Name(a.b), shapes[a.b]) for a in report.adapters
    ]
    scale = report.adapters[0].scale
    text = f"{adapters_in_words(report)}. The product of the LoRA matrices, times {scale:g}, is added to the weight."
    if report.adapters[0].magnitude:
        text += " The weights of each output are then scaled to a trained length; their norms are treated as constants."
    head = ("frozen weight", "shape", "A", "shape", "B", "shape")
    yield Paragraph(text)
    yield Table(head, _short(rows))


def _short(rows: list[Row]) -> list[Row]:
    if len(rows) <= MAX_ROWS:
        return rows
    more = f"... and {len(rows) - MAX_ROWS:,} more (the JSON report lists all)"
    return [*rows[:MAX_ROWS], (more, *[""] * (len(rows[0]) - 1))]


def _not_trained(report: Report) -> Iterator[Block]:
    """Yield a table of the float tensors without gradient, grouped by reason."""
    if not report.not_trained:
        return
    rows: list[Row] = [
        (reason, number(len(tensors)), number(sum(t.count for t in tensors)), names([t.name for t in tensors]))
        for reason, tensors in report.untrained_by_reason.items()
    ]
    options = (Name("--train GLOB"), " and ", Name("--freeze GLOB"))
    yield Paragraph(("These float tensors get no gradient. ", *options, " change the selection."))
    yield Table(("reason", "tensors", "parameters", "names"), rows, frozenset({1, 2}))


_MEANING = {
    "model input": "feed a batch of samples",
    "label": "feed the labels of the batch",
    "sample weight": "feed one weight per sample",
    "loss weight": "feed the weight of the loss in the step",
    "learning rate": "feed the learning rate of the step",
    "weight": "trainable; the stored value is used unless you feed one",
    "state": "optimizer state; the stored value is used unless you feed one",
    "loss gradient": "feed the gradient of the loss, usually 1",
    "constant": "not trained; the stored value is used unless you feed one",
}


def _ports(report: Report) -> Iterator[Block]:
    """Yield the tables of inputs and outputs. One row stands for all trained weights, another for their gradients."""
    weights = {weight.name for weight in report.weights}
    rows: list[Row] = [
        (Name(v.name), _role(v), v.dtype, shape(v.shape), _MEANING.get(v.role, ""))
        for v in report.inputs
        if v.role != "weight"
    ]
    if len(rows) < len(report.inputs):
        rows.append((f"the {several(len(weights), 'trained weight')}", "weight", "", "see above", _MEANING["weight"]))
    yield from _table(("input", "role", "type", "shape", "meaning"), _short(rows))
    rows = [
        (Name(v.name), _role(v), v.dtype, shape(v.shape))
        for v in report.outputs
        if v.role != "gradient" or v.of not in weights
    ]
    if len(rows) < len(report.outputs):
        rows.append((f"the {several(len(weights), 'gradient')} of the trained weights", "gradient", "", "see above"))
    yield from _table(("output", "role", "type", "shape"), _short(rows))


def _role(value: Value) -> Inline:
    return (f"{value.role} of ", Name(value.of)) if value.of else value.role


def _passes(report: Report) -> Iterator[Block]:
    if not report.passes:
        return
    rows: list[Row] = [(p.name, p.summary, number(p.nodes_before), number(p.nodes_after)) for p in report.passes]
    first, last = report.passes[0].nodes_before, report.passes[-1].nodes_after
    rows.append(("all of them", "", number(first), number(last)))
    yield Table(("pass", "effect", "nodes before", "after"), rows, frozenset({2, 3}))


_DERIVATIVES = {"zero": "zero by mathematics", "not needed": "not needed", "none": "no rule needed", "": ""}


def _operators(report: Report) -> Iterator[Block]:
    """Yield a table of the operators: the number of nodes in each part, and the rules that differentiated them."""
    if not report.operators:
        return
    refused = {refusal.op_type for refusal in report.refusals}
    parts = ["model", "loss", "backward"]
    parts += ["optimizer"] if any(row.optimizer for row in report.operators) else []
    rows: list[Row] = []
    for row in report.operators:
        counts = [number(getattr(row, part)) if getattr(row, part) else "" for part in parts]
        rows.append((Name(row.op), *counts, "refused" if row.op in refused else _derivative(row)))
    totals = [sum(getattr(row, part) for row in report.operators) for part in parts]
    rows.append(("all of them", *map(number, totals), ""))
    yield Paragraph(
        "Nodes of each operator, and the rule that differentiated those of the model and the loss. "
        "'Not needed' means that no requested gradient passes through the operator."
    )
    yield Table(("operator", *parts, "derivative by"), rows, frozenset(range(1, len(parts) + 1)))


def _derivative(row: Operator) -> Inline:
    """Return the rules that differentiate an operator. If not all of its nodes are differentiated, add their number."""
    if not row.rules:
        return _DERIVATIVES.get(row.derivative, "")
    rules = names([source.removeprefix("onnxgrad_cli.autodiff.rules.") for source in row.rules])
    inside = row.model + row.loss
    return (*pieces(rules), f" ({row.differentiated:,} of {inside:,})") if row.differentiated != inside else rules


def _cautions(report: Report) -> Iterator[Block]:
    for kind, heading in KINDS.items():
        found = [caution for caution in report.cautions if caution.kind == kind]
        if not found:
            continue
        items = [quoted(caution.text) for caution in found[:20]]
        if len(found) > 20:
            items.append(f"... and {len(found) - 20:,} more (the JSON report lists all)")
        yield Paragraph(f"{heading}.")
        yield Bullets(items)
    if report.status == "built" and not any(caution.kind in KINDS for caution in report.cautions):
        yield Paragraph("None.")


def _cost(report: Report) -> Iterator[Block]:
    cost = report.cost
    if cost is None or not has_backward(report):
        return
    nodes = cost.nodes
    rows: list[Row] = [
        ("nodes", number(nodes["model"] + nodes["loss"]), number(nodes["backward"])),
        ("floating-point operations", number(cost.flops_forward), number(cost.flops_backward)),
    ]
    yield Paragraph(_how_counted(report, cost))
    yield Table(("", "forward", "backward"), rows, frozenset({1, 2}))
    yield from _memory(report, cost)


def _cost_details(report: Report) -> Iterator[Block]:
    """Yield the cost of each operator and module, and the values that take the most memory."""
    if report.cost and has_backward(report):
        cost = report.cost
        if cost.uncounted:
            listed = ", ".join(f"{op} ({n:,})" for op, n in cost.uncounted.items())
            yield Paragraph(f"Not counted, because their sizes or the number of their runs are unknown: {listed}.")
        yield from _shares(cost, "operator", [(Name(c.op), c.forward, c.backward) for c in cost.operators[:8]])
        modules = [(ModelName(m.module) if m.module else "in no module", m.forward, m.backward) for m in cost.modules]
        yield from _shares(cost, "module", modules)
        yield from _memory_details(report, cost)


def _how_counted(report: Report, cost: Cost) -> str:
    """Return a text that says how operations were counted, and which sizes were assumed."""
    sizes = f", counted with {sizes_in_words(report)}" if cost.sizes or cost.assumed else ""
    text = f"One run of the training model{sizes}."
    if cost.assumed:
        least = " or as the smallest size that the network accepts" if max(cost.assumed.values()) > 1 else ""
        text += f" A size that was not given counts as 1{least}; set it with --dim NAME=SIZE."
    if cost.at_run_time:
        text += f" Sizes known only at run time count as 1 ({several(cost.at_run_time, 'value')})."
    text += " A multiply-add counts as two operations, a function such as Exp as one."
    if cost.branches:
        text += f" For {several(cost.branches, 'If')}, the more expensive branch counts as if it always ran."
    if cost.nodes["optimizer"]:
        text += f" The optimizer takes another {number(cost.flops_optimizer)} operations in "
        text += f"{several(cost.nodes['optimizer'], 'node')}."
    return text


def _shares(cost: Cost, what: str, parts: Sequence[tuple[str, int, int]]) -> Iterator[Block]:
    """Yield a table of the operations of each operator or module: (name, forward part, backward part)."""
    total = cost.flops_forward + cost.flops_backward
    rows: list[Row] = [(name, number(a), number(b), percent((a + b) / total)) for name, a, b in parts]
    yield from _table((f"operations by {what}", "forward", "backward", "share"), rows, 1, 2, 3)


def _memory(report: Report, cost: Cost) -> Iterator[Block]:
    """Yield a table of the bytes of weights, gradients, and forward values kept for the backward part."""
    sizes = {
        "trained weights": cost.weight_bytes,
        "gradients": cost.gradient_bytes,
        "activations kept for the backward part": cost.kept_bytes,
        "peak of all values": max(cost.memory, default=0),
    }
    rows: list[Row] = [(what, number(size), scaled(size, "B")) for what, size in sizes.items()]
    yield Table(("memory", "bytes", ""), rows if cost.memory else rows[:-1], frozenset({1, 2}))
    if report.recomputed:
        yield Paragraph(f"Computed again in the backward part: {recomputed_in_words(report.recomputed)}.")


def _memory_details(report: Report, cost: Cost) -> Iterator[Block]:
    """Yield the memory over a run as a picture, the possible recomputation plans, and the largest kept values."""
    if len(cost.memory) > 1:
        peak = scaled(max(cost.memory), "B")
        words = f"Bytes of the values in memory, from the first node to the last; the peak is {peak}"
        yield Picture(partial(area, cost.memory, words), words, CodeBlock("text", bars(cost.memory)))
    if report.recomputed and len(report.recomputed.trade) > 1:
        yield _trade(report.recomputed)
    rows: list[Row] = [(ModelName(k.name), Name(k.op), shape(k.shape), number(k.bytes)) for k in cost.kept]
    if rows:
        yield Paragraph("The largest values of the forward part that the backward part reads:")
        yield Table(("value", "operator", "shape", "bytes"), rows, frozenset({3}))


def _trade(done: Recomputed) -> Picture:
    """Return a picture of the possible recomputation plans, which trade bytes kept for operations added."""
    every = -(-len(done.trade) // 6)
    few = dict.fromkeys((*done.trade[::every], done.trade[-1]))
    rows: list[Row] = [(scaled(kept, "B"), scaled(flops, "FLOP")) for kept, flops in few]
    words = "Bytes kept and operations added by each recompute budget"
    table = Table(("kept, by `budget`", "operations added"), rows, frozenset({0, 1}))
    axes, taken = ("bytes kept", "operations added"), (done.kept, done.flops)
    return Picture(partial(trade, axes, done.trade, taken, words), words, table)


def _proof(report: Report) -> Iterator[Block]:
    """Yield the verdict of the proof and a table of its checks."""
    proof = report.proof
    if proof is None:
        if report.status == "built":
            yield Paragraph(("Nothing was checked. Run ", Name("onnxgrad check"), " on the written model."))
        return
    text = {
        PROVED: "Every check passed.",
        FAILED: "A check failed. Do not train with this model.",
        NOT_PROVED: "No check failed, but the gradients are not proved.",
    }[proof.verdict]
    why = proof.why if proof.verdict == NOT_PROVED else ""
    yield Paragraph((text, " Reason: ", *pieces(quoted(why)), ".") if why else text)
    rows: list[Row] = [
        (step.name, "FAILED" if step.status == "failed" else step.status, quoted(step.detail)) for step in proof.steps
    ]
    yield from _table(("check", "result", "detail"), rows)
    limits = ""
    if proof.sizes:
        limits = f"The data were drawn at random, with {with_sizes(proof.sizes)}. "
    if proof.executor:
        limits += "The gradients were compared with central differences of the loss along random directions, computed "
        limits += f"by {proof.executor}. The proof holds for these sizes and data."
    if limits:
        yield Paragraph(quoted(limits.rstrip()))


def _files(report: Report) -> Iterator[Block]:
    rows: list[Row] = [
        (Name(f.path), f.role, number(f.bytes), Name(f.sha256) if f.sha256 else "not read") for f in report.files
    ]
    yield from _table(("file", "role", "bytes", "sha256"), rows, 2)


def _versions(report: Report) -> Iterator[Block]:
    versions = report.versions | ({"opset": str(report.asked.opset)} if report.asked.opset else {})
    if versions:
        yield Paragraph(f"{', '.join(map(' '.join, versions.items()))}.")


def _next(report: Report, programs: bool = False) -> Iterator[Block]:
    """Yield the suggested commands or, with `programs`, the example programs that run the training model."""
    for step in report.next:
        if (step.language != "sh") == programs:
            yield from (Paragraph(f"{step.why}:"), CodeBlock(step.language, step.text))


SECTIONS: Mapping[str, Callable[[Report], Iterator[Block]]] = {
    "Obstacles": _obstacles,
    "Cautions": _cautions,
    "Trained weights": _weights,
    "Adapters": _adapters,
    "Not trained": _not_trained,
    "Inputs and outputs": _ports,
    "Cost": _cost,
    "Proof": _proof,
    "Request": _asked,
    "Files": _files,
    "Versions": _versions,
    "Next steps": _next,
}
"""Heading of a section -> the function that yields its blocks. The sections appear in this order."""

APPENDIX: Mapping[str, Callable[[Report], Iterator[Block]]] = {
    "Passes": _passes,
    "Operators": _operators,
    "Cost in detail": _cost_details,
    "Programs": partial(_next, programs=True),
}
"""Heading -> function that yields the blocks, for the last sections. HTML shows them collapsed, Markdown omits them."""
