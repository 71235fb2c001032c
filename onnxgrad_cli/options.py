"""What a build is asked for: `Options`, whose defaults are those of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.losses.spec import LossSpec


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters as asked for: their rank, and what their product is multiplied with, times the rank."""

    rank: int
    alpha: float | None = None

    def __str__(self) -> str:
        return str(self.rank) if self.alpha is None else f"{self.rank}:{self.alpha:g}"


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
class Group:
    """A parameter group as asked for: the weights that `pattern` names, and their options of the optimizer.

    `lr` among them is a factor of the learning rate.
    """

    pattern: str
    options: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(f'{name}={value}' for name, value in self.options.items())}"


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
        tuned: forms of gradients to write instead of those that suit their shapes; see `kernel_variants`.
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
