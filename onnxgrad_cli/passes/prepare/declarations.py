"""What a model declares of its values, and how far it is believed.

Of inputs, the declared sizes count: the caller keeps to them. What stands where a size is unknown is no size, and no
name that two sizes could share. What a model stores of other values is a hint: it may stem from another model, or from
one run of this one, and nothing that runs a model reads it. So it is set aside (`Graph.hints`) and inferred again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from onnx import ModelProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.observation import fed_types
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import bodies
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, element_type, in_words, shape_of, without_shape

Axis = tuple[str, int]
"""An input and a position in its shape."""

Dimensions = Iterator[TensorShapeProto.Dimension]

UNTESTED = "which was not tested"

_PLACEHOLDER = re.compile(
    r"<?(\?*|\*|-?\d+(\.\d+)?|(none|null|nil|nan|unk|unknown|undefined|unnamed|dynamic|dyn|any)_*\d*)>?", re.I
)
"""What exporters write for a size that they don't know: '?', '-1', 'None', 'unk__7', ..."""


def says_nothing(symbol: str) -> bool:
    """Whether the name of a size is but a placeholder for one."""
    return _PLACEHOLDER.fullmatch(symbol.strip()) is not None or UNNAMED.fullmatch(symbol) is not None


def forget_placeholders(graph: Graph) -> None:
    """Take for unknown every size that is no size, or whose name may mean two: each gets a symbol of its own then.

    Those are negative numbers, placeholders, the symbols that onnx or we have counted, which models merged into one
    share, and all symbols of bodies, each of which has its own. A placeholder that could be a name, and stands on one
    axis of the inputs alone, is the name of that axis.
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
    """Every dimension in declarations, those of the elements of sequences too."""
    for value in values:
        tensor = element_type(value.type)
        if tensor is not None:
            yield from tensor.tensor_type.shape.dim


def repeated(model: ModelProto, fixed: Mapping[str, Sequence[int]]) -> dict[str, list[Axis]]:
    """The symbols that stand on several axes of what is fed, but those that are `fixed`, as names or as inputs.

    Axes of what is empty by that are left out: it holds no number, and any sizes would do.
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
    """What a user should know of symbols that stand on several axes, and that were believed."""
    names = listed(symbols)
    return Caution("note", "shapes", f"sizes that the model calls by one name are taken to be equal, {why}: {names}")


def set_hints_aside(graph: Graph) -> None:
    """Move what the model stores of inner values, and the shapes that it declares of outputs, to `graph.hints`."""
    proto = graph.proto.graph
    given = {*graph.input_names, *graph.initializers}
    outputs = [value for value in proto.output if value.name not in given and shape_of(value.type) is not None]
    for value in (*outputs, *proto.value_info):
        graph.hints.setdefault(value.name, ValueInfoProto()).CopyFrom(value)
    for value in outputs:
        value.type.CopyFrom(without_shape(value.type))
    del proto.value_info[:]


def settle_hints(graph: Graph, training: Cautions) -> None:
    """Declare again what agrees with what was inferred, tell what is taken on trust, and forget what is wrong."""
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
    """Whether what is stored of a value can't be so."""
    said, is_ = shape_of(stored), shape_of(found)
    if said is None or is_ is None:
        return False
    pairs = zip(said, is_, strict=False)
    return len(said) != len(is_) or any(
        isinstance(a, int) and a != b and (isinstance(b, int) or b in borne) for a, b in pairs
    )


def _follows(stored: TypeProto, found: TypeProto, borne: Container[str] | None) -> bool:
    """Whether all that is stored of a value follows from what was found.

    With `borne`, the symbols of the inputs, a symbol that is none of them says nothing.
    """
    said, is_ = shape_of(stored), shape_of(found)
    if said is None or is_ is None or len(said) != len(is_) or dtype_of(stored) != dtype_of(found):
        return False
    free = [a == "?" or (borne is not None and isinstance(a, str) and a not in borne) for a in said]
    return all(known or a == b for known, a, b in zip(free, said, is_, strict=True))


def _tell(graph: Graph, wrong: list[str], training: Cautions) -> None:
    """Say which hints were found wrong, and which were taken because nothing else was found."""
    if wrong:
        first = wrong[0]
        said, found = in_words(graph.hints[first].type), in_words(graph.types[first])
        more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        text = f"the model stores that '{first}' is {said}; it is {found}, as follows from the inputs{more}"
        training.cautions.append(Caution("note", first, text))
    for how, names in (
        ("a run confirms them", [name for name in graph.assumed if name in graph.confirmed]),
        ("untested", [name for name in graph.assumed if name not in graph.confirmed]),
    ):
        if names:
            text = f"shapes taken from what the model stores, as they could not be inferred ({how}): of {listed(names)}"
            training.cautions.append(Caution("note", "shapes", text))
