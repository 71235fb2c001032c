"""A step of a training model on onnxruntime: `Trainer`, or a bare session where there is no optimizer.

python -m benchmarks.systems.ours TRAIN.onnx BATCH.npz THREADS [PROVIDER]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.turns import RATE, serve
from onnxgrad_cli.passes.describe import Roles, describe
from onnxgrad_cli.runtime.session import CPU, Buffer, feed, find_provider, open_session, take_out
from onnxgrad_cli.runtime.trainer import Trainer


class Gradients:
    """Loss and gradients of a batch; weights and gradients lie where they are from run to run."""

    def __init__(self, path: Path, batch: Mapping[str, np.ndarray], threads: int, provider: str = CPU) -> None:
        model = onnx.load(path, load_external_data=False)
        self.roles: Roles = describe(model)
        held = [name for name, role in self.roles.inputs.items() if role in ("weight", "state")]
        model, values = take_out(model, held, path)
        self.session = open_session(model, path, provider, threads)
        self._inputs = {name: Buffer(values[name]) for name in held}
        self._binding = self.session.io_binding()
        for name, array in batch.items():
            feed(self._binding, name, np.ascontiguousarray(array))
        for name, buffer in self._inputs.items():
            self._binding.bind_ortvalue_input(name, buffer.value)
        self.outputs = {name: Buffer(self._room(role.of, values)) for name, role in self.roles.outputs.items()}
        for name, buffer in self.outputs.items():
            self._binding.bind_ortvalue_output(name, buffer.value)

    def _room(self, of: str, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.empty_like(values[of]) if of else np.zeros((), np.float32)

    def step(self) -> float:
        """The loss."""
        self.session.run_with_iobinding(self._binding)
        return float(self.outputs[self.roles.loss].array)

    def norm(self) -> float:
        """Of all gradients together."""
        found = (self.outputs[name].array for name in self.roles.gradients.values())
        return float(np.sqrt(sum(np.vdot(array, array) for array in found)))


class Training:
    """Steps with the optimizer."""

    def __init__(self, path: Path, batch: Mapping[str, np.ndarray], threads: int, provider: str = CPU) -> None:
        model = onnx.load(path, load_external_data=False)
        self.trainer = Trainer(model, path=path, provider=provider, threads=threads)
        self.session: onnxruntime.InferenceSession = self.trainer._session
        self._batch = batch

    def step(self) -> float:
        """The loss before the step."""
        return self.trainer.step(self._batch, RATE)


def open_step(path: Path, batch: Mapping[str, np.ndarray], threads: int, provider: str = CPU) -> Any:
    """A step of the kind that the model is for."""
    optimizer = describe(onnx.load(path, load_external_data=False)).optimizer
    return (Training if optimizer else Gradients)(path, batch, threads, provider)


def main(model: str, batch: str, threads: str, provider: str = "cpu") -> None:
    """Serve."""
    serve(lambda: open_step(Path(model), dict(np.load(batch)), int(threads), find_provider(provider)))


if __name__ == "__main__":
    main(*sys.argv[1:])
