"""Low-rank adapters (LoRA) of frozen weights: y = x W becomes y = x W + alpha / rank (x A) B.

A and B are thin matrices. x A is computed first, so no gradient has the size of W. B starts at zero, so the model
initially computes the same as before. Source: E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR
2022.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution, UsageError, missing_value, suggest, unknown_name, wrong_value
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import module_path
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import Shape, dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.options import AdaptationOptions, LoraSpec
from onnxgrad_cli.passes.dora import bias_apart, gains, squared_norms, store
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.passes.stored_integers import Uses, is_transpose, quantized_matrices
from onnxgrad_cli.record import ParameterRecord


def parse_lora(text: str) -> LoraSpec:
    """Parse RANK or RANK:ALPHA.

    Raises:
        UsageError: the text does not have this form.
    """
    rank, _, alpha = text.partition(":")
    try:
        return LoraSpec(int(rank), float(alpha) if alpha else None)
    except ValueError:
        raise wrong_value(
            f"`lora`: '{text}' is not of the form RANK[:ALPHA]", "write, for example, 8 or 8:16"
        ) from None


def adapters_asked(options: AdaptationOptions) -> bool:
    """Return True if adapters are requested.

    Raises:
        UsageError: options configure adapters, but `lora` is not set.
    """
    own = {"lora_target": (), "lora_scaling": "lora", "lora_dropout": 0.0, "lora_dora": False}
    told = next((name for name, usual in own.items() if getattr(options, name) != usual), "")
    if told and options.lora is None:
        raise missing_value(f"`{told}` requires adapters", "request adapters with `lora=RANK`")
    return options.lora is not None


class Reader(NamedTuple):
    """A product that reads a weight: its node, the position of the weight, and True if it is read transposed."""

    node: Node
    position: int
    transposed: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The node's attributes."""
        return attributes_of(self.node)

    @property
    def inputs_first(self) -> bool:
        """True if the product reads the weight with the axis of the inputs first, as W in x W."""
        return self.node.op_type == "MatMul" or (self.node.op_type == "Gemm" and not self.settings.get("transB", 0))

    @property
    def leads(self) -> bool:
        """True if the product sums over the first axis of the stored weight, False if over its second axis."""
        if self.node.op_type == "Conv":
            return False
        transposed = self.transposed != bool(self.settings.get("transB" if self.position else "transA", 0))
        return (self.position == 1) != transposed


def add_adapters(graph: Graph, options: AdaptationOptions, training: ParameterRecord) -> None:
    """With --lora: freeze the chosen weights, and add a low-rank adapter to every product that reads one of them."""
    spec = options.lora
    assert spec is not None
    targets = _targets(graph, spec, options, training)
    random = np.random.default_rng(options.seed or 0)
    op = Op(graph)
    before, after = dict[str, list[Node]](), dict[str, list[Node]]()
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    for name, weight in targets.items():
        adapter = _store(graph, name, weight, spec, options.lora_scaling, random)
        gain = None
        if weight.squares is not None:
            first = min(weight.readers, key=lambda reader: order[reader.node.name])
            adapter, before[first.node.name], gain = _with_magnitudes(op, adapter, first, weight)
        for reader in weight.readers:
            after[reader.node.name] = _add(op, adapter, reader, options.lora_dropout, gain)
        training.adapters.append(adapter)
        training.trained += adapter.names
        training.not_trained[name] = "frozen: its adapter is trained"
    graph.set_nodes([
        each for node in graph.nodes for each in (*before.get(node.name, ()), node, *after.get(node.name, ()))
    ])  # fmt: skip


# -- choosing the weights -------------------------------------------------------------------------------------------


def _targets(graph: Graph, spec: LoraSpec, options: AdaptationOptions, training: ParameterRecord) -> dict[str, _Weight]:
    """Return the weights that get an adapter, each with the products that read it."""
    found = _asked(graph, options, training)
    products = Counter(reader.node.name for weight in found.values() for reader in weight.readers)
    twice = {name for name, count in products.items() if count > 1}
    judged = graph.ancestors(training.predictions)
    reasons = {name: _obstacle(graph, name, weight, spec, training, twice, judged) for name, weight in found.items()}
    if options.lora_dora:
        found = {name: weight if reasons[name] else _measured(graph, weight) for name, weight in found.items()}
        reasons = {name: reasons[name] or _without_directions(weight) for name, weight in found.items()}
    barred = {name: why for name, why in reasons.items() if why}
    if (barred and options.lora_target) or len(barred) == len(found):
        option = "`lora_target`" if options.lora_target else "`lora`"
        what = "these weights can't" if barred else "no weight is left that can"
        raise UsageError(
            f"{option}: {what} have an adapter of rank {spec.rank}",
            "name other weights with `lora_target`, choose a smaller rank, or train these weights fully with `train`",
            [f"{name}: {why}" for name, why in list(barred.items())[:20]],
            code="wrong_value",
        )
    training.not_trained.update((name, f"frozen, without an adapter: {why}") for name, why in barred.items())
    training.cautions.extend(Caution("note", name, f"'{name}' gets no adapter: {why}") for name, why in barred.items())
    return {name: weight for name, weight in found.items() if name not in barred}


def _asked(graph: Graph, options: AdaptationOptions, training: ParameterRecord) -> dict[str, _Weight]:
    """Return the weights that should get an adapter: those that `lora_target` selects, or the matrices of products.

    Without `lora_target`, these are the matrices of MatMul and Gemm that would be trained, and all that are stored as
    integers. Some of them can't have an adapter; `_obstacle` finds these.
    """
    uses = graph.uses()
    quantized = {name: _weight(graph, uses, values) for name, values in quantized_matrices(graph).items()}
    stored = graph.initializers.items()
    floats = [n for n, t in stored if len(t.dims) > 1 and is_float(graph.types[n]) and not graph.added(n)]
    every = {name: _weight(graph, uses, [name]) for name in floats} | quantized
    flat = {name for name in training.adaptable if name in every and len(every[name].dims) == 2}
    linear = {name for name in flat | quantized.keys() if every[name].products & {"MatMul", "Gemm"}}
    chosen, frozen = linear, set[str]()
    if options.lora_target:
        chosen = set().union(*(_named(pattern, every, linear) for pattern in options.lora_target))
        frozen = {*matching(options.freeze, list(graph.initializers), "`freeze`", "float weights"), *training.trained}
        training.not_trained.update(dict.fromkeys(quantized.keys() - chosen, "frozen: not named by `lora_target`"))
    return {name: weight for name, weight in every.items() if name in chosen and name not in frozen}


ALL = "all-linear"
"""The value of `lora_target` that selects all matrices of MatMul and Gemm."""

MODULES = {
    "attention": re.compile(r"(self_?)?attn|.*attention.*|[qkvo]_proj|(in|out|qkv)_proj|query|key|value|qkv|c_attn"),
    "mlp": re.compile(r"mlp|ffn?|feed_?forward|(gate|up|down)_proj|fc\d*|intermediate|c_fc"),
}
"""Map from a value of `lora_target` to a pattern for the names of the modules whose weights it selects."""


def _named(pattern: str, every: Mapping[str, _Weight], linear: set[str]) -> set[str]:
    """Return the weights that a pattern of `lora_target` selects.

    A pattern is the name of a weight, the path of a module that reads it, the end of such a path, a glob for one of
    these, a key of `MODULES`, or `ALL`.

    Raises:
        UsageError: the pattern matches no weight.
    """
    names = {name: [name, *weight.modules] for name, weight in every.items()}
    if pattern == ALL:
        found = linear
    elif pattern in MODULES:
        parts = {name: re.split("[./]", ".".join(names[name])) for name in linear}
        found = {name for name in linear if any(map(MODULES[pattern].fullmatch, parts[name]))}
    else:
        ends = (pattern, f"*.{pattern}")
        found = {n for n, own in names.items() if pattern in own or any(fnmatchcase(o, e) for o in own for e in ends)}
    if not found:
        known = [*itertools.chain(*names.values()), *(name for name in (*MODULES, ALL) if name != pattern)]
        raise unknown_name(
            f"`lora_target`: '{pattern}' matches no matrix weight",
            suggest(pattern, known, "matrix weights"),
        )
    return found


class _Weight(NamedTuple):
    """A weight that may get an adapter, with the names of its views that are matrices too, and all readers.

    For a weight that is stored as integers, shape and type are those of the dequantized matrix. With DoRA, `squares`
    holds the squared norm of each output's weights, or None if the values are not available.
    """

    dims: Shape
    dtype: int
    names: list[str]
    readers: list[Reader]
    squares: np.ndarray | None = None

    @property
    def products(self) -> set[str]:
        """The operators of the nodes that read the weight."""
        return {reader.node.op_type for reader in self.readers}

    @property
    def modules(self) -> list[str]:
        """The dotted path of the innermost module of each node that reads the weight."""
        return [path for reader in self.readers if (path := module_path(reader.node))]


def _weight(graph: Graph, uses: Uses, values: Sequence[str]) -> _Weight:
    """Return the weight whose float values are `values`: several if it is dequantized for each reader separately."""
    value_type = graph.types[values[0]]
    views = [view for value in values for view in views_of(uses, value)]
    same = all(shape_of(graph.types[value]) == shape_of(value_type) for value in values)
    readers = [reader for _, own in views for reader in own]
    return _Weight((same and shape_of(value_type)) or (), dtype_of(value_type), [name for name, _ in views], readers)


def views_of(uses: Uses, name: str, transposed: bool = False) -> Iterator[tuple[str, list[Reader]]]:
    """Yield (name, readers) for a matrix, and then for each view that equals the matrix or its transpose.

    Args:
        uses: the readers of each value.
        name: the matrix.
        transposed: True if `name` is itself the transpose of a weight.
    """
    readers, views = list[Reader](), list[Node]()
    for node, position in uses.get(name, ()):
        if is_transpose(node) or node.op_type == "Identity":
            views.append(node)
        else:
            readers.append(Reader(node, position, transposed))
    yield name, readers
    for node in views:
        yield from views_of(uses, node.output[0], transposed != is_transpose(node))


def _obstacle(
    graph: Graph, name: str, weight: _Weight, spec: LoraSpec, training: ParameterRecord, twice: Collection[str],
    judged: set[str],
) -> str:  # fmt: skip
    """Return the reason why a weight can't have an adapter, or "" if it can.

    `twice` has the names of the products both of whose operands would have an adapter. `judged` has the values that the
    loss depends on.
    """
    if is_float(graph.types[name]) and name not in training.adaptable:
        return training.not_trained[name]
    dims = [dim for dim in weight.dims if isinstance(dim, int)]
    if len(dims) < max(len(weight.dims), 2) or set(dims[2:]) - {1}:
        return f"it is not a matrix, but has the shape {list(weight.dims)}"
    if judged.isdisjoint(output for reader in weight.readers for output in reader.node.output):
        return "the loss doesn't depend on it"
    if spec.rank >= min(dims[:2]):
        return f"the rank must be less than the smaller side of the matrix, {min(dims[:2])}"
    if not set(graph.output_names).isdisjoint(weight.names):
        return "it is an output of the model"
    for reader in weight.readers:
        label = f"'{reader.node.name}' ({reader.node.op_type})"
        if reader.node.name in twice:
            return f"{label} multiplies it by itself or by another weight that would get an adapter"
        if why := _unlike_a_product(graph, reader, len(dims)):
            return f"{label} {why}"
    return ""


def _measured(graph: Graph, weight: _Weight) -> _Weight:
    reader = weight.readers[0]
    return weight._replace(squares=squared_norms(graph, reader.node.input[reader.position], reader.inputs_first))


def _without_directions(weight: _Weight) -> str:
    """Return the reason why DoRA can't train the directions of a matrix, or "" if it can."""
    if weight.squares is None:
        return "the values that it is computed from are unknown"
    if not np.isfinite(weight.squares).all():
        return "some of its values are not finite"
    if not weight.squares.all():
        return f"all weights of its output {int(weight.squares.argmin())} are zero, so they have no direction"
    for reader in weight.readers:
        if reader.position == 0:
            return f"'{reader.node.name}' ({reader.node.op_type}) multiplies by it from the left"
    return "it is also read transposed" if len({reader.leads for reader in weight.readers}) > 1 else ""


PRODUCTS = frozenset({("MatMul", 0), ("MatMul", 1), ("Gemm", 0), ("Gemm", 1), ("Conv", 1)})
"""Operators and input positions, as (operator, position), at which a weight can have an adapter."""


def _unlike_a_product(graph: Graph, reader: Reader, rank: int) -> str:
    node, position = reader.node, reader.position
    if position < 0:
        return "reads it inside a subgraph"
    if not is_standard(node.domain) or (node.op_type, position) not in PRODUCTS:
        return "does not use it as a matrix in a product"
    if (rank == 2) == (node.op_type == "Conv") or reader.settings.get("group", 1) != 1:
        return "does not use it as one matrix"
    other = node.input[1 - position]
    return "" if other in graph.types else f"multiplies it by '{other}', whose type is unknown"


# -- writing the adapters -------------------------------------------------------------------------------------------


def _store(
    graph: Graph, name: str, weight: _Weight, spec: LoraSpec, scaling: str, random: np.random.Generator
) -> Adapter:
    """Store the LoRA matrices of an adapter as initializers: A is random, as in nn.Linear and PEFT, and B is zero."""
    first, last, *ones = (int(dim) for dim in weight.dims)
    leads = weight.readers[0].leads
    dtype = helper.tensor_dtype_to_np_dtype(weight.dtype)
    fan_in = first if leads else last
    shapes = [(first, spec.rank, *ones), (spec.rank, last, *ones)]
    a, b = shapes if leads else shapes[::-1]
    bound = 1 / math.sqrt(fan_in)  # Kaiming's uniform bound, sqrt(6 / ((1 + 5) fan in)), for a slope of sqrt(5)
    names = graph.fresh(f"{name}_lora_A"), graph.fresh(f"{name}_lora_B")
    graph.add_initializer(names[0], random.uniform(-bound, bound, a).astype(dtype))
    graph.add_initializer(names[1], np.zeros(b, dtype))
    return Adapter(name, *names, spec.rank, spec.rank if spec.alpha is None else spec.alpha, scaling)


def _with_magnitudes(op: Op, adapter: Adapter, reader: Reader, weight: _Weight) -> tuple[Adapter, list[Node], Val]:
    """Return the adapter with DoRA's magnitudes, the nodes before the first product, and the gain of each output."""
    assert weight.squares is not None
    dtype = helper.tensor_dtype_to_np_dtype(weight.dtype)
    magnitude, known = store(op.graph, adapter.weight, weight.squares, dtype)
    adapter = replace(adapter, magnitude=magnitude)
    op.scope, op.nodes = f"{reader.node.name}/magnitude", []
    left, right = _sides(op, adapter, reader)
    if left.rank > 2:
        left, right = (op.Reshape(each, op.ints([0, -1]), shape=each.shape[:2]) for each in (left, right))
    first, last = (op.transpose(left, [1, 0]), right) if reader.inputs_first else (right, op.transpose(left, [1, 0]))
    gain = gains(op, adapter, known, op.val(reader.node.input[1]), first, last, reader.inputs_first)
    return adapter, op.nodes, gain


def _sides(op: Op, adapter: Adapter, reader: Reader) -> tuple[Val, Val]:
    """Return the LoRA matrices (left, right) whose product has the shape in which `reader` reads the weight."""
    a, b = op.val(adapter.a), op.val(adapter.b)
    left, right = (a, b) if a.shape[1] == adapter.rank else (b, a)
    if reader.transposed:
        return op.transpose(right, [1, 0]), op.transpose(left, [1, 0])
    return left, right


def _add(op: Op, adapter: Adapter, reader: Reader, dropout: float, gain: Val | None) -> list[Node]:
    """Return nodes to insert after a product; they add the result of the adapter to the product's result."""
    graph, node = op.graph, reader.node
    op.scope = f"{node.name}/adapter"
    op.nodes = []
    result, base = node.output[0], graph.fresh(f"{node.output[0]}_base")
    node.output[0] = base
    graph.types[base] = graph.types[result]
    if result in graph.declared_shapes:
        graph.declared_shapes.add(base)
    x = op.val(node.input[1 - reader.position])
    if dropout:
        x, _ = op.Dropout(x, op.const(dropout, x), op.const(True), outputs=2)  # the gradient needs the mask
    bias, beta = bias_apart(node) if gain is not None else ("", 1.0)
    y = _THROUGH[node.op_type](op, reader, x, *_sides(op, adapter, reader), op.val(base), adapter.scale)
    if gain is not None:
        y = _lengthened(op, y, gain, bias, beta, x.rank - 2 if node.op_type == "Conv" else 0)
    op.rename(y, result)
    graph.types[result] = graph.types[base]
    return op.nodes


def _matmul(op: Op, reader: Reader, x: Val, left: Val, right: Val, base: Val, scale: float) -> Val:
    if reader.position == 1:
        return base + _scaled(x @ left, scale) @ right
    return base + left @ _scaled(right @ x, scale)


def _gemm(op: Op, reader: Reader, x: Val, left: Val, right: Val, base: Val, scale: float) -> Val:
    own = reader.settings
    alpha, turn_a, turn_b = own.get("alpha", 1.0) * scale, own.get("transA") or None, own.get("transB") or None
    if x.dtype == TensorProto.DOUBLE and float(np.float32(alpha)) != alpha:  # the attribute is float32
        alpha, left = own.get("alpha", 1.0), _scaled(left, scale)
    if reader.position == 1:
        first, last = (right, left) if turn_b else (left, right)
        thin = op.Gemm(x, first, alpha=alpha, transA=turn_a, transB=turn_b)
        return op.Gemm(thin, last, base, transB=turn_b)
    first, last = (left, right) if turn_a else (right, left)
    thin = op.Gemm(first, x, alpha=alpha, transA=turn_a, transB=turn_b)
    return op.Gemm(last, thin, base, transA=turn_a)


def _conv(op: Op, reader: Reader, x: Val, left: Val, right: Val, base: Val, scale: float) -> Val:
    return base + op.Conv(_scaled(op.Conv(x, right, **reader.settings), scale), left)


def _lengthened(op: Op, y: Val, gain: Val, bias: str, beta: float, spatial: int) -> Val:
    """Multiply outputs by their gains, then add the bias times `beta`. `spatial` axes follow the channel axis."""
    axes = range(1, 1 + spatial)
    y = y * op.unsqueeze(gain, axes)
    return y + _scaled(op.unsqueeze(op.val(bias), axes), beta) if bias else y


def _scaled(thin: Val, scale: float) -> Val:
    return thin if scale == 1 else thin * scale


_THROUGH = {"MatMul": _matmul, "Gemm": _gemm, "Conv": _conv}
