"""From a checkpoint, or an adapter, and the model it belongs to back to an inference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import STREAM, ModelSource, check_target, own_model, save_model
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import Adapter, Quantized
from onnxgrad_cli.training.run.adapter_file import is_adapter, load_adapter
from onnxgrad_cli.training.run.ema_weights import check_ema
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.run.merge import merge
from onnxgrad_cli.verification.written import check_opens


@judged
def run_export(
    source: Path,
    model: ModelSource,
    out: str | Path | None = None,
    *,
    use_ema: bool = False,
    keep_mode: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Path]:
    """Write the inference model with the weights of a checkpoint, adapters merged into those they belong to.

    Args:
        source: a checkpoint in the folder of a run of `onnxgrad train`, or the adapter that one has written.
        model: the inference model that was trained.
        out: by default `<model>.trained.onnx`.
        use_ema: write the moving averages that `Options.ema` has kept, in place of the weights.
        keep_mode: leave BatchNormalization and Dropout in the mode in which the model came; else they are in
            inference mode.
        force: replace a file that onnxgrad did not write.
        tell: takes a line where another program has written the checkpoint, whose damage would not be noticed.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: a file would be replaced that must not be, or there are no averages of the weights' types.
        OnnxgradError: the checkpoint can't be read, is damaged, or is that of another model.
        CheckFailed: onnxruntime does not open what would be written, and opens the model.
    """
    weights, state, adapters, quantized = _read(source, use_ema, tell)
    proto, path = own_model(model)
    target = target_of(model, out, "trained")
    if target is not None:
        check_target(target, proto, path, force)
    merged = merge(proto, adapters, weights, path, state, keep_mode, quantized)
    return save_model(merged, target or STREAM, path, force, check=check_opens(merged, proto, path))


def _read(source: Path, use_ema: bool, tell: Tell) -> tuple[Arrays, Arrays, Sequence[Adapter], Quantized]:
    """The weights, or their moving averages, the state, the adapters and what is stored as integers, in a file."""
    if is_adapter(source):
        if use_ema:
            raise UsageError(
                "`use_ema`: an adapter has no averages besides its factors",
                "`onnxgrad train --use-ema` writes them as its factors; or name a checkpoint",
            )
        adapters, values = load_adapter(source, tell)
        return values, {}, adapters, Quantized()
    values, progress = load_checkpoint(source, tell)
    ema = _ema(source, values, progress) if use_ema else {}
    weights = {name: values[ema.get(name, name)] for name in progress["weights"]}
    values = {name: array for name, array in values.items() if name not in weights}
    adapters = [Adapter(**adapter) for adapter in progress["adapters"]]
    quantized = Quantized.of(progress["quantized"]) if "quantized" in progress else Quantized()
    return weights, values, adapters, quantized


def _ema(source: Path, values: Arrays, progress: Mapping[str, Any]) -> dict[str, str]:
    ema = check_ema(progress.get("averages", {}), values)
    if not any(values[average].any() for average in ema.values()):
        raise UsageError(
            f"`use_ema`: the averages in '{source}' are still zeros: no step has been taken", "leave `use_ema` out"
        )
    return ema
