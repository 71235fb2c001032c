"""Which output each loss judges."""

from __future__ import annotations

from onnxgrad_cli.errors import UnsupportedError, UsageError, suggest
from onnxgrad_cli.ir.domains import short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import LossOptions

NEEDED = "a gradient needs a float output: export the model without what is behind its scores"


def resolve_outputs(graph: Graph, options: LossOptions) -> list[str]:
    """The output that each loss judges: as named, else the model's first float output.

    Of maps from class to probability, as scikit-learn's converter writes them, that is the tensor they are made of.

    Raises:
        UsageError: no such output, or it is not of floats.
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
                raise UnsupportedError(f"the model has no float output to judge{_why(graph)}", hint=NEEDED)
            name = floats[0]
        elif name not in graph.types:
            raise UsageError(f"the model has no output '{name}'", suggest(name, graph.output_names, "outputs"))
        elif not is_float(graph.types[name]):
            raise UsageError(f"'{name}' is not a float output, so it has no gradient", suggest("", floats, "outputs"))
        names.append(name)
    return names


def _why(graph: Graph) -> str:
    """What makes the model's outputs, in words."""
    makers = [n for n in graph.nodes if not set(n.output).isdisjoint(graph.output_names)]
    made = [f"{short_name(n.op_type, n.domain)} '{n.name}'" for n in makers]
    return f": {', '.join(made[:3])} make{'s' * (len(made) == 1)} no floats" if made else ""
