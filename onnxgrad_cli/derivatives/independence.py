"""The proof that the samples of a batch do not mix: on which axis of every value they lie, from the inputs on."""

from __future__ import annotations

from collections.abc import Iterable

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.sample_places import Place, Tracker
from onnxgrad_cli.ir.types import Dim, shape_of

HINT = "leave per-sample derivatives out: the others are right for any model"


def sample_axes(graph: Graph, outputs: Iterable[str]) -> dict[str, int]:
    """The axis on which the samples lie, of every value that depends on them and on which one of `outputs` does.

    The batch is the first axis of the first input that has axes, and of each input whose first axis is of that size.

    Raises:
        UnsupportedError: samples mix on the way to one of `outputs`, or whether they do is not known.
    """
    batch, inputs = _batch(graph)
    if batch is None:
        return {}
    tracker = Tracker(graph, batch, {name: [Place(0)] for name in inputs}, frees=False)
    tracker.run(outputs, HINT)
    if tracker.refusals:
        raise UnsupportedError("the samples of the batch are not proven to be independent:", tracker.refusals)
    return {name: place.axis for name, place in tracker.places.items()}


def _batch(graph: Graph) -> tuple[Dim | None, list[str]]:
    """The size of the batch, and the inputs that have it."""
    fed = [name for name in graph.input_names if name not in graph.initializers]
    shapes = {name: shape_of(graph.types.get(name)) or () for name in fed}
    batch = next((shape[0] for shape in shapes.values() if shape), None)
    return batch, [name for name, shape in shapes.items() if shape and shape[0] == batch]
