"""Options of a build.

The fields of `Options` are divided into base classes, called parts. A pass names in its signature the parts that it
reads. The command line is generated from the declarations of the fields. If a pass can't handle a combination of fields
of several parts, it raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import (
    SEEDS,
    Init,
    Mode,
    Preset,
    Quantization,
    Reduction,
    Scaling,
    TargetName,
    Yield,
)
from onnxgrad_cli.errors import conflict, no_data
from onnxgrad_cli.options.compound_values import Group, LoraSpec, LossScale, RecomputeSpec, check_loss_scale
from onnxgrad_cli.options.declare import check, document, option

if TYPE_CHECKING:
    from onnxgrad_cli.ir.types import Shape
    from onnxgrad_cli.losses.spec import LossSpec

Part = TypeVar("Part")

LOSS, TRAINED, OPTIMIZER = "Loss", "Trained parameters", "Optimizer"
MODEL, MEMORY, OUTPUT = "Reading the model", "Memory", "Output"
"""Headings of `--help-all`."""

PATTERNS = "('*.bias',)"
"""An example of glob patterns as Python code, for hints."""


@dataclass_transform(frozen_default=True, field_specifiers=(field, option))
def part(cls: type[Part]) -> type[Part]:
    """Decorate a part of `Options`: make it a dataclass.

    A part is never instantiated on its own, so no methods are generated for it. That saves a millisecond per class at
    each start.
    """
    return document(dataclass(frozen=True, init=False, repr=False, eq=False)(cls))


@part
class _Part(checks.KnownKeywords):
    """Base class of the parts.

    `__post_init__` of a part does the checks that the declarations of fields can't express.
    """

    def __post_init__(self) -> None:
        """Do nothing: this ends the chain of `super().__post_init__()` calls."""


def _mse() -> tuple[LossSpec, ...]:
    from onnxgrad_cli.losses.spec import default_loss

    return (default_loss(),)


@part
class LossOptions(_Part):
    """Options of the loss to minimize."""

    SECTION = LOSS

    losses: tuple[LossSpec, ...] = option(
        default_factory=_mse,
        help="Loss to minimize. If the option is repeated, the weighted sum of the losses is minimized. SET= names the "
        "data set for the loss. WEIGHT, by default 1, may follow a schedule, such as 10@cosine. See `onnxgrad list "
        "losses`.",
        details="`LossSpec`, names as they are typed on the command line, or functions, written as `loss` describes.",
        common=True,
        flags=("--loss",),
        metavar="[SET=]NAME|FILE.onnx|FILE.py:FUNCTION[:OUTPUT[:LABEL[:WEIGHT]]]",
        shown="mse",
        example="(LossSpec('mse'),)",
        parse="losses.spec:parse_loss",
        complete="losses:LOSSES",
        code=True,
    )
    label: str = option(
        default="label",
        help="Name of the label input, for losses that don't name their own.",
        common=True,
        metavar="NAME",
    )
    output: str | None = option(
        default=None,
        help="Model output the loss is computed on.",
        common=True,
        metavar="NAME",
        shown="the first float output",
    )
    reduction: Reduction = option(
        default="mean",
        help="Reduce the loss over the batch to its mean or its sum.",
        details="As in PyTorch, the mean divides by the number of elements whose label is not ignored. With class "
        "weights, it divides by the sum of the class weights of these labels.",
    )
    sample_weight: str | None = option(
        default=None,
        help="Add an input NAME with one weight per sample; the loss of a sample is multiplied by its weight.",
        details="The mean divides the sum of the weighted losses by the same number as without sample weights, as "
        "PyTorch's (criterion(reduction='none') * weight).mean() does.",
        metavar="NAME",
    )
    loss_options: Mapping[str, object] = option(
        default_factory=dict,
        help="Setting of the loss, such as label-smoothing=0.1; OUTPUT:KEY or LABEL:KEY sets it for one of several "
        "losses, such as cls:ignore-index=0. See `onnxgrad list losses`.",
        flags=("--loss-option",),
        metavar="KEY=VALUE",
        example="{'label_smoothing': 0.1}",
    )
    l1: float = option(
        default=0.0,
        help="Add FACTOR times the sum of the absolute values of the trained weights to the loss.",
        metavar="FACTOR",
        least=0,
    )
    l2: float = option(
        default=0.0,
        help="Add FACTOR times the sum of the squares of the trained weights to the loss.",
        metavar="FACTOR",
        least=0,
    )

    def __post_init__(self) -> None:
        from onnxgrad_cli.losses.spec import LossSpec

        checks.tuple_of("losses", self.losses, LossSpec, "such as losses=(LossSpec('mse'),)")
        if not self.losses:
            raise no_data("`losses` is empty, so there is nothing to minimize", "such as losses=(LossSpec('mse'),)")
        super().__post_init__()


@part
class ParameterOptions(_Part):
    """Options that select the weights to train.

    Patterns match the names of weights, and of the nodes and modules that read them.
    """

    SECTION = TRAINED

    train: tuple[str, ...] = option(
        default=(),
        help="Train only the weights or modules that match.",
        common=True,
        shown="all weights",
        metavar="GLOB",
        example=PATTERNS,
    )
    freeze: tuple[str, ...] = option(
        default=(),
        help="Don't train the weights or modules that match.",
        common=True,
        metavar="GLOB",
        example=PATTERNS,
    )
    untie: tuple[str, ...] = option(
        default=(),
        help="Untie matching weights: if several modules share one, each gets its own copy. '*' matches all.",
        metavar="GLOB",
        example=PATTERNS,
    )
    tie: tuple[str, ...] = option(
        default=(),
        help="Train each matching weight and its duplicate (equal or transposed values) as a single weight; '*' "
        "matches all.",
        metavar="GLOB",
        example=PATTERNS,
    )
    preset: tuple[Preset, ...] = option(
        default=(),
        help="Train only biases, normalization layers, or the last layer. Presets can be combined with each other and "
        "with --train.",
        example="('bias',)",
    )
    train_last: int = option(
        default=0,
        help="Train only the last N layers that have weights.",
        least=1,
        shown="all layers",
    )


@part
class AdapterOptions(_Part):
    """Options of low-rank adapters (LoRA), which are trained in place of weights."""

    SECTION = TRAINED

    lora: LoraSpec | None = option(
        default=None,
        help="Train LoRA adapters of this rank and freeze the other weights. Weights that --train or --preset selects "
        "are trained, too. ALPHA, by default the rank, scales the adapters.",
        common=True,
        metavar="RANK[:ALPHA]",
        example="LoraSpec(rank) or None",
        parse="passes.adapters:parse_lora",
    )
    lora_target: tuple[str, ...] = option(
        default=(),
        help="Weight matrices or modules that get an adapter.",
        details="Patterns match names of weights, or (ends of) paths of modules. 'all-linear' are the matrices of "
        "MatMul and Gemm that would be trained or are stored as integers.",
        metavar="GLOB|attention|mlp|all-linear",
        shown="all-linear",
        example=PATTERNS,
    )
    lora_scaling: Scaling = option(
        default="lora",
        help="Scale by which the product of an adapter's two matrices is multiplied. lora: ALPHA / RANK. rslora: ALPHA "
        "/ square root of RANK.",
    )
    lora_dropout: float = option(
        default=0.0,
        help="Probability of dropping an element of an adapter's input in training.",
        metavar="PROBABILITY",
        least=0,
        below=1,
        shown="0",
        example="0.05",
    )
    lora_dora: bool = option(
        default=False,
        help="Train DoRA adapters: also train the norm of the adapted matrix for each of its outputs.",
    )

    def __post_init__(self) -> None:
        if self.lora_dora and self.lora_dropout:
            raise conflict(
                "`lora_dora` can't be combined with `lora_dropout`, because each product would be computed twice",
                "leave one of them out",
            )
        super().__post_init__()


@part
class InputOptions(_Part):
    """Options that select the model inputs that get a gradient."""

    SECTION = TRAINED

    grad_of_input: tuple[str, ...] = option(
        default=(),
        help="Also write the gradients of the model inputs that match.",
        metavar="GLOB",
        example=PATTERNS,
    )


@part
class OptimizerOptions(_Part):
    """Options of the optimizer and its step."""

    SECTION = OPTIMIZER

    optimizer: str = option(
        default="",
        help="Append a step of this optimizer to the training model; see `onnxgrad list optimizers`.",
        common=True,
        metavar="NAME",
        shown="no step",
        complete="optimizers:OPTIMIZERS",
    )
    optimizer_options: Mapping[str, object] = option(
        default_factory=dict,
        help="Setting of the optimizer, such as weight-decay=0.01.",
        flags=("--optimizer-option",),
        metavar="KEY=VALUE",
        example="{'weight_decay': 0.01}",
    )
    group: tuple[Group, ...] = option(
        default=(),
        help="Optimizer settings for the weights that match GLOB; lr is a factor by which the learning rate is "
        "multiplied. If several groups set the same key for a weight, the last one applies.",
        metavar="GLOB:KEY=VALUE,...",
        example="(Group('*.bias', {'weight_decay': 0}),)",
        parse="passes.optimizer.groups:parse_group",
    )
    clip_norm: float | None = option(
        default=None,
        help="Scale all gradients down by one factor if their global L2 norm is above MAX.",
        metavar="MAX",
        shown="no limit",
        above=0,
    )
    clip_value: float | None = option(
        default=None,
        help="Clip each element of the gradients to the range -MAX to MAX.",
        metavar="MAX",
        shown="no limit",
        above=0,
    )
    accumulate: int = option(
        default=1,
        help="Take one optimizer step per N batches, with the accumulated gradients of these batches.",
        details="The result is the same as one step on a large batch with all samples if the N batches have the same "
        "number of labels that are not ignored. A single loss with ignored labels or class weights does not require "
        "this.",
        least=1,
    )
    loss_scale: LossScale | None = option(
        default=None,
        help="Multiply the gradient of the loss by FACTOR and divide the gradients by it, so that float16 gradients "
        "don't vanish; dynamic adapts the factor.",
        metavar="FACTOR|dynamic",
        shown="no scaling",
        parse="passes.loss_scale:parse_loss_scale",
    )
    ema: float | None = option(
        default=None,
        help="Keep exponential moving averages of the weights with this decay per step, such as 0.999.",
        metavar="DECAY",
        least=0,
        below=1,
        shown="no averages",
        example="0.999",
    )
    embed_state: bool = option(
        default=True,
        help="Store the initial optimizer state in the model instead of passing it as inputs.",
        details="If the weights exceed 256 MB, the state is passed as inputs in any case.",
    )

    cycle_momentum: bool = option(
        default=False,
        help="Store the momentum, or beta1, as state, so that a schedule can change it at each step.",
    )

    def __post_init__(self) -> None:
        if self.optimizer:
            from onnxgrad_cli.optimizers import LBFGS, OPTIMIZERS

            if self.optimizer != LBFGS.name:
                OPTIMIZERS.lookup(self.optimizer)
        if self.clip_norm is not None and self.clip_value is not None:
            raise conflict("`clip_norm` can't be combined with `clip_value`", "leave one of them out")
        if self.loss_scale is not None:
            check_loss_scale(self.loss_scale)
        super().__post_init__()


@part
class InitOptions(_Part):
    """Options of the initial values of a training, and of the training information that contains them."""

    SECTION = TRAINED

    training_info: bool = option(
        default=False,
        help="Write the inference model with the training step in its training_info (ONNX TrainingInfoProto), instead "
        "of a training model.",
        section=OUTPUT,
    )
    init: Init = option(
        default="keep",
        help="Start from the stored weights (keep), or draw new ones. In `build`, drawing requires --training-info.",
    )
    seed: int | None = option(
        default=None,
        help="Seed of all random numbers: new weights, adapters, the order of the samples, and Dropout.",
        details="With None, the runtime chooses its seed, and the seed of adapters is 0.",
        least=0,
        most=SEEDS - 1,
        shown="0; in `build`, 0 for adapters, and for all else the runtime chooses",
    )


@part
class MemoryOptions(_Part):
    """Options that save memory, for example by computing values again instead of keeping them."""

    SECTION = MEMORY

    recompute: RecomputeSpec | None = option(
        default=None,
        help="Save memory: compute forward values again in the backward part instead of keeping them. elementwise: "
        "results of elementwise operators. block: all values inside a layer, or between values that match GLOB. "
        "budget, optimal: enough values that the kept values take at most SIZE, such as 500MB.",
        metavar="elementwise|block:auto|block:GLOB|budget:SIZE|optimal:SIZE",
        shown="keep all values",
        example="RecomputeSpec('elementwise') or None",
        parse="passes.rematerialization.recompute:parse_recompute",
    )
    loss_chunks: int | None = option(
        default=None,
        help="Save memory: compute the loss of a language model and its gradient in N chunks of tokens.",
        least=1,
        shown="4 if the vocabulary is large",
    )


@part
class OutputOptions(_Part):
    """Options of the form of the training model, such as its outputs."""

    SECTION = OUTPUT

    keep_outputs: bool = option(default=False, help="Keep the outputs of the inference model in the training model.")
    yield_: Yield = option(
        default="ones",
        help="Gradient with respect to the loss, from which the backward part starts. ones: ones in the shape of the "
        "loss. input: an input of the model. keep: the output of a YieldOp, which only onnxruntime-training can run.",
    )
    as_gradient_op: bool = option(
        default=False,
        help="Write the backward part as one Gradient node of the ONNX standard; see `onnxgrad expand`.",
    )


@part
class ModeOptions(_Part):
    """Options of the mode of layers that behave differently in training and in inference."""

    SECTION = MODEL

    mode: Mode = option(
        default="keep",
        help="Mode of BatchNormalization and Dropout: as in the model, training, or inference.",
        common=True,
    )
    unbiased_variance: bool = option(
        default=False,
        help="Update the running variance of BatchNormalization with the unbiased variance of the batch, as PyTorch "
        "does, instead of the biased one of ONNX.",
    )


@part
class GradientOptions(_Part):
    """Options that decide how gradients are computed."""

    SECTION = OUTPUT

    quantization: Quantization = option(
        default="refuse",
        help="Gradient of QuantizeLinear. refuse: report an error. ste: straight-through estimator. lsq: ste, and "
        "train the scales too.",
        section=MODEL,
    )
    tuned: Mapping[str, str] = option(
        default_factory=dict,
        help="Use the gradient implementations that `onnxgrad tune` has found faster on this machine.",
        metavar="FILE.toml",
        example="what `onnxgrad tune` writes, by `onnxgrad.load_tuned`",
        parse="autodiff.kernel_variants:load_tuned",
        file=True,
    )
    target: TargetName = option(
        default="standard",
        help="Runtime to build for; targets other than standard may use operators that only their runtime has.",
    )

    @property
    def straight_through(self) -> bool:
        """True if rounding to integers gets the gradient of the identity (the straight-through estimator)."""
        return self.quantization != "refuse"


@part
class NameOptions(_Part):
    """Options of the names that onnxgrad adds to the model."""

    SECTION = OUTPUT

    identifiers: bool = option(
        default=False,
        help="Use valid C identifiers for all names that onnxgrad adds to the model.",
    )


@part
class ShapeOptions(_Part):
    """Options of the shapes in the model."""

    SECTION = MODEL

    dims: Mapping[str, int] = option(
        default_factory=dict,
        help="Fix the size of a symbolic dimension; 0 stands for an empty KV cache.",
        common=True,
        flags=("--dim",),
        metavar="SYMBOL=SIZE",
        example="dims={'batch': 1}",
    )
    shapes: Mapping[str, Shape] = option(
        default_factory=dict,
        help="Set the shape of an input. If a name replaces a fixed batch size, the batch size becomes dynamic.",
        flags=("--shape",),
        metavar="INPUT:DIM,DIM,...",
        example="shapes={'x': (1, 3, 224, 224)}",
    )
    infer_by_run: bool | None = option(
        default=None,
        help="Run the model to find the ranks of values that shape inference can't find.",
        shown="only if that is quick",
    )

    def __post_init__(self) -> None:
        for symbol, size in self.dims.items():
            checks.sizes("dims", symbol, [size], 0)
        for name, shape in self.shapes.items():
            checks.tuple_of("shapes", shape, object, "such as shapes={'x': (1, 3, 224, 224)}")
            checks.sizes("shapes", name, shape[:1], 1, symbols=True)
            checks.sizes("shapes", name, shape[1:], 0, symbols=True)
        super().__post_init__()


# -- combinations of parts --------------------------------------------------------------------------------------------
# These classes are never instantiated. They are not dataclasses: creating one takes a millisecond or two at each start.


class SelectionOptions(GradientOptions, InputOptions, AdapterOptions, ParameterOptions):
    """The parts of `Options` that decide which weights and inputs get a gradient."""


class FormOptions(ShapeOptions, GradientOptions, ModeOptions):
    """The parts of `Options` that decide how a model is transformed before it is differentiated."""


class PreparationOptions(FormOptions, SelectionOptions, LossOptions):
    """The parts of `Options` read by the pass that prepares a model."""


class AdaptationOptions(InitOptions, AdapterOptions, ParameterOptions):
    """The parts of `Options` read by the pass that adds adapters."""


class BackwardOptions(GradientOptions, OutputOptions, MemoryOptions, InitOptions):
    """The parts of `Options` read by the pass that writes the backward part."""


class RematerializationOptions(OutputOptions, MemoryOptions):
    """The parts of `Options` that decide which values are computed again."""


class GradientNodeOptions(GradientOptions, RematerializationOptions, OptimizerOptions, AdapterOptions):
    """The parts of `Options` read by the pass that writes a Gradient node in place of the backward part.

    These include parts whose options the pass refuses.
    """


class StepOptions(InitOptions, OptimizerOptions, LossOptions):
    """The parts of `Options` about a training step: initial values, optimizer and loss."""


@part
class AppendOptions(ShapeOptions, OutputOptions, MemoryOptions, InitOptions, LossOptions):
    """The parts of `Options` read by the pass that appends the loss."""


class UpdateOptions(GradientOptions, StepOptions):
    """The parts of `Options` read by the pass that writes the optimizer's step."""


class SignatureOptions(OutputOptions, StepOptions):
    """The parts of `Options` that decide the inputs and outputs of the training model."""


class NamingOptions(NameOptions, StepOptions):
    """The parts of `Options` that decide the names of values, and their description in the metadata."""


@dataclass(frozen=True)
class Options(
    PreparationOptions,
    AdaptationOptions,
    BackwardOptions,
    GradientNodeOptions,
    AppendOptions,
    UpdateOptions,
    SignatureOptions,
    NamingOptions,
    ShapeOptions,
    NameOptions,
    GradientOptions,
    ModeOptions,
    OutputOptions,
    MemoryOptions,
    InitOptions,
    OptimizerOptions,
    InputOptions,
    AdapterOptions,
    ParameterOptions,
    LossOptions,
):
    """All options of a build. The defaults are the same as on the command line.

    Raises:
        UsageError: a field doesn't exist, or a value does not fit; the message names the field.
    """

    def __post_init__(self) -> None:
        if self.losses is not None:
            from onnxgrad_cli.losses.spec import as_losses

            object.__setattr__(self, "losses", as_losses(self.losses))
        check(self)
        super().__post_init__()
