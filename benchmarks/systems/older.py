"""A step on onnxruntime-training 1.19.2: artifacts made by its own function, and its Module and Optimizer.

    python -m benchmarks.systems.older prepare MODEL.onnx WEIGHTS.json FOLDER
    python -m benchmarks.systems.older FOLDER BATCH.npz THREADS gradients|adamw

It has an environment of its own, and so imports nothing of this project but `interleaved`. The package's `__init__`
imports PyTorch's front end, which artifacts don't need, and so PyTorch: it is passed over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.interleaved import RATE, serve


def training(name: str) -> Any:
    """A module of onnxruntime.training."""
    from importlib import import_module

    if "onnxruntime.training" not in sys.modules:
        package = ModuleType("onnxruntime.training")
        package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
        sys.modules[package.__name__] = package
    return import_module(f"onnxruntime.training.{name}")


def prepare(model_file: str, weights_file: str, folder: str) -> None:
    """Write the artifacts of a model whose listed weights are trained."""
    artifacts, blocks = training("artifacts"), training("onnxblock")

    class Loss(blocks.loss.CrossEntropyLoss):  # type: ignore[misc, name-defined]
        """Classes are axis 1; left to itself, the loss declares labels as if they were the last."""

        def build(self, scores: str) -> str:
            made: str = super().build(scores)
            label, output = self.base.graph.input[-1], model.graph.output[0]
            axes = list(output.type.tensor_type.shape.dim)
            del label.type.tensor_type.shape.dim[:]
            label.type.tensor_type.shape.dim.extend([axes[0], *axes[2:]])
            return made

    model, weights = onnx.load(model_file), json.loads(Path(weights_file).read_text())
    in_training_mode(model)
    Path(folder).mkdir()
    artifacts.generate_artifacts(
        model,
        requires_grad=weights,
        frozen_params=[t.name for t in model.graph.initializer if t.name not in weights and t.data_type == 1],
        loss=Loss(),
        optimizer=blocks.optim.AdamW(eps=1e-8, weight_decay=0.01),  # PyTorch's and ours
        artifact_directory=folder,
    )


def in_training_mode(model: onnx.ModelProto) -> None:
    """Let normalizations hand out their statistics, which gradients read, and those of the batch be what counts."""
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            kept = [a for a in node.attribute if a.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("training_mode", 1)])
            node.output.extend(f"{name}_next" for name in node.input[3:5])
        if node.op_type == "LayerNormalization" and len(node.output) == 1:
            node.output.extend(f"{node.output[0]}_{name}" for name in ("mean", "deviation"))


class Step:
    """Forward, backward and perhaps the optimizer."""

    def __init__(self, folder: Path, batch: dict[str, np.ndarray], threads: int, kind: str) -> None:
        api = training("api")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        self.module = api.Module(folder / "training_model.onnx", self.state, session_options=options)
        self.optimizer = None
        if kind == "adamw":
            self.optimizer = api.Optimizer(folder / "optimizer_model.onnx", self.module)
            self.optimizer.set_learning_rate(RATE)
        else:
            self.norm = self._norm
        batch["labels"] = batch.pop("y")
        arrays = [np.ascontiguousarray(batch[name]) for name in self.module.input_names()]
        self.inputs = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]

    def step(self) -> float:
        """The loss before the step."""
        loss = self.module(*self.inputs)
        if self.optimizer:
            self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss.numpy())

    def _norm(self) -> float:
        found = [parameter.grad for _, parameter in self.state.parameters if parameter.requires_grad]
        return float(np.sqrt(sum(np.vdot(array, array) for array in found)))


def main(*words: str) -> None:
    """Prepare, or serve."""
    if words[0] == "prepare":
        return prepare(words[1], words[2], words[3])
    folder, batch, threads, kind = words
    serve(lambda: Step(Path(folder), dict(np.load(batch)), int(threads), kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
