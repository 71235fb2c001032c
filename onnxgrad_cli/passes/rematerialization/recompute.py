"""Compute cheap or chosen values of the forward part again in the backward part, so that they need not be kept.

Memory for operations: `passes.kept` chooses the values, `passes.copies` writes the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxgrad_cli.errors import Caution, UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.parameters.select import matching
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import Recomputed, Training

ELEMENTWISE, BLOCK, BUDGET = KINDS = ("elementwise", "block", "budget")
FORM = "--recompute takes elementwise, block:GLOB or budget:SIZE"
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_recompute(text: str) -> RecomputeSpec:
    """Read `elementwise`, `block:GLOB` or `budget:SIZE`, such as budget:512MB.

    Raises:
        UsageError: it is none of these.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    if kind not in KINDS:
        raise UsageError(f"{FORM}, not '{text}'", suggest(kind, KINDS, "kinds"))
    if bool(rest) != (kind != ELEMENTWISE):
        raise UsageError(f"{FORM}, not '{text}'", "such as block:'*layer*/output' or budget:512MB")
    return RecomputeSpec(kind, rest if kind == BLOCK else "", _size(rest) if kind == BUDGET else 0)


def _size(text: str) -> int:
    number = text.rstrip("".join(UNITS).lower() + "".join(UNITS).upper())
    unit = {each.lower(): size for each, size in UNITS.items()}.get(text[len(number) :].strip().lower() or "b")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if unit is None or not 0 <= size < float("inf"):
        hint = f"a number and one of {', '.join(UNITS)}, such as 512MB"
        raise UsageError(f"--recompute budget takes a size, not '{text}'", hint)
    return int(size * unit)


def _run(graph: Graph, options: Options, training: Training) -> bool:
    from onnxgrad_cli.cost import Facts, cost  # which asks the passes, so that it can't come first
    from onnxgrad_cli.passes.rematerialization.plan import LONGEST, Flow, between, cheap_again, within
    from onnxgrad_cli.passes.rematerialization.rewrite import write_copies

    spec = options.recompute
    assert spec is not None
    results = [training.loss, *training.gradients.values(), *training.state.values()]
    graph.remove_unused([*results, *training.yielded.values()])  # zero gradients alone need no seed, passes do
    before = cost(graph, training)
    ends = _boundaries(graph, training, spec) if spec.kind == BLOCK else set()
    flow = Flow(graph, training, ends, None if spec.kind == BLOCK else LONGEST)
    flow.fixed.update(training.state.values(), graph.output_names if options.keep_outputs else ())
    if spec.kind == BLOCK:
        plan = between(flow, ends)
    elif spec.kind == BUDGET:
        plan = within(flow, spec.size, Facts(graph, dict.fromkeys(before.assumed, 1)), before.kept_bytes)
    else:
        plan = cheap_again(flow)
    count = write_copies(plan)
    after = cost(graph, training)
    added = after.flops_backward - before.flops_backward
    training.recomputed = Recomputed(str(spec), count, before.kept_bytes, after.kept_bytes, added)
    for text in _shortfalls(spec, training.recomputed, before.assumed):
        training.cautions.append(Caution("note", "", f"--recompute {spec}: {text}"))
    return count > 0


def _shortfalls(spec: RecomputeSpec, done: Recomputed, assumed: list[str]) -> Iterator[str]:
    """What was asked for and not reached."""
    if not done.nodes and (spec.kind != BUDGET or done.kept_before > spec.size):
        yield "there is nothing that could be computed again"
    elif spec.kind == BUDGET and done.kept > spec.size:
        yield f"{done.kept:,} bytes stay, for the rest can't be computed again from them; try block:GLOB"
    if spec.kind == BUDGET and assumed:
        sizes = ", ".join(f"{symbol} = 1" for symbol in assumed)
        yield f"bytes were counted with {sizes}; --dim NAME=SIZE gives a size"


def _boundaries(graph: Graph, training: Training, spec: RecomputeSpec) -> set[str]:
    names: dict[str, None] = {}
    for node in graph.nodes:
        if training.yielded.keys() & set(node.input):
            break
        names.update(dict.fromkeys(filter(None, (node.name, *node.output))))
    return set(matching(spec.pattern, list(names), "--recompute block", "nodes or values"))


RECOMPUTE = Pass(
    "recompute",
    "with --recompute: values computed again in the backward part instead of being kept",
    _run,
    ("backward",),
)
