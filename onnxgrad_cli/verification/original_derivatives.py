"""Differentiate the original model again, for the outputs and variables of the derivatives to check.

`perturbed` adds new inputs to inner values, so that finite differences with respect to these values can be taken.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative, Mode
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.derivatives.named_values import take_name
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import Derived, read_derived
from onnxgrad_cli.options import Options


def derive_again(
    derived: Derived, original: ModelProto, path: Path | None, kind: str, moves: Mapping[str, str], **options: Any
) -> tuple[ModelProto, Derived]:
    """Return another model of derivatives, and its description.

    Args:
        derived: the description of the checked derivatives.
        original: the model to differentiate; external data are relative to `path`.
        path: the file it was read from.
        kind: the kind of the other derivatives.
        moves: variable of the checked derivatives -> the variable to use instead.
        options: more options of `derive`.
    """
    of, wrt = (map(glob.escape, names) for names in (derived.of, (moves.get(x, x) for x in derived.wrt)))
    options = {"class_": derived.pick or None, **options}
    model = derive(
        original, cast(Derivative, kind), of=list(of), wrt=list(wrt), class_axis=derived.class_axis, path=path,
        options=Options(mode=cast(Mode, derived.mode)), **options,
    )  # fmt: skip
    said = read_derived(model)
    assert said is not None
    return model, said


def feeds_again(said: Derived, derived: Derived, feeds: Arrays) -> Arrays:
    """Return feeds that also hold the output weights and the label under the names in `derived`."""
    names = [*zip(said.weights, derived.weights, strict=False), (said.label, derived.label)]
    return {**feeds, **{theirs: feeds[ours] for theirs, ours in names if ours}}


def perturbed(model: ModelProto, path: Path | None, names: Sequence[str]) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a copy of a model in which a new input is added, by an Add node, to each of the named values.

    The input has the shape of the value. Every reader of the value reads the sum.

    Returns:
        The copy, and a map from value to the new input.

    Raises:
        OnnxgradError: the model contradicts itself, or the type of a value can't be inferred.
    """
    graph = Graph(copied(model), path)
    if names:
        infer_types(graph)
    untyped = next((name for name in names if name not in graph.types), None)
    if untyped is not None:
        raise OnnxgradError(f"the type of '{untyped}' can't be inferred in the original model")
    added = {name: graph.fresh(f"{name}_added") for name in names}
    for name, more in added.items():
        made = graph.fresh(f"{name}_made")
        node = make_node("Add", [made, more], [name], name=graph.fresh(f"{name}/Add"))
        position = take_name(graph, name, made)
        graph.nodes.insert(position, node)
        graph.add_input(more, graph.types[name])
    return graph.commit(), added
