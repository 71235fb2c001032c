"""From a checkpoint, or an adapter, and the model it belongs to back to an inference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import STREAM, ModelSource, check_target, own_model, save_model
from onnxgrad_cli.files.start_values import is_values, read_values
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.training.run.adapter_file import is_adapter, load_adapter
from onnxgrad_cli.training.run.ema_weights import check_ema
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.run.merge import merge
from onnxgrad_cli.training.run.tensors import is_foreign, load_tensors
from onnxgrad_cli.verification.written import check_opens


@judged
def run_export(
    source: Path,
    model: ModelSource,
    out: str | Path | None = None,
    *,
    roles: Path | None = None,
    use_ema: bool = False,
    keep_mode: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Path]:
    """Write the inference model with the weights of a checkpoint, adapters merged into those they belong to.

    Args:
        source: a checkpoint in the folder of a run of `onnxgrad train`, or the adapter that one has written; what was
            trained elsewhere, as bytes (.bin) in the order of a training model's JSON; or a safetensors file that has
            nothing but weights of the model.
        model: the inference model that was trained.
        out: by default `<model>.trained.onnx`.
        roles: that JSON, where it does not lie beside the bytes under the same name.
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
    weights, state, adapters = _read(source, roles, use_ema, tell)
    proto, path = own_model(model)
    target = target_of(model, out, "trained")
    if target is not None:
        check_target(target, proto, path, force)
    merged = merge(proto, adapters, weights, path, state, keep_mode)
    return save_model(merged, target or STREAM, path, force, check=check_opens(merged, proto, path))


def _read(source: Path, roles: Path | None, use_ema: bool, tell: Tell) -> tuple[Arrays, Arrays, Sequence[Adapter]]:
    """The weights, or their moving averages, the state and the adapters in a file."""
    if is_values(source):
        held = read_values(source, roles)
        return _parted(source, held.values, held.weights, held.averages, held.adapters, use_ema)
    if roles is not None:
        raise UsageError(f"`roles` says what bytes are, and '{source}' says so itself", "leave it out")
    if is_adapter(source):
        if use_ema:
            raise UsageError(
                "`use_ema`: an adapter has no averages besides its factors",
                "`onnxgrad train --use-ema` writes them as its factors; or name a checkpoint",
            )
        adapters, values = load_adapter(source, tell)
        return values, {}, adapters
    if is_foreign(source):
        values = load_tensors(source)[0]
        return _parted(source, values, list(values), {}, (), use_ema)
    values, progress = load_checkpoint(source, tell)
    adapters = [Adapter(**adapter) for adapter in progress["adapters"]]
    return _parted(source, values, progress["weights"], progress.get("averages", {}), adapters, use_ema)


def _parted(
    source: Path,
    values: Arrays,
    weights: Sequence[str],
    averages: Mapping[str, str],
    adapters: Sequence[Adapter],
    use_ema: bool,
) -> tuple[Arrays, Arrays, Sequence[Adapter]]:
    """What `_read` returns: the weights by name, or the averages in their place, and the rest."""
    ema = _ema(source, values, averages) if use_ema else {}
    found = {name: values[ema.get(name, name)] for name in weights}
    return found, {name: array for name, array in values.items() if name not in found}, adapters


def _ema(source: Path, values: Arrays, averages: Mapping[str, str]) -> dict[str, str]:
    ema = check_ema(averages, values)
    if not any(values[average].any() for average in ema.values()):
        raise UsageError(
            f"`use_ema`: the averages in '{source}' are still zeros: no step has been taken", "leave `use_ema` out"
        )
    return ema
