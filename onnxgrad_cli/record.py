"""The results of the passes so far: `Training`. Later passes, the check of the gradients and the report read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from onnx import TensorProto

from onnxgrad_cli.autodiff.differentiation import Cautions, Differentiation
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, metadata_of
from onnxgrad_cli.metadata import Adapter, InnerDerivative, InnerEvaluation, IntegerWeight, Slot, StepSettings


@dataclass(frozen=True)
class Recomputed:
    """The result of a recomputation: forward values that the backward part computes again instead of keeping them.

    Attributes:
        asked: the value of the option that requests the recomputation, as the user typed it.
        nodes: the number of nodes that run twice.
        kept_before, kept: bytes of forward values that stay in memory for the backward part, without and with the
            recomputation.
        flops: the number of operations that the recomputation adds.
        trade: the plans that were available, as pairs (bytes kept, operations added), from the plan that keeps all
            values to the one that keeps the fewest bytes.
    """

    asked: str
    nodes: int
    kept_before: int
    kept: int
    flops: int
    trade: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Targeted:
    """The nodes that were replaced by operators of a target runtime.

    Attributes:
        name: the name of the target.
        nodes: the number of nodes that were replaced by operators of the target.
        operators: 'domain::Op' of such an operator -> the number of its nodes.
    """

    name: str
    nodes: int
    operators: dict[str, int]


class Chunks(NamedTuple):
    """A loss that is computed in chunks of tokens.

    Attributes:
        of: the model output that is computed in chunks.
        values: the values that each contain one chunk of this output.
        starts: for each chunk, the slices of activations from which its nodes compute.
        nodes: for each chunk, the names of its nodes in the forward part.
    """

    of: str
    values: tuple[str, ...]
    starts: tuple[tuple[str, ...], ...]
    nodes: tuple[frozenset[str], ...]


@dataclass(init=False, repr=False, eq=False)
class ParameterRecord(Cautions):
    """The weights and inputs that get a gradient, and those that get none.

    Attributes:
        inputs: the inputs of the original model that must be fed, in order.
        trained: the weights that get a gradient, in order.
        not_trained: every other float weight -> the reason why it is not trained.
        heuristics: weight in `not_trained` that a heuristic classified as a constant -> the identifier of the
            heuristic.
        adaptable: with adapters, the weights that would be trained if there were no adapters.
        adapters: the low-rank adapters, whose LoRA matrices are trained.
        grad_of_input: the inputs that get a gradient.
        predictions: for each loss, the model output on which it is computed. For a data set with a copy of the model,
            this becomes the output of the copy.
        ends: the values that the losses may depend on: the predictions or, if a loss is a Python function, all outputs.
        named: the weights that `train` names exactly.
        may_be_none: True if a model without any gradient is allowed, as when only the loss is computed.
        integer_weights: the weights that the original model stores as integers, and that were converted to floats.
        learned_scales: the quantization scales that are trained, unless the user excludes them by name.
        copies: scale or weight that was removed from the model -> the tensor with the same values that replaces it.
        transposed: the keys of `copies` that equal the transpose of their replacement.
    """

    inputs: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    not_trained: dict[str, str] = field(default_factory=dict)
    heuristics: dict[str, str] = field(default_factory=dict)
    adaptable: list[str] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    grad_of_input: list[str] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    may_be_none: bool = False
    integer_weights: list[IntegerWeight] = field(default_factory=list)
    learned_scales: list[str] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    transposed: list[str] = field(default_factory=list)


@dataclass(init=False, repr=False, eq=False)
class StateRecord(Cautions):
    """The values that a training step replaces.

    Attributes:
        learning_rate: the input with the learning rate; "" without an optimizer.
        state: input -> the output with its value after the step. These are running statistics and, if there is an
            optimizer, the weights, the optimizer's state and the step counter.
        slots: input that is state of the optimizer -> its description.
        step: the settings of the optimizer's step. None if there is no optimizer, or if it is not one of onnxgrad's.
    """

    learning_rate: str = ""
    state: dict[str, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    step: StepSettings | None = None


@dataclass(init=False, repr=False, eq=False)
class LossRecord(ParameterRecord, Differentiation):
    """The inputs and values that belong to the losses.

    Attributes:
        labels: the label inputs of the model.
        judged: for each loss, the label input that its output is compared with, or "" if there is none. Empty until the
            losses are appended.
        settings: for each loss, the settings that the user gave for it.
        terms: for each loss, the name of its value, not multiplied by its weight.
        factors: position of a loss -> the input by which the loss is multiplied, if its weight follows a schedule.
        penalties: the names of the penalties on weights, multiplied by their factors.
        divisors: position of a loss -> the name of the value by which its sum is divided, if that is not the number of
            elements.
        scalars: the positions of losses whose function returns a single number for the batch, so that nothing is
            reduced.
        sample_weight: the input with one weight per sample.
        loss: the name of the total loss; "" without a loss, as in models of derivatives.
        chunks: the loss that is computed in chunks of tokens, if any.
        more: position of a loss -> the labels that its Python function takes after the first one.
        masks: position of a loss -> the label that is its mask.
        mixing: position of a loss -> why the loss of a sample may depend on other samples of the batch.
        inner: the derivatives that are parts of the loss.
        evaluated: the evaluations of the model on other inputs that are parts of the loss.
        proof_nodes: copies of the nodes that compute the values in `inner` and `evaluated`.
        proof_constants: map from a name to each initializer that these nodes read.
        sets: data set -> a map from the name of each array of the set to the input of the model. Empty if the losses
            name no data sets.
    """

    labels: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    settings: list[Mapping[str, object]] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    factors: dict[int, str] = field(default_factory=dict)
    penalties: list[str] = field(default_factory=list)
    divisors: dict[int, str] = field(default_factory=dict)
    scalars: set[int] = field(default_factory=set)
    sample_weight: str | None = None
    loss: str = ""
    chunks: Chunks | None = None
    more: dict[int, list[str]] = field(default_factory=dict)
    masks: dict[int, str] = field(default_factory=dict)
    mixing: dict[int, str] = field(default_factory=dict)
    inner: list[InnerDerivative] = field(default_factory=list)
    evaluated: list[InnerEvaluation] = field(default_factory=list)
    proof_nodes: list[Node] = field(default_factory=list)
    proof_constants: dict[str, TensorProto] = field(default_factory=dict)
    sets: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(init=False, repr=False, eq=False)
class BackwardRecord(ParameterRecord, Differentiation):
    """The end of the forward part, and the results of the backward part.

    Attributes:
        yielded: value at the end of the forward part -> the name of its cotangent, with which the backward part starts.
        gradients: weight or input -> the name of its gradient.
        forward_nodes: the number of nodes in the forward part: the model and its loss.
    """

    yielded: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    forward_nodes: int = 0


# -- combinations of records ------------------------------------------------------------------------------------------
# These classes serve only as base classes and annotations. They are not dataclasses, which would slow each start.


class SelectionRecord(StateRecord, ParameterRecord):
    """The records that the selection of parameters reads and writes."""


class ModeRecord(StateRecord, Differentiation):
    """The records that a change of the mode writes: running statistics, and gradient rules for inserted nodes."""


class PreparationRecord(SelectionRecord, ModeRecord):
    """The records that the preparation of a model writes."""


class StepRecord(SelectionRecord, BackwardRecord, LossRecord):
    """The records of all parts of a training step."""


@dataclass
class Training(PreparationRecord, StepRecord):
    """All results of the passes so far.

    Attributes:
        recomputed: the recomputation in the backward part; None if nothing is recomputed.
        targeted: the nodes that were replaced for a target; None for the target 'standard'.
    """

    recomputed: Recomputed | None = None
    targeted: Targeted | None = None


def parts(graph: Graph, training: StepRecord) -> list[str]:
    """Return, for each node, the part of the training model to which it belongs.

    The parts are 'model', 'loss', 'backward' and 'optimizer'.
    """
    found: list[str] = []
    after = False
    for node in graph.nodes:
        if after and not training.learning_rate:  # saves time: most nodes of a large model are in the backward part
            return found + ["backward"] * (len(graph.nodes) - len(found))
        tag = metadata_of(node, ROLE)
        if after:
            found.append("optimizer" if tag == "optimizer" else "backward")
            continue
        after = bool(training.loss) and training.loss in node.output[:]
        early = tag in ("seed", "backward")  # the backward part of a chunk of the loss runs before the next chunk
        found.append("backward" if early else "loss" if after or tag == "loss" else "model")
    return found
