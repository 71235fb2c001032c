"""Options of all jobs. Each option is declared once, at the dataclass field that holds its value."""

from onnxgrad_cli.options.build import (
    AdaptationOptions as AdaptationOptions,
    AppendOptions as AppendOptions,
    BackwardOptions as BackwardOptions,
    FormOptions as FormOptions,
    GradientNodeOptions as GradientNodeOptions,
    GradientOptions as GradientOptions,
    LossOptions as LossOptions,
    ModeOptions as ModeOptions,
    NamingOptions as NamingOptions,
    OptimizerOptions as OptimizerOptions,
    Options as Options,
    ParameterOptions as ParameterOptions,
    PreparationOptions as PreparationOptions,
    RematerializationOptions as RematerializationOptions,
    SelectionOptions as SelectionOptions,
    ShapeOptions as ShapeOptions,
    SignatureOptions as SignatureOptions,
    StepOptions as StepOptions,
    UpdateOptions as UpdateOptions,
)
from onnxgrad_cli.options.compound_values import (
    DYNAMIC as DYNAMIC,
    RATE as RATE,
    Group as Group,
    LoraSpec as LoraSpec,
    LossScale as LossScale,
    RecomputeSpec as RecomputeSpec,
    check_loss_scale as check_loss_scale,
)
