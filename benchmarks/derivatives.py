"""What the derivatives of two nets cost, beside torch.func in the same run.

    python -m benchmarks.derivatives [--repeat N] [--threads N]

The two take turns in blocks, after a run each that is not measured; the figure is a ratio of medians. `loop` is the
time of ours when the rows of a Jacobian or Hessian are computed one after the other. Results that differ by more than a
thousandth of the largest entry end the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from benchmarks.models import export
from benchmarks.ops import ours
from onnxgrad_cli.derivatives import jacobian
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.execution.interleaved_timing import interleaved
from onnxgrad_cli.options import Options

KINDS = ("jvp", "hvp", "jacobian", "hessian")


def nets() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, module, input."""
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10), nn.LogSoftmax(-1)]
    yield "perceptron 64-128-10, batch 8", nn.Sequential(*layers), torch.randn(8, 64)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)]
    yield "two convolutions, 16x16, batch 1", nn.Sequential(*layers), torch.randn(1, 1, 16, 16)


def by_torch(kind: str, net: nn.Module, x: Tensor, vector: Tensor) -> Callable[[], Tensor]:
    """The derivative by torch.func."""

    def total(x: Tensor) -> Tensor:
        return net(x).sum()

    calls: dict[str, Callable[[], Tensor]] = {
        "jvp": lambda: torch.func.jvp(net, (x,), (vector,))[1],
        "hvp": lambda: torch.func.jvp(torch.func.grad(total), (x,), (vector,))[1],
        "jacobian": lambda: torch.func.jacrev(net)(x),
        "hessian": lambda: torch.func.hessian(total)(x),
    }
    return calls[kind]


def measure(
    kind: str, model: onnx.ModelProto, net: nn.Module, x: Tensor, repeat: int, threads: int
) -> dict[str, float]:
    """The median milliseconds of ours, of torch.func, and of ours as a loop.

    Raises:
        AssertionError: they don't compute the same.
    """
    vector = torch.randn_like(x)
    options = Options(dims={"batch": len(x)})
    built = {"onnxgrad": derive(model, kind, options=options)}
    if kind in ("jacobian", "hessian"):
        with patch.object(jacobian, "MAX_VECTORIZED_ELEMENTS", -1):
            built["loop"] = derive(model, kind, options=options)
    theirs = by_torch(kind, net, x, vector)
    steps: dict[str, Callable[[], object]] = {"torch": theirs}
    wanted = theirs().detach().numpy()
    for name, derived in built.items():
        feeds = {v.name: vector.numpy() if v.name != "x" else x.numpy() for v in derived.graph.input}
        steps[name], found = ours(derived, feeds, threads)
        steps[name]()
        (value,) = found().values()
        error = np.abs(value - wanted).max() / np.abs(wanted).max()
        assert error < 1e-3, f"{kind}: {name} differs by {error:.1e} of the largest entry"
    return interleaved(steps, repeat)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each; with one, other work disturbs least")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{'':44} {'onnxgrad':>11} {'torch.func':>11} {'ratio':>6} {'loop':>11}")
    for name, net, x in nets():
        net.eval().requires_grad_(False)
        with TemporaryDirectory() as folder:
            model = onnx.load(export(net, x, Path(folder) / "net.onnx"))
        for kind in KINDS:
            found = measure(kind, model, net, x, arguments.repeat, arguments.threads)
            ratio = found["onnxgrad"] / found["torch"]
            loop = f"{found['loop']:8.2f} ms" if "loop" in found else ""
            print(
                f"{name:34} {kind:9} {found['onnxgrad']:8.2f} ms {found['torch']:8.2f} ms {ratio:6.2f} {loop}",
                flush=True,
            )


if __name__ == "__main__":
    main()
