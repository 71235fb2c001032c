"""What runs: a pipeline is a list of passes over one graph, and its records are the report.

A pass states what it needs, does one thing, and tells the truth about what it changed. `Options` is what was
asked; `Training` is what the passes have found out so far and what later passes and the report read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onnxgrad_cli.errors import Caution, OnnxgradError
from onnxgrad_cli.graph import Graph, Shape
from onnxgrad_cli.lowerings import Lowerings


@dataclass(frozen=True)
class LossSpec:
    """One loss as asked for: its name or file, the output it judges, the label input, its share of the total."""

    name: str
    output: str | None = None
    label: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters as asked for: their rank, and what their product is multiplied with, times the rank."""

    rank: int
    alpha: float | None = None

    def __str__(self) -> str:
        return str(self.rank) if self.alpha is None else f"{self.rank}:{self.alpha:g}"


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: a weight W acts as W plus alpha / rank times the product of two thin factors.

    Attributes:
        weight: the initializer that it adds to, which is frozen.
        a: the factor that meets the input. For W of [in, out], A is [in, rank], B is [rank, out], and the product A B;
            for W of [out, in], as of Gemm(transB=1) or Conv, A is [rank, in], B is [out, rank], and the product B A.
        b: the other factor, which begins at zero.
        rank, alpha: as asked for.
    """

    weight: str
    a: str
    b: str
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied with."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class RecomputeSpec:
    """What to compute again in the backward part, as asked for.

    `kind` is 'elementwise', 'block' (all between values or nodes that `pattern` names) or 'budget' (as much as it takes
    until no more than `size` bytes are kept).
    """

    kind: str
    pattern: str = ""
    size: int = 0

    def __str__(self) -> str:
        return {"block": f"block:{self.pattern}", "budget": f"budget:{self.size}B"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Recomputed:
    """What is computed again, as it was done.

    Attributes:
        asked: the request.
        nodes: how many nodes run twice.
        kept_before, kept: bytes of forward values that the backward part reads, without and with it.
        flops: the operations that it adds.
    """

    asked: str
    nodes: int
    kept_before: int
    kept: int
    flops: int


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


@dataclass(frozen=True)
class Adjoint:
    """The cotangents of what several nodes compute together, where one rule for all takes fewer passes over memory.

    Attributes:
        operator: what they stand for, as 'domain::Op'.
        inputs: the values that get a cotangent.
        kept: other values of theirs that the rule reads.
        function: `rule(op, g, *inputs, *kept)`, which returns a cotangent for each input.
    """

    operator: str
    inputs: tuple[str, ...]
    kept: tuple[str, ...]
    function: Callable[..., Any]


@dataclass(frozen=True)
class Group:
    """A parameter group as asked for: the weights that `pattern` names, and their options of the optimizer.

    `lr` among them is a factor of the learning rate.
    """

    pattern: str
    options: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(f'{name}={value}' for name, value in self.options.items())}"


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
class Options:
    """Everything a build can be asked for; the defaults are those of the command line.

    Attributes:
        losses: the losses, summed with their weights.
        label: the name of the label input, for a loss that does not name its own.
        output: the output that is judged, for a loss that does not name its own.
        reduction: 'mean' or 'sum'. The mean is PyTorch's: over all elements, or divided by the sum of class weights.
        sample_weight: the name of an input with one weight per sample, which multiplies that sample's losses. The
            mean divides by what it would without: as (criterion(reduction='none') * weight).mean() in PyTorch.
        loss_options: what a loss takes besides (label_smoothing, ignore_index, delta, ...), by name.
        l1, l2: factors of the sum of the trained weights' magnitudes and of their squares, added to the loss.
        train, freeze: glob patterns over initializer names.
        preset: groups of weights to train: 'bias', 'norm', 'head'. They add up, with `train` and `train_last` too.
        train_last: how many of the last layers with weights to train; 0: no such choice.
        lora: freeze all that is not chosen by these, and train adapters of the frozen matrices; None: no adapters.
        lora_target: glob patterns over the names of weight matrices, of those that get an adapter; by default all
            of MatMul and Gemm that would be trained.
        grad_of_input: glob patterns over input names.
        optimizer: the name of the optimizer whose step is appended; "" for none.
        optimizer_options: what it takes besides (momentum, weight_decay, ...), by name.
        group: what weights of certain names have for options instead; of two groups the later one counts.
        clip_norm: where the gradients' norm, of all together, is larger, they are scaled down to it; None: no bound.
        clip_value: what no element of a gradient exceeds in magnitude; None: no bound.
        accumulate: of how many runs the gradients are gathered for a step; it is that of one batch of all their
            samples if the runs have equally many.
        loss_scale: what the gradient of the loss is multiplied with, and gradients are divided by, so that those of
            16 bits don't vanish; 'dynamic' adapts it; None: none.
        ema: how much of the exponential moving average of the weights stays at a step; None: none is kept.
        embed_state: store the optimizer's state as it is before the first step, so that it need not be fed; of weights
            beyond a gigabyte it is described only.
        training_info: leave the inference graph as it is, and describe the training beside it, in `training_info`.
        init: how weights begin there: 'keep' their stored values, 'xavier', 'he' or 'normal'.
        seed: of the random numbers that they begin with; None lets the runtime choose. Adapters are drawn with it
            too; with None as with 0.
        recompute: what to compute again in the backward part, so that it need not be kept; None: nothing.
        keep_outputs: keep the model's own outputs too.
        yield_: what becomes of the YieldOp: 'ones' (filled), 'input' (fed) or 'keep'.
        as_gradient_op: write one Gradient node of ai.onnx.preview.training in place of the backward part.
        mode: 'keep', 'train' or 'eval' for BatchNormalization and Dropout.
        quantization: what becomes of a path through QuantizeLinear: 'refuse' it, or 'ste', the straight-through
            estimator, for which rounding is the identity within the quantized range.
        tuned: forms of gradients to write instead of those that suit their shapes; see `lowerings`.
        target: the runtime that the model is written for: 'standard' is any, for others see `targets`.
        identifiers: make valid C identifiers of the names that are not the model's own.
        dims: symbol -> size, fixed before anything else.
        shapes: input -> shape, fixed before anything else.
    """

    losses: tuple[LossSpec, ...] = (LossSpec("mse"),)
    label: str = "label"
    output: str | None = None
    reduction: str = "mean"
    sample_weight: str | None = None
    loss_options: dict[str, object] = field(default_factory=dict)
    l1: float = 0.0
    l2: float = 0.0
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()
    train_last: int = 0
    lora: LoraSpec | None = None
    lora_target: tuple[str, ...] = ()
    grad_of_input: tuple[str, ...] = ()
    optimizer: str = ""
    optimizer_options: dict[str, object] = field(default_factory=dict)
    group: tuple[Group, ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    loss_scale: float | Literal["dynamic"] | None = None
    ema: float | None = None
    embed_state: bool = True
    training_info: bool = False
    init: str = "keep"
    seed: int | None = None
    recompute: RecomputeSpec | None = None
    keep_outputs: bool = False
    yield_: str = "ones"
    as_gradient_op: bool = False
    mode: str = "keep"
    quantization: str = "refuse"
    tuned: Mapping[str, str] = field(default_factory=dict)
    target: str = "standard"
    identifiers: bool = False
    dims: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)


@dataclass
class Training:
    """What is known of the training model so far.

    Attributes:
        inputs: the model's own inputs that are fed, in order.
        trained: the weights that get a gradient, in order.
        not_trained: every other float weight, with the reason.
        adaptable: the weights that would be trained if there were no adapters.
        adapters: the low-rank adapters, whose factors are trained.
        grad_of_input: the inputs that get a gradient.
        predictions, labels: what the losses compare: the output that each judges, and the label inputs there are.
        judged: the label of each loss, "" where it has none; empty until the losses are written.
        divisors: the value by which a loss is divided, by its position, where that is not the number of its elements.
        sample_weight: the input with one weight per sample.
        loss: the value of the loss; "" where there is none, as in derivative models.
        yielded: the values at which the forward part ends, each with the name of its cotangent.
        learning_rate: the input with the learning rate; "" without an optimizer.
        state: what an output replaces at the next step (running statistics; with an optimizer weights, its slots and
            the count of steps): name -> successor.
        slots: the state that is the optimizer's, by the name of the input that holds it.
        gradients: weight or input -> name of its gradient.
        rules: how often each rule was used, by 'domain::Op', with its source.
        kinks: the conventions that were followed, by operator.
        cautions: what a careful reader should know.
        forward_nodes: how many nodes belong to the model and its loss.
        straight_through: whether rounding to integers counts as the identity.
        forward_stays: whether the forward nodes must stay as they are.
        lowerings: which of several forms of a gradient were written.
        partial: weights and inputs whose gradient leaves out paths, for `stop_gradient` declares so.
        recomputed: what is computed again in the backward part.
        targeted: what was done for a target that is not any runtime.
        adjoints: values that several nodes make together -> the rule for all of them.
    """

    inputs: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    not_trained: dict[str, str] = field(default_factory=dict)
    adaptable: list[str] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    grad_of_input: list[str] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    divisors: dict[int, str] = field(default_factory=dict)
    sample_weight: str | None = None
    learning_rate: str = ""
    loss: str = ""
    yielded: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinks: dict[str, str] = field(default_factory=dict)
    cautions: list[Caution] = field(default_factory=list)
    forward_nodes: int = 0
    straight_through: bool = False
    forward_stays: bool = False
    lowerings: Lowerings = field(default_factory=Lowerings)
    partial: list[str] = field(default_factory=list)
    recomputed: Recomputed | None = None
    targeted: Targeted | None = None
    adjoints: dict[str, Adjoint] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One step: `run(graph, options, training) -> changed`; `needs` names the passes that come before it."""

    name: str
    summary: str
    run: Callable[[Graph, Options, Training], bool]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What a pass did: how long it took, the nodes before and after, whether it changed the graph."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


def run(
    passes: Sequence[Pass],
    graph: Graph,
    options: Options,
    training: Training,
    after: Callable[[Pass, Graph, Record], None] | None = None,
    stop_after: str | None = None,
) -> list[Record]:
    """Run `passes` in order on `graph`, in place, and return their records.

    Args:
        after: called after each pass, to write the model or to check it.
        stop_after: the name of the pass to end with.

    Raises:
        OnnxgradError: a pass failed, or its needs were not met.
    """
    records: list[Record] = []
    for step in passes:
        missing = [name for name in step.needs if name not in {r.name for r in records}]
        if missing:
            raise OnnxgradError(f"pass '{step.name}' needs {', '.join(missing)} before it")
        before, start = len(graph.nodes), time.perf_counter()
        changed = step.run(graph, options, training)
        record = Record(step.name, time.perf_counter() - start, before, len(graph.nodes), changed)
        records.append(record)
        if after:
            after(step, graph, record)
        if step.name == stop_after:
            break
    return records
