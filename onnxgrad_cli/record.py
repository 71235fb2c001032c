"""What the passes have found out so far: `Training`, which later passes, the proof and the report read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from onnxgrad_cli.autodiff.differentiation import Cautions, Differentiation
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, metadata_of
from onnxgrad_cli.metadata import Adapter, IntegerWeight, Slot, StepSettings


@dataclass(frozen=True)
class Recomputed:
    """What is computed again, as it was done.

    Attributes:
        asked: the request.
        nodes: how many nodes run twice.
        kept_before, kept: bytes of forward values that the backward part reads, without and with it.
        flops: the operations that it adds.
        trade: what else could be had: bytes kept and operations added, from all kept to the fewest.
    """

    asked: str
    nodes: int
    kept_before: int
    kept: int
    flops: int
    trade: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Targeted:
    """What was done for a target.

    Attributes:
        name: the target.
        nodes: how many nodes are computed by operators of its own.
        operators: those, as 'domain::Op' -> how many there are.
    """

    name: str
    nodes: int
    operators: dict[str, int]


class Chunks(NamedTuple):
    """A loss that is written by chunks of tokens.

    Attributes:
        of: the output of the model that the chunks are of.
        values: the chunks of that output.
        starts: for each chunk the values that it begins with.
        nodes: for each chunk the names of its nodes in the forward part.
    """

    of: str
    values: tuple[str, ...]
    starts: tuple[tuple[str, ...], ...]
    nodes: tuple[frozenset[str], ...]


@dataclass(init=False, repr=False, eq=False)
class ParameterRecord(Cautions):
    """What is differentiated by, and what is not.

    Attributes:
        inputs: the model's own inputs that are fed, in order.
        trained: the weights that get a gradient, in order.
        not_trained: every other float weight, with the reason.
        heuristics: those of them that are constants by role, with the identifier of the heuristic that decided.
        adaptable: the weights that would be trained if there were no adapters.
        adapters: the low-rank adapters, whose factors are trained.
        grad_of_input: the inputs that get a gradient.
        predictions: the output that each loss judges.
        may_be_none: whether there may be nothing to differentiate by, as where a loss is only computed.
        integer_weights: the weights that the model stores as integers and that are floats now.
        learned_scales: the scales of quantizers that are trained unless they are left out by name.
        copies: scales and weights of the model that are no more, each with the one of the same values in its place.
        transposed: those of `copies` that hold the values transposed.
    """

    inputs: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    not_trained: dict[str, str] = field(default_factory=dict)
    heuristics: dict[str, str] = field(default_factory=dict)
    adaptable: list[str] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    grad_of_input: list[str] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    may_be_none: bool = False
    integer_weights: list[IntegerWeight] = field(default_factory=list)
    learned_scales: list[str] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    transposed: list[str] = field(default_factory=list)


@dataclass(init=False, repr=False, eq=False)
class StateRecord(Cautions):
    """What a step replaces.

    Attributes:
        learning_rate: the input with the learning rate; "" without an optimizer.
        state: what an output replaces at the next step (running statistics; with an optimizer weights, its slots and
            the count of steps): name -> successor.
        slots: the state that is the optimizer's, by the name of the input that holds it.
        step: the settings of the optimizer's step; None without one, or if it is not one of onnxgrad's own.
    """

    learning_rate: str = ""
    state: dict[str, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    step: StepSettings | None = None


@dataclass(init=False, repr=False, eq=False)
class LossRecord(ParameterRecord, Differentiation):
    """What the losses compare, and what they come to.

    Attributes:
        labels: the label inputs there are.
        judged: the label of each loss, "" where it has none; empty until the losses are written.
        terms: the value of each loss, before its weight.
        penalties: the values of the penalties on weights, their factors included.
        divisors: the value by which a loss is divided, by its position, where that is not the number of its elements.
        scalars: the positions of losses that are one number for the batch before any reduction.
        sample_weight: the input with one weight per sample.
        loss: the value of the loss; "" where there is none, as in derivative models.
        chunks: what is computed chunk by chunk of the tokens; None: nothing.
    """

    labels: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    penalties: list[str] = field(default_factory=list)
    divisors: dict[int, str] = field(default_factory=dict)
    scalars: set[int] = field(default_factory=set)
    sample_weight: str | None = None
    loss: str = ""
    chunks: Chunks | None = None


@dataclass(init=False, repr=False, eq=False)
class BackwardRecord(ParameterRecord, Differentiation):
    """Where the forward part ends, and what the backward part gives.

    Attributes:
        yielded: the values at which the forward part ends, each with the name of its cotangent.
        gradients: weight or input -> name of its gradient.
        forward_nodes: how many nodes belong to the model and its loss.
    """

    yielded: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    forward_nodes: int = 0


# -- what is read together --------------------------------------------------------------------------------------------
# None of these is made by itself, so none is a dataclass of its own: making one takes time at each start.


class SelectionRecord(StateRecord, ParameterRecord):
    """What the choice of parameters reads and notes."""


class ModeRecord(StateRecord, Differentiation):
    """What a change of the mode notes: running statistics, and rules for what it writes in several nodes."""


class PreparationRecord(SelectionRecord, ModeRecord):
    """What the preparation of a model notes."""


class StepRecord(SelectionRecord, BackwardRecord, LossRecord):
    """All that a step consists of."""


@dataclass
class Training(PreparationRecord, StepRecord):
    """What is known of the training model so far: all that its parts have, and what is told of the whole.

    Attributes:
        recomputed: what is computed again in the backward part.
        targeted: what was done for a target that is not any runtime.
    """

    recomputed: Recomputed | None = None
    targeted: Targeted | None = None


def parts(graph: Graph, training: StepRecord) -> list[str]:
    """The part each node belongs to: 'model', 'loss', 'backward' (what comes after the loss) or 'optimizer'."""
    found: list[str] = []
    after = False
    for node in graph.nodes:
        if after and not training.learning_rate:  # most nodes of a large model: their metadata need not be looked at
            return found + ["backward"] * (len(graph.nodes) - len(found))
        tag = metadata_of(node, ROLE)
        if after:
            found.append("optimizer" if tag == "optimizer" else "backward")
            continue
        after = bool(training.loss) and training.loss in node.output[:]
        early = tag in ("seed", "backward")  # what one chunk of the loss has done before the next begins
        found.append("backward" if early else "loss" if after or tag == "loss" else "model")
    return found
