"""Run the model on random data to find ranks that can't be inferred, and to check the hints.

Only ranks are taken from a run. Sizes differ between runs and are never assumed.
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
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.limits import within_budget
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick, samples_for
from onnxgrad_cli.execution.sizes_to_try import sized, sizes_to_try, summed
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import read_by, reads
from onnxgrad_cli.ir.types import Arrays, Dim, dtype_of, element_name, in_words, shape_of, tensor_type

MAX_PROBED_SIZE = 64
"""The largest size that a symbol gets in a run. The memory of a run may grow with its fourth power."""

MAX_PROBED_ELEMENTS = 2**12
"""If no input has more elements than this, symbols may exceed `MAX_PROBED_SIZE`: audio inputs have one long axis."""

RUNS = 2
"""Number of runs at different sizes that are compared. If the model runs at fewer sizes, there are fewer runs."""


def observe_ranks(graph: Graph, training: Cautions, asked: bool | None = None) -> bool:
    """Run the model to find ranks that type inference could not find. Return True if any were found.

    If the user gave data, only these are used. Otherwise, the data are random, and a rank that depends on the values of
    the data, not only on their shapes, stays unknown. A value may have a different rank if a size is 1, for example
    after a Squeeze. That is reported, and `keep_ranks` guards against it.

    Args:
        graph: the graph. The ranks that were found are added to its `observed`. Values whose rank differs between runs
            are added to its `ranks`.
        training: receives cautions.
        asked: True to run the model however large it is, False not to run it. By default, it runs only if that is
            quick.
    """
    if asked is False or (asked is None and not is_quick(graph.proto)):
        graph.run_for_ranks = "forbidden" if asked is False else "too large"
        return False
    with within_budget(limited=not asked):
        runs = _runs_for_ranks(graph)
    graph.run_for_ranks = "" if runs else "failed"
    if not runs:
        return False
    usual = [run for run in runs if not run.one]
    arrays = usual[0].values if usual else {}
    tensors = {name: x for name, x in arrays.items() if isinstance(x, np.ndarray) and name not in graph.ranks}
    graph.ranks |= {name: told for name in tensors if (told := _apart(name, usual))}
    found = {name: x for name, x in tensors.items() if name not in graph.ranks}
    graph.observed.update((name, _type_of(array)) for name, array in found.items())
    if found:
        text = f"the numbers of axes of {listed(found)} could not be inferred, and were read from a run of the model"
        training.cautions.append(Caution("note", "shapes", text))
    training.cautions.extend(_elsewhere(graph, found, runs))
    return bool(found)


def _runs_for_ranks(graph: Graph) -> list[_Run]:
    """Return runs that fetch the values of unknown rank: one on the user's data, or several on random data."""
    lost = _lost(graph)
    runs = _given_run(graph, lost) if lost else []
    if runs or not lost:
        return runs
    varying = _of_any_rank(graph)
    lost = [name for name in lost if name not in varying]
    return _runs(graph, lost, ones=True) if lost else []


class _Run(NamedTuple):
    """A run of the model.

    Attributes:
        fed: map from each input to its shape.
        values: the values that were fetched.
        one: the symbol whose size was set to 1 in this run; "" in a normal run.
    """

    fed: Mapping[str, Sequence[int]]
    values: Arrays
    one: str = ""


def _apart(name: str, runs: Sequence[_Run]) -> str:
    """Describe the ranks of a value if they differ between runs; otherwise return ""."""
    fed = {np.ndim(run.values[name]): ", ".join(f"{each} {list(s)}" for each, s in run.fed.items()) for run in runs}
    return ", and ".join(f"{rank} axes if the inputs are {fed[rank]}" for rank in sorted(fed)) if len(fed) > 1 else ""


def _elsewhere(graph: Graph, found: Arrays, runs: Sequence[_Run]) -> Iterator[Caution]:
    """For each symbol, yield a caution about the first value whose rank changes if the symbol is 1."""
    told = set[str]()
    for name in graph.made():
        for run in runs if name in found else ():
            rank, usual = np.ndim(run.values[name]), found[name].ndim
            if run.one and rank != usual and run.one not in told:
                told.add(run.one)
                text = (
                    f"it has {rank} axes if {run.one} is 1, and {usual} otherwise; the training model supports "
                    f"only the other sizes, and fails with an error if {run.one} is 1. To build a model for "
                    "one size, set it with `dims`"
                )
                yield Caution("note", name, text)


def keep_ranks(graph: Graph) -> None:
    """Insert nodes that make a run fail if a value has a different rank than was observed or taken from a hint.

    The gradients are valid for these ranks only. Values computed from a guarded value need no guard, nor do values that
    nothing reads. Values of an element type that Shape does not accept need none either, because no runtime can run a
    model with them.
    """
    taken = {*graph.observed, *(name for name, known in graph.assumed.items() if shape_of(known) is not None)}
    if not taken:
        return
    taken &= {*read_by(graph.nodes), *graph.output_names}
    shaped = Op(graph).schema("Shape").inputs[0].types
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
    """Insert a Reshape after a value that makes a run fail if the value does not have its declared rank.

    The Reshape copies one size for each axis of the declared rank. If the value has fewer axes, there is no size to
    copy. If it has more, the number of elements does not match (unless the further sizes are 1).
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
    """Return the element type and the rank of an array."""
    return tensor_type(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)


def _of_any_rank(graph: Graph) -> set[str]:
    """Return the values whose rank may depend on the values of the inputs, not only on their shapes.

    Inputs may determine which axes are removed, or which branch runs.
    """
    by_values = set(graph.input_names) - set(graph.initializers)  # depend on the data's values, not only their shapes
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
    """Return True if the second input of a node lists the axes that it removes or adds."""
    return is_standard(node.domain) and (node.op_type.startswith("Reduce") or node.op_type in ("Squeeze", "Unsqueeze"))


def _lost(graph: Graph) -> list[str]:
    """Return the outputs of nodes that are, or may be, tensors of unknown rank."""
    unknown = {id(value_type) for value_type in graph.distinct_types() if _is_unknown(value_type)}
    types, known = graph.types, {"", *graph.observed}
    return [name for name in graph.made() if name not in known and (name not in types or id(types[name]) in unknown)]


def _is_unknown(value_type: TypeProto) -> bool:
    """Return True if a type is missing, or is the type of a tensor of unknown rank or unknown elements."""
    tensor = value_type.WhichOneof("value") in (None, "tensor_type")
    return tensor and (shape_of(value_type) is None or not dtype_of(value_type))


def check_hints(graph: Graph, training: Cautions, asked: bool | None = None) -> bool:
    """Drop the shapes that were taken from hints and that a run contradicts. Return True if there are any.

    The hints that a run confirms are added to `graph.confirmed`.

    Args:
        graph: the graph.
        training: receives cautions.
        asked: True to run the model however large it is, False not to run it. By default, it runs only if that is
            quick.
    """
    tested = [name for name, value_type in graph.assumed.items() if shape_of(value_type) is not None]
    known = graph.confirmed | _of_any_rank(graph) if tested else set()
    tested = [name for name in tested if name not in known]
    if not tested or asked is False or (asked is None and not is_quick(graph.proto)):
        return False
    with within_budget(limited=not asked):
        runs = _runs(graph, tested)
    wrong = {name for run in runs for name in tested if not _agrees(graph, name, run.values[name], run.fed)}
    for name in sorted(wrong):
        del graph.hints[name]
        graph.observed[name] = _type_of(runs[0].values[name])
        text = f"the model stores that '{name}' is {in_words(graph.assumed[name])}, but a run gave another shape"
        training.cautions.append(Caution("note", name, text))
    if runs:
        graph.confirmed.update(name for name in tested if name not in wrong)
    return bool(wrong)


def _agrees(graph: Graph, name: str, array: np.ndarray, fed: Mapping[str, Sequence[int]]) -> bool:
    """Return True if a value agrees with its assumed shape, given the shapes `fed` of the inputs in that run."""
    shape = shape_of(graph.assumed[name]) or ()
    bound: dict[Dim, int] = {}
    for each, sizes in fed.items():
        bound.update(zip(shape_of(graph.types[each]) or (), sizes, strict=True))
    known = [bound.get(dim) if isinstance(dim, str) else dim for dim in shape]
    return len(shape) == array.ndim and all(a in (None, b) for a, b in zip(known, array.shape, strict=True))


def _given_run(graph: Graph, names: list[str]) -> list[_Run]:
    """Run the model on the user's data, if any, and fetch the values of `names`. Return [] if that fails."""
    arrays = samples_for(graph.proto)
    if arrays is None:
        return []
    with suppress(Exception):  # onnxruntime's exceptions share no base class
        values = Probe(graph.commit(), names, graph.path).on(arrays)
        return [_Run({name: array.shape for name, array in arrays.items()}, values)]
    return []


def _runs(graph: Graph, names: list[str], ones: bool = False) -> list[_Run]:
    """Run the model at different sizes and fetch the values of `names`. Return [] if it fails at all sizes.

    With `ones`, further runs follow. Their sizes are those of the first run, but one symbol at a time is set to 1. Runs
    that fail are left out.
    """
    runs: list[_Run] = []
    shapes = fed_shapes(graph.proto)
    if shapes is None:
        return []
    try:
        probe = Probe(graph.commit(), names, graph.path)
    except Exception:  # onnxruntime's exceptions share no base class, and it may reject valid models
        return []
    tried: list[Mapping[str, Sequence[int]]] = []
    base: dict[str, int] = {}
    for sizes in sizes_to_try(shapes, graph.proto, apart=True, ones=False):
        fed = sized(shapes, sizes)
        few = all(math.prod(shape) <= MAX_PROBED_ELEMENTS for shape in fed.values())
        if fed in tried or (max(sizes.values(), default=0) > MAX_PROBED_SIZE and not few):
            continue
        tried.append(fed)
        with suppress(Exception):  # other sizes may be valid
            runs.append(_Run(fed, probe(fed)))
            base = base or sizes
        if len(runs) == RUNS:
            break
    for symbol in base if ones else ():
        fed = sized(shapes, summed({**base, symbol: 1}))
        with suppress(Exception):
            runs.append(_Run(fed, probe(fed), symbol))
    return runs
