"""From a checkpoint and the model it belongs to back to an inference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.files import check_target, load_model, save_model
from onnxgrad_cli.jobs import target_of
from onnxgrad_cli.pipeline import Adapter
from onnxgrad_cli.runtime.export import with_weights
from onnxgrad_cli.runtime.folder import load_checkpoint
from onnxgrad_cli.runtime.merge import merged


def run_export(
    checkpoint: Path, model: str | Path, out: str | Path | None = None, *, force: bool = False
) -> list[Path]:
    """Write the inference model with the weights of a checkpoint, adapters merged into those they belong to.

    Args:
        checkpoint: what `onnxgrad train` has written in the folder of its run.
        model: the inference model that was trained.
        out: by default `<model>.trained.onnx`.
        force: replace a file that onnxgrad did not write.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: a file would be replaced that must not be.
        OnnxgradError: the checkpoint can't be read, or is that of another model.
    """
    values, progress = load_checkpoint(checkpoint)
    proto, path = load_model(model)
    target = target_of(path, out, "trained")
    if target is not None:
        check_target(target, proto, path, force)
    weights = {name: values.pop(name) for name in progress["weights"]}
    adapters = [Adapter(**adapter) for adapter in progress["adapters"]]
    return save_model(write_back(proto, weights, values, adapters, path), target or "-", path, force)


def write_back(
    model: ModelProto, weights: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray],
    adapters: Sequence[Adapter], path: Path | None,
) -> ModelProto:  # fmt: skip
    """An inference model with what training has found: weights, running statistics among the state, merged adapters.

    Raises:
        OnnxgradError: it is another model than the one that was trained.
    """
    return with_weights(model, merged(model, adapters, weights, path), state)
