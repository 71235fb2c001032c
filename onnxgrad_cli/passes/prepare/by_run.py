"""What a run of the model on drawn data tells of its shapes: ranks that can't be inferred, and whether hints are right.

Of what is read off, ranks alone are believed, not sizes: they are other ones in the next run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TypeProto

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.limits import unasked
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick, samples_for
from onnxgrad_cli.execution.sizes import sized, sizes_to_try, summed
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import Arrays, Dim, dtype_of, element_name, in_words, shape_of, tensor_type

LARGEST = 64
"""The largest size of a symbol in a run: what is in the model may grow with its fourth power."""

FEW = 2**12
"""Numbers in each input, up to which symbols may be larger: sound has one long axis."""

RUNS = 2
"""Runs at different sizes in which a value must have one rank, as far as the model runs at several."""


def observe_ranks(graph: Graph, training: Cautions, asked: bool | None = None) -> bool:
    """Find the ranks that inference has lost, where the model runs; whether there are any.

    Data that are given decide alone. Without them, data are drawn, and a rank that follows from values, not shapes,
    stays unknown. A value may have another rank where a size is 1, as behind what squeezes: it is told, and
    `keep_ranks` sees to it.

    Args:
        graph: the graph; what is found is kept in `observed`, and in `ranks` what has no one rank.
        training: gets a caution.
        asked: run the model however large it is (True), or not at all (False); by default where that is quick.
    """
    if asked is False or (asked is None and not is_quick(graph.proto)):
        graph.run_for_ranks = "forbidden" if asked is False else "too large"
        return False
    lost = [name for name in _lost(graph) if name]
    with unasked(limited=not asked):
        runs = _given_run(graph, lost) if lost else []
        varying = _of_any_rank(graph) if lost and not runs else ()
        lost = [name for name in lost if name not in varying]
        runs = runs or (_runs(graph, lost, ones=True) if lost else [])
    graph.run_for_ranks = "" if runs else "failed"
    usual = [run for run in runs if not run.one]
    arrays = usual[0].values if usual else {}
    found = {name: x for name, x in arrays.items() if isinstance(x, np.ndarray) and name not in graph.ranks}
    graph.ranks |= {name: told for name in found if (told := _apart(name, usual))}
    found = {name: x for name, x in found.items() if name not in graph.ranks}
    for name, array in found.items():
        graph.observed[name] = _type_of(array)
    if found:
        text = f"read off a run of the model, as they could not be inferred: the numbers of axes of {listed(found)}"
        training.cautions.append(Caution("note", "shapes", text))
    training.cautions.extend(_elsewhere(graph, found, runs))
    return bool(found)


class _Run(NamedTuple):
    """A run of the model.

    Attributes:
        fed: the shapes of the inputs.
        values: what was fetched.
        one: the symbol that alone was set to 1; "" in a usual run.
    """

    fed: Mapping[str, Sequence[int]]
    values: Arrays
    one: str = ""


def _apart(name: str, runs: Sequence[_Run]) -> str:
    """How many axes a value has in runs, in words, where these are not as many in each; else ""."""
    ranks = {np.ndim(run.values[name]): run for run in runs}
    told = (f"{rank} axes where the inputs are {_sizes(run.fed)}" for rank, run in sorted(ranks.items()))
    return ", and ".join(told) if len(ranks) > 1 else ""


def _sizes(fed: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in fed.items())


def _elsewhere(graph: Graph, found: Arrays, runs: Sequence[_Run]) -> Iterator[Caution]:
    """What a user should know of values that have another rank where a symbol is 1: of the first one of each symbol."""
    told = set[str]()
    for name in graph.made():
        for run in runs if name in found else ():
            rank, usual = np.ndim(run.values[name]), found[name].ndim
            if run.one and rank != usual and run.one not in told:
                told.add(run.one)
                text = (
                    f"it has {rank} axes where {run.one} is 1, and {usual} else: the training model is for other "
                    "sizes, and ends with an error at 1; `dims` fixes a size, to build one for that"
                )
                yield Caution("note", name, text)


def keep_ranks(graph: Graph) -> None:
    """Let a run end with an error in which a value has other ranks than were read off, or taken from what is stored.

    Gradients are written for these ranks. Of what follows from such a value nothing needs to be asked, nor of elements
    that no operator has a shape of: nothing runs that has them.
    """
    shaped = Op(graph).schema("Shape").inputs[0].types
    taken = {*graph.observed, *(name for name, known in graph.assumed.items() if shape_of(known) is not None)}
    first = [
        name
        for node in graph.nodes
        for name in node.output
        if name in taken
        and taken.isdisjoint(reads(node))
        and shape_of(graph.types.get(name)) is not None
        and f"tensor({element_name(dtype_of(graph.types[name]))})" in shaped  # a file may leave out the element type
    ]
    for name in first:
        keep_rank(graph, name)


def keep_rank(graph: Graph, name: str) -> None:
    """Put behind a value a Reshape to the sizes of its first axes, as many as it is known to have.

    A run ends with an error if the value has another rank: of too few axes one can't be taken, of too many the numbers
    don't fit.
    """
    made = graph.fresh(f"{name}_made")
    at = next(i for i, node in enumerate(graph.nodes) if name in node.output)
    maker = graph.nodes[at]
    maker.output[:] = [made if output == name else output for output in maker.output]
    known = graph.types[name]
    graph.observed[made] = tensor_type(dtype_of(known), [None] * len(shape_of(known) or ()))
    graph.types[made] = known
    op = Op(graph)
    op.scope = op.forward = f"{name}/rank"
    value = op.val(made)
    shape = op.Gather(op.Shape(value), op.const(np.arange(value.rank)), axis=0)
    op.rename(op.Reshape(value, shape), name)
    graph.types[name] = known
    graph.set_nodes([*graph.nodes[: at + 1], *op.nodes, *graph.nodes[at + 1 :]])


def _type_of(array: np.ndarray) -> TypeProto:
    """The element type and the rank of an array."""
    return tensor_type(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)


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


def _has_axes(node: Node) -> bool:
    """Whether the second input of a node says which axes it takes away or adds."""
    return is_standard(node.domain) and (node.op_type.startswith("Reduce") or node.op_type in ("Squeeze", "Unsqueeze"))


def _lost(graph: Graph) -> list[str]:
    """The tensors that nodes make of unknown rank, as far as is known that they are tensors."""
    unknown = {id(value_type) for value_type in graph.distinct_types() if _is_unknown(value_type)}
    types = graph.types
    made = [name for name in graph.made() if name not in types or id(types[name]) in unknown]
    return [name for name in made if name not in graph.observed]


def _is_unknown(value_type: TypeProto) -> bool:
    """Whether a type is that of a tensor of unknown rank or of unknown elements, or none."""
    tensor = value_type.WhichOneof("value") in (None, "tensor_type")
    return tensor and (shape_of(value_type) is None or not dtype_of(value_type))


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
    wrong = {name for run in runs for name in tested if not _agrees(graph, name, run.values[name], run.fed)}
    for name in sorted(wrong):
        del graph.hints[name]
        graph.observed[name] = _type_of(runs[0].values[name])
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


def _given_run(graph: Graph, names: list[str]) -> list[_Run]:
    """The run on the data that are given, which fetches the values of names; none where the model does not run."""
    arrays = samples_for(graph.proto)
    if arrays is None:
        return []
    with suppress(Exception):  # onnxruntime's exceptions share no base class
        values = Probe(graph.commit(), names, graph.path).on(arrays)
        return [_Run({name: array.shape for name, array in arrays.items()}, values)]
    return []


def _runs(graph: Graph, names: list[str], ones: bool = False) -> list[_Run]:
    """Runs at different sizes, which fetch the values of names; none where the model does not run.

    With `ones`, those of the first one follow, with each symbol set to 1 alone, where the model runs so.
    """
    runs: list[_Run] = []
    shapes = fed_shapes(graph.proto)
    if shapes is None:
        return []
    try:
        probe = Probe(graph.commit(), names, graph.path)
    except Exception:  # onnxruntime's exceptions share no base class; it need not take what we take
        return []
    tried: list[Mapping[str, Sequence[int]]] = []
    base: dict[str, int] = {}
    for sizes in sizes_to_try(shapes, graph.proto, apart=True, ones=False):
        fed = sized(shapes, sizes)
        few = all(math.prod(shape) <= FEW for shape in fed.values())
        if fed in tried or (max(sizes.values(), default=0) > LARGEST and not few):
            continue
        tried.append(fed)
        with suppress(Exception):  # sizes that don't fit: others may
            runs.append(_Run(fed, probe(fed)))
            base = base or sizes
        if len(runs) == RUNS:
            break
    for symbol in base if ones else ():
        fed = sized(shapes, summed({**base, symbol: 1}))
        with suppress(Exception):
            runs.append(_Run(fed, probe(fed), symbol))
    return runs
