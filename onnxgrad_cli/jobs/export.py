"""From a checkpoint, or an adapter, and the model it belongs to back to an inference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.files import STREAM, check_target, load_model, save_model
from onnxgrad_cli.jobs import target_of
from onnxgrad_cli.pipeline import Adapter
from onnxgrad_cli.proof.check import Arrays
from onnxgrad_cli.runtime.adapter_file import is_adapter, load_adapter
from onnxgrad_cli.runtime.export import with_weights
from onnxgrad_cli.runtime.folder import load_checkpoint
from onnxgrad_cli.runtime.merge import merged


def run_export(source: Path, model: str | Path, out: str | Path | None = None, *, force: bool = False) -> list[Path]:
    """Write the inference model with the weights of a checkpoint, adapters merged into those they belong to.

    Args:
        source: a checkpoint in the folder of a run of `onnxgrad train`, or the adapter that one has written.
        model: the inference model that was trained.
        out: by default `<model>.trained.onnx`.
        force: replace a file that onnxgrad did not write.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: a file would be replaced that must not be.
        OnnxgradError: the checkpoint can't be read, or is that of another model.
    """
    weights, state, adapters = _read(source)
    proto, path = load_model(model)
    target = target_of(path, out, "trained")
    if target is not None:
        check_target(target, proto, path, force)
    return save_model(write_back(proto, weights, state, adapters, path), target or STREAM, path, force)


def _read(source: Path) -> tuple[Arrays, Arrays, Sequence[Adapter]]:
    """The weights, the state and the adapters in a file."""
    if is_adapter(source):
        adapters, values = load_adapter(source)
        return values, {}, adapters
    values, progress = load_checkpoint(source)
    weights = {name: values.pop(name) for name in progress["weights"]}
    return weights, values, [Adapter(**adapter) for adapter in progress["adapters"]]


def write_back(
    model: ModelProto, weights: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray],
    adapters: Sequence[Adapter], path: Path | None,
) -> ModelProto:  # fmt: skip
    """An inference model with what training has found: weights, running statistics among the state, merged adapters.

    Raises:
        OnnxgradError: it is another model than the one that was trained.
    """
    return with_weights(model, merged(model, adapters, weights, path), state)
