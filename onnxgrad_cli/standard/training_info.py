"""Read and write the TrainingInfoProto of the standard, which adds training to an unchanged inference graph.

The algorithm of a TrainingInfoProto is a graph that contains only the nodes and tensors that the inference graph lacks.
A step runs the two graphs combined. After it, bindings name the result that replaces each initializer. `pack` writes a
TrainingInfoProto. `step_model` and `initial_model` turn a TrainingInfoProto of any tool into plain models. Source: the
comments on TrainingInfoProto in onnx.proto.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, helper

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.errors import OnnxgradError, conflict, missing_value
from onnxgrad_cli.files import check_structure
from onnxgrad_cli.ir.domains import STANDARD, plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import is_gradient, node_names, reads
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import LOSS, ROLES, rewrite
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.gradient_op import rename_named, xs_zs_y
from onnxgrad_cli.passes.identifiers import as_identifier
from onnxgrad_cli.passes.loss.append import fed_first
from onnxgrad_cli.passes.prepare.declarations import set_hints_aside
from onnxgrad_cli.passes.prepare.normalise import name_nodes
from onnxgrad_cli.standard.initialization import initialization, initializer

FIRST_WITH_TRAINING = 7
"""The first IR version in which a model can contain training information."""

AS_PREPARED = (
    "use the model that `onnxgrad build MODEL --stop-after prepare -o prepared.onnx` writes, which has the "
    "form that is differentiated, and add `training_info` to it"
)


# -- writing ---------------------------------------------------------------------------------------------------------


def check_request(options: Options) -> None:
    """Check that the options of a build can be combined with `training_info`.

    Raises:
        UsageError: two options can't be combined, or a required option is missing.
    """
    one = "leave out one of them"
    conflicts("`lora`", {"`training_info`, which does not change the inference graph": bool(options.lora)}, one)
    if not options.optimizer:
        message = "`training_info` requires an optimizer, because it contains complete steps"
        raise missing_value(message, "add `optimizer=NAME`")
    stored = "`training_info`, which always stores the state in initializers"
    conflicts("`embed_state=False`", {stored: not options.embed_state}, one)
    runs = "`yield_='keep'`, because its steps must run"
    conflicts("`training_info`", {runs: options.yield_ == "keep"}, "leave out `yield_`")
    graph = "`training_info`, which does not change the inference graph"
    conflicts("`dims` and `shapes`", {graph: bool(options.dims or options.shapes)}, "set the shapes in the model first")


def pack(original: ModelProto, built: TrainingModel) -> ModelProto:
    """Return a copy of the original model with training information, taken from the training model.

    The nodes of the inference graph stay the same. The algorithm leaves out nodes of the training model that the
    inference graph contains too. If a node computes a value of the inference graph in a different way, its results get
    new names. The initialization resets the optimizer's state and draws the weights as `options.init` says. With 'keep'
    it leaves out the weights, because they start from their stored values.

    Args:
        original: the inference model; not changed.
        built: the training model that was built from a copy of it.

    Raises:
        UsageError: the training can't be added to this model: it needs another opset, it trains a tensor that is not an
            initializer of the inference graph, or the model already has training information.
    """
    check_request(built.options)
    trained, training = built.model, built.training
    _check_fit(original, trained, [*training.trained, *training.state], training.slots)
    model = copied(original)

    def fresh(stem: str) -> str:
        """Return an unused name for the training model. If `options.identifiers` is set, it is a valid identifier."""
        return built.graph.fresh(as_identifier(stem) if built.options.identifiers else stem)

    _part_names(model.graph.node, fresh)
    _correct(model.graph, built.graph)
    model.ir_version = max(model.ir_version, FIRST_WITH_TRAINING)
    for entry in trained.opset_import:
        if entry.domain not in {known.domain for known in model.opset_import}:
            model.opset_import.append(entry)
    info = model.training_info.add()
    names = _Algorithm(original.graph, built.graph.proto.graph, info.algorithm, fresh).names
    successors = {name: training.state[name] for name in built.graph.input_names if name in training.state}
    _bind(info.update_binding, {name: names.get(new, new) for name, new in successors.items()})
    for entry in trained.metadata_props:
        if entry.key in (LOSS, ROLES):
            info.algorithm.metadata_props.add(key=entry.key, value=_renamed_roles(entry.value, names))
    values = initialization(built.graph, original.graph, training, built.options.init, built.options.seed)
    initial = {name: fresh(f"{name}_init") for name in values}
    info.initialization.CopyFrom(initializer(values, initial).graph)
    _bind(info.initialization_binding, initial)
    check_training_info(model, built.graph.path)
    return model


def _correct(inference: GraphProto, built: Graph) -> None:
    """Remove declared types of inner values that the build found wrong. Declare outputs with their inferred types."""
    refill(inference.value_info, [value for value in inference.value_info if value.name in built.hints])
    for value in inference.output:
        if shape_of(value.type) is not None and value.name not in built.hints and value.name in built.types:
            value.type.CopyFrom(built.types[value.name])


def _part_names(nodes: Iterable[NodeProto], fresh: Callable[[str], str]) -> None:
    """Rename nodes so that no two have the same name. The standard allows equal names, but onnxruntime does not."""
    taken = {""}
    for node in nodes:
        if node.name in taken and node.name:
            node.name = fresh(node.name)
        taken.add(node.name)


def _check_fit(original: ModelProto, trained: ModelProto, mutable: Iterable[str], slots: Iterable[str]) -> None:
    """Raise an error unless both models use the same opsets and the original stores all tensors that change."""
    if original.training_info:
        hint = "remove it with `onnxgrad expand MODEL -o plain.onnx`, and add `training_info` to that model"
        raise conflict("the model already has training information", hint)
    own = {plain_domain(entry.domain): entry.version for entry in original.opset_import}
    for entry in trained.opset_import:
        version = own.get(plain_domain(entry.domain), entry.version)
        if version != entry.version:
            needed = f"version {entry.version} of {entry.domain or STANDARD}"
            message = f"`training_info`: the training requires {needed}, but the model uses version {version}"
            raise conflict(message, AS_PREPARED)
    stored = {tensor.name for tensor in original.graph.initializer} | set(slots)
    for name in mutable:
        if name not in stored:
            message = f"`training_info`: '{name}' is trained, but it is not an initializer of the model's main graph"
            raise conflict(message, f"{AS_PREPARED}; or freeze it with `freeze`")


def _bind(binding: Any, pairs: Mapping[str, str]) -> None:
    binding.extend(StringStringEntryProto(key=key, value=value) for key, value in pairs.items())


def _renamed_roles(text: str, names: Mapping[str, str]) -> str:
    """Return a JSON entry of the metadata with the outputs renamed: `names` maps old names to new ones."""
    said = strict_json.loads(text)
    if "outputs" in said:
        said["outputs"] = {names.get(name, name): role for name, role in said["outputs"].items()}
    return json.dumps(said)


class _Algorithm:
    """Writer of an algorithm: the nodes and tensors of a training model that the inference graph lacks.

    Attributes:
        names: value of the training model -> its name in the algorithm, for values whose names differ.
    """

    def __init__(
        self, inference: GraphProto, trained: GraphProto, algorithm: GraphProto, fresh: Callable[[str], str]
    ) -> None:
        self.fresh = fresh
        self.names: dict[str, str] = {}
        self._taken = set(node_names(inference))
        self._made = {name: node for node in inference.node for name in node.output if name}
        self._stored = {tensor.name: tensor for tensor in inference.initializer}
        algorithm.name = "algorithm"
        given = {value.name for value in inference.input} | {tensor.name for tensor in trained.initializer}
        algorithm.input.extend(value for value in trained.input if value.name not in given)
        for tensor in trained.initializer:
            if not self._shares_tensor(tensor):
                algorithm.initializer.append(tensor)
                algorithm.initializer[-1].name = self._own(tensor.name)
        for node in trained.node:
            if not self._shares_node(node):
                algorithm.node.append(node)
                self._write(algorithm.node[-1])
        self._write_outputs(trained, inference, algorithm)
        self._write_types(trained, algorithm)

    def _shares_tensor(self, tensor: TensorProto) -> bool:
        computed = tensor.name in self._made  # the output of a constant node or of a node that was folded
        return computed or self._stored.get(tensor.name) == tensor

    def _shares_node(self, node: NodeProto) -> bool:
        other = self._made.get(next(filter(None, node.output), ""))
        return other is not None and self.names.keys().isdisjoint(reads(node)) and _equal(node, other)

    def _own(self, name: str) -> str:
        """Return the name of a value in the algorithm: a new name if the inference graph already uses its own name."""
        if name in self._taken:
            self.names[name] = self.fresh(f"{name}_training")
        return self.names.get(name, name)

    def _write(self, node: NodeProto) -> None:
        before = dict(self.names)
        for name in filter(None, node.output):
            self._own(name)
        outputs = list(node.output)
        rename([node], before)
        rename_named(node, lambda name: before.get(name, name))
        node.output[:] = [self.names.get(name, name) for name in outputs]
        if node.name in self._taken:
            node.name = self.fresh(node.name)

    def _write_outputs(self, trained: GraphProto, inference: GraphProto, algorithm: GraphProto) -> None:
        known = {value.name for value in inference.output}
        for value in trained.output:
            name = self.names.get(value.name, value.name)
            if name in known:
                continue
            if name in self._taken:
                self.names[value.name] = self.fresh(f"{name}_training")
                algorithm.node.append(helper.make_node("Identity", [name], [self.names[value.name]]))
                algorithm.node[-1].name = self.fresh(f"{name}/Identity")
            algorithm.output.append(value)
            algorithm.output[-1].name = self.names.get(value.name, value.name)

    def _write_types(self, trained: GraphProto, algorithm: GraphProto) -> None:
        own = {name for node in algorithm.node for name in node.output}
        for value in trained.value_info:
            name = self.names.get(value.name, value.name)
            if name in own:
                algorithm.value_info.append(value)
                algorithm.value_info[-1].name = name


def _equal(node: NodeProto, other: NodeProto) -> bool:
    """Return True if two nodes are equal, apart from their names and metadata."""

    def said(node: NodeProto) -> tuple[object, ...]:
        inputs = list(node.input)
        while inputs and not inputs[-1]:
            inputs.pop()
        return node.op_type, plain_domain(node.domain), node.overload, inputs, list(node.output), _attributes(node)

    return said(node) == said(other)


def _attributes(node: NodeProto) -> dict[str, bytes]:
    found = {}
    for attribute in node.attribute:
        bare = AttributeProto()
        bare.CopyFrom(attribute)
        bare.ClearField("doc_string")
        found[attribute.name] = bare.SerializeToString(deterministic=True)
    return found


# -- checking --------------------------------------------------------------------------------------------------------


def check_training_info(model: ModelProto, path: Path | None = None) -> None:
    """Check that a model follows the standard's rules for training information, which onnx.checker does not check.

    - The keys of bindings are unique. They name initializers of the inference graph or of the same algorithm.
    - The values of bindings name outputs.
    - An initialization has no inputs.
    - The inference graph reads no value of an algorithm.
    - In the inference graph combined with an algorithm, every value is computed once, and before it is read.
    - The value that replaces an initializer has the type of the initializer.

    Args:
        model: the model; not changed.
        path: the file that the model was read from; paths of external data are relative to it.

    Raises:
        OnnxgradError: the model breaks some of the rules. The error lists each violation.
    """
    faults = [*_faults(model)]
    if not faults:
        for index in range(len(model.training_info)):
            where = f"training_info[{index}]"
            step, initial = step_model(model, index), initial_model(model, index)
            check_structure(step, f"{where}: the inference graph combined with the algorithm")
            if initial is not None:
                check_structure(initial, f"{where}: the initialization")
            info = model.training_info[index]
            variables = {tensor.name: tensor for graph in (model.graph, info.algorithm) for tensor in graph.initializer}
            for made, binding in ((step, info.update_binding), (initial, info.initialization_binding)):
                if made is not None:
                    faults += (f"{where}: {fault}" for fault in _type_faults(Graph(made, path), variables, binding))
    if faults:
        message = "the model's training information violates the standard:"
        raise OnnxgradError(message, "create the training information again", faults, code="unreadable_file")


def _faults(model: ModelProto) -> Iterator[str]:
    """Yield the violations of the rules in onnx.proto by the training information of a model."""
    stored = {tensor.name for tensor in model.graph.initializer}
    results = {value.name for value in model.graph.output}
    updated: set[str] = set()
    begun: set[str] = set()
    for index, info in enumerate(model.training_info):
        where = f"training_info[{index}]"
        variables = stored | {tensor.name for tensor in info.algorithm.initializer}
        initial = {value.name for value in info.initialization.output}
        after = results | {value.name for value in info.algorithm.output}
        if info.initialization.input:
            yield f"{where}: its initialization has the input '{info.initialization.input[0].name}'"
        for field, pairs, seen, values, what in (
            ("update_binding", info.update_binding, updated, after, "the algorithm or of the inference graph"),
            ("initialization_binding", info.initialization_binding, begun, initial, "the initialization"),
        ):
            for pair in pairs:
                if pair.key in seen:
                    yield f"{where}: {field} has the key '{pair.key}' twice"
                if pair.key not in variables:
                    yield f"{where}: {field} has the key '{pair.key}', which is not an initializer"
                if pair.value not in values:
                    yield f"{where}: {field} has the value '{pair.value}', which is not an output of {what}"
                seen.add(pair.key)
        yield from (f"{where}: {fault}" for fault in _combined_faults(model.graph, info.algorithm))


def _combined_faults(inference: GraphProto, algorithm: GraphProto) -> Iterator[str]:
    """Yield the errors that show when the two graphs are combined: names that are defined twice or never."""
    inner, outer = list(_defined(algorithm)), set(_defined(inference))
    seen: set[str] = set()
    for name in inner:
        if name in outer:
            yield f"the algorithm defines '{name}', which the inference graph also defines"
        elif name in seen:
            yield f"the algorithm defines '{name}' twice"
        seen.add(name)
    for name in {name for node in inference.node for name in reads(node)} & (seen - outer):
        yield f"the inference graph reads '{name}', which only the algorithm defines"
    for node in algorithm.node:
        for name in reads(node):
            if name not in seen and name not in outer:
                yield f"the algorithm reads '{name}', which is not defined"


def _defined(graph: GraphProto) -> Iterator[str]:
    """Yield the names that a graph defines. An initializer that is also an input counts once."""
    given = [value.name for value in graph.input]
    stored = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
    yield from given
    yield from (name for name in stored if name not in given)
    yield from (name for node in graph.node for name in node.output if name)


def _type_faults(
    made: Graph, variables: Mapping[str, TensorProto], binding: Iterable[StringStringEntryProto]
) -> Iterator[str]:
    set_hints_aside(made)  # exporters store wrong types of inner values, and runtimes ignore them
    infer_types(made)
    for pair in binding:
        have, want = made.types.get(pair.value), variables[pair.key]
        shape = shape_of(have)
        if dtype_of(have) not in (TensorProto.UNDEFINED, want.data_type):
            yield f"'{pair.value}' replaces '{pair.key}', but has another type"
        elif shape is not None and not _may_be(shape, tuple(want.dims)):
            yield f"'{pair.value}' has the shape {list(shape)}, but replaces '{pair.key}' of shape {list(want.dims)}"


def _may_be(shape: Shape, known: Shape) -> bool:
    return len(shape) == len(known) and all(isinstance(a, str) or a == b for a, b in zip(shape, known, strict=True))


# -- reading ---------------------------------------------------------------------------------------------------------


def step_model(model: ModelProto, index: int, keep_outputs: bool = False) -> ModelProto:
    """Return one training step as a plain model: the inference graph and the algorithm combined.

    The inputs are the inputs of both graphs, then the variables as overridable initializers. A variable is an
    initializer that a binding of the model names. The outputs are the outputs of the algorithm, and then the outputs of
    the inference graph that an update needs or that the training model was built to keep. For each output with the new
    value of a variable, the metadata name the variable. If onnxgrad wrote the training information, the step has all
    metadata of the training model.

    Args:
        model: the model; not changed.
        index: the position of the entry in its `training_info`.
        keep_outputs: keep all outputs of the inference graph, after the outputs of the algorithm.
    """
    info = model.training_info[index]
    step = inference_model(model)
    for field in ("node", "initializer", "sparse_initializer", "input", "value_info", "quantization_annotation"):
        getattr(step.graph, field).extend(getattr(info.algorithm, field))
    updates = {pair.key: pair.value for pair in info.update_binding}
    said = {entry.key: entry.value for entry in info.algorithm.metadata_props}
    needed = {value.name for value in step.graph.output} if keep_outputs else set()
    _join_outputs(step.graph, info.algorithm, {*needed, *updates.values(), *_described_outputs(said)})
    graph = Graph(step)
    name_nodes(graph)
    requests = [xs_zs_y(node) for node in graph.nodes if is_gradient(node)]
    graph.remove_unused(keep=[name for xs, zs, y in requests for name in (*xs, *zs, y)])
    _declare_variables(graph, model, updates)
    graph.drop_unread(list(graph.initializers))
    rewrite(step, said if ROLES in said else {ROLES: _roles_of_step(graph, updates)})
    return graph.commit()


def _join_outputs(graph: GraphProto, algorithm: GraphProto, needed: Set[str]) -> None:
    """Set the outputs of a step: all outputs of the algorithm, then the other needed outputs of the inference graph."""
    known = {value.name for value in algorithm.output}
    own = (value for value in graph.output if value.name in needed and value.name not in known)
    refill(graph.output, [*algorithm.output, *own])


def _roles_of_step(graph: Graph, updates: Mapping[str, str]) -> str:
    """Return the text of the metadata entry with the roles of inputs and outputs, for a step that has no such entry.

    Inputs with an initializer are states. An output bound to a state is its next value. No other roles are known, so
    other inputs are model inputs and other outputs are kept outputs.
    """
    inputs = {name: "state" if name in graph.initializers else "model input" for name in graph.input_names}
    replaced = {value: name for name, value in updates.items()}
    outputs = {name: ("next state", replaced[name]) if name in replaced else ("kept output", "")
               for name in graph.output_names}  # fmt: skip
    return _roles(inputs, outputs)


def _described_outputs(said: Mapping[str, str]) -> list[str]:
    """Return the outputs that a step's metadata name, which include outputs kept by `--keep-outputs`."""
    try:
        return list(strict_json.loads(said[ROLES])["outputs"])
    except (KeyError, TypeError, ValueError):
        return []


def _declare_variables(graph: Graph, model: ModelProto, updates: Mapping[str, str]) -> None:
    """Declare as inputs the initializers that change between steps.

    These are the initializers that this step updates, and the initializers that it reads and any other binding sets.
    """
    bound = [pair for info in model.training_info for pair in (*info.update_binding, *info.initialization_binding)]
    read = {name for node in graph.nodes for name in reads(node)}
    for name in dict.fromkeys([*updates, *(pair.key for pair in bound if pair.key in read)]):
        if name in graph.initializers and name not in graph.input_names:
            tensor = graph.initializers[name]
            graph.add_input(name, helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    graph.proto.ir_version = max(graph.proto.ir_version, FIRST_WITH_TRAINING)
    fed_first(graph)


def initial_model(model: ModelProto, index: int) -> ModelProto | None:
    """Return the initialization as a plain model without inputs, or None if there is none.

    For each output, the metadata name the variable that it initializes.
    """
    info = model.training_info[index]
    if not info.initialization.output:
        return None
    initial = inference_model(model)
    initial.graph.CopyFrom(info.initialization)
    outputs = {pair.value: ("initial value", pair.key) for pair in info.initialization_binding}
    rewrite(initial, {ROLES: _roles({}, outputs)})
    return initial


def inference_model(model: ModelProto) -> ModelProto:
    """Return a copy of the model without its training information."""
    copy = copied(model)
    copy.ClearField("training_info")
    return copy


def _roles(inputs: Mapping[str, str], outputs: Mapping[str, Sequence[str]]) -> str:
    said = {name: {"role": role, "of": of} for name, (role, of) in outputs.items()}
    return json.dumps({"inputs": dict(inputs), "outputs": said})
