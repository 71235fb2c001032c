"""List the losses, optimizers, metrics, schedules, passes and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from onnxgrad_cli.cli.terminal.console import table
from onnxgrad_cli.errors import suggest, unknown_name

if TYPE_CHECKING:
    from onnxgrad_cli.common.catalogue import Documented
    from onnxgrad_cli.common.settings import Option
    from onnxgrad_cli.verification.coverage import Coverage

DERIVATIVES = {
    "rule": "a rule of its own",
    "definition": "replaced by operators that have rules",
    "function": "replaced by the function body that the standard gives it",
    "converted": "deprecated: replaced by another operator first",
    "straight-through": "on integers: refused, unless `--quantization ste` replaces it by float operators",
    "zero": "its derivative is zero by mathematics",
    "no float": "no floating-point value goes in, or none comes out",
    "refused": "refused, with the reason",
}
"""Kind of an operator's derivative -> the meaning of the kind."""

PLAIN_KINDS = ("zero", "no float", "straight-through", "refused")
"""Kinds of derivatives that always apply to all operands of an operator, so that operands need not be listed."""


class Listing(NamedTuple):
    """A list of objects, as JSON and as text, with a note to print on stderr."""

    data: list[dict[str, Any]]
    text: str
    note: str = ""


Thing = TypeVar("Thing", bound="Documented")


def losses(pattern: str) -> Listing:
    """List the losses, the labels they expect, and their settings."""
    from onnxgrad_cli.losses import LOSSES
    from onnxgrad_cli.losses.registry import LABELS

    found = sorted(matching(LOSSES, pattern, "losses"), key=lambda loss: loss.name)
    rows = [row for loss in found for row in rows_of(loss)]
    names = {text: [loss.name for loss in found if loss.label == kind] for kind, text in LABELS.items()}
    labels = "\n".join(f"label {text}: {', '.join(losses)}" for text, losses in names.items() if losses)
    return Listing(
        [described(loss, {"label": loss.label}) for loss in found],
        f"{table(('loss', 'what it is'), rows)}\n\n{labels}",
        "any other loss can be given as a file: --loss FILE.onnx (inputs prediction and label, one scalar output)",
    )


def optimizers(pattern: str) -> Listing:
    """List the optimizers, the state they keep for each weight, and their settings."""
    from onnxgrad_cli.optimizers import LBFGS, OPTIMIZERS

    found = matching([*OPTIMIZERS, LBFGS], pattern, "optimizers")
    rows = []
    for each in found:
        rows += rows_of(each)
        rows += rows_below(f"state <weight>_{slot}: {doc}" for slot, doc in each.slots.items())
    data = [described(each, {"slots": dict(each.slots)}) for each in found]
    return Listing(data, table(("optimizer", "what it does"), rows))


def metrics(pattern: str) -> Listing:
    """List the metrics, their settings, and the losses for which they are computed by default."""
    from onnxgrad_cli.training.metrics import DEFAULTS, METRICS, parse_metric

    found = matching(METRICS, pattern, "metrics")
    kinds = {loss: [parse_metric(text).kind for text in texts] for loss, texts in DEFAULTS.items()}
    better = {each.name: "more" if each.higher else "less" for each in found}
    default_of = {each.name: [loss for loss, names in kinds.items() if each.name in names] for each in found}
    rows = [row for each in found for row in rows_of(each, better[each.name])]
    defaults = "\n".join(
        f"default for {loss}: {', '.join(texts)}"
        for loss, texts in DEFAULTS.items()
        if better.keys() & set(kinds[loss])
    )
    return Listing(
        [described(each, {"better": better[each.name], "default of": default_of[each.name]}) for each in found],
        f"{table(('metric', 'better', 'what it is'), rows)}\n\n{defaults}".rstrip(),
        "any other metric can be given as a file: --metric FILE.onnx (inputs prediction and label, one scalar output)",
    )


def schedules(pattern: str) -> Listing:
    """List the schedules of the learning rate and their settings."""
    from onnxgrad_cli.training.schedules import SCHEDULES, WARM_UP

    found = matching(SCHEDULES, pattern, "schedules")
    rows = [row for each in found for row in rows_of(each)]
    rows += [("all schedules", "Options that all schedules have."), *rows_below(settings_lines(WARM_UP))]
    data = [described(each, {"validation": each.watches}, WARM_UP) for each in found]
    return Listing(data, table(("schedule", "what the rate does"), rows))


def passes(pattern: str) -> Listing:
    """List the passes of a build in their order."""
    from onnxgrad_cli.passes.pipeline import PASSES, SUMMARIES

    needs = {step.name: [step.needs] for step in PASSES if step.needs}
    names = [name for name in SUMMARIES if fits(name, pattern)] or no_match(pattern, SUMMARIES, "passes")
    data = [{"name": name, "summary": SUMMARIES[name], "needs": needs.get(name, [])} for name in names]
    return Listing(data, table(("pass", "what it does"), [(name, SUMMARIES[name]) for name in names]))


def operators(pattern: str) -> Listing:
    """List the operators with their gradients, the conventions at kinks, and the reasons why some are refused."""
    from onnxgrad_cli.verification.coverage import coverage

    every = list(coverage())
    found = [c for c in every if fits(c.op_type, pattern)] or no_match(pattern, {c.op_type for c in every}, "operators")
    rows = [(c.op_type, c.domain or "ai.onnx", c.kind, _operands(c), _remark(c)) for c in found]
    kinds = Counter(c.kind for c in found)
    return Listing(
        [_data(c) for c in found],
        table(("operator", "domain", "derivative", "operands", "at kinks"), rows),
        f"{len(found)} operators: {', '.join(f'{kinds[kind]} {kind}' for kind in DERIVATIVES if kinds[kind])}",
    )


def _remark(c: Coverage) -> str:
    """Return the convention for the derivative at kinks, or the reason why there is no derivative."""
    return f"{c.reason}, but by --quantization ste" if c.kind == "straight-through" else c.kink or c.reason


def _data(c: Coverage) -> dict[str, Any]:
    data = asdict(c)
    data["operands"] = [{**asdict(operand), "agrees": operand.agrees} for operand in c.operands]
    op_type, domain, kind = data.pop("op_type"), data.pop("domain"), data.pop("kind")
    return {"op": op_type, "domain": domain or "ai.onnx", "derivative": kind, **data}


def _operands(c: Coverage) -> str:
    """Return the names of the operands with a gradient, then the other operands with the reasons why they have none."""
    with_gradient = [operand.name for operand in c.operands if operand.state == "gradient"]
    others = [f"{o.name}: {o.state}" for o in c.operands if o.state not in ("gradient", "no float")]
    return ", ".join(with_gradient + others if c.kind not in PLAIN_KINDS else with_gradient)


def matching(things: Iterable[Thing], pattern: str, kind: str) -> list[Thing]:
    """Return the objects whose name matches a pattern.

    Raises:
        UsageError: no name matches.
    """
    every = list(things)
    return [each for each in every if fits(each.name, pattern)] or no_match(pattern, [e.name for e in every], kind)


def fits(name: str, pattern: str) -> bool:
    """Return True if a name matches a glob pattern. Case does not matter."""
    return fnmatchcase(name.lower(), pattern.lower())


def no_match(pattern: str, names: Iterable[str], kind: str) -> NoReturn:
    """Raise the error that no name matches a pattern.

    Raises:
        UsageError: always. The hint gives similar names.
    """
    raise unknown_name(f"'{pattern}' matches none of the {kind}", suggest(pattern, names, kind))


def described(each: Documented, facts: Mapping[str, object], shared: Iterable[Option] = ()) -> dict[str, Any]:
    """Return the JSON entry of an object in a listing.

    Args:
        each: the object.
        facts: name -> value, for what only objects of this kind have.
        shared: settings that all objects of this kind have.
    """
    options = [
        {"name": option.name, "kind": option.kind, "default": option.default, "doc": option.doc}
        for option in (*each.options, *shared)
    ]
    return {"name": each.name, "summary": each.summary, "doc": each.doc, **facts, "options": options}


def rows_of(each: Documented, *cells: str) -> list[tuple[str, ...]]:
    """Return the table rows of an object: a row of its name, the `cells` and its summary, then a row per setting."""
    return [(each.name, *cells, each.summary), *rows_below(settings_lines(each.options), len(cells))]


def rows_below(lines: Iterable[str], cells: int = 0) -> list[tuple[str, ...]]:
    """Return rows for the lines about an object, to print below its row. The lines are indented in the last column."""
    return [("", *[""] * cells, f"  {line}") for line in lines]


def settings_lines(options: Iterable[Option]) -> list[str]:
    """Return a line for each setting, as a user types it, with its default and its description."""
    return [f"{option.name.replace('_', '-')}={_typed(option.default)}: {option.doc}" for option in options]


def _typed(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
