"""Bring any model into the one form the other passes know.

Functions inlined, constants held as initializers, every node named, the opset raised where the backward graph
needs it (and only then), every value typed, on a model without its weights; then: what is trained.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from onnx import NodeProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli import registry
from onnxgrad_cli.emit import FORWARD, ROLE, is_float
from onnxgrad_cli.errors import Caution, OnnxgradError, UnsupportedError, UsageError, suggest
from onnxgrad_cli.graph import UNNAMED, Graph, dims_in, dtype_of, shape_of, subgraphs, with_bodies
from onnxgrad_cli.passes.expand import expand, standard_functions
from onnxgrad_cli.passes.fold import fold
from onnxgrad_cli.passes.functions import inline
from onnxgrad_cli.passes.loss import resolve_outputs
from onnxgrad_cli.passes.lower import lower
from onnxgrad_cli.passes.mode import apply_mode
from onnxgrad_cli.passes.sequences import unpack
from onnxgrad_cli.passes.subgraphs import choose_branches, hoist, separate_outputs, settle_bodies
from onnxgrad_cli.passes.time_first import time_first
from onnxgrad_cli.passes.trainable import select
from onnxgrad_cli.passes.upgrade import upgrade
from onnxgrad_cli.pipeline import Options, Pass, Training
from onnxgrad_cli.targets.standard import to_standard

FIRST_WITH_CONSTANTS = 4
"""The IR version from which an initializer that is no input is a constant; before it, all had to be inputs too."""

FIRST_WITH_BFLOAT16 = 22
"""The opset from which all that the rules emit takes bfloat16: Round, Softplus and others came to it that late."""

OLDEST_OPSET = 13
"""The lowest opset whose operators the rules know in their present form."""


def _run(graph: Graph, options: Options, training: Training) -> bool:
    if graph.proto.training_info:
        text = "the training information that the model had is left out: it is about the graph as it was"
        training.cautions.append(Caution("note", "training_info", text))
    admit(graph, options)
    bring(graph, options, training)
    training.inputs = [name for name in graph.input_names if name not in graph.initializers]
    training.predictions = resolve_outputs(graph, options)
    select(graph, options, training)
    return True


def admit(graph: Graph, options: Options) -> None:
    """Refuse what is beyond us, fix the shapes that were asked for, and forget what an earlier build has said."""
    _refuse_unknown_opset(graph)
    _fix_shapes(graph, options)
    _forget_roles(graph)
    if graph.proto.ir_version < FIRST_WITH_CONSTANTS:
        graph.unlist_initializers()
        graph.proto.ir_version = FIRST_WITH_CONSTANTS


def bring(graph: Graph, options: Options, training: Training) -> None:
    """Bring an admitted graph into the form that can be differentiated."""
    normalise(graph)
    settle(graph, training)
    if apply_mode(graph, options, training):
        graph.infer()


def settle(graph: Graph, training: Training) -> None:
    """Type a normalised graph, raise it to the opset its gradient needs, replace operators that have no rule.

    What is beyond the newest opset that onnxruntime loads is then written at that one.
    """
    if graph.opset() is None:  # all of its operators are of other domains
        graph.proto.opset_import.add(domain="", version=OLDEST_OPSET)
    infer(graph)
    while raise_opset(graph, training) or _replace(graph):
        normalise(graph)
        infer(graph)
    lower(graph, training)


def _replace(graph: Graph) -> bool:
    """Replace nodes that have no rule or need not stand, those of bodies too; whether there were any."""
    return (
        expand(graph)
        or unpack(graph)
        or choose_branches(graph)
        or settle_bodies(graph, _settle_body)
        or _inline_standard(graph)
    )


def _settle_body(body: Graph) -> None:
    infer(body)
    while _replace(body):
        infer(body)


def infer(graph: Graph) -> None:
    """Type every value; each shape that turns out to be constant may give others theirs."""
    graph.infer()
    while fold(graph):
        graph.infer()


def normalise(graph: Graph) -> None:
    """Inline functions, hold constants as initializers, and name every node."""
    to_standard(graph.proto, graph.nodes)
    inline(graph, _constant_tensor)
    _forget_symbols(graph)
    _hoist_constants(graph)
    separate_outputs(graph)
    name_nodes(graph)
    _write_defaults(graph)
    time_first(graph)


def convert(graph: Graph, opset: int) -> None:
    """Take the graph to another opset; the official converter, which lowers it, raises errors of any kind."""
    if opset >= (graph.opset() or opset):
        upgrade(graph, opset)
    else:
        _adopt(graph, onnx.version_converter.convert_version(graph.skeleton(), opset))


def _refuse_unknown_opset(graph: Graph) -> None:
    opset = graph.opset()
    if opset is None and any(node.domain in ("", "ai.onnx") for node in graph.nodes):
        raise OnnxgradError("the model imports no opset of the default domain", "it is not a valid ONNX model")
    if (opset or 0) > onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"the model is at opset {opset}; the newest that is known here is {onnx.defs.onnx_opset_version()}",
            hint="export the model at an older opset",
        )


def _fix_shapes(graph: Graph, options: Options) -> None:
    inputs = {value.name: value for value in graph.proto.graph.input}
    sizes: dict[str, int] = dict(options.dims)
    for name, shape in options.shapes.items():
        if name not in inputs:
            raise UsageError(f"--shape: the model has no input '{name}'", suggest(name, inputs, "inputs"))
        declared = shape_of(inputs[name].type)
        if declared is not None and len(declared) != len(shape):
            raise UsageError(f"--shape: '{name}' has {len(declared)} dimensions, {len(shape)} were given")
        for old, new in zip(declared or (), shape, strict=False):
            if isinstance(old, int) and old != new:
                raise UsageError(f"--shape: '{name}' has size {old} where {new} was given")
            if isinstance(old, str) and old != "?" and isinstance(new, int):
                sizes[old] = new
        inputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(dtype_of(inputs[name].type), shape))
    symbols = {dim for value in inputs.values() for dim in shape_of(value.type) or () if isinstance(dim, str)}
    for symbol in options.dims:
        if symbol not in symbols:
            raise UsageError(f"--dim: no input has a dimension '{symbol}'", suggest(symbol, symbols - {"?"}, "symbols"))
    if sizes:
        values = graph.proto.graph
        for value in (*values.input, *values.output, *values.value_info):
            _set_dims(value.type, sizes)


def _set_dims(value_type: TypeProto, sizes: dict[str, int]) -> None:
    for dim in value_type.tensor_type.shape.dim:
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]


def _inline_standard(graph: Graph) -> bool:
    """Write out the operators that only the function body of the standard can differentiate; whether there are any."""
    chosen = standard_functions(graph)
    if not chosen:
        return False
    bare = graph.skeleton()
    known = {value.name for value in (*bare.graph.value_info, *bare.graph.input, *bare.graph.output)}
    named = ((name, value_type) for name, value_type in graph.types.items() if name not in known)
    bare.graph.value_info.extend(onnx.helper.make_value_info(*pair) for pair in named)
    _adopt(graph, onnx.inliner.inline_selected_functions(bare, chosen, inline_schema_functions=True))
    return True


def _adopt(graph: Graph, rewritten: onnx.ModelProto) -> None:
    """Take nodes and opsets of a rewritten skeleton; the weights stay as they are."""
    props = {output: node.metadata_props for node in graph.nodes for output in node.output if output}
    for node in rewritten.graph.node:
        if not node.metadata_props and node.output and node.output[0] in props:
            node.metadata_props.extend(props[node.output[0]])
    graph.set_nodes(rewritten.graph.node)
    del graph.proto.opset_import[:]
    graph.proto.opset_import.extend(rewritten.opset_import)
    graph.proto.ir_version = max(graph.proto.ir_version, rewritten.ir_version)
    for tensor in rewritten.graph.initializer:
        if tensor.name not in graph.initializers:
            graph.proto.graph.initializer.append(tensor)
            graph.initializers[tensor.name] = graph.proto.graph.initializer[-1]


def _forget_symbols(graph: Graph) -> None:
    """Forget the symbols that may mean two sizes: those that onnx or we have counted, which models merged into one
    share, and those of bodies, each of which has its own."""
    proto = graph.proto.graph
    for values, counted in ((proto.input, ("_d",)), ((*proto.output, *proto.value_info), ("_d", "unk__"))):
        for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
            if dim.dim_param.startswith(counted) and UNNAMED.fullmatch(dim.dim_param):
                dim.ClearField("dim_param")
    for node in with_bodies(graph.nodes):
        for body in subgraphs(node):
            for dim in dims_in(body):
                dim.ClearField("dim_param")


def _hoist_constants(graph: Graph) -> None:
    """Constant nodes become initializers of the same name: weights are found there, and inference skips them."""
    hoist(graph, _constant_tensor)
    kept = []
    for node in graph.nodes:
        tensor = _constant_tensor(node)
        if tensor is None or node.output[0] in graph.output_names:
            kept.append(node)
            continue
        tensor.name = node.output[0]
        graph.proto.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = graph.proto.graph.initializer[-1]
    graph.nodes = kept


def _constant_tensor(node: NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name in dtypes:
        return numpy_helper.from_array(np.asarray(value, dtypes[attribute.name]))
    return None


def name_nodes(graph: Graph) -> None:
    """Backward nodes are named after forward nodes, so each of these needs a name, and onnxruntime wants one owner.

    It wants every output of Split named too: else it dies.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        if not node.name or node.name in seen:
            node.name = graph.fresh(node.name or f"{node.op_type}_{next(iter(node.output), '')}")
        seen.add(node.name)
        if node.op_type == "Split":
            node.output[:] = [name or graph.fresh(f"{node.name}_unread") for name in node.output]


_UNKNOWN_DEFAULTS = {"MeanVarianceNormalization": ("axes", [0, 2, 3]), "STFT": ("onesided", 1)}
"""Attributes whose default the inference of shapes does not know: it follows the operator's body, or takes another."""


def _write_defaults(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op_type in _UNKNOWN_DEFAULTS and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute(*_UNKNOWN_DEFAULTS[node.op_type]))


def _forget_roles(graph: Graph) -> None:
    """A training model can be built on again: what an earlier build said of its nodes is no longer so.

    Nor is what the model says of its training, which is about the graph as it was.
    """
    graph.proto.ClearField("training_info")
    for node in with_bodies(graph.nodes):
        for entry in [p for p in node.metadata_props if p.key in (ROLE, FORWARD)]:
            node.metadata_props.remove(entry)


def raise_opset(graph: Graph, training: Training) -> bool:
    """Convert the graph where what its gradient needs is newer than it; whether it was.

    Raises:
        UnsupportedError: an operator has no form at that opset.
    """
    opset = graph.opset() or OLDEST_OPSET
    target = max(opset, OLDEST_OPSET, _needed(graph, max(opset, OLDEST_OPSET)))
    if target == opset:
        return False
    upgrade(graph, target)
    text = f"opset raised from {opset} to {target}: the backward graph needs it"
    training.cautions.append(Caution("opset change", "opset", text))
    return True


def _needed(graph: Graph, opset: int) -> int:
    bfloat16 = any(dtype_of(value_type) == TensorProto.BFLOAT16 for value_type in graph.distinct_types())
    needs = [FIRST_WITH_BFLOAT16 if bfloat16 else OLDEST_OPSET]
    operators = {(n.op_type, n.domain) for n in with_bodies(graph.nodes) if _any_float(graph, n.output[:])}
    for op_type, domain in operators:
        key = (op_type, domain, graph.opset(domain) or 1 if domain else opset)
        rule = registry.lookup(*key)
        definition = None if rule else registry.lookup_definition(*key)
        if definition is not None or (rule is not None and not rule.is_zero):
            needs.append((definition or rule).needs_opset)  # type: ignore[union-attr]
        elif rule is None and domain in ("", "ai.onnx"):
            needs.append(registry.first_known(*key) or OLDEST_OPSET)
    return max(needs)


def _any_float(graph: Graph, names: Iterable[str]) -> bool:
    return any(name not in graph.types or is_float(graph.types[name]) for name in names if name)


PREPARE = Pass("prepare", "functions inlined, opset raised where needed, values typed, weights chosen", _run)
