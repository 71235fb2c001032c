"""A step of a training model on OpenVINO's own runtime.

    python -m benchmarks.systems.openvino TRAIN.onnx BATCH.npz THREADS

It has an environment of its own, without onnxruntime. Two requests read weights and state where the other has written
them, as `Trainer` does with two bindings, so a step copies nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import openvino

from benchmarks.interleaved import RATE, serve
from onnxgrad_cli.ir.weightless_copy import without_initializers
from onnxgrad_cli.metadata import Roles, describe


class Step:
    """Forward and backward, or with the optimizer, as the training model is; all shapes are those of the batch."""

    def __init__(self, path: Path, batch: Mapping[str, np.ndarray], threads: int) -> None:
        model = onnx.load(path)
        self.roles: Roles = describe(model)
        wanted = {*self._outputs(), *self._successors().values()}
        values = {t.name: np.array(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
        held = {
            name: values[name]
            for name, role in self.roles.inputs.items()
            if role in ("weight", "state") and name in values
        }
        held |= self.roles.begun(values)
        model = without_initializers(model, held)  # an input with a value is a constant to OpenVINO
        outputs = [value for value in model.graph.output if value.name in wanted]
        del model.graph.output[:]
        model.graph.output.extend(outputs)
        fed = {name: np.ascontiguousarray(array) for name, array in batch.items()}
        if self.roles.optimizer:
            fed |= {name: np.array(RATE, np.float32) for name in self.roles.fed if name not in fed}
        read = openvino.Core().read_model(model.SerializeToString())
        read.reshape({name: array.shape for name, array in {**fed, **held}.items()})
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.compile_model(read, "CPU", options)
        self.found = {name: np.empty(compiled.output(name).shape, np.float32) for name in self._outputs()}
        self._requests = self._bound(compiled, fed, held)

    def _outputs(self) -> list[str]:
        """What a step writes besides the weights and the state."""
        return [self.roles.loss] if self.roles.optimizer else list(self.roles.outputs)

    def _successors(self) -> dict[str, str]:
        """Weight or state -> what a step replaces it by; nothing where gradients alone are wanted."""
        return self.roles.successors if self.roles.optimizer else {}

    def _bound(
        self, compiled: openvino.CompiledModel, fed: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray]
    ) -> list[openvino.InferRequest]:
        successors = self._successors()
        other = {name: np.empty_like(held[name]) for name in successors}
        self._arrays = [*fed.values(), *held.values(), *other.values()]  # tensors that share memory don't keep it
        requests = []
        for now, then in ((held, other), (other, held)) if successors else ((held, {}),):
            request = compiled.create_infer_request()
            inputs = {**fed, **held, **now}
            outputs = {**self.found, **{successors[name]: then[name] for name in successors}}
            for name, array in {**inputs, **outputs}.items():
                request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            requests.append(request)
        return requests

    def step(self) -> float:
        """The loss before the step."""
        self._requests[0].infer()
        self._requests.reverse()
        return float(self.found[self.roles.loss])

    def norm(self) -> float | None:
        """Of all gradients together; None where the optimizer alone has seen them."""
        if self.roles.optimizer:
            return None
        found = (self.found[name] for name in self.roles.gradients.values())
        return float(np.sqrt(sum(np.vdot(array, array) for array in found)))


def main(model: str, batch: str, threads: str) -> None:
    """Serve."""
    serve(lambda: Step(Path(model), dict(np.load(batch)), int(threads)))


if __name__ == "__main__":
    main(*sys.argv[1:])
