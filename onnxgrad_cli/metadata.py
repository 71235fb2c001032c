"""The schema of the metadata in a training model, and the functions that write and read it.

A tool or person that has only the training model (`onnxgrad check`, a training loop, a user of Netron) must find out
which output is the gradient of which weight. The names of outputs don't suffice: they follow a convention, but may
differ from it if the model already uses such a name. Therefore the metadata name the output of each gradient.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.choices import WEIGHTED_DERIVATIVES, Derivative, Mode, Scaling
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.common.strict_json import decoded
from onnxgrad_cli.errors import OnnxgradError, unreadable, wrong_type
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import FLOATS, is_external, is_float
from onnxgrad_cli.ir.weightless_copy import copied

T = TypeVar("T")


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: it replaces a weight W by W + (alpha / rank) times the product of two thin matrices A and B.

    Attributes:
        weight: the frozen initializer W.
        a: the name of the factor A, by which the input is multiplied first. If W is [in, out], A is [in, rank], B is
            [rank, out], and the product is A B. If W is [out, in], as in Gemm(transB=1) or Conv, A is [rank, in], B is
            [out, rank], and the product is B A.
        b: the name of the factor B, which is zero initially.
        rank, alpha: the values that the user requested.
        scaling: 'lora' divides alpha by the rank. 'rslora' divides it by the square root of the rank, so that the size
            of gradients does not depend on the rank (D. Kalajdzievski, A Rank Stabilization Scaling Factor for
            Fine-Tuning with LoRA, 2023).
        magnitude: with DoRA, the name of the tensor with a trained norm for each output, "" otherwise. After the
            product is added to W, the weights of each output are scaled to this norm.
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
            raise ValueError(f"rank {self.rank} and scaling '{self.scaling}' are not valid for an adapter")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trained tensors of the adapter: both LoRA matrices, and the magnitudes if there are any."""
        return (self.a, self.b, self.magnitude) if self.magnitude else (self.a, self.b)

    @property
    def scale(self) -> float:
        """The number by which the product of the factors is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


@dataclass(frozen=True)
class IntegerWeight:
    """A weight that the inference model stores as integers. The training model stores it as floats and quantizes them.

    Attributes:
        weight: the name of the float weight.
        tensor: the name of the integer tensor in the inference model.
        scale, zero_point: the names of the scale and the zero point in the inference model; "" if it has no such
            tensor.
        axis, block_size: as the attributes of DequantizeLinear.
        factors: the names of two scales whose product is the scale of this tensor, or () if the tensor has its own
            scale. A bias has such a scale, the product of the scales of the data and the weight, because an integer
            kernel adds the bias to sums of integer products.
        times: a number by which the product of `factors` is also multiplied.
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
    """The tensors that the training model stores differently than the inference model: integers and duplicates.

    Attributes:
        weights: the integer weights, which the training model stores as floats.
        scales: the quantization scales that can be trained, including the scales that the user excluded by name.
        copies: scale or weight of the inference model -> the tensor with the same values that replaces it.
        transposed: the keys of `copies` that equal the transpose of their replacement.
    """

    weights: tuple[IntegerWeight, ...] = ()
    scales: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A state tensor of the optimizer. All its elements have the same value before the first step.

    Attributes:
        of: the weight to which the state belongs; "" if it belongs to the whole model.
        kind: the kind of state: 'm', 'acc', 'ema', ... for a weight; 'step', 'loss_scale', ... for the whole model.
        dtype: the element type, by its numpy name.
        shape: the shape of the tensor.
        initial: the value of each element before the first step.
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
        options: the optimizer's options that the group overrides -> their values; `lr` is a factor of the learning
            rate. True is stored as 1.
    """

    weights: tuple[str, ...]
    options: dict[str, float]


@dataclass(frozen=True)
class InnerDerivative:
    """A derivative that is part of a loss, as in a gradient penalty.

    Attributes:
        kind: 'vjp' or 'jvp'.
        of: the value that is differentiated.
        seed: the cotangent (vjp) or tangent (jvp); "" if it is 1 everywhere.
        wrt: the values with respect to which `of` is differentiated.
        results: for vjp, the gradient with respect to each of `wrt`; for jvp, the derivative of `of`.
    """

    kind: str
    of: str
    seed: str
    wrt: tuple[str, ...]
    results: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> InnerDerivative:
        """Return a copy in which values are renamed. `names` maps old names to new names."""
        wrt, results = ([names.get(name, name) for name in field] for field in (self.wrt, self.results))
        of, seed = names.get(self.of, self.of), names.get(self.seed, self.seed)
        return InnerDerivative(self.kind, of, seed, tuple(wrt), tuple(results))


@dataclass(frozen=True)
class InnerEvaluation:
    """An evaluation of the model on other inputs that is part of a loss.

    Attributes:
        inputs: input of the model -> the value that the evaluation uses for it.
        outputs: output of the model -> the value that the evaluation computes for it.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]

    def renamed(self, names: Mapping[str, str]) -> InnerEvaluation:
        """Return a copy in which values are renamed. `names` maps old names to new names."""
        both = ({key: names.get(name, name) for key, name in field.items()} for field in (self.inputs, self.outputs))
        return InnerEvaluation(*both)


@dataclass(frozen=True)
class StepSettings:
    """The settings of the optimizer's step. With them, a check can repeat the step in a reference implementation.

    Attributes:
        options: option of the optimizer -> its value, including defaults. True is stored as 1.
        groups: the parameter groups. If a weight is in several groups, later ones override earlier ones.
        clip_norm, clip_value: the bounds to which gradients are clipped; None if they are not clipped.
        accumulate: the number of batches, each one run of the model, per step of the optimizer.
        ema: the decay of the moving average of the weights; None if there is no average.
    """

    options: dict[str, float]
    groups: tuple[StepGroup, ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    ema: float | None = None

    def of(self, weight: str) -> dict[str, float]:
        """Return the optimizer's options for one weight, including those of its parameter groups."""
        found = dict(self.options)
        for group in self.groups:
            if weight in group.weights:
                found |= group.options
        return found


VERSION, LOSS, ROLES, DERIVED = "onnxgrad.version", "onnxgrad.loss", "onnxgrad.roles", "onnxgrad.derivative"
TENSORS = "onnxgrad.tensors"
"""The keys of onnxgrad's entries in the model's metadata_props."""


_FIELDS = (
    "inputs outputs estimated partial optimizer step adapters slots quantized held inner evaluated proof_part sets"
).split()
PORTS = {name: "state" if name == "slots" else name for name in _FIELDS}
"""Field of `Roles` that is stored in the metadata entry `ROLES` -> its key in that entry."""

STORED = frozenset({"weight", "state", "constant"})
"""The roles of inputs that have a value before the first step.

The model stores this value. For optimizer state, the metadata may describe it instead.
"""

INPUTS = STORED | {"model input", "label", "sample weight", "loss weight", "learning rate", "loss gradient"}
OUTPUTS = frozenset({"loss", "gradient", "next state", "kept output"})
"""All roles that inputs and outputs of a training model can have."""

CHANGED = "the model was changed after it was built: build it again"
"""The hint of errors about a model that does not match the description in its metadata."""

PROOF_PREFIX = "proof/"
"""The prefix of the names of the values that only `Roles.proof_part` computes."""

AVERAGE = "ema"
"""The `Slot.kind` of a state that is the moving average of a weight."""


@dataclass(frozen=True)
class Role:
    """The role of an output.

    Attributes:
        role: 'loss', 'gradient', 'next state' or 'kept output'.
        of: for 'gradient' and 'next state', the input, weight or state to which the output belongs; otherwise "".
    """

    role: str
    of: str = ""


@dataclass(frozen=True)
class Term:
    """One term of the loss.

    Attributes:
        name: the name of the loss, or the name of its file.
        output: the model output on which the loss is computed.
        label: the label input; "" if the loss has no label.
        weight: the factor of the loss in the sum of all losses; if it follows a schedule, its highest value.
        classes: the number of classes if labels are class numbers; otherwise 0.
        ignore_index: the label of samples that the loss ignores. None if there is no such label, or if the model was
            built by an old version of onnxgrad, which did not record it.
        class_axis: the axis of the output that runs over the classes, if labels are class numbers.
        chunks: if the model computes the output in chunks of tokens: the values that each contain one chunk; otherwise
            ().
        data: the name of the data set on which the loss is computed; "" if the losses name no data sets.
        factor: the input by which the loss is multiplied in place of `weight`; "" if the weight follows no schedule.
        more: the labels that a loss written as a Python function takes after the first one.
        mask: the label that shows which entries of a padded sample are real; "" if the loss takes no mask.
    """

    name: str
    output: str
    label: str
    weight: float
    classes: int = 0
    ignore_index: int | None = None
    class_axis: int = 1
    chunks: tuple[str, ...] = ()
    data: str = ""
    factor: str = ""
    more: tuple[str, ...] = ()
    mask: str = ""


@dataclass(frozen=True)
class Roles:
    """The description of a training model in its metadata.

    Attributes:
        version: the version of onnxgrad that built the model.
        losses: the terms of the loss.
        reduction: 'mean' or 'sum'.
        inputs: input -> its role, in order: 'model input', 'label', 'sample weight', 'loss weight' (a scalar),
            'learning rate', 'weight' (trained), 'state', 'loss gradient' or 'constant' (not trained, but feeding it
            overrides its value). A model that contains only the optimizer also has inputs with the role 'gradient',
            named like the outputs of the gradient model.
        outputs: output -> its role, in order.
        estimated: True if gradients are straight-through estimates, so that they don't match finite differences of the
            loss.
        partial: the inputs and weights whose gradient is incomplete, because `stop_gradient` stops some of their paths
            to the loss.
        optimizer: the name of the optimizer whose step is part of the model; "" without a step.
        step: the settings of the optimizer's step. None if the optimizer is not one of onnxgrad's, or if an old version
            of onnxgrad built the model.
        adapters: the low-rank adapters in the model. Their LoRA matrices have the role 'weight'.
        slots: name of a state of the optimizer -> its description, with the initial value. Other inputs with the role
            'state' are running statistics, whose initial values the model stores.
        quantized: the tensors that the inference model stores differently, such as weights that it stores as integers.
        held: values that are treated as constants in the gradients although they depend on weights, such as DoRA's
            norms.
        inner: the derivatives that are parts of the loss.
        evaluated: the evaluations of the model on other inputs that are parts of the loss.
        proof_part: the nodes and constants that compute the values in `inner` and `evaluated` if the training model
            does not need these values itself. It is the base64 text of a GraphProto; "" if there are none.
        sets: data set -> a map from the name of each array of the set to the input that takes it. Empty if the losses
            name no data sets.
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
    inner: tuple[InnerDerivative, ...] = ()
    evaluated: tuple[InnerEvaluation, ...] = ()
    proof_part: str = ""
    sets: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def loss(self) -> str:
        """The name of the output with the loss."""
        return next(name for name, role in self.outputs.items() if role.role == "loss")

    @property
    def successors(self) -> dict[str, str]:
        """Weight or state -> the output with its value after the step."""
        return {role.of: name for name, role in self.outputs.items() if role.role == "next state"}

    @property
    def gradients(self) -> dict[str, str]:
        """Weight or input -> the output with its gradient."""
        return {role.of: name for name, role in self.outputs.items() if role.role == "gradient"}

    @property
    def fed(self) -> list[str]:
        """The inputs that the caller must feed at each step: data, labels, the learning rate."""
        return [name for name, role in self.inputs.items() if role not in STORED]

    @property
    def sampled(self) -> list[str]:
        """The inputs that are fed with a batch: all inputs in `fed` except the learning rate."""
        return [name for name in self.fed if self.inputs[name] != "learning rate"]

    @property
    def averages(self) -> dict[str, str]:
        """Weight -> the name of the state with its exponential moving average. Empty if the model keeps no averages."""
        return {slot.of: name for name, slot in self.slots.items() if slot.kind == AVERAGE}

    def on_set(self, data: str) -> Roles:
        """Return the roles for one data set: its arrays as inputs, and only the losses computed on it.

        Inputs and labels get the names of the set's arrays, and the losses name the outputs of the original model. If
        the losses name no data sets, return the roles unchanged.
        """
        if not self.sets:
            return self
        arrays, is_copy = self.sets[data], data != next(iter(self.sets))
        names = {own: name for name, own in arrays.items()}
        losses = tuple(
            replace(
                term,
                output=term.output.removeprefix(f"{data}/") if is_copy else term.output,
                label=names.get(term.label, term.label),
                more=tuple(names.get(label, label) for label in term.more),
                mask=names.get(term.mask, term.mask),
            )
            for term in self.losses
            if term.data == data
        )
        return replace(self, losses=losses, inputs={name: self.inputs[own] for name, own in arrays.items()}, sets={})

    def begun(self, stored: Collection[str]) -> dict[str, np.ndarray]:
        """Return optimizer state -> its initial value, for all states whose name is not in `stored`.

        The arrays are read-only and take no memory: each is a single number broadcast to the shape of the state.
        """
        return {
            name: np.broadcast_to(np.array(slot.initial, slot.dtype), slot.shape)
            for name, slot in self.slots.items()
            if name not in stored
        }


@dataclass(frozen=True)
class Derived:
    """The description of a model of derivatives in its metadata.

    Attributes:
        kind: 'vjp', 'jvp', 'hvp', 'gnvp', 'jacobian', 'hessian', 'hessian-diagonal' or 'laplacian'.
        of: the outputs that are differentiated.
        wrt: the inputs, weights and inner values with respect to which `of` is differentiated.
        inputs: the inputs for cotangents or tangents that were added. vjp: one per name in `of`, or () if the
            cotangents are ones. jvp, hvp and gnvp: one per name in `wrt`. Other kinds: ().
        outputs: the outputs with the derivatives. jvp: one per name in `of`. jacobian: one per pair (name in `of`, name
            in `wrt`). hessian: one per pair of names in `wrt`. Other kinds: one per name in `wrt`. In the order of
            pairs, the first name varies slowest.
        mode: the mode of BatchNormalization and Dropout, such as 'keep' or 'train'.
        estimated, partial: as in `Roles`.
        inner: the names in `wrt` that are inner values of the model. The derivative with respect to an inner value is
            computed as the derivative with respect to a tensor of zeros that is added to it.
        pick: if the score of one class is differentiated: the class, as a number, 'argmax' or 'label'. "" if all of
            `of` is differentiated.
        class_axis: the axis of the scores that runs over the classes.
        label: the input with the class numbers if `pick` is 'label'.
        per_sample: the names in `wrt` whose derivatives are computed for each sample separately. These derivatives have
            the samples along axis 0. None if all derivatives are for the whole batch.
        weights: the added inputs with the weights of the differentiated outputs, one per name in `of`; () if all
            weights are one.
        kinks: for second derivatives, the operators of the model that have no derivative at some points, such as Relu.
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
    weights: tuple[str, ...] = ()
    kinks: tuple[str, ...] = ()

    def added(self, names: Mapping[str, str] = MappingProxyType({})) -> dict[tuple[str, ...], str]:
        """Return (name in `of` or `wrt`,) -> the input for its cotangent or tangent.

        Args:
            names: name in `of` or `wrt` -> the name to use instead of it in the keys.
        """
        by = self.of if self.kind == "vjp" else self.wrt
        return {(names.get(x, x),): name for x, name in zip(by, self.inputs, strict=False)}

    def results(self, names: Mapping[str, str] = MappingProxyType({})) -> dict[tuple[str, ...], str]:
        """Return a map to the outputs that are derivatives. The keys depend on `kind`.

        - jvp: (name in `of`,)
        - jacobian: (name in `of`, name in `wrt`)
        - hessian: (name in `wrt`, name in `wrt`)
        - other kinds: (name in `wrt`,)

        Args:
            names: name in `wrt` -> the name to use instead of it in the keys.
        """
        wrt = [names.get(x, x) for x in self.wrt]
        keys: Mapping[str, Iterable[tuple[str, ...]]] = {
            "jvp": product(self.of), "jacobian": product(self.of, wrt), "hessian": product(wrt, wrt)
        }  # fmt: skip
        return dict(zip(keys.get(self.kind, product(wrt)), self.outputs, strict=True))


@dataclass(frozen=True)
class ModelTensors:
    """A record of the float tensors that a model had before onnxgrad added derivatives to it.

    Other tools may later fold, merge or rename tensors. The record shows such changes, which can make training wrong:
    for example, a folded `Transpose(W)` would keep its value while W is trained.

    Attributes:
        names: the names of the tensors, which are initializers or Constant nodes.
        literals: the names that were outputs of Constant nodes in the original model.
        equal: tensor that is equal to a constant that onnxgrad generated -> this constant. A tool may merge the two.
        computed: float values that nodes compute only from shapes, integers and generated constants. A tool may fold
            them to initializers, but they are not parameters.
    """

    names: tuple[str, ...]
    literals: tuple[str, ...] = ()
    equal: dict[str, str] = field(default_factory=dict)
    computed: tuple[str, ...] = ()


def write_tensors(model: ModelProto, graph: Graph) -> None:
    """Write a record of a model's original float tensors to its metadata.

    If the model already has a record, only tensors that are in it are recorded again.

    Args:
        model: the model with the derivatives added; external data are not read.
        graph: the graph from which the model was written. It knows the types, the origin of tensors and the generated
            constants.
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
    rewrite(model, {TENSORS: json.dumps(asdict(found))}, [TENSORS])


def read_tensors(model: ModelProto) -> ModelTensors | None:
    """Return the record of a model's original float tensors, or None if the model has no record.

    Raises:
        OnnxgradError: the record can't be read.
    """
    text = _entry(model, TENSORS)
    try:
        return None if text is None else decoded(ModelTensors, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise unreadable(f"the model's entry '{TENSORS}' can't be read: {error}", "derive it again") from error


def has_derivatives(model: ModelProto) -> bool:
    """Return True if onnxgrad added derivatives to a model, which are valid only for the model's current mode."""
    return _entry(model, TENSORS) is not None


def _entry(model: ModelProto, key: str) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == key), None)


def stored_floats(model: ModelProto) -> Iterator[TensorProto]:
    """Yield the float tensors in initializers and Constant nodes. The tensor of a Constant is named like its output."""
    yield from (tensor for tensor in model.graph.initializer if tensor.data_type in FLOATS)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and attribute.t.data_type in FLOATS:
                tensor = TensorProto()
                tensor.CopyFrom(attribute.t)
                tensor.name = node.output[0]
                yield tensor


def _computed_of_constants(graph: Graph, floats: Collection[str]) -> Iterator[str]:
    """Yield the float values that depend only on shapes, integers and constants that onnxgrad generated.

    Args:
        graph: the graph.
        floats: the names of the stored float tensors.
    """
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
    """Return the element type, the shape and the bytes of a tensor."""
    return tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes()


def write_derived(model: ModelProto, found: Derived) -> None:
    """Write the description of a model of derivatives into its metadata."""
    rewrite(model, {DERIVED: json.dumps(asdict(found)), VERSION: tool_version()})


def read_derived(model: ModelProto) -> Derived | None:
    """Return the description of a model of derivatives, or None if the model has no such description.

    Raises:
        OnnxgradError: the description can't be read, or it does not match the model.
    """
    text = _entry(model, DERIVED)
    if text is None:
        return None
    if _entry(model, ROLES) is not None:
        raise _changed("is that of a training model and of a model of derivatives")
    try:
        found: Derived = decoded(Derived, strict_json.loads(text))
        stored = {tensor.name for tensor in model.graph.initializer}
        _check_derived(found, stored.union(value.name for value in model.graph.input))
    except (ValueError, RecursionError) as error:
        raise unreadable(f"the model's entry '{DERIVED}' can't be read: {error}", "derive it again") from error
    _compare("input", (*found.inputs, *found.weights, *filter(None, [found.label])), model.graph.input)
    _compare("output", found.outputs, model.graph.output)
    return found


def _check_derived(found: Derived, known: Collection[str]) -> None:
    """Check that a description of derivatives is consistent, and names only values in `known`.

    Raises:
        ValueError: the description is inconsistent or names an unknown value.
    """
    of, wrt = len(found.of), len(found.wrt)
    outputs = {"jvp": of, "jacobian": of * wrt, "hessian": wrt**2}.get(found.kind, wrt)
    inputs = {"vjp": (0, of), "jvp": (wrt,), "hvp": (wrt,), "gnvp": (wrt,)}.get(found.kind, (0,))
    weights = (0, of) if found.kind in WEIGHTED_DERIVATIVES else (0,)
    if found.kind not in get_args(Derivative) or found.mode not in get_args(Mode):
        raise ValueError(f"there are no derivatives of kind '{found.kind}' and mode '{found.mode}'")
    if len(found.outputs) != outputs or len(found.inputs) not in inputs or len(found.weights) not in weights:
        raise ValueError(f"the numbers of inputs and outputs don't fit a {found.kind}")
    strange = next((name for name in found.wrt if name not in known and name not in found.inner), None)
    if strange is not None:
        raise ValueError(f"there is no input or weight '{strange}'")
    for names in (found.of, found.wrt, (*found.inputs, *found.weights), found.outputs):
        if (twice := _twice(names)) is not None:
            raise ValueError(f"'{twice}' is listed twice")
    words = ("", "argmax", *(["label"] if found.label else []))
    if found.pick not in words and number_in(found.pick) is None:
        raise ValueError(f"there is no class '{found.pick}'")


def _twice(each: Iterable[T]) -> T | None:
    """Return the first element that occurs more than once, or None if there is none.

    If two outputs had the same role, a check could use the wrong output. Such descriptions are refused.
    """
    return next((one for one, count in Counter(each).items() if count > 1), None)


def write(model: ModelProto, found: Roles) -> None:
    """Write the description of a training model into its metadata, replacing any earlier description."""
    terms = {"terms": [_said(term) for term in found.losses], "reduction": found.reduction}
    said, empty = asdict(found), asdict(Roles("", (), "", {}, {}))
    needed = ("inputs", "outputs")
    ports = {key: said[name] for name, key in PORTS.items() if name in needed or said[name] != empty[name]}
    rewrite(model, {LOSS: json.dumps(terms), ROLES: json.dumps(ports), VERSION: found.version})


def _said(term: Term) -> dict[str, Any]:
    optional = ("chunks", "data", "factor", "more", "mask")
    return {name: value for name, value in asdict(term).items() if value or name not in optional}


def rewrite(
    model: ModelProto, said: Mapping[str, str], replaced: Collection[str] = (VERSION, LOSS, ROLES, DERIVED)
) -> None:
    """Replace onnxgrad's entries in a model's metadata; by default all but the record of tensors.

    `said` must have the version last, because `is_ours` searches a file from its end.
    """
    refill(model.metadata_props, [entry for entry in model.metadata_props if entry.key not in replaced])
    for key, value in said.items():
        model.metadata_props.add(key=key, value=value)


def describe(model: ModelProto) -> Roles:
    """Return the description of a training model.

    Raises:
        UsageError: the model has no description with a loss. Either onnxgrad did not build it as a training model, or
            another tool has removed its metadata.
        OnnxgradError: the description can't be read, or it does not match the model.
    """
    found = read(model)
    if not any(role.role == "loss" for role in found.outputs.values()):
        hint = "make one with `onnxgrad build MODEL`; models of initializations and of other tools can't be used here"
        raise wrong_type("the model is not a training model made by onnxgrad: its description names no loss", hint)
    _check_known("input", found.inputs, INPUTS)
    _check_known("output", {name: role.role for name, role in found.outputs.items()}, OUTPUTS)
    return found


def check_is_original(model: ModelProto) -> None:
    """Check that a model is not a training model that onnxgrad built.

    Raises:
        UsageError: the model is a training model.
    """
    if _entry(model, ROLES) is not None:
        hint = "pass the model that it was made from; to run it, use `Trainer`, `onnxgrad pack` or onnxruntime"
        raise wrong_type("the model is already a training model, made by `onnxgrad build`", hint)


def read(model: ModelProto) -> Roles:
    """Return the description of a model that onnxgrad built for training.

    Unlike `describe`, this function also accepts models without a loss, which compute only the optimizer's step or
    initial values.

    Raises:
        UsageError: the model has no description.
        OnnxgradError: the description can't be read, or it does not match the model.
    """
    props = {entry.key: entry.value for entry in model.metadata_props}
    if ROLES not in props and model.training_info:
        hint = "write that as separate models with `onnxgrad expand MODEL`, and use the one called step0"
        raise wrong_type("the model is not a training model: it only has a TrainingInfoProto", hint)
    if ROLES not in props:
        hint = "make one with `onnxgrad build MODEL`; if this was one, another tool has dropped its metadata"
        raise wrong_type(f"the model is not a training model of onnxgrad: its metadata have no entry '{ROLES}'", hint)
    try:
        ports = strict_json.loads(props[ROLES])
        loss = strict_json.loads(props.get(LOSS, '{"terms": [], "reduction": ""}'))
        said = {field: ports[name] for field, name in PORTS.items() if name in ports}
        said |= {"version": props.get(VERSION, "unknown"), "losses": loss["terms"], "reduction": loss["reduction"]}
        found: Roles = decoded(Roles, said)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(f"the model's entry '{ROLES}' can't be read: {error}", "build it again") from error
    _fits(found, model)
    return found


def _fits(found: Roles, model: ModelProto) -> None:
    """Check that a description and its model match.

    Raises:
        OnnxgradError: they don't match.
    """
    _compare("input", found.inputs, model.graph.input, complete=True)
    _compare("output", found.outputs, model.graph.output, complete=True)
    of = [role.of for role in found.outputs.values() if role.role in ("gradient", "next state")]
    of += [name for names in found.sets.values() for name in names.values()]
    if gone := [name for name in (*of, *found.slots) if name not in found.inputs]:
        raise _changed(f"refers to an input '{gone[0]}' that it does not list")
    for value in model.graph.output:
        role = found.outputs[value.name].role
        if role in ("loss", "gradient") and not is_float(value.type):
            raise _changed(f"gives '{value.name}' the role '{role}', but it is not a tensor of floats")
    said = [(role.role, role.of * (role.role != "loss")) for role in found.outputs.values()]
    if (twice := _twice(each for each in said if each[0] != "kept output")) is not None:
        of_what = f" of '{twice[1]}'" if twice[1] else ""
        raise _changed(f"gives two outputs the role '{twice[0]}'{of_what}")
    made = {name for node in model.graph.node for name in node.output}
    if never := [name for name in found.held if name not in made]:
        raise _changed(f"lists '{never[0]}', which no node computes")


def _check_known(kind: str, roles: Mapping[str, str], known: Collection[str]) -> None:
    """Check that all roles are in `known`, because a check of the model would ignore values with other roles."""
    for name, role in roles.items():
        if role not in known:
            raise _changed(f"gives the {kind} '{name}' the invalid role '{role}'")


def _compare(kind: str, described: Collection[str], values: Iterable[ValueInfoProto], complete: bool = False) -> None:
    """Check that the model has all inputs or outputs that its description names.

    With `complete`, also check that it has no others, whose purpose would be unknown.
    """
    there = dict.fromkeys(value.name for value in values)
    if gone := [name for name in described if name not in there]:
        raise _changed(f"names the {kind} '{gone[0]}', which the model does not have")
    if complete and (strange := [name for name in there if name not in described]):
        raise _changed(f"does not list the {kind} '{strange[0]}'")


def _changed(what: str) -> OnnxgradError:
    return OnnxgradError(f"the model's description {what}", CHANGED, code="mismatch")


def started(model: ModelProto, roles: Roles) -> ModelProto:
    """Return a training model that stores the initial state of the optimizer.

    Returns:
        The model itself if it stores the state already; otherwise a copy with the described initial values as
        initializers.
    """
    values = roles.begun([tensor.name for tensor in model.graph.initializer])
    if not values:
        return model
    copy = copied(model)
    copy.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return copy
