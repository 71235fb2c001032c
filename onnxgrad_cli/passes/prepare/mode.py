"""Set BatchNormalization and Dropout to training or inference mode: as in the file, or as `--mode` requests.

Batch statistics are computed by ReduceMean and arithmetic, because onnxruntime's BatchNormalization(training_mode=1)
overwrites the running statistics that it reads, even if they are shared constants or the user's arrays. Dropout gets
the output for its mask, because its gradient needs the mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
from onnx import helper, numpy_helper

from onnxgrad_cli.autodiff.rules.norm import through_batch_statistics, through_convolved_statistics
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Fusion
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError, conflict
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import (
    BY_ATTRIBUTE,
    drops,
    for_inference,
    fresh_statistic,
    is_batch_normalization,
    is_dropout,
    is_for_inference,
    own_statistics,
    uses_batch,
)
from onnxgrad_cli.ir.modules import VIEWS
from onnxgrad_cli.ir.node import Node, copied, refill
from onnxgrad_cli.ir.node_values import attributes_of, bodies, captured, with_bodies
from onnxgrad_cli.ir.types import Dim, shape_of
from onnxgrad_cli.options import ModeOptions
from onnxgrad_cli.record import ModeRecord

MOMENTUM, EPSILON = 0.9, 1e-5

SUBJECT = "`mode`"
"""The subject of cautions about modes."""

DEPENDS = "its output for a sample depends on the other samples of the batch, even in the written inference model"


def set_mode(graph: Graph, options: ModeOptions, training: ModeRecord) -> bool:
    """Set BatchNormalization and Dropout to the mode `options.mode`; 'keep' leaves the mode of the model.

    In training, BatchNormalization uses the statistics of the batch and outputs the next running statistics, which are
    listed in `training.state`. They are momentum * running + (1 - momentum) * batch statistic, with the population
    variance, as in the definition of the ONNX operator. (PyTorch's momentum is one minus this one. PyTorch uses the
    unbiased variance, which is count / (count - 1) times as large; `options.unbiased_variance` selects that too.)

    Each BatchNormalization remains a single node here, so that the same weights are chosen in every mode.
    `write_batch_statistics` expands it later.

    Returns:
        True if the graph changed. Its types must then be inferred again.

    Raises:
        UnsupportedError: a BatchNormalization in training reads a value of unknown rank.
        UsageError: the model has derivatives that were written for another mode.
    """
    refusals: list[Refusal] = []
    training.cautions += (Caution("training mode", SUBJECT, text) for text in _comes_in_training(graph, options.mode))
    changed = _own_statistics(graph)
    changed |= _separate_statistics(graph, options.mode)
    training.cautions += (Caution("note", SUBJECT, text) for text in _by_own_batch(graph, options.mode))

    def in_mode(node: Node) -> list[Node] | None:
        new = None
        if is_batch_normalization(node):
            new = _batch_normalization(graph, node, options.mode, training, refusals)
        elif is_dropout(node):
            new = _dropout(graph, node, options.mode)
        if new is not None:
            _refuse_for_derivatives(graph, node, options.mode)
        return new

    changed |= graph.rewrite(in_mode, {"BatchNormalization", "Dropout"})
    if refusals:
        raise UnsupportedError(f"{len(refusals)} nodes can't be put in training mode:", refusals)
    training.cautions += (Caution("note", SUBJECT, text) for text in _without_effect(graph, training, options.mode))
    return changed


def write_batch_statistics(graph: Graph, options: ModeOptions, training: ModeRecord) -> bool:
    """Expand each BatchNormalization in training mode to simple operators.

    Returns:
        True if there were any. The types must then be inferred again.
    """
    opset = graph.opset() or 0

    def written_out(node: Node) -> list[Node] | None:
        in_training = is_batch_normalization(node) and uses_batch(node, opset)
        return _with_batch_statistics(graph, node, options, training) if in_training else None

    return graph.rewrite(written_out, {"BatchNormalization"})


def _refuse_for_derivatives(graph: Graph, node: Node, mode: str) -> None:
    """Refuse to change a node's mode if the model has derivatives of it, which are valid for its old mode only."""
    if graph.derived and mode != "keep":
        raise conflict(
            f"`mode`: the derivatives in the model were built for the current mode of '{node.name}', which "
            "can't be changed",
            f"build the derivatives again with `mode={mode!r}`, from the model without derivatives",
        )


def _comes_in_training(graph: Graph, mode: str) -> Iterator[str]:
    """Yield a message if the file is in training mode, which users seldom intend when they export a model."""
    nodes, fed = list(with_bodies(graph.nodes)), set(graph.input_names).difference(graph.initializers)
    counts = {
        "BatchNormalization": sum(is_batch_normalization(n) and uses_batch(n, graph.opset() or 0) for n in nodes),
        "Dropout": sum(is_dropout(node) and drops(graph, node) and node.input[2] not in fed for node in nodes),
    }
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    if found:
        what = "the training model keeps this mode, and trained models are written in inference mode"
        what = "it is switched to inference mode here" if mode == "eval" else what
        what = "it stays in this mode, because its derivatives were built for it" if graph.derived else what
        yield f"the model is in training mode ({found}): {what}"


def _own_statistics(graph: Graph) -> bool:
    """Replace running statistics that are an Identity of a weight by separate initializers.

    PyTorch's older exporter writes equal tensors only once. The running variance of an untrained network is then an
    Identity of its scale, because both are ones. Without this function, the gradient with respect to the statistic
    would be added to the gradient of the weight.
    """
    read = {name for node in graph.nodes if node.op_type == "BatchNormalization" for name in list(node.input)[3:5]}
    if not read:
        return False

    def stored(node: Node) -> list[Node] | None:
        name = node.output[0]
        if name not in read or node.input[0] not in graph.initializers or name in graph.output_names:
            return None
        graph.copy_initializer(node.input[0], name)
        return []

    return graph.rewrite(stored, {"Identity"})


def _separate_statistics(graph: Graph, mode: str) -> bool:
    """In layers that learn running statistics, replace those shared with another layer or a weight by copies.

    If a layer has no stored statistics because it always computes them from the batch, it gets new ones.
    """
    layers = [node for node in graph.nodes if is_batch_normalization(node) and _by_batch(graph, node, mode)]
    if not layers:
        return False
    readers, varies = _readers(graph), _varying(graph)
    changed = False
    for node in layers:
        for position, name in own_statistics(node).items():
            shared = node.input[position]
            if shared in graph.initializers and len(readers[shared]) > 1 and not graph.taken(name):
                graph.copy_initializer(shared, name)
                node.input[position], changed = name, True
            elif (scale := graph.initializers.get(node.input[1])) and not graph.taken(name) and varies(shared):
                graph.store(name, numpy_helper.to_array(fresh_statistic(scale, position)))
                node.input[position], changed = name, True
    return changed


def _varying(graph: Graph) -> Callable[[str], bool]:
    """Return a function that returns True if a value is computed from the model's inputs."""
    fed = set(graph.input_names).difference(graph.initializers)
    stored = {*fed, *graph.initializers}
    return lambda name: name not in stored and not fed.isdisjoint(graph.ancestors([name]))


def _by_own_batch(graph: Graph, mode: str) -> Iterator[str]:
    """Yield a message for each normalization that uses the statistics of its batch even in inference."""
    varies, needed, within = _varying(graph), graph.ancestors(graph.output_names), set[str]()
    for node in filter(is_batch_normalization, graph.nodes):
        computed = [name for name in node.input[3:5] if varies(name)]
        if computed and not _by_batch(graph, node, mode):
            within |= graph.ancestors(computed) - graph.ancestors(node.input[:1])
            yield (
                f"'{node.name}' normalizes with the statistics of the current batch: {DEPENDS}. `mode='train'` "
                "learns running statistics instead, which start with mean 0 and variance 1, and writes them"
            )
    producers, batch, needed = graph.producers(), _batch(graph), needed - within
    for node in graph.nodes:
        if node.op_type == "Sub" and is_standard(node.domain) and node.output[0] in needed:
            mean = producers.get(node.input[1])
            while mean is not None and mean.op_type in VIEWS and mean.input[0] != node.input[0]:
                mean = producers.get(mean.input[0])
            if mean is not None and mean.input[:1] == node.input[:1] and _over_samples(graph, mean, batch):
                yield f"'{node.name}' subtracts the mean of the current batch: {DEPENDS}"


def _batch(graph: Graph) -> Dim | None:
    """Return the size of the first axis of the first input that has axes, which is the batch; None if it is 1."""
    shapes = (shape_of(graph.types.get(name)) for name in graph.input_names if name not in graph.initializers)
    size = next((shape[0] for shape in shapes if shape), None)
    return None if size == 1 else size


def _over_samples(graph: Graph, node: Node, batch: Dim | None) -> bool:
    """Return True if a node computes a mean over the axis of the samples."""
    shape = shape_of(graph.types.get(node.input[0]))
    if node.op_type != "ReduceMean" or batch is None or not shape or shape[0] != batch:
        return False
    axes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    listed = attributes_of(node).get("axes", [] if axes is None else axes.tolist())
    return not listed or 0 in [axis % len(shape) for axis in listed]


def _readers(graph: Graph) -> dict[str, set[object]]:
    """Return a map from a value to its readers. BatchNormalizations with the same operands count as one layer.

    If scale, bias and statistics are four different tensors, all nodes that read them are calls of one layer. If two of
    the four are the same tensor, an exporter has merged equal tensors, and the nodes count separately.
    """
    found: dict[str, set[object]] = defaultdict(set)
    for number, node in enumerate(graph.nodes):
        four = tuple(node.input[1:5])
        called = is_batch_normalization(node) and len(set(four)) == len(four)
        for position, name in enumerate((*node.input, *captured(node))):
            found[name].add((four if called else number, position))
    return found


def _by_batch(graph: Graph, node: Node, mode: str) -> bool:
    """Return True if, in the requested mode, a BatchNormalization uses the statistics of its batch."""
    return mode == "train" or (mode == "keep" and uses_batch(node, graph.opset() or 0))


def _without_effect(graph: Graph, training: ModeRecord, mode: str) -> Iterator[str]:
    """Yield a message for each operator whose mode can't change: it is missing, or in a subgraph."""
    if mode == "train" and all(node.op_type != "Dropout" for node in graph.nodes):
        yield "`mode='train'`: the model has no Dropout; exporters remove it from models in inference mode"
    if mode == "train" and not training.state:
        yield "`mode='train'`: the model has no BatchNormalization; exporters fold it into the preceding convolution"
    inner = {node.op_type for body in bodies(graph.nodes) for node in body.node} if mode != "keep" else set()
    for kind in sorted(inner & {"Dropout", "BatchNormalization"}):
        yield f"`mode={mode!r}`: a {kind} inside a subgraph does not change its mode"


def _dropout(graph: Graph, node: Node, mode: str) -> list[Node] | None:
    """Return a copy of the Dropout in the requested mode, or None if nothing changes."""
    if mode == "eval":
        return None if is_for_inference(node) else for_inference(node)
    new = copied(node)
    if mode == "keep":
        if not drops(graph, node) or (len(node.output) > 1 and node.output[1]):
            return None
    else:
        name = "dropout_training_mode"
        if name not in graph.initializers:
            name = graph.fresh(name)
            graph.add_initializer(name, np.array(True))
        new.input.extend([""] * (3 - len(new.input)))
        new.input[2] = name
    if len(new.output) < 2 or not new.output[1]:
        del new.output[1:]
        new.output.append(graph.fresh(f"{node.output[0]}_mask"))
    return [new]


def _batch_normalization(
    graph: Graph, node: Node, mode: str, training: ModeRecord, refusals: list[Refusal]
) -> list[Node] | None:
    """Return the nodes that replace a BatchNormalization in the requested mode, or None if it stays."""
    if _by_batch(graph, node, mode):
        if shape_of(graph.types.get(node.input[0])) is None:
            refusals.append(Refusal(node.name, node.op_type, f"the rank of '{node.input[0]}' is unknown"))
            return None
        return [_in_training(graph, node, training)]
    if is_for_inference(node):
        return None
    new, *same = for_inference(node)
    for identity in same:
        identity.name = graph.fresh(f"{new.name}/Identity")
    return [new, *same]


def _in_training(graph: Graph, node: Node, training: ModeRecord) -> Node:
    """Return a copy of a BatchNormalization in training mode, which outputs both next running statistics.

    If layers share running statistics, each one reads the statistics that the preceding one returns.
    """
    new = copied(node)
    if (graph.opset() or 0) >= BY_ATTRIBUTE:
        kept = (a for a in node.attribute if a.name != "training_mode")
        refill(new.attribute, [*kept, helper.make_attribute("training_mode", 1)])
    fed = {*graph.input_names, *graph.initializers}
    if attributes_of(node).get("momentum", MOMENTUM) >= 1 and not fed.isdisjoint(node.input[3:5]):
        text = (
            f"the momentum of '{node.name}' is 1, so its running statistics never change, and the written "
            "inference model normalizes with these instead of the statistics of the training; export the "
            "model with a momentum below 1 (in PyTorch: above 0)"
        )
        training.cautions.append(Caution("note", SUBJECT, text))
    asked = [*node.output[1:3], "", ""]
    del new.output[1:]
    for position, which in ((3, "mean"), (4, "variance")):
        name = node.input[position]
        after = asked[position - 3] or graph.fresh(f"{name}_next")
        new.input[position] = training.state.get(name, name)
        new.output.append(after)
        graph.types[after] = graph.types[name]
        if name in fed:
            training.state[name] = after
        else:
            text = f"the running {which} '{name}' of '{node.name}' is computed, not stored, so it is not learned"
            training.cautions.append(Caution("note", SUBJECT, text))
    return new


def _with_batch_statistics(graph: Graph, node: Node, options: ModeOptions, training: ModeRecord) -> list[Node]:
    """Write y = (x - mean) scale / sqrt(var + epsilon) + b with batch statistics, and the next running statistics."""
    op = Op(graph)
    op.replaces(node)
    x, scale, b = (op.val(name) for name in node.input[:3])
    axes = [axis for axis in range(x.rank) if axis != 1]
    per_channel = [-1, *[1] * (x.rank - 2)]
    work = op.wide(x)
    op.scope = f"{node.name}/batch_mean"
    mean = op.mean(work, axes)
    op.scope = f"{node.name}/batch_var"
    centred = work + -mean  # the gradient of Sub would negate a tensor as large as x
    var = op.mean(centred * centred, axes)
    op.scope = f"{node.name}/normalize"
    deviation = op.Sqrt(var + attributes_of(node).get("epsilon", EPSILON))
    factor = op.reshape(op.cast(scale, work), per_channel) / deviation
    y = op.cast(centred * factor + op.reshape(op.cast(b, work), per_channel), x)
    op.rename(y, node.output[0])
    kept = (centred.name, deviation.name, factor.name)
    rules = through_batch_statistics, through_convolved_statistics
    training.fusions[node.output[0]] = Fusion("ai.onnx::BatchNormalization", tuple(node.input[:3]), kept, *rules)
    momentum = attributes_of(node).get("momentum", MOMENTUM)
    learned = var
    if options.unbiased_variance:
        op.scope = f"{node.name}/running_var"
        count = op.count(x, axes, dtype=var.dtype)
        learned = var * (count / op.Max(count - 1, op.const(1.0, count)))
    for position, statistic, which in ((3, mean, "mean"), (4, learned, "var")):
        op.scope = f"{node.name}/running_{which}"
        running = op.val(node.input[position])
        fresh = op.cast(op.Reshape(statistic, op.ints([-1])), running)
        op.rename(running * momentum + fresh * (1 - momentum), node.output[position - 2])
    return op.nodes
