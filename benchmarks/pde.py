"""Physics-informed losses: the time of a step and the error after training, beside PyTorch and JAX in the same run.

    python -m benchmarks.pde [--steps N] [--repeat N] [--threads N] [--width N] [--points N]

Each equation has a loss in this module. onnxgrad trains a network from an ONNX file with it. PyTorch trains the same
network with autograd. Both use Adam at 0.001, with all points in one batch. The error is the relative L2 error on other
points. Steps of all three are timed in turn, in blocks. JAX is only timed, and left out if it is not installed.

The equations are Burgers 1D, Poisson 2D (classic) and wave 1D of PINNacle (Z. Hao et al., 2023, arXiv:2306.08827). To
compare the errors with its table, train as it does, 5 layers of 100 units on 8,192 points: --width 100 --points 8192
--steps 20000.
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

EDGE = np.linspace(0, 1, 101, dtype=np.float32)[:, None]
"""Points on a side of the domain, from one end to the other."""

DISKS = np.array([(x, y) for x in (-0.3, 0.3) for y in (-0.3, 0.3)])
"""The centers of the four disks that are cut out of the square of the Poisson equation."""

RADIUS = 0.1
"""The radius of these disks."""


def side(x: tuple[float, float], t: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return points on the line from (x[0], t[0]) to (x[1], t[1])."""
    return tuple(np.float32(start + (end - start) * EDGE) for start, end in (x, t))  # type: ignore[return-value]


def rims() -> tuple[np.ndarray, np.ndarray]:
    """Return points on the rims of the disks."""
    angles = 2 * np.pi * EDGE[:-1:4]
    return tuple(
        np.concatenate([np.float32(disk[axis] + RADIUS * turn(angles)) for disk in DISKS])
        for axis, turn in enumerate((np.cos, np.sin))
    )  # type: ignore[return-value]


def wave_exact(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The solution of the wave equation u_tt = 4 u_xx."""
    first = np.sin(np.pi * x) * np.cos(2 * np.pi * t)
    found: np.ndarray = first + 0.5 * np.sin(4 * np.pi * x) * np.cos(8 * np.pi * t)
    return found


@dataclass(frozen=True)
class Edge:
    """A part of the boundary: `u`, or its derivative with respect to t if `flow` is True, has these values.

    Attributes:
        points: the coordinates x and t, [n, 1] each.
        values: the prescribed values, [n, 1].
        flow: whether the derivative with respect to t is prescribed.
    """

    points: tuple[np.ndarray, np.ndarray]
    values: np.ndarray
    flow: bool = False


def edges(*sides: tuple[tuple[np.ndarray, np.ndarray], Any]) -> tuple[Edge, ...]:
    """Return parts of the boundary from points, and a function of the points or a number."""
    return tuple(
        Edge(points, np.float32(values(*points) if callable(values) else np.full_like(points[0], values)))
        for points, values in sides
    )


BURGERS = edges(
    (side((-1, 1), (0, 0)), lambda x, t: -np.sin(np.pi * x)), (side((-1, -1), (0, 1)), 0), (side((1, 1), (0, 1)), 0)
)
POISSON = edges(
    *((side((-0.5, 0.5), (at, at)), 1) for at in (-0.5, 0.5)),
    *((side((at, at), (-0.5, 0.5)), 1) for at in (-0.5, 0.5)),
    (rims(), 0),
)
WAVE = (
    *edges((side((0, 1), (0, 0)), wave_exact), (side((0, 0), (0, 1)), 0), (side((1, 1), (0, 1)), 0)),
    Edge(side((0, 1), (0, 0)), 0 * EDGE, flow=True),
)


def boundary(op, parts, like):
    """Return the sum of the mean squared errors on the parts of the boundary."""
    total = 0.0
    for part in parts:
        x, t = (op.const(values, like) for values in part.points)
        u = op.model(x=x, t=t)
        error = (op.grad(u, t) if part.flow else u) - op.const(part.values, like)
        total = total + op.mean(error * error)
    return total


def burgers(op, u, x: "input", t: "input"):
    """u_t + u u_x = nu u_xx on [-1, 1] x [0, 1], with u(x, 0) = -sin πx and u(±1, t) = 0."""
    u_x, u_t = op.grad(u, x, t)
    residual = u_t + u * u_x - NU * op.grad(u_x, x)
    return residual * residual + boundary(op, BURGERS, x)


def poisson(op, u, x: "input", t: "input"):
    """u_xx + u_tt = 0 on [-0.5, 0.5]² without four disks, with u = 1 on the square and u = 0 on the disks."""
    u_x, u_t = op.grad(u, x, t)
    residual = op.grad(u_x, x) + op.grad(u_t, t)
    return residual * residual + boundary(op, POISSON, x)


def wave(op, u, x: "input", t: "input"):
    """u_tt = 4 u_xx on [0, 1]², with u and u_t given at t = 0, and u = 0 at both ends."""
    u_x, u_t = op.grad(u, x, t)
    residual = op.grad(u_t, t) - 4 * op.grad(u_x, x)
    return residual * residual + boundary(op, WAVE, x)


def burgers_exact(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The solution of Burgers' equation by the Cole-Hopf transform, integrated with Gauss-Hermite nodes.

    Source: C. Basdevant et al., Spectral and finite difference solutions of the Burgers equation, 1986.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    places = x - 2 * np.sqrt(NU * np.maximum(t, 1e-9)) * nodes
    share = weights * np.exp(-(np.cos(np.pi * places) - np.cos(np.pi * x)) / (2 * np.pi * NU))
    found: np.ndarray = -(np.sin(np.pi * places) * share).sum(1, keepdims=True) / share.sum(1, keepdims=True)
    return found


def poisson_exact(x: np.ndarray, t: np.ndarray, cells: int = 400) -> np.ndarray:
    """The solution of the Poisson equation by differences of second order on a grid, read between the grid points.

    Next to a disk, the distance to its rim replaces the width of a cell (G. H. Shortley, R. Weller, The numerical
    solution of Laplace's equation, 1938).
    """
    from scipy.interpolate import RegularGridInterpolator
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import spsolve

    axis, width = np.linspace(-0.5, 0.5, cells + 1), 1 / cells
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    free = outside(grid[..., 0], grid[..., 1])
    free[[0, -1]] = free[:, [0, -1]] = False
    at = np.argwhere(free)
    index = np.full(free.shape, -1)
    index[free] = np.arange(len(at))
    rows, columns, factors = [], [], []
    right, middle = np.zeros(len(at)), np.zeros(len(at))
    for axis_step in np.eye(2, dtype=int):
        reach = {sign: _distances(grid[free], sign * axis_step, width) for sign in (-1, 1)}
        for sign in (-1, 1):
            factor = 2 / (reach[sign] * (reach[-1] + reach[1]))
            middle -= factor
            neighbor = tuple((at + sign * axis_step).T)
            inside, edge = index[neighbor] >= 0, outside(*grid[neighbor].T) & (index[neighbor] < 0)
            rows.append(np.flatnonzero(inside))
            columns.append(index[neighbor][inside])
            factors.append(factor[inside])
            right[edge] -= factor[edge]
    rows, columns, factors = [*rows, np.arange(len(at))], [*columns, np.arange(len(at))], [*factors, middle]
    places = tuple(np.concatenate(each).astype(np.int32) for each in (rows, columns))
    values = np.where(outside(grid[..., 0], grid[..., 1]), 1.0, 0.0)
    values[free] = spsolve(csr_array((np.concatenate(factors), places)), right)
    found: np.ndarray = RegularGridInterpolator((axis, axis), values)(np.concatenate([x, t], 1))[:, None]
    return found


def _distances(points: np.ndarray, direction: np.ndarray, width: float) -> np.ndarray:
    """Return the distances from grid points to the next point in a direction: on the grid, or on a rim before it."""
    found = np.full(len(points), width)
    for disk in DISKS:
        along, across = (points - disk) @ direction, (points - disk) @ direction[::-1]
        half = np.sqrt(np.maximum(RADIUS**2 - across**2, 0))
        rim = -along - half
        hit = (np.abs(across) < RADIUS) & (rim > 0) & (rim < width)
        found[hit] = np.maximum(rim[hit], 1e-9)
    return found


def outside(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return True for each point that no disk covers."""
    found: np.ndarray = np.all([np.hypot(x - a, t - b) > RADIUS for a, b in DISKS], axis=0)
    return found


@dataclass(frozen=True)
class Equation:
    """An equation.

    Attributes:
        loss: the loss of onnxgrad.
        low, high: the smallest and the largest x and t.
        exact: the solution.
        residual: the residual, from u, u_x, u_t, u_xx and u_tt.
        boundary: the conditions on the boundary.
        second: whether the residual needs u_tt.
        holes: whether the disks are cut out of the domain.
    """

    loss: Callable[..., Any]
    low: tuple[float, float]
    high: tuple[float, float]
    exact: Callable[[np.ndarray, np.ndarray], np.ndarray]
    residual: Callable[..., Any]
    boundary: tuple[Edge, ...]
    second: bool
    holes: bool = False

    def points(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return x and t of random points in the domain, [count, 1] each, in float32."""
        drawn = rng.uniform(self.low, self.high, (2 * count, 2)).astype(np.float32)
        kept = drawn[outside(*drawn.T)] if self.holes else drawn
        return kept[:count, :1], kept[:count, 1:]


EQUATIONS = {
    "Burgers 1D": Equation(
        burgers, (-1, 0), (1, 1), burgers_exact, lambda u, ux, ut, uxx, utt: ut + u * ux - NU * uxx, BURGERS,
        second=False,
    ),
    "Poisson 2D": Equation(
        poisson, (-0.5, -0.5), (0.5, 0.5), poisson_exact, lambda u, ux, ut, uxx, utt: uxx + utt, POISSON,
        second=True, holes=True,
    ),
    "wave 1D": Equation(
        wave, (0, 0), (1, 1), wave_exact, lambda u, ux, ut, uxx, utt: utt - 4 * uxx, WAVE,
        second=True,
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
    uxx, utt = grad(ux, x)[0], grad(ut, t)[0] if equation.second else ut
    loss = (equation.residual(u, ux, ut, uxx, utt) ** 2).mean()
    for part in equation.boundary:
        at, time = (torch.tensor(values, requires_grad=part.flow) for values in part.points)
        u = net(at, time)
        loss = loss + (((grad(u, time)[0] if part.flow else u) - torch.tensor(part.values)) ** 2).mean()
    return loss


def jax_step(equation: Equation, net: Network, x: np.ndarray, t: np.ndarray) -> Callable[[], object]:
    """Return the computation of the loss and its gradients by jax.jit, forward over reverse, without the optimizer."""
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
        utt = jax.jvp(lambda t: jax.grad(u, 2)(weights, x, t), (t,), (1.0,))[1] if equation.second else 0.0
        return equation.residual(value, ux, ut, uxx, utt)

    over = {False: jax.vmap(u, (None, 0, 0)), True: jax.vmap(jax.grad(u, 2), (None, 0, 0))}
    parts = [
        (over[part.flow], *(jnp.array(each[:, 0]) for each in (*part.points, part.values)))
        for part in equation.boundary
    ]

    def loss(weights: Any, x: Any, t: Any) -> Any:
        total = (jax.vmap(residual, (None, 0, 0))(weights, x, t) ** 2).mean()
        return total + sum(((function(weights, at, time) - values) ** 2).mean() for function, at, time, values in parts)

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
    x, t = equation.points(settings.points, rng)
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
    test = equation.points(2000, rng)
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
