"""A model in the format that onnxruntime opens faster: optimized once, and without protobuf."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.session import CPU, SILENT, load_onnxruntime

PLATFORMS = ["NchwcTransformer"]
"""Optimizations for one processor; onnxruntime's own tool of conversion leaves them out, too."""


def ort_format(model: ModelProto) -> bytes:
    """The bytes of a .ort file, optimized for the processor: what runs it must be onnxruntime of this release or near.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/ort-format-models.html.

    Raises:
        OnnxgradError: onnxruntime can't open the model.
    """
    runtime = load_onnxruntime()
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.ort")
        options = runtime.SessionOptions()
        options.log_severity_level = SILENT
        options.optimized_model_filepath = os.fsencode(path)
        options.add_session_config_entry("session.save_model_format", "ORT")
        try:
            runtime.InferenceSession(model.SerializeToString(), options, providers=[CPU], disabled_optimizers=PLATFORMS)
        except Exception as error:  # onnxruntime's exceptions have no class in common
            raise OnnxgradError(f"onnxruntime can't write the model as .ort: {error}") from None
        return path.read_bytes()
