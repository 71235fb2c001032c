"""Which output each loss judges."""

from __future__ import annotations

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import LossOptions


def resolve_outputs(graph: Graph, options: LossOptions) -> list[str]:
    """The output that each loss judges: as named, else the model's first float output.

    Of maps from class to probability, as scikit-learn's converter writes them, that is the tensor they are made of.

    Raises:
        UsageError: no such output, or no float output.
    """
    tables = {node.output[0]: node.input[0] for node in graph.nodes if node.op_type == "ZipMap"}
    judged = [tables.get(name, name) for name in graph.output_names]
    floats = [name for name in judged if is_float(graph.types.get(name))]
    names = []
    for spec in options.losses:
        name = spec.output or options.output
        if name is None:
            if not floats:
                raise UsageError("the model has no float output to judge", "a gradient needs a float output")
            name = floats[0]
        elif name not in graph.types:
            raise UsageError(f"the model has no output '{name}'", suggest(name, graph.output_names, "outputs"))
        elif not is_float(graph.types[name]):
            raise UsageError(f"'{name}' is not a float output, so it has no gradient", suggest("", floats, "outputs"))
        names.append(name)
    return names
