"""Decide which of the shapes that a model declares are used.

The declared sizes of inputs are used, because callers must respect them. But exporters sometimes declare an unknown
size as a negative number, or by a placeholder name that several unknown sizes share; these declarations are ignored.
The shapes that a model stores for other values are only hints. They may come from another model, or from a single run
of this model, and no runtime reads them. So they are moved to `Graph.hints`, and the shapes are inferred again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from onnx import ModelProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.observation import fed_types
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import bodies
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, element_type, in_words, shape_of, without_shape

Axis = tuple[str, int]
"""An axis of an input: the input's name, and the position in its shape."""

Dimensions = Iterator[TensorShapeProto.Dimension]

UNTESTED = "which was not tested"

_PLACEHOLDER = re.compile(
    r"<?(\?*|\*|-?\d+(\.\d+)?|(none|null|nil|nan|unk|unknown|undefined|unnamed|dynamic|dyn|any)_*\d*)>?", re.I
)
"""Pattern of names that exporters write for a size that they don't know: '?', '-1', 'None', 'unk__7', ..."""


def says_nothing(symbol: str) -> bool:
    """Return True if the symbol of a size is only a placeholder for an unknown size."""
    return _PLACEHOLDER.fullmatch(symbol.strip()) is not None or UNNAMED.fullmatch(symbol) is not None


def forget_placeholders(graph: Graph) -> None:
    """Declare sizes as unknown if they are invalid, or if their symbol may stand for several different sizes.

    This applies to negative numbers, placeholders, numbered symbols that onnx or onnxgrad generated, and all symbols in
    bodies. Merged models may contain the same generated symbols with different meanings, and each body has its own
    symbols. A placeholder stays if it is a valid identifier and is used for only one axis of the inputs.
    """
    proto = graph.proto.graph
    count = Counter(dim.dim_param for dim in _dims(proto.input))
    for dim in _dims(proto.input):
        alone = count[dim.dim_param] == 1 and dim.dim_param.isidentifier() and not dim.dim_param.startswith("_d")
        if _is_unknown(dim) and not alone:
            dim.Clear()
    for dim in _dims((*proto.output, *proto.value_info)):
        if _is_unknown(dim):
            dim.Clear()
    for body in bodies(graph.nodes):
        for dim in _dims((*body.input, *body.output, *body.value_info)):
            if dim.dim_value < 0 or dim.dim_param:
                dim.Clear()


def _is_unknown(dim: TensorShapeProto.Dimension) -> bool:
    return dim.dim_value < 0 if dim.HasField("dim_value") else says_nothing(dim.dim_param)


def _dims(values: Iterable[ValueInfoProto]) -> Dimensions:
    """Yield every dimension in the given declarations, including those of the elements of sequences."""
    for value in values:
        tensor = element_type(value.type)
        if tensor is not None:
            yield from tensor.tensor_type.shape.dim


def repeated(model: ModelProto, fixed: Mapping[str, Sequence[int]]) -> dict[str, list[Axis]]:
    """Return a map from each symbol that several axes of the inputs share to these axes.

    A symbol is left out if `fixed` contains it or an input that has it. The axes of inputs that `fixed` makes empty are
    left out too, because an empty input may have any other sizes.
    """
    axes: dict[str, list[Axis]] = defaultdict(list)
    for name, value_type in fed_types(model).items():
        shape = shape_of(value_type) or ()
        empty = any(0 in fixed.get(str(size), ()) for size in shape)
        for position, size in enumerate(shape):
            if isinstance(size, str) and size != "?" and not empty:
                axes[size].append((name, position))
    named = {symbol: where for symbol, where in axes.items() if len(where) > 1 and symbol not in fixed}
    return {symbol: where for symbol, where in named.items() if not any(name in fixed for name, _ in where)}


def taken_to_be_equal(symbols: Sequence[str], why: str = UNTESTED) -> Caution:
    """Return a note that symbols are used for several axes, whose sizes are assumed to be equal."""
    names = listed(symbols)
    return Caution(
        "note", "shapes", f"sizes that have the same name in the model are assumed to be equal, {why}: {names}"
    )


def set_hints_aside(graph: Graph) -> None:
    """Move the stored types of inner values, and the declared shapes of outputs, to `graph.hints`."""
    proto = graph.proto.graph
    given = {*graph.input_names, *graph.initializers}
    outputs = [value for value in proto.output if value.name not in given and shape_of(value.type) is not None]
    for value in (*outputs, *proto.value_info):
        graph.hints.setdefault(value.name, ValueInfoProto()).CopyFrom(value)
    for value in outputs:
        value.type.CopyFrom(without_shape(value.type))
    del proto.value_info[:]


def settle_hints(graph: Graph, training: Cautions) -> None:
    """Declare the hints again that agree with inferred types, drop those that contradict them, and report the rest."""
    proto = graph.proto.graph
    outputs = {value.name: value for value in proto.output if value.name in graph.hints}
    borne = {dim.dim_param for dim in _dims(proto.input)}
    wrong = [name for name, hint in graph.hints.items() if _contradict(hint.type, graph.types.get(name), borne)]
    for name, hint in graph.hints.items():
        found = graph.types.get(name)
        if name in outputs:
            outputs[name].CopyFrom(hint)
            if found is not None and (name in wrong or not _follows(hint.type, found, borne)):
                outputs[name].type.CopyFrom(found)
        elif found is None or found == hint.type or _follows(hint.type, found, None):
            proto.value_info.append(hint)
    _tell(graph, wrong, training)
    for name in wrong:
        del graph.hints[name]


def _contradict(stored: TypeProto, found: TypeProto | None, borne: Container[str]) -> bool:
    """Return True if the stored shape of a value contradicts the inferred shape. `borne` are symbols of inputs."""
    said, is_ = shape_of(stored), shape_of(found)
    if said is None or is_ is None:
        return False
    pairs = zip(said, is_, strict=False)
    return len(said) != len(is_) or any(
        isinstance(a, int) and a != b and (isinstance(b, int) or b in borne) for a, b in pairs
    )


def _follows(stored: TypeProto, found: TypeProto, borne: Container[str] | None) -> bool:
    """Return True if the inferred type of a value implies the stored one.

    If `borne`, the symbols of the inputs, is given, other symbols in the stored shape count as unknown sizes.
    """
    said, is_ = shape_of(stored), shape_of(found)
    if said is None or is_ is None or len(said) != len(is_) or dtype_of(stored) != dtype_of(found):
        return False
    free = [a == "?" or (borne is not None and isinstance(a, str) and a not in borne) for a in said]
    return all(known or a == b for known, a, b in zip(free, said, is_, strict=True))


def _tell(graph: Graph, wrong: list[str], training: Cautions) -> None:
    """Add notes for the user: on hints that are wrong, and on hints that are used because inference found nothing."""
    if wrong:
        first = wrong[0]
        said, found = in_words(graph.hints[first].type), in_words(graph.types[first])
        more = f" (and {len(wrong) - 1} more values like it)" if len(wrong) > 1 else ""
        text = f"the model stores that '{first}' is {said}, but inferred from the inputs it is {found}{more}"
        training.cautions.append(Caution("note", first, text))
    for how, names in (
        ("confirmed by a run", [name for name in graph.assumed if name in graph.confirmed]),
        ("untested", [name for name in graph.assumed if name not in graph.confirmed]),
    ):
        if names:
            text = f"shapes could not be inferred for {listed(names)}; the shapes stored in the model are used ({how})"
            training.cautions.append(Caution("note", "shapes", text))
