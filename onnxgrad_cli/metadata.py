"""What a training model says of itself: the schema of its metadata, written into the model and read from it.

Whoever holds a training model alone (`onnxgrad check`, a training loop, a reader in Netron) needs to know which
output is the gradient of which weight. Names are a convention and may be taken; the model's metadata say it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

import onnxgrad_cli
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.choices import Mode, Scaling
from onnxgrad_cli.common.typed_json import decoded
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import FLOATS, is_external, is_float

T = TypeVar("T")


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: a weight W acts as W plus alpha / rank times the product of two thin factors.

    Attributes:
        weight: the initializer that it adds to, which is frozen.
        a: the factor that meets the input. For W of [in, out], A is [in, rank], B is [rank, out], and the product A B;
            for W of [out, in], as of Gemm(transB=1) or Conv, A is [rank, in], B is [out, rank], and the product B A.
        b: the other factor, which begins at zero.
        rank, alpha: as asked for.
        scaling: 'lora' divides alpha by the rank, 'rslora' by its square root, with which gradients keep their size
            whatever the rank (D. Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023).
        magnitude: with DoRA the lengths that the weights of each output are brought to, after the sum; else "".
    """

    weight: str
    a: str
    b: str
    rank: int
    alpha: float
    scaling: str = "lora"
    magnitude: str = ""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.scaling not in get_args(Scaling):
            raise ValueError(f"an adapter of rank {self.rank} and scaling '{self.scaling}' is none")

    @property
    def names(self) -> tuple[str, ...]:
        """All that is trained of it: both factors, and magnitudes if it has some."""
        return (self.a, self.b, self.magnitude) if self.magnitude else (self.a, self.b)

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


@dataclass(frozen=True)
class IntegerWeight:
    """A weight that is float in a training model, quantized as it is read, and that its inference model stores.

    Attributes:
        weight: the float weight.
        tensor: the inference model's tensor, of integers.
        scale, zero_point: those tensors of the inference model; "" for one that it has not.
        axis, block_size: as DequantizeLinear has them.
        factors: of a bias the scales, of data and of weight, whose product is its scale: a kernel of integers adds it
            to their products as it is. () where its scale is its own.
        times: what that product is multiplied with besides.
    """

    weight: str
    tensor: str
    scale: str
    zero_point: str = ""
    axis: int = 1
    block_size: int = 0
    factors: tuple[str, ...] = ()
    times: float = 1.0


@dataclass(frozen=True)
class Quantized:
    """Tensors of the inference model that the training model stores otherwise: integers, and copies of others.

    Attributes:
        weights: the weights that are floats.
        scales: the scales that are learned, or would be if they were not left out by name.
        copies: scales and weights of the inference model -> the one of the same values that has taken their place.
        transposed: those of `copies` that hold the values transposed.
    """

    weights: tuple[IntegerWeight, ...] = ()
    scales: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A state of the optimizer, which holds one number throughout before the first step.

    Attributes:
        of: the weight that it belongs to; "" for one of the whole.
        kind: what it is there: 'm', 'acc', 'ema', ...; for one of the whole 'step', 'loss_scale', ...
        dtype: the element type, as numpy calls it.
        shape: the sizes.
        initial: the number.
    """

    of: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    initial: float


@dataclass(frozen=True)
class StepGroup:
    """A parameter group of the optimizer.

    Attributes:
        weights: the names of its weights.
        options: the options that it replaces; `lr` is a factor of the learning rate. True is 1.
    """

    weights: tuple[str, ...]
    options: dict[str, float]


@dataclass(frozen=True)
class StepSettings:
    """The settings of the optimizer's step, from which a reference can repeat it.

    Attributes:
        options: the optimizer's options, defaults included. True is 1.
        groups: parameter groups; the later one counts.
        clip_norm, clip_value: bounds of the gradients; None: no bound.
        accumulate: the number of runs in a step.
        ema: the decay of the moving average of the weights; None: there is none.
    """

    options: dict[str, float]
    groups: tuple[StepGroup, ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    ema: float | None = None

    def of(self, weight: str) -> dict[str, float]:
        """Return the options for one weight."""
        found = dict(self.options)
        for group in self.groups:
            if weight in group.weights:
                found |= group.options
        return found


VERSION, LOSS, ROLES, DERIVED = "onnxgrad.version", "onnxgrad.loss", "onnxgrad.roles", "onnxgrad.derivative"
TENSORS = "onnxgrad.tensors"
"""The keys in the model's metadata_props."""


PORTS = {
    **{
        name: name
        for name in ("inputs", "outputs", "estimated", "partial", "optimizer", "step", "adapters", "quantized", "held")
    },
    "slots": "state",
}
"""The fields of `Roles` that the entry `ROLES` holds -> what they are called there."""

STORED = frozenset({"weight", "state", "constant"})
"""The roles of inputs that have a value before the first step: a stored one, or for state the one that is described."""

INPUTS = STORED | {"model input", "label", "sample weight", "learning rate", "loss gradient"}
OUTPUTS = frozenset({"loss", "gradient", "next state", "kept output"})
"""The roles of what a training model reads and makes."""

CHANGED = "it was changed after it was built: build it again"
"""The hint where a model and its description do not agree."""

AVERAGE = "ema"
"""The kind of a state that holds the average of a weight."""


@dataclass(frozen=True)
class Role:
    """What an output is: 'loss', 'gradient' or 'next state' `of` an input or weight, or 'kept output'."""

    role: str
    of: str = ""


@dataclass(frozen=True)
class Term:
    """One loss: its name or file name, the output it judges, the label input ("" for none), its weight.

    `classes` is how many there are, where the label is a class number; else 0. `ignore_index` is the label of samples
    that do not count; None where there is none, or a version of the tool that did not write it has made the model.
    `class_axis` is the axis of the output that runs over the classes, where the label is a class number. `chunks` are
    the values that hold the output by chunks of its tokens, where the model does not make it as a whole.
    """

    name: str
    output: str
    label: str
    weight: float
    classes: int = 0
    ignore_index: int | None = None
    class_axis: int = 1
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roles:
    """What a training model says of itself.

    Attributes:
        version: of the tool that made it.
        losses: the terms of its loss.
        reduction: 'mean' or 'sum'.
        inputs: input -> 'model input', 'label', 'sample weight', 'learning rate', 'weight' (trained), 'state',
            'loss gradient' or 'constant' (one that can be overridden but isn't trained), in order; an optimizer alone
            has each 'gradient' too, by the name under which the gradient model gives it.
        outputs: output -> its role, in order.
        estimated: whether gradients are straight-through estimates, which no difference of the loss agrees with.
        partial: inputs and weights whose gradient leaves out paths at which `stop_gradient` stops it.
        optimizer: the name of the optimizer whose step is part of the model; "" where there is none.
        step: the settings of that step; None where the optimizer is not one of onnxgrad's own, or an earlier version
            made the model.
        adapters: the low-rank adapters in the model, whose factors are weights.
        slots: what of the state is the optimizer's, and how it begins; the rest are running statistics, which begin as
            they are stored.
        quantized: what of the inference model's integers are floats.
        held: values that count as constants in the gradients, though they depend on weights: norms of DoRA.
    """

    version: str
    losses: tuple[Term, ...]
    reduction: str
    inputs: dict[str, str]
    outputs: dict[str, Role]
    estimated: bool = False
    partial: tuple[str, ...] = ()
    optimizer: str = ""
    adapters: tuple[Adapter, ...] = ()
    slots: dict[str, Slot] = field(default_factory=dict)
    quantized: Quantized = field(default_factory=Quantized)
    held: tuple[str, ...] = ()
    step: StepSettings | None = None

    @property
    def loss(self) -> str:
        """The output that holds the loss."""
        return next(name for name, role in self.outputs.items() if role.role == "loss")

    @property
    def successors(self) -> dict[str, str]:
        """Weight or state -> the output that replaces it at the next step."""
        return {role.of: name for name, role in self.outputs.items() if role.role == "next state"}

    @property
    def gradients(self) -> dict[str, str]:
        """Weight or input -> the output that holds its gradient."""
        return {role.of: name for name, role in self.outputs.items() if role.role == "gradient"}

    @property
    def fed(self) -> list[str]:
        """The inputs that are new at each step: data, labels, the learning rate."""
        return [name for name, role in self.inputs.items() if role not in STORED]

    @property
    def sampled(self) -> list[str]:
        """Of what is `fed`, what data hold: all but the learning rate."""
        return [name for name in self.fed if self.inputs[name] != "learning rate"]

    @property
    def averages(self) -> dict[str, str]:
        """Weight -> the state that holds its exponential moving average, where such are kept."""
        return {slot.of: name for name, slot in self.slots.items() if slot.kind == AVERAGE}

    def begun(self, stored: Collection[str]) -> dict[str, np.ndarray]:
        """What the optimizer's state holds before the first step, of what is not in `stored`.

        The arrays can't be written, and take no memory: each is one number, seen in a shape.
        """
        return {
            name: np.broadcast_to(np.array(slot.initial, slot.dtype), slot.shape)
            for name, slot in self.slots.items()
            if name not in stored
        }


@dataclass(frozen=True)
class Derived:
    """What a model of derivatives says of itself.

    Attributes:
        kind: 'vjp', 'jvp', 'hvp', 'jacobian' or 'hessian'.
        of, wrt: the outputs that are differentiated, and the inputs and weights with respect to which.
        inputs: the inputs that were added: for vjp one for each of `of`, or none where the cotangents are ones; for jvp
            and hvp one for each of `wrt`.
        outputs: the derivatives: for vjp and hvp one for each of `wrt`, for jvp for each of `of`; for jacobian one for
            each pair of both, and for hessian for each pair of two of `wrt`, the first varying slowest.
        mode: 'keep' or 'train', what became of operators that behave otherwise in training.
        estimated, partial: see `Roles`.
        inner: those of `wrt` that are values in between; a derivative by one is that by something added to it.
        pick: of the scores of classes that `of` are, the one that is differentiated: a number, 'argmax', 'label', or
            "" for all; they lie along `class_axis`.
        label: the input that says which class, for 'label'.
        per_sample: those of `wrt` of which each sample, along axis 0, has derivatives of its own alone; None where
            derivatives are those of the whole batch.
    """

    kind: str
    of: tuple[str, ...]
    wrt: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mode: str
    estimated: bool = False
    partial: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    pick: str = ""
    class_axis: int = 1
    label: str = ""
    per_sample: tuple[str, ...] | None = None

    def added(self, names: Mapping[str, str] = MappingProxyType({})) -> dict[tuple[str, ...], str]:
        """What each added input belongs to -> the input; `names` are other names for what that is."""
        by = self.of if self.kind == "vjp" else self.wrt
        return {(names.get(x, x),): name for x, name in zip(by, self.inputs, strict=False)}

    def results(self, names: Mapping[str, str] = MappingProxyType({})) -> dict[tuple[str, ...], str]:
        """What each derivative is of, or by, or both -> the output that it is."""
        wrt = [names.get(x, x) for x in self.wrt]
        keys: Mapping[str, Iterable[tuple[str, ...]]] = {
            "jvp": product(self.of), "jacobian": product(self.of, wrt), "hessian": product(wrt, wrt)
        }  # fmt: skip
        return dict(zip(keys.get(self.kind, product(wrt)), self.outputs, strict=True))


@dataclass(frozen=True)
class ModelTensors:
    """The float tensors that a model had before onnxgrad added derivatives to it.

    Other tools fold, merge and rename tensors. The record shows what they changed: a folded `Transpose(W)` would keep
    its value while W is trained.

    Attributes:
        names: the tensors, in initializers and Constant nodes.
        literals: those that were Constant nodes in the original model.
        equal: tensors that are equal to a generated constant -> the constant. A tool may merge the two.
        computed: float values that nodes compute of shapes, integers and generated constants alone. A tool may store
            them as initializers; they are no parameters.
    """

    names: tuple[str, ...]
    literals: tuple[str, ...] = ()
    equal: dict[str, str] = field(default_factory=dict)
    computed: tuple[str, ...] = ()


def write_tensors(model: ModelProto, graph: Graph) -> None:
    """Record a model's own float tensors in its metadata; an earlier record is narrowed to those that remain.

    Args:
        model: the model with the derivatives added; external data are not read.
        graph: the graph that it was made of, which knows types, provenance and generated constants.
    """
    stored = {tensor.name: tensor for tensor in stored_floats(model)}
    before = read_tensors(model)
    names = [name for name in stored if not graph.added(name) and (before is None or name in before.names)]
    inline = {name: tensor for name, tensor in stored.items() if not is_external(tensor)}
    constants = {_contents(tensor): name for name, tensor in inline.items() if graph.added(name)}
    sizes = {key[:2] for key in constants}
    alike = [n for n in names if n in inline and (inline[n].data_type, tuple(inline[n].dims)) in sizes]
    equal = {name: constants[key] for name in alike if (key := _contents(inline[name])) in constants}
    literals = [name for name in names if name in graph.provenance.literals]
    found = ModelTensors(tuple(names), tuple(literals), equal, tuple(_computed_of_constants(graph, stored)))
    for old in [entry for entry in model.metadata_props if entry.key == TENSORS]:
        model.metadata_props.remove(old)
    model.metadata_props.add(key=TENSORS, value=json.dumps(asdict(found)))


def read_tensors(model: ModelProto) -> ModelTensors | None:
    """Return the record of a model's own float tensors, or None if it has none.

    Raises:
        OnnxgradError: the record can't be read.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == TENSORS), None)
    try:
        return None if text is None else decoded(ModelTensors, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise OnnxgradError(f"the model's entry '{TENSORS}' can't be read: {error}", "derive it again") from error


def has_derivatives(model: ModelProto) -> bool:
    """Return True if onnxgrad added derivatives to the model: its mode must stay the one they were written for."""
    return any(entry.key == TENSORS for entry in model.metadata_props)


def stored_floats(model: ModelProto) -> Iterator[TensorProto]:
    """The float tensors of a graph, in initializers and Constant nodes, under the names of their values."""
    yield from (tensor for tensor in model.graph.initializer if tensor.data_type in FLOATS)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and attribute.t.data_type in FLOATS:
                tensor = TensorProto()
                tensor.CopyFrom(attribute.t)
                tensor.name = node.output[0]
                yield tensor


def _computed_of_constants(graph: Graph, floats: Collection[str]) -> Iterator[str]:
    """The float values that are computed of shapes and of constants that are no float tensors of the model itself."""
    model = graph.proto.graph
    constant = {tensor.name for tensor in model.initializer if tensor.name not in floats}
    constant.update(filter(graph.added, floats))
    yield from (name for name in floats if name in graph.computed)
    for node in model.node:
        if node.op_type == "Constant":
            constant.update(name for name in node.output if name not in floats)
        elif node.op_type in ("Shape", "Size") or (node.input and constant.issuperset(filter(None, reads(node)))):
            constant.update(node.output)
            yield from (name for name in node.output if is_float(graph.types.get(name)))


def _contents(tensor: TensorProto) -> tuple[int, tuple[int, ...], bytes]:
    """The element type, the sizes and the bytes of a tensor."""
    return tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes()


def write_derived(model: ModelProto, found: Derived) -> None:
    """Write what a model of derivatives is into its metadata."""
    _rewrite(model, {DERIVED: json.dumps(asdict(found)), VERSION: tool_version()})


def read_derived(model: ModelProto) -> Derived | None:
    """What a model of derivatives says of itself; None where a model is none.

    Raises:
        OnnxgradError: the description can't be read, or the model no longer is what it describes.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == DERIVED), None)
    if text is None:
        return None
    if any(entry.key == ROLES for entry in model.metadata_props):
        raise OnnxgradError("the model describes itself as a training model and as one of derivatives", CHANGED)
    try:
        found: Derived = decoded(Derived, strict_json.loads(text))
        stored = {tensor.name for tensor in model.graph.initializer}
        _check_derived(found, stored.union(value.name for value in model.graph.input))
    except (ValueError, RecursionError) as error:
        raise OnnxgradError(f"the model's entry '{DERIVED}' can't be read: {error}", "derive it again") from error
    _compare("input", (*found.inputs, *filter(None, [found.label])), model.graph.input)
    _compare("output", found.outputs, model.graph.output)
    return found


def _check_derived(found: Derived, known: Collection[str]) -> None:
    """Make sure that a description of derivatives agrees with itself, and speaks of inputs and weights that there are.

    Raises:
        ValueError: it does not.
    """
    wrt, pairs = len(found.wrt), {"jacobian": len(found.of) * len(found.wrt), "hessian": len(found.wrt) ** 2}
    outputs = {"vjp": wrt, "hvp": wrt, "jvp": len(found.of), **pairs}
    inputs = {"vjp": (0, len(found.of)), "jvp": (wrt,), "hvp": (wrt,), "jacobian": (0,), "hessian": (0,)}
    if found.kind not in outputs or found.mode not in get_args(Mode):
        raise ValueError(f"there are no derivatives of kind '{found.kind}' and mode '{found.mode}'")
    if len(found.outputs) != outputs[found.kind] or len(found.inputs) not in inputs[found.kind]:
        raise ValueError(f"a {found.kind} of so many has other inputs or outputs")
    strange = next((name for name in found.wrt if name not in known and name not in found.inner), None)
    if strange is not None:
        raise ValueError(f"there is no input or weight '{strange}'")
    for names in (found.of, found.wrt, found.inputs, found.outputs):
        if (twice := _twice(names)) is not None:
            raise ValueError(f"'{twice}' stands there twice")
    words = ("", "argmax", *(["label"] if found.label else []))
    if found.pick not in words and number_in(found.pick) is None:
        raise ValueError(f"there is no class '{found.pick}'")


def _twice(each: Iterable[T]) -> T | None:
    """What is there more than once: of two outputs that are said to be the same, one could pass for both."""
    return next((one for one, count in Counter(each).items() if count > 1), None)


def tool_version() -> str:
    """The version of onnxgrad that runs."""
    return onnxgrad_cli.__version__


def write(model: ModelProto, found: Roles) -> None:
    """Write a description into a model's metadata, in place of the one it has."""
    terms = {"terms": [_said(term) for term in found.losses], "reduction": found.reduction}
    ports: dict[str, Any] = {
        "inputs": found.inputs, "outputs": {name: vars(role) for name, role in found.outputs.items()}
    }  # fmt: skip
    if found.estimated:
        ports["estimated"] = True
    if found.partial:
        ports["partial"] = found.partial
    if found.optimizer:
        ports["optimizer"] = found.optimizer
    if found.step is not None:
        ports["step"] = asdict(found.step)
    if found.adapters:
        ports["adapters"] = [asdict(adapter) for adapter in found.adapters]
    if found.slots:
        ports["state"] = {name: asdict(slot) for name, slot in found.slots.items()}
    if found.quantized != Quantized():
        ports["quantized"] = asdict(found.quantized)
    if found.held:
        ports["held"] = found.held
    _rewrite(model, {LOSS: json.dumps(terms), ROLES: json.dumps(ports), VERSION: found.version})


def _said(term: Term) -> dict[str, Any]:
    return {name: value for name, value in asdict(term).items() if name != "chunks" or value}


def _rewrite(model: ModelProto, said: Mapping[str, str]) -> None:
    """Write what a model says of itself in place of all that it has said; the version comes last, for `is_ours`."""
    props = model.metadata_props
    for old in [entry for entry in props if entry.key in (VERSION, LOSS, ROLES, DERIVED)]:
        props.remove(old)
    for key, value in said.items():
        props.add(key=key, value=value)


def describe(model: ModelProto) -> Roles:
    """What a training model says of itself.

    Raises:
        UsageError: the model carries no description: onnxgrad did not make it, or another tool dropped it.
        OnnxgradError: the description can't be read, or the model no longer is what it describes.
    """
    found = read(model)
    if not any(role.role == "loss" for role in found.outputs.values()):
        raise UsageError(
            "the model is no training model made by onnxgrad: its description names no loss",
            "an initialization has none, nor has a step of another tool; make one with `onnxgrad build MODEL`",
        )
    _check_known("input", found.inputs, INPUTS)
    _check_known("output", {name: role.role for name, role in found.outputs.items()}, OUTPUTS)
    return found


def check_is_original(model: ModelProto) -> None:
    """Make sure that a model is none that a loss and gradients were added to.

    Raises:
        UsageError: it is a training model.
    """
    if any(entry.key == ROLES for entry in model.metadata_props):
        raise UsageError(
            "the model is a training model already, which `onnxgrad build` has made",
            "give the model that it was made from; `Trainer` in Python, `onnxgrad pack` and onnxruntime run this one",
        )


def read(model: ModelProto) -> Roles:
    """What any part of a training says of itself, an optimizer's step alone too; see `describe`."""
    props = {entry.key: entry.value for entry in model.metadata_props}
    if ROLES not in props and model.training_info:
        raise UsageError(
            "the model is no training model: it describes its training in its training information",
            "`onnxgrad expand MODEL` writes that as models of their own; take the one called step0",
        )
    if ROLES not in props:
        raise UsageError(
            f"the model is no training model made by onnxgrad: its metadata have no entry '{ROLES}'",
            "make one with `onnxgrad build MODEL`; if this was one, another tool has dropped its metadata",
        )
    try:
        ports, loss = (
            strict_json.loads(props[ROLES]),
            strict_json.loads(props.get(LOSS, '{"terms": [], "reduction": ""}')),
        )
        said = {field: ports[name] for field, name in PORTS.items() if name in ports}
        found: Roles = decoded(
            Roles,
            {**said, "version": props.get(VERSION, "unknown"), "losses": loss["terms"], "reduction": loss["reduction"]},
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OnnxgradError(f"the model's entry '{ROLES}' can't be read: {error}", "build it again") from error
    _fits(found, model)
    return found


def _fits(found: Roles, model: ModelProto) -> None:
    _compare("input", found.inputs, model.graph.input)
    _compare("output", found.outputs, model.graph.output)
    of = [role.of for role in found.outputs.values() if role.role in ("gradient", "next state")]
    gone = next((name for name in (*of, *found.slots) if name not in found.inputs), None)
    if gone is not None:
        raise OnnxgradError(f"the model's description says no input '{gone}', of which it speaks", "build it again")
    _check_all_described("input", found.inputs, model.graph.input)
    _check_all_described("output", found.outputs, model.graph.output)
    for value in model.graph.output:
        role = found.outputs[value.name].role
        if role in ("loss", "gradient") and not is_float(value.type):
            raise OnnxgradError(f"'{value.name}' is no tensor of floats, and is described as {role}", "build it again")
    said = [(role.role, role.of * (role.role != "loss")) for role in found.outputs.values()]
    if (twice := _twice(each for each in said if each[0] != "kept output")) is not None:
        what = f"the {twice[0]} of '{twice[1]}'" if twice[1] else f"the {twice[0]}"
        raise OnnxgradError(f"two of the model's outputs are described as {what}", CHANGED)
    made = {name for node in model.graph.node for name in node.output}
    never = next((name for name in found.held if name not in made), None)
    if never is not None:
        raise OnnxgradError(f"the model's description holds '{never}', which no node makes", "build it again")


def _check_known(kind: str, roles: Mapping[str, str], known: Collection[str]) -> None:
    """Make sure that values have roles that there are: of another no check would speak."""
    strange = next((name for name, role in roles.items() if role not in known), None)
    if strange is not None:
        raise OnnxgradError(f"the model's description calls the {kind} '{strange}' a '{roles[strange]}'", CHANGED)


def _compare(kind: str, described: Iterable[str], values: Iterable[ValueInfoProto]) -> None:
    """Make sure that the values that a description names are there."""
    there = {value.name for value in values}
    gone = [name for name in described if name not in there]
    if gone:
        raise OnnxgradError(
            f"the model's description names the {kind} '{gone[0]}', which it does not have",
            CHANGED,
        )


def _check_all_described(kind: str, described: Collection[str], values: Iterable[ValueInfoProto]) -> None:
    """Make sure that values are described: of what is not, nobody knows what it is for, and no proof speaks of it."""
    strange = next((value.name for value in values if value.name not in described), None)
    if strange is not None:
        raise OnnxgradError(f"the model's description says nothing of its {kind} '{strange}'", CHANGED)


def started(model: ModelProto, roles: Roles) -> ModelProto:
    """A training model whose state is stored: the model itself, or else a copy, where state is described alone."""
    values = roles.begun([tensor.name for tensor in model.graph.initializer])
    if not values:
        return model
    copy = copied(model)
    copy.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return copy
