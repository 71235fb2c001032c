"""A step of a training model on onnxruntime: `Trainer`, or a bare session where there is no optimizer.

python -m benchmarks.systems.ours TRAIN.onnx BATCH.npz THREADS [PROVIDER]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # noqa: F401 (a session imports it late; memory is told beyond the imports)

from benchmarks.interleaved import RATE, serve
from onnxgrad_cli.execution.session import CPU, Buffer, feed, find_provider, open_session, take_out, trim
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.training.trainer import Trainer

with suppress(ImportError):
    import llvmlite.binding  # noqa: F401 (as onnxruntime)


class Gradients:
    """Loss and gradients of a batch; weights lie where they are, and a run's gradients are given up before the next."""

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
        self.sessions = [self.session]
        self._outputs = [output.name for output in self.session.get_outputs()]
        del model
        trim()  # as `Trainer` does

    def step(self) -> float:
        """The loss."""
        self._binding.clear_binding_outputs()
        for name in self._outputs:
            self._binding.bind_output(name)
        self.session.run_with_iobinding(self._binding)
        return float(self._result(self.roles.loss))

    def norm(self) -> float:
        """Of all gradients together."""
        found = map(self._result, self.roles.gradients.values())
        return float(np.sqrt(sum(np.vdot(array, array) for array in found)))

    def _result(self, name: str) -> np.ndarray:
        return self._binding.get_outputs()[self._outputs.index(name)].numpy()


class Training:
    """Steps with the optimizer."""

    def __init__(self, path: Path, batch: Mapping[str, np.ndarray], threads: int, provider: str = CPU) -> None:
        self.trainer = Trainer(path, provider=provider, threads=threads)
        self.sessions = self.trainer.sessions
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
