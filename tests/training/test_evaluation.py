"""The loss of an evaluation over batches, and of the model that is exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from onnxgrad_cli.checkpoints.stored_weights import with_weights
from onnxgrad_cli.data import (
    Batches,
)
from onnxgrad_cli.training.evaluation import EvalResult, EvalSession, Evaluator, make_eval_model
from onnxgrad_cli.training.trainer import Trainer
from tests.data.test_sampling import folder
from tests.training.test_trainer import batches, exported, network, training


def test_the_loss_of_whole_batches_is_a_mean(tmp_path: Path) -> None:
    """A model that takes batches of 8 is evaluated on 16 samples of 20; the mean is over those."""

    class Session:
        sums, weights = False, (1.0,)

        def __call__(self, feeds: dict[str, np.ndarray], weights: object) -> EvalResult:
            return EvalResult({}, [float(feeds["x"][:, 0].mean())], [None], 0.0)

    data = folder(tmp_path, 20, batch=8)
    evaluator = Evaluator(Session(), data, Batches(data, 8, shuffle=False), [])  # type: ignore[arg-type]
    assert evaluator({}) == {"loss": np.arange(16).mean()}


def test_evaluation_and_the_exported_model_agree(tmp_path: Path) -> None:
    model = exported(network(0.5))
    built = training(model)
    trainer = Trainer(built, threads=1)
    found = make_eval_model(model, built.options, trainer.buffers, counted=True)
    evaluator = EvalSession(found, None, "CPUExecutionProvider", 1)
    for batch in batches(5):
        trainer.step(batch, 0.05)
    (batch,) = batches(1)
    judged = evaluator(batch, trainer.buffers)
    final = with_weights(model, trainer.weights(), trainer.state())
    assert [node.op_type for node in final.graph.node] == [node.op_type for node in model.graph.node]
    assert final.opset_import == model.opset_import
    onnx.save(final, tmp_path / "trained.onnx")
    (y,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": batch["x"]})
    np.testing.assert_allclose(judged.outputs["y"], y, atol=1e-5)
    wanted = torch.nn.functional.cross_entropy(torch.tensor(y), torch.tensor(batch["label"]))
    assert abs(judged.values[0] - wanted.item()) < 1e-5
    mean = next(name for name in trainer.state() if name.endswith("running_mean"))
    assert np.any(trainer.state()[mean] != 0)  # what a step has found of the data goes back too
