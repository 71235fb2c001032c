"""A step in PyTorch's eager mode.

python -m benchmarks.systems.pytorch NET BATCH.npz THREADS gradients|adamw|adamw-fused
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from benchmarks import models
from benchmarks.interleaved import RATE, serve


class Step:
    """Forward, backward and perhaps the optimizer, with cross-entropy."""

    def __init__(
        self, net: torch.nn.Module, batch: dict[str, np.ndarray], kind: str, device: str = "cpu", compiled: bool = False
    ) -> None:
        self._net = net.train()
        self._call = torch.compile(net) if compiled else net
        self._label = torch.tensor(batch.pop("y"), device=device)
        self._inputs = [torch.tensor(array, device=device) for array in batch.values()]
        fused = kind.endswith("fused")
        parameters = self._net.parameters()
        self._adamw = None if kind == "gradients" else torch.optim.AdamW(parameters, RATE, fused=fused)

    def step(self) -> float:
        """The loss before the step."""
        self._net.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._call(*self._inputs), self._label)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._adamw:
            self._adamw.step()
        return loss.item()

    def norm(self) -> float:
        """Of all gradients together."""
        found = [p.grad.float() for p in self._net.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(found))


def main(net: str, batch: str, threads: str, kind: str) -> None:
    """Serve."""
    torch.set_num_threads(int(threads))
    serve(lambda: Step(getattr(models, net)(), dict(np.load(batch)), kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
