"""Evaluate an inference model on data: compute the loss, metrics and confusion matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Evaluated, Setting, Source, evaluate


@attribute_failures
@job
def run_evaluate(
    model: ModelSource,
    data: Source,
    options: Options | None = None,
    *,
    metrics: Sequence[str] = (),
    setting: Setting | None = None,
    keep_mode: bool = False,
    tell: Tell = silent,
) -> Evaluated:
    """Evaluate a model on data. The results are computed over all samples, and don't depend on the batch size.

    Args:
        model: the inference model, trained or not; '-' is stdin.
        data: the samples with their labels: a file or folder (see `open_data`), or a map from the name of an input or
            label to its array.
        options: the losses with their outputs and labels, and the sizes of the model; other options have no effect.
        metrics: the metrics to compute in addition to the loss, in the form of `parse_metric`, such as 'accuracy',
            'rmse:reg' or 'top-5'; () selects the default metrics of the losses.
        setting: the batch size, the execution provider, and how data are read.
        keep_mode: leave BatchNormalization and Dropout in the mode that they have in the model; by default they run in
            inference mode.
        tell: receives progress messages.

    Raises:
        UsageError: the model, the data, the options and the metrics don't fit each other.
        OnnxgradError: a file can't be read, or onnxruntime fails.
    """
    metrics = checks.tuple_of("metrics", metrics, str, "such as metrics=('accuracy',)")
    data = data if isinstance(data, Mapping) else checks.path("data", data)
    proto, path = own_model(model)
    return evaluate(proto, path, data, options or Options(), metrics, setting or Setting(), keep_mode, tell)
