"""What a run of the model on drawn data tells of its shapes: ranks that can't be inferred, and whether hints are right.

Of what is read off, ranks alone are believed, not sizes: they are other ones in the next run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.limits import unasked
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick
from onnxgrad_cli.execution.sizes import sized, sizes_to_try
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import Arrays, Dim, dtype_of, in_words, shape_of, tensor_type

LARGEST = 64
"""The largest size of a symbol in a run: what is in the model may grow with its fourth power."""

FEW = 2**12
"""Numbers in each input, up to which symbols may be larger: sound has one long axis."""

RUNS = 2
"""Runs at different sizes in which a value must have one rank, as far as the model runs at several."""


def observe_ranks(graph: Graph, training: Cautions, asked: bool | None = None) -> bool:
    """Find the ranks that inference has lost, where the model runs; whether there are any.

    Args:
        graph: the graph; what is found is kept in `observed`.
        training: gets a caution.
        asked: run the model however large it is (True), or not at all (False); by default where that is quick.
    """
    if asked is False or (asked is None and not is_quick(graph.proto)):
        return False
    varying = _of_any_rank(graph)
    lost = [name for name in graph.made() if name and _is_lost(graph, name) and name not in varying]
    with unasked(limited=not asked):
        found = _observed(graph, lost) if lost else {}
    if not found:
        return False
    for name, array in found.items():
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.observed[name] = tensor_type(dtype, [None] * array.ndim)
    text = f"read off a run of the model, as they could not be inferred: the numbers of axes of {listed(found)}"
    training.cautions.append(Caution("note", "shapes", text))
    return True


def _of_any_rank(graph: Graph) -> set[str]:
    """The values that may have another rank where the data are others: numbers that are fed say which axes go, or a
    condition on them which branch runs."""
    by_values = set(graph.input_names) - set(graph.initializers)  # what the values of the data decide, not their shapes
    varying: set[str] = set()
    for node in graph.nodes:
        names = reads(node)
        if node.op_type not in ("Shape", "Size") and not by_values.isdisjoint(names):
            by_values.update(node.output)
        decides = node.input[:1] if node.op_type in ("If", "Loop") else node.input[1:] if _has_axes(node) else ()
        if not by_values.isdisjoint(filter(None, decides)) or not varying.isdisjoint(names):
            varying.update(node.output)
    return varying


def _has_axes(node: NodeProto) -> bool:
    """Whether the second input of a node says which axes it takes away or adds."""
    return is_standard(node.domain) and (node.op_type.startswith("Reduce") or node.op_type in ("Squeeze", "Unsqueeze"))


def _is_lost(graph: Graph, name: str) -> bool:
    """Whether a tensor is of unknown rank, as far as is known that it is one."""
    value_type = graph.types.get(name)
    tensor = value_type is None or value_type.WhichOneof("value") in (None, "tensor_type")
    return tensor and (shape_of(value_type) is None or not dtype_of(value_type)) and name not in graph.observed


def check_hints(graph: Graph, training: Cautions, asked: bool | None = None) -> bool:
    """Forget the shapes that were taken from what the model stores and that a run contradicts; whether there are any.

    Those that it confirms are noted in `confirmed`.

    Args:
        graph: the graph.
        training: gets a caution.
        asked: see `observe_ranks`.
    """
    tested = [name for name, value_type in graph.assumed.items() if shape_of(value_type) is not None]
    tested = [name for name in tested if name not in graph.confirmed and name not in _of_any_rank(graph)]
    if not tested or asked is False or (asked is None and not is_quick(graph.proto)):
        return False
    with unasked(limited=not asked):
        runs = _runs(graph, tested)
    wrong = {name for shapes, run in runs for name in tested if not _agrees(graph, name, run[name], shapes)}
    for name in sorted(wrong):
        del graph.hints[name]
        array = runs[0][1][name]
        graph.observed[name] = tensor_type(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        text = f"the model stores that '{name}' is {in_words(graph.assumed[name])}; a run contradicts it"
        training.cautions.append(Caution("note", name, text))
    if runs:
        graph.confirmed.update(name for name in tested if name not in wrong)
    return bool(wrong)


def _agrees(graph: Graph, name: str, array: np.ndarray, fed: Mapping[str, Sequence[int]]) -> bool:
    """Whether a value has the shape that it is assumed to have, where the inputs have those of `fed`."""
    shape = shape_of(graph.assumed[name]) or ()
    bound: dict[Dim, int] = {}
    for each, sizes in fed.items():
        bound.update(zip(shape_of(graph.types[each]) or (), sizes, strict=True))
    known = [bound.get(dim) if isinstance(dim, str) else dim for dim in shape]
    return len(shape) == array.ndim and all(a in (None, b) for a, b in zip(known, array.shape, strict=True))


def _observed(graph: Graph, names: list[str]) -> dict[str, np.ndarray]:
    """The values of names in a run, those that have the same rank in a second one at other sizes."""
    runs = [arrays for _, arrays in _runs(graph, names)]
    arrays = runs[0] if runs else {}
    kept = {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)}
    return {name: x for name, x in kept.items() if all(np.ndim(run[name]) == x.ndim for run in runs)}


def _runs(graph: Graph, names: list[str]) -> list[tuple[Mapping[str, Sequence[int]], Arrays]]:
    """Runs at different sizes: the shapes of the inputs, and the values of names; none where the model does not run."""
    runs: list[tuple[Mapping[str, Sequence[int]], Arrays]] = []
    shapes = fed_shapes(graph.proto)
    if shapes is None:
        return []
    try:
        probe = Probe(graph.commit(), names, graph.path)
    except Exception:  # onnxruntime's exceptions share no base class; it need not take what we take
        return []
    tried: list[Mapping[str, Sequence[int]]] = []
    for sizes in sizes_to_try(shapes, graph.proto, apart=True):
        fed = sized(shapes, sizes)
        few = all(math.prod(shape) <= FEW for shape in fed.values())
        if fed in tried or (max(sizes.values(), default=0) > LARGEST and not few):
            continue
        tried.append(fed)
        try:
            runs.append((fed, probe(fed)))
        except Exception:  # sizes that don't fit: others may
            continue
        if len(runs) == RUNS:
            break
    return runs
