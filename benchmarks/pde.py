"""Physics-informed losses: the time of a step and the error after training, beside PyTorch and JAX in the same run.

    python -m benchmarks.pde [--steps N] [--repeat N] [--threads N] [--width N] [--points N]

Each equation has a loss in this module. onnxgrad trains a network from an ONNX file with it. PyTorch trains the same
network with autograd. Both use Adam at 0.001, with all points in one batch. The error is the relative L2 error on other
points. Steps of all three are timed in turn, in blocks. JAX is only timed, and left out if it is not installed.
The equations are Burgers in 1D, Poisson in 2D and heat in 1D of PINNacle (Z. Hao et al., 2023), with smooth data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onnxgrad_cli import Options, Trainer, build
from onnxgrad_cli.execution.interleaved_timing import interleaved

NU = 0.01 / math.pi
"""The viscosity of PINNacle's Burgers equation."""

ALPHA = 0.1
"""The diffusivity of the heat equation."""

EDGE = np.linspace(-1, 1, 101, dtype=np.float32)[:, None]
"""Points on the boundary, along each axis."""


def along_x(op, t, like):
    """Return u on the boundary with this t, at the points of `EDGE`."""
    return op.model(x=op.const(EDGE, like), t=op.const(0 * EDGE + t, like))


def along_t(op, x, like, times):
    """Return u on the boundary with this x, at these times."""
    return op.model(x=op.const(0 * EDGE + x, like), t=op.const(times, like))


def mean_squares(op, *values):
    """Return the sum of the mean squares of values."""
    means = [op.mean(value * value) for value in values]
    return sum(means[1:], means[0])


def burgers(op, u, x: "input", t: "input"):
    """u_t + u u_x = nu u_xx on [-1, 1] x [0, 1], with u(x, 0) = -sin πx and u(±1, t) = 0."""
    u_x, u_t = op.grad(u, x, t)
    residual = u_t + u * u_x - NU * op.grad(u_x, x)
    start = along_x(op, 0, x) + op.const(np.sin(np.pi * EDGE), x)
    return residual * residual + mean_squares(op, start, *(along_t(op, side, x, (EDGE + 1) / 2) for side in (-1, 1)))


def poisson(op, u, x: "input", t: "input"):
    """u_xx + u_tt = -2π² sin πx sin πt on [-1, 1]², with u = 0 on the boundary."""
    u_x, u_t = op.grad(u, x, t)
    source = 2 * math.pi**2 * op.Sin(math.pi * x) * op.Sin(math.pi * t)
    residual = op.grad(u_x, x) + op.grad(u_t, t) + source
    sides = [each for side in (-1, 1) for each in (along_t(op, side, x, EDGE), along_x(op, side, x))]
    return residual * residual + 100 * mean_squares(op, *sides)


def heat(op, u, x: "input", t: "input"):
    """u_t = 0.1 u_xx on [-1, 1] x [0, 1], with u(x, 0) = sin πx and u(±1, t) = 0."""
    u_x, u_t = op.grad(u, x, t)
    residual = u_t - ALPHA * op.grad(u_x, x)
    start = along_x(op, 0, x) - op.const(np.sin(np.pi * EDGE), x)
    return residual * residual + mean_squares(op, start, *(along_t(op, side, x, (EDGE + 1) / 2) for side in (-1, 1)))


def exact_burgers(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The solution of Burgers' equation by the Cole-Hopf transform, integrated with Gauss-Hermite nodes.

    Source: C. Basdevant et al., Spectral and finite difference solutions of the Burgers equation, 1986.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    places = x - 2 * np.sqrt(NU * np.maximum(t, 1e-9)) * nodes
    share = weights * np.exp(-(np.cos(np.pi * places) - np.cos(np.pi * x)) / (2 * np.pi * NU))
    found: np.ndarray = -(np.sin(np.pi * places) * share).sum(1, keepdims=True) / share.sum(1, keepdims=True)
    return found


@dataclass(frozen=True)
class Equation:
    """An equation.

    Attributes:
        loss: the loss of onnxgrad.
        least: the smallest t; the largest is 1, and x is between -1 and 1.
        exact: the solution.
        residual: the residual, from u, u_x, u_t, u_xx, u_tt and the points.
        start: the values at `least`, None if they are 0 as on the other sides.
        sides: the weight of the sides in the loss.
    """

    loss: Callable[..., Any]
    least: float
    exact: Callable[[np.ndarray, np.ndarray], np.ndarray]
    residual: Callable[..., Any]
    start: Callable[[Tensor], Tensor] | None
    sides: float = 1.0


EQUATIONS = {
    "Burgers 1D": Equation(
        burgers, 0.0, exact_burgers,
        lambda u, ux, ut, uxx, utt, x, t, sin: ut + u * ux - NU * uxx, lambda x: -torch.sin(math.pi * x),
    ),
    "Poisson 2D": Equation(
        poisson, -1.0, lambda x, t: np.sin(np.pi * x) * np.sin(np.pi * t),
        lambda u, ux, ut, uxx, utt, x, t, sin: uxx + utt + 2 * math.pi**2 * sin(math.pi * x) * sin(math.pi * t),
        None, 100.0,
    ),
    "heat 1D": Equation(
        heat, 0.0, lambda x, t: np.exp(-ALPHA * np.pi**2 * t) * np.sin(np.pi * x),
        lambda u, ux, ut, uxx, utt, x, t, sin: ut - ALPHA * uxx, lambda x: torch.sin(math.pi * x),
    ),
}  # fmt: skip


class Network(nn.Module):
    """A perceptron u(x, t) of five hidden layers with tanh, as PINNacle trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [2, *[width] * 5]
        layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return u at points, [n, 1] each."""
        found: Tensor = self.net(torch.cat([x, t], 1))
        return found


def torch_loss(equation: Equation, net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """The same loss with autograd."""

    def grad(y: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.sum(), xs, create_graph=True)

    u = net(x, t)
    ux, ut = grad(u, x, t)
    uxx, utt = grad(ux, x)[0], grad(ut, t)[0] if equation.start is None else ut
    loss = (equation.residual(u, ux, ut, uxx, utt, x, t, torch.sin) ** 2).mean()
    edge = torch.tensor(EDGE)
    times = edge if equation.start is None else (edge + 1) / 2
    sides = [net(torch.full_like(edge, side), times) for side in (-1.0, 1.0)]
    if equation.start is None:
        sides += [net(edge, torch.full_like(edge, side)) for side in (-1.0, 1.0)]
    else:
        sides.append(net(edge, torch.zeros_like(edge)) - equation.start(edge))
    return loss + equation.sides * torch.stack([(side**2).mean() for side in sides]).sum()


def jax_step(equation: Equation, net: Network, x: np.ndarray, t: np.ndarray) -> Callable[[], object]:
    """Value and gradients of the residual's loss by jax.jit, forward over reverse; the sides are left out."""
    import jax
    import jax.numpy as jnp

    layers = [layer for layer in net.net if isinstance(layer, nn.Linear)]
    weights = [(jnp.array(layer.weight.detach().numpy().T), jnp.array(layer.bias.detach().numpy())) for layer in layers]

    def u(weights: Any, x: Any, t: Any) -> Any:
        h = jnp.stack([x, t])
        for w, b in weights[:-1]:
            h = jnp.tanh(h @ w + b)
        return (h @ weights[-1][0] + weights[-1][1])[0]

    def residual(weights: Any, x: Any, t: Any) -> Any:
        value, (ux, ut) = jax.value_and_grad(u, (1, 2))(weights, x, t)
        uxx = jax.jvp(lambda x: jax.grad(u, 1)(weights, x, t), (x,), (1.0,))[1]
        utt = jax.jvp(lambda t: jax.grad(u, 2)(weights, x, t), (t,), (1.0,))[1] if equation.start is None else 0.0
        return equation.residual(value, ux, ut, uxx, utt, x, t, jnp.sin)

    def loss(weights: Any, x: Any, t: Any) -> Any:
        return (jax.vmap(residual, (None, 0, 0))(weights, x, t) ** 2).mean()

    step, points = jax.jit(jax.value_and_grad(loss)), (jnp.array(x[:, 0]), jnp.array(t[:, 0]))
    return lambda: jax.block_until_ready(step(weights, *points))


def error(values: np.ndarray, exact: np.ndarray) -> float:
    """The relative L2 error."""
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


def measure(equation: Equation, settings: argparse.Namespace) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the milliseconds of a step, and the relative errors after training."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    net = Network(settings.width)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "u.onnx"
        empty = (torch.zeros(2, 1), torch.zeros(2, 1))
        torch.onnx.export(net, empty, file, input_names=["x", "t"], output_names=["u"], dynamo=False,
                          dynamic_axes={name: {0: "n"} for name in ("x", "t", "u")})  # fmt: skip
        built = build(file, Options(losses=equation.loss, optimizer="adam"))
    x = rng.uniform(-1, 1, (settings.points, 1)).astype(np.float32)
    t = rng.uniform(equation.least, 1, (settings.points, 1)).astype(np.float32)
    trainer = Trainer(built, threads=settings.threads)
    tensors = torch.tensor(x, requires_grad=True), torch.tensor(t, requires_grad=True)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def theirs() -> None:
        optimizer.zero_grad()
        torch_loss(equation, net, *tensors).backward()
        optimizer.step()

    steps: dict[str, Callable[[], object]] = {
        "onnxgrad": lambda: trainer.step({"x": x, "t": t}, 1e-3), "torch": theirs
    }  # fmt: skip
    for _ in range(settings.steps):
        steps["onnxgrad"]()
        theirs()
    test = [rng.uniform(low, 1, (2000, 1)).astype(np.float32) for low in (-1, equation.least)]
    exact = equation.exact(*map(np.float64, test))
    trained = Network(settings.width)
    trained.load_state_dict({name: torch.tensor(array) for name, array in trainer.weights().items()})
    with torch.no_grad():
        errors = {
            name: error(each(*map(torch.tensor, test)).numpy(), exact)
            for name, each in {"onnxgrad": trained, "torch": net}.items()
        }
    if find_spec("jax"):
        steps["jax"] = jax_step(equation, net, x, t)
        steps["jax"]()  # compiles
    return interleaved(steps, settings.repeat), errors


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of onnxgrad and PyTorch; JAX takes all")
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--points", type=int, default=1000)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    print(f"{'':12} {'onnxgrad':>12} {'torch':>12} {'jax':>12}   relative L2 error after {settings.steps} steps")
    for name, equation in EQUATIONS.items():
        times, errors = measure(equation, settings)
        columns = " ".join(
            f"{times[peer]:9.2f} ms" if peer in times else f"{'':12}" for peer in ("onnxgrad", "torch", "jax")
        )
        ratios = ", ".join(f"{times['onnxgrad'] / times[peer]:.2f} of {peer}" for peer in times if peer != "onnxgrad")
        print(
            f"{name:12} {columns}   onnxgrad {errors['onnxgrad']:.1e}, torch {errors['torch']:.1e}; {ratios}",
            flush=True,
        )


if __name__ == "__main__":
    main()
