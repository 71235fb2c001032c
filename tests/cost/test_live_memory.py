"""The order in which onnxruntime runs nodes, against what its profile says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.cost.live_memory import run_order
from onnxgrad_cli.ir.node_values import reads

SAMPLES = Path(__file__).parents[2] / "sample_models"


@pytest.mark.parametrize("optimizer", ["", "adamw"])
def test_it_is_the_order_of_a_profile(optimizer: str, tmp_path: Path) -> None:
    options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer=optimizer, mode="train")
    model = build(SAMPLES / "digits_cnn.onnx", options).model
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 3
    settings.enable_profiling, settings.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    feeds = {"x": np.zeros((2, 1, 8, 8), np.float32), "y": np.zeros(2, np.int64)}
    session.run(None, feeds | ({"learning_rate": np.array(1e-3, np.float32)} if optimizer else {}))
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [e["name"].removesuffix("_kernel_time") for e in events if e["name"].endswith("_kernel_time")]
    nodes = model.graph.node
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    order = run_order([[makers[name] for name in reads(node) if name in makers] for node in nodes])
    foretold = [nodes[at].name for at in order if nodes[at].name in set(ran)]
    assert len(ran) > 100
    assert foretold == [name for name in ran if name in set(foretold)]
    assert foretold != [node.name for node in nodes if node.name in set(ran)]  # it is not the file's
