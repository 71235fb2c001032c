"""What a build is asked for: `Options`, whose defaults are those of the command line.

It is made of parts that belong together, so that a pass says which of them it reads. Each part checks its own fields
when it is made; what does not go with something of another part is refused by the pass that finds it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import (
    SEEDS,
    Init,
    Mode,
    Preset,
    Quantization,
    Recomputation,
    Reduction,
    Scaling,
    TargetName,
    Yield,
)
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.losses.spec import LossSpec, as_losses
from onnxgrad_cli.optimizers import OPTIMIZERS

Part = TypeVar("Part")

LossScale = float | Literal["dynamic"]
DYNAMIC: Literal["dynamic"] = "dynamic"
"""The loss scale that adapts itself."""

RATE = "lr"
"""What a group calls its factor of the learning rate."""


# -- what is asked for in several words -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters as asked for: their rank, and what their product is multiplied with, times the rank.

    Raises:
        UsageError: the rank is below 1, or alpha is not above 0.
    """

    rank: int
    alpha: float | None = None

    def __post_init__(self) -> None:
        checks.of_type("lora", self.rank, int, "a rank")
        if self.rank < 1:
            raise UsageError(f"`lora`: a rank of {self.rank} leaves nothing to train", "8 is usual")
        if self.alpha is not None and not (checks.is_number(self.alpha) and self.alpha > 0):
            raise UsageError(f"`lora`: alpha must be a positive number, not {self.alpha}", "by default it is the rank")

    def __str__(self) -> str:
        return str(self.rank) if self.alpha is None else f"{self.rank}:{self.alpha:g}"


@dataclass(frozen=True)
class RecomputeSpec:
    """What to compute again in the backward part, as asked for.

    `kind` is 'elementwise', 'block' (all between values or nodes that `pattern` names, or with 'auto' all of a layer),
    'budget' (as much as it takes until no more than `size` bytes are kept) or 'optimal' (the same with the fewest
    operations, by a solver).

    Raises:
        UsageError: there is no such kind, a block has no pattern, or the size is negative.
    """

    kind: Recomputation
    pattern: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, Recomputation)
        checks.text("pattern", self.pattern)
        checks.at_least("size", self.size, 0, whole=True)
        if bool(self.pattern) != (self.kind == "block"):
            raise UsageError(f"`recompute`: a pattern goes with the kind 'block', and with it alone: {self!r}")

    def __str__(self) -> str:
        sized = f"{self.kind}:{self.size}B"
        return {"block": f"block:{self.pattern}", "budget": sized, "optimal": sized}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Group:
    """A parameter group as asked for: the weights that `pattern` names, and their options of the optimizer.

    `lr` among them is a factor of the learning rate.

    Raises:
        UsageError: the pattern is no string, or `lr` is no factor.
    """

    pattern: str
    options: Mapping[str, object]

    def __post_init__(self) -> None:
        checks.text("pattern", self.pattern)
        checks.mapping("options", self.options, "such as Group('*.bias', {'weight_decay': 0})")
        factor = self.options.get(RATE, 1.0)
        if not checks.is_number(factor, 0):
            raise UsageError(f"`group`: {RATE} takes a factor of the learning rate, not {factor!r}", "such as lr=0.1")

    def __str__(self) -> str:
        typed = (f"{name.replace('_', '-')}={value}" for name, value in self.options.items())
        return f"{self.pattern}:{','.join(typed)}"


def check_loss_scale(scale: object) -> LossScale:
    """A number above zero, or 'dynamic'.

    Raises:
        UsageError: it is neither.
    """
    if scale == DYNAMIC:
        return DYNAMIC
    if isinstance(scale, (int, float)) and checks.is_number(scale) and scale > 0:
        return scale
    raise UsageError(f"`loss_scale` takes a number above 0 or '{DYNAMIC}', not {scale!r}", "such as 1024")


# -- the parts --------------------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def part(cls: type[Part]) -> type[Part]:
    """A dataclass of fields that `Options` has: nobody makes an instance of the part alone, so it gets no methods.

    To make those takes a millisecond a class, at each start.
    """
    return dataclass(frozen=True, init=False, repr=False, eq=False)(cls)


@part
class _Part(KnownKeywords):
    """A part of the options: `__post_init__` checks its fields, then those of the parts after it."""

    def __post_init__(self) -> None:
        """The last part: there is nothing more to check."""

    def _tuple(self, name: str, kind: type, example: str) -> None:
        """Make a tuple of a field, which may be given as a list."""
        object.__setattr__(self, name, checks.tuple_of(name, getattr(self, name), kind, example))

    def _patterns(self, *names: str) -> None:
        for name in names:
            self._tuple(name, str, f"glob patterns: {name}=('*.bias',)")


@part
class LossOptions(_Part):
    """What is minimised.

    Attributes:
        losses: the losses, summed with their weights: one or several of `LossSpec`, names as they are typed on the
            command line, and functions, which are written as `loss` says; a tuple of `LossSpec` is made of them.
        label: the name of the label input, for a loss that does not name its own.
        output: the output that is judged, for a loss that does not name its own.
        reduction: 'mean' or 'sum'. The mean is PyTorch's: over all elements, or divided by the sum of class weights.
        sample_weight: the name of an input with one weight per sample, which multiplies that sample's losses. The
            mean divides by what it would without: as (criterion(reduction='none') * weight).mean() in PyTorch.
        loss_options: what a loss takes besides (label_smoothing, ignore_index, delta, ...), by name; with the name of
            an output or a label before it, as in 'cls:ignore_index', it is of that loss alone.
        l1, l2: factors of the sum of the trained weights' magnitudes and of their squares, added to the loss.
    """

    losses: tuple[LossSpec, ...] = (LossSpec("mse"),)
    label: str = "label"
    output: str | None = None
    reduction: Reduction = "mean"
    sample_weight: str | None = None
    loss_options: Mapping[str, object] = field(default_factory=dict)
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", as_losses(self.losses))
        self._tuple("losses", LossSpec, "such as losses=(LossSpec('mse'),)")
        if not self.losses:
            raise UsageError("`losses` is empty: there is nothing to minimise", "such as losses=(LossSpec('mse'),)")
        checks.text("label", self.label)
        checks.text("output", self.output, optional=True)
        checks.one_of("reduction", self.reduction, Reduction)
        checks.text("sample_weight", self.sample_weight, optional=True)
        checks.mapping("loss_options", self.loss_options, "such as {'label_smoothing': 0.1}")
        checks.at_least("l1", self.l1, 0)
        checks.at_least("l2", self.l2, 0)
        super().__post_init__()


@part
class ParameterOptions(_Part):
    """Which weights are trained.

    Attributes:
        train, freeze: glob patterns over the names of initializers, and of the nodes and modules that read them.
        untie: glob patterns over the same names, of weights that several modules read and that each is to have its own
            copy of.
        tie: glob patterns over the same names, of weights that have the values of another one, transposed perhaps, and
            that are to be trained as one with it.
        preset: groups of weights to train: 'bias', 'norm', 'head'. They add up, with `train` and `train_last` too.
        train_last: how many of the last layers with weights to train; 0: no such choice.
    """

    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    untie: tuple[str, ...] = ()
    tie: tuple[str, ...] = ()
    preset: tuple[Preset, ...] = ()
    train_last: int = 0

    def __post_init__(self) -> None:
        self._patterns("train", "freeze", "untie", "tie")
        self._tuple("preset", str, "such as preset=('bias',)")
        for name in self.preset:
            checks.one_of("preset", name, Preset)
        checks.at_least("train_last", self.train_last, 0, whole=True)
        super().__post_init__()


@part
class AdapterOptions(_Part):
    """Adapters that are trained in place of weights.

    Attributes:
        lora: freeze all that is not chosen by these, and train adapters of the frozen matrices; None: no adapters.
        lora_target: which matrices get an adapter: glob patterns over their names, or over the paths of the modules
            that read them (or the ends of these); 'attention' or 'mlp' for modules that are usually called so; or
            'all-linear', as by default: all of MatMul and Gemm that would be trained or are stored as integers.
        lora_scaling: 'lora' divides alpha by the rank, 'rslora' by its square root.
        lora_dropout: the share of an adapter's input that is dropped at each step; of a trained model none is.
        lora_dora: train with each adapter the lengths of an adapted matrix's weights, one for each output (DoRA).
    """

    lora: LoraSpec | None = None
    lora_target: tuple[str, ...] = ()
    lora_scaling: Scaling = "lora"
    lora_dropout: float = 0.0
    lora_dora: bool = False

    def __post_init__(self) -> None:
        checks.of_type("lora", self.lora, (LoraSpec, type(None)), "LoraSpec(rank), or None,")
        self._patterns("lora_target")
        checks.one_of("lora_scaling", self.lora_scaling, Scaling)
        checks.at_least("lora_dropout", self.lora_dropout, 0)
        if self.lora_dropout >= 1:
            raise UsageError(f"`lora_dropout={self.lora_dropout}`: nothing would be left", "0.05 is usual")
        checks.of_type("lora_dora", self.lora_dora, bool, "True or False")
        if self.lora_dora and self.lora_dropout:
            raise UsageError(
                "`lora_dora` does not go with `lora_dropout`, by which each product would be computed twice",
                "leave one of them out",
            )
        super().__post_init__()


@part
class InputOptions(_Part):
    """Which inputs get a gradient.

    Attributes:
        grad_of_input: glob patterns over input names.
    """

    grad_of_input: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._patterns("grad_of_input")
        super().__post_init__()


@part
class OptimizerOptions(_Part):
    """How a step is taken.

    Attributes:
        optimizer: the name of the optimizer whose step is appended; "" for none.
        optimizer_options: what it takes besides (momentum, weight_decay, ...), by name.
        group: what weights of certain names have for options instead; of two groups the later one counts.
        clip_norm: where the gradients' norm, of all together, is larger, they are scaled down to it; None: no bound.
        clip_value: what no element of a gradient exceeds in magnitude; None: no bound.
        accumulate: of how many runs the gradients are gathered for a step; it is that of one batch of all their
            samples, where the loss is a mean over labels that count, or the runs have equally many.
        loss_scale: what the gradient of the loss is multiplied with, and gradients are divided by, so that those of
            16 bits don't vanish; 'dynamic' adapts it; None: none.
        ema: how much of the exponential moving average of the weights stays at a step; None: none is kept.
        embed_state: store the optimizer's state as it is before the first step, so that it need not be fed; of weights
            beyond 256 MB it is described only.
    """

    optimizer: str = ""
    optimizer_options: Mapping[str, object] = field(default_factory=dict)
    group: tuple[Group, ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    loss_scale: LossScale | None = None
    ema: float | None = None
    embed_state: bool = True

    def __post_init__(self) -> None:
        checks.text("optimizer", self.optimizer)
        if self.optimizer:
            OPTIMIZERS.lookup(self.optimizer)
        checks.mapping("optimizer_options", self.optimizer_options, "such as {'weight_decay': 0.01}")
        self._tuple("group", Group, "such as group=(Group('*.bias', {'weight_decay': 0}),)")
        for name in ("clip_norm", "clip_value"):
            bound = getattr(self, name)
            if bound is not None and not (checks.is_number(bound) and bound > 0):
                raise UsageError(f"`{name}` must be above 0, not {bound}", "leave it out for no bound")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UsageError("`clip_norm` and `clip_value` don't go together", "leave one of the two out")
        if not checks.is_number(self.accumulate, 1, whole=True):
            raise UsageError(f"`accumulate` must be 1 or more, not {self.accumulate}", "1 takes a step at each run")
        if self.loss_scale is not None:
            check_loss_scale(self.loss_scale)
        if self.ema is not None and not (checks.is_number(self.ema, 0) and self.ema < 1):
            raise UsageError(f"`ema` must be at least 0 and below 1, not {self.ema}", "such as 0.999")
        checks.flag("embed_state", self.embed_state)
        super().__post_init__()


@part
class InitOptions(_Part):
    """How a training begins.

    Attributes:
        training_info: leave the inference graph as it is, and describe the training beside it, in `training_info`.
        init: how weights begin there: 'keep' their stored values, 'xavier', 'he' or 'normal'.
        seed: of the random numbers that they begin with; None lets the runtime choose. Adapters are drawn with it
            too; with None as with 0.
    """

    training_info: bool = False
    init: Init = "keep"
    seed: int | None = None

    def __post_init__(self) -> None:
        checks.flag("training_info", self.training_info)
        checks.one_of("init", self.init, Init)
        if self.seed is not None and not (checks.is_number(self.seed, 0, whole=True) and self.seed < SEEDS):
            raise UsageError(f"`seed={self.seed!r}`: a whole number from 0 to {SEEDS - 1} is wanted")
        super().__post_init__()


@part
class MemoryOptions(_Part):
    """What is computed again instead of kept.

    Attributes:
        recompute: what to compute again in the backward part, so that it need not be kept; None: nothing.
        loss_chunks: in how many chunks of tokens the loss of a language model and its gradient are computed, one after
            the other, so that there never are the logits of all; None: in 4 where the vocabulary is large; 1: as one.
    """

    recompute: RecomputeSpec | None = None
    loss_chunks: int | None = None

    def __post_init__(self) -> None:
        kinds = (RecomputeSpec, type(None))
        checks.of_type("recompute", self.recompute, kinds, "RecomputeSpec('elementwise'), or None,")
        if self.loss_chunks is not None:
            checks.at_least("loss_chunks", self.loss_chunks, 1, whole=True)
        super().__post_init__()


@part
class OutputOptions(_Part):
    """How the training model is written.

    Attributes:
        keep_outputs: keep the model's own outputs too.
        yield_: what becomes of the YieldOp: 'ones' (filled), 'input' (fed) or 'keep'.
        as_gradient_op: write one Gradient node of ai.onnx.preview.training in place of the backward part.
    """

    keep_outputs: bool = False
    yield_: Yield = "ones"
    as_gradient_op: bool = False

    def __post_init__(self) -> None:
        checks.flag("keep_outputs", self.keep_outputs)
        checks.one_of("yield_", self.yield_, Yield)
        checks.flag("as_gradient_op", self.as_gradient_op)
        super().__post_init__()


@part
class ModeOptions(_Part):
    """How layers behave that training changes.

    Attributes:
        mode: 'keep', 'train' or 'eval' for BatchNormalization and Dropout.
        unbiased_variance: put the unbiased variance of a batch into the running variance of BatchNormalization, as
            PyTorch does; by default the biased one, as the ONNX operator does.
    """

    mode: Mode = "keep"
    unbiased_variance: bool = False

    def __post_init__(self) -> None:
        checks.flag("unbiased_variance", self.unbiased_variance)
        checks.one_of("mode", self.mode, Mode)
        super().__post_init__()


@part
class GradientOptions(_Part):
    """How gradients are computed.

    Attributes:
        quantization: what becomes of a path through QuantizeLinear: 'refuse' it, or 'ste', the straight-through
            estimator, for which rounding is the identity within the quantized range, or 'lsq', which trains the scales
            too; see `passes.learned_scales`.
        tuned: forms of gradients to write instead of those that suit their shapes; see `kernel_variants`.
        target: the runtime that the model is written for: 'standard' is any, for others see `targets`.
    """

    quantization: Quantization = "refuse"
    tuned: Mapping[str, str] = field(default_factory=dict)
    target: TargetName = "standard"

    def __post_init__(self) -> None:
        checks.one_of("quantization", self.quantization, Quantization)
        checks.mapping("tuned", self.tuned, "what `onnxgrad tune` writes, by `onnxgrad.load_tuned`")
        checks.one_of("target", self.target, TargetName)
        super().__post_init__()

    @property
    def straight_through(self) -> bool:
        """Whether rounding to integers counts as the identity."""
        return self.quantization != "refuse"


@part
class NameOptions(_Part):
    """What values are called.

    Attributes:
        identifiers: make valid C identifiers of the names that are not the model's own.
    """

    identifiers: bool = False

    def __post_init__(self) -> None:
        checks.flag("identifiers", self.identifiers)
        super().__post_init__()


@part
class ShapeOptions(_Part):
    """Shapes of the model.

    Attributes:
        dims: symbol -> size, fixed before anything else; 0 for a past that is empty.
        shapes: input -> shape, set before anything else. A symbol, or another size, in place of a size that the model
            has fixed frees the batch of the model.
        infer_by_run: read ranks that can't be inferred off a run of the model; by default where that is quick.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    infer_by_run: bool | None = None

    def __post_init__(self) -> None:
        checks.mapping("dims", self.dims, "such as dims={'batch': 1}")
        checks.mapping("shapes", self.shapes, "such as shapes={'x': (1, 3, 224, 224)}")
        if self.infer_by_run is not None:
            checks.of_type("infer_by_run", self.infer_by_run, bool, "True or False")
        for symbol, size in self.dims.items():
            checks.sizes("dims", symbol, [size], 0)
        for name, shape in self.shapes.items():
            checks.tuple_of("shapes", shape, object, "such as shapes={'x': (1, 3, 224, 224)}")
            checks.sizes("shapes", name, shape[:1], 1, symbols=True)
            checks.sizes("shapes", name, shape[1:], 0, symbols=True)
        super().__post_init__()


# -- what is read together --------------------------------------------------------------------------------------------
# What nobody makes an instance of is no dataclass of its own: making one takes a millisecond or two at each start.


class SelectionOptions(GradientOptions, InputOptions, AdapterOptions, ParameterOptions):
    """What decides which weights and inputs get a gradient."""


class FormOptions(ShapeOptions, GradientOptions, ModeOptions):
    """What decides how a model is brought into the form that is differentiated."""


class PreparationOptions(FormOptions, SelectionOptions, LossOptions):
    """What the preparation of a model reads."""


class AdaptationOptions(InitOptions, AdapterOptions, ParameterOptions):
    """What adapters are made by."""


class BackwardOptions(GradientOptions, OutputOptions, MemoryOptions, InitOptions):
    """What the backward part is written by."""


class RematerializationOptions(OutputOptions, MemoryOptions):
    """What decides which values are computed again."""


class GradientNodeOptions(GradientOptions, RematerializationOptions, OptimizerOptions, AdapterOptions):
    """What a Gradient node in place of the backward part can say, and what it can't."""


class StepOptions(InitOptions, OptimizerOptions, LossOptions):
    """What a step is written by, its loss and its optimizer."""


@part
class AppendOptions(ShapeOptions, OutputOptions, MemoryOptions, InitOptions, LossOptions):
    """What the loss is appended by."""


class UpdateOptions(GradientOptions, StepOptions):
    """What the optimizer's step is written by."""


class SignatureOptions(OutputOptions, StepOptions):
    """What decides which inputs and outputs there are."""


class NamingOptions(NameOptions, StepOptions):
    """What values are called, and what the metadata then say of them."""


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
    """Everything a build can be asked for; the defaults are those of the command line.

    The attributes are those of its parts: `LossOptions`, `ParameterOptions`, `AdapterOptions`, `InputOptions`,
    `OptimizerOptions`, `InitOptions`, `MemoryOptions`, `OutputOptions`, `ModeOptions`, `GradientOptions`, `NameOptions`
    and `ShapeOptions`.

    Raises:
        UsageError: there is no such field, or a word, a number or a type does not fit; the message names it.
    """
