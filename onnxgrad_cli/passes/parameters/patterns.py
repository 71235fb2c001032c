"""Match names that the user chooses by patterns, and resolve the output of each loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from onnxgrad_cli.errors import UnsupportedError, suggest, unknown_name
from onnxgrad_cli.ir.domains import short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import LossOptions

Known = Mapping[str, Collection[str]]
"""Map from a weight to further names by which it can be chosen; see `ir.modules.known_as`."""


def matching(
    patterns: str | Sequence[str], names: list[str], option: str, kind: str, known: Known | None = None
) -> list[str]:
    """Return those of `names` that equal one of `patterns` or match one as a glob, in their order.

    Args:
        patterns: the patterns, or a single one.
        names: the names that can be chosen.
        option: the option that the patterns were given with, for errors.
        kind: a plural noun for the names, for errors.
        known: map from a name to further names by which it can be chosen.

    Raises:
        UsageError: a pattern matches no name.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in names if any(matches(each, pattern) for each in (name, *(known or {}).get(name, ())))]
        if not hits:
            raise unknown_name(f"{option}: '{pattern}' matches no {kind[:-1]}", suggest(pattern, names, kind))
        found.update(hits)
    return [name for name in names if name in found]


def matches(name: str, pattern: str) -> bool:
    """Return True if a name equals a pattern, or matches it as a glob."""
    return name == pattern or fnmatchcase(name, pattern)


NEEDED = "export the model without the nodes after its scores: the loss needs a float output"


def resolve_outputs(graph: Graph, options: LossOptions) -> list[str]:
    """Return the output that each loss is computed on: the named one, or the model's first float output.

    scikit-learn's converter writes outputs that map classes to probabilities. For such an output, the result is the
    tensor of probabilities from which it is made.

    Raises:
        UsageError: the output does not exist, or its values are not floats.
        UnsupportedError: the model has no float output.
    """
    tables = {node.output[0]: node.input[0] for node in graph.nodes if node.op_type == "ZipMap"}
    judged = [tables.get(name, name) for name in graph.output_names]
    floats = [name for name in judged if is_float(graph.types.get(name))]
    names = []
    for spec in options.losses:
        name = spec.output or options.output
        if name is None:
            if not floats:
                raise UnsupportedError(f"the model has no float output for the loss{_why(graph)}", hint=NEEDED)
            name = floats[0]
        elif name not in graph.types:
            raise unknown_name(f"the model has no output '{name}'", suggest(name, graph.output_names, "outputs"))
        elif not is_float(graph.types[name]):
            raise unknown_name(
                f"'{name}' is not a float output, so no loss can be computed on it",
                suggest("", floats, "outputs"),
            )
        names.append(name)
    return names


def _why(graph: Graph) -> str:
    """Describe the nodes that compute the model's outputs, to explain why there is no float output."""
    makers = [n for n in graph.nodes if not set(n.output).isdisjoint(graph.output_names)]
    made = [f"{short_name(n.op_type, n.domain)} '{n.name}'" for n in makers]
    return f": {', '.join(made[:3])} produce{'s' * (len(made) == 1)} no floats" if made else ""
