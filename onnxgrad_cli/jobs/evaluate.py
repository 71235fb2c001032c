"""How good an inference model is on data: the loss, metrics and how its classes are confused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Evaluated, Setting, Source, evaluate


@judged
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
    """Measure a model on data, exactly over all of them, in whatever batches they are taken.

    Args:
        model: the inference model, trained or not; '-' is stdin.
        data: what it is measured on, labels included: a file or folder, see `open_data`; or arrays by the names of
            inputs and labels.
        options: the losses, and what they take of the model; the rest does not count.
        metrics: what is measured besides the loss, as `train` takes it: 'accuracy', 'rmse:reg', 'top-5'; () is what
            suits the losses.
        setting: batches, provider, names in the data.
        keep_mode: leave BatchNormalization and Dropout in the mode in which the model came; else they are in
            inference mode.
        tell: takes what is narrated.

    Raises:
        UsageError: the model, the data, the options and the metrics do not fit each other.
        OnnxgradError: a file can't be read, or onnxruntime fails.
    """
    metrics = checks.tuple_of("metrics", metrics, str, "such as metrics=('accuracy',)")
    data = data if isinstance(data, Mapping) else checks.path("data", data)
    proto, path = own_model(model)
    return evaluate(proto, path, data, options or Options(), metrics, setting or Setting(), keep_mode, tell)
