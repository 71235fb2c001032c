"""Attributions of a picture are drawn as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.jobs.explain import run_explain


def test_a_picture_is_drawn_of_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    net (float[N, 3, 8, 8] x) => (float[N, M] f) { c = Conv(x, w)
      p = GlobalMaxPool(c)
      f = Flatten(p) }""")
    model.graph.initializer.append(
        numpy_helper.from_array(np.float32(np.random.default_rng(0).random((2, 3, 3, 3))), "w")
    )
    onnx.save(model, tmp_path / "m.onnx")
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "in.png")
    for name in ("saliency", "grad-cam", "occlusion"):
        found = run_explain(tmp_path / "m.onnx", tmp_path / "in.png", tmp_path / "out.png", Method(name), verify=False)  # type: ignore[arg-type]
        with image.open(tmp_path / "out.png") as drawn:
            left = np.asarray(drawn)[8:128:16, 8:128:16]
            assert drawn.size == (260, 128) and drawn.info["Description"] == found.words
        stretched = (pixels - float(pixels.min())) / np.ptp(pixels) * 255
        assert np.abs(left - stretched).max() < 1.01
    with pytest.raises(UsageError, match="labels"):
        run_explain(tmp_path / "m.onnx", tmp_path / "in.png", class_="label", label="labels")
