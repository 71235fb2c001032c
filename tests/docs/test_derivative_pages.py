"""The tutorials on uses of derivatives: their blocks run, and their results match sources that don't use onnxgrad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from tests.docs.test_pages import run_blocks

pytestmark = pytest.mark.slow
Array = NDArray[np.floating]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page runs, which stays the current one for the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(file: str) -> dict[str, torch.Tensor]:
    """Return the float initializers of a model as tensors in double precision."""
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer}
    return {name: torch.tensor(value).double() for name, value in arrays.items() if value.dtype.kind == "f"}


def run(file: str, **feeds: Array) -> list[Array]:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_force_matching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forces match PyTorch's gradient of the same network, and those of the potential, which differences prove."""
    names = run_blocks("tutorials/force-matching.md", folder, monkeypatch)
    data = np.load("test.npz")
    slope, _ = run("slope.onnx", positions=data["positions"])

    w = weights("trained.onnx")
    x = torch.tensor(data["positions"]).double().requires_grad_()
    first, second = torch.triu_indices(4, 4, 1)
    distance = torch.linalg.vector_norm(x[:, first] - x[:, second], dim=-1, keepdim=True)
    (torch.tanh(distance @ w["w1"] + w["b1"]) @ w["w2"]).sum().backward()
    np.testing.assert_allclose(slope, x.grad, rtol=1e-3, atol=1e-5)

    assert np.sqrt(np.mean((slope + data["forces"]) ** 2)) < 0.02 * np.sqrt(np.mean(data["forces"] ** 2))
    assert abs(names["energy"][:, 0] + names["kinetic"] - names["start"]).max() < 0.01 * names["kinetic"].mean()

    def energy(x: Array) -> Array:
        pairs = np.linalg.norm(x[:, first] - x[:, second], axis=-1)
        return ((1 - np.exp(1 - pairs)) ** 2).sum(1)

    x, towards = data["positions"].astype(np.float64), np.random.default_rng(1).normal(size=(200, 4, 3))
    difference = (energy(x + 1e-5 * towards) - energy(x - 1e-5 * towards)) / 2e-5
    np.testing.assert_allclose(-(data["forces"] * towards).sum((1, 2)), difference, rtol=1e-4, atol=1e-5)


def test_control_with_scipy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trust-constr converges to the optimum of SLSQP, which gets its derivatives from PyTorch, in double precision."""
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    names = run_blocks("tutorials/optimal-control.md", folder, monkeypatch)
    result, steps, limit = names["result"], names["N"], names["LIMIT"]
    assert result.constr_violation < 1e-5
    assert result.nit < 100

    w = weights("step.onnx")

    def gaps(z: torch.Tensor) -> torch.Tensor:
        after = z[: 2 * steps].reshape(-1, 2)
        a = torch.cat([torch.cat([torch.zeros(1, 2), after[:-1]]), z[2 * steps :, None]], 1)
        return (torch.tanh(a @ w["w1"] + w["b1"]) @ w["w2"] + a @ w["w3"] - after).reshape(-1)

    def cost(z: torch.Tensor) -> torch.Tensor:
        return torch.tensor(names["weights"]) @ (z - torch.tensor(names["target"])) ** 2

    def gradient(z: Array) -> Array:
        return torch.func.grad(cost)(torch.tensor(z)).numpy()

    def jacobian(z: Array) -> Array:
        return torch.func.jacrev(gaps)(torch.tensor(z)).numpy()

    other = optimize.minimize(
        lambda z: float(cost(torch.tensor(z))),
        np.zeros(3 * steps),
        jac=gradient,
        method="SLSQP",
        bounds=[(None, None)] * (2 * steps) + [(-limit, limit)] * steps,
        constraints={"type": "eq", "fun": lambda z: gaps(torch.tensor(z)).numpy(), "jac": jacobian},
    )
    assert other.success
    np.testing.assert_allclose(result.fun, other.fun, rtol=1e-4)
    np.testing.assert_allclose(result.x, other.x, atol=0.1)

    rng = np.random.default_rng(0)
    z, v, multipliers = rng.normal(size=3 * steps), rng.normal(size=3 * steps), rng.normal(size=2 * steps)
    np.testing.assert_allclose(names["gaps_jacobian"](z), jacobian(z), atol=1e-5)
    _, expected = torch.autograd.functional.hvp(
        lambda z: gaps(z) @ torch.tensor(multipliers), torch.tensor(z), torch.tensor(v)
    )
    np.testing.assert_allclose(names["gaps_hessian"](z, multipliers) @ v, expected, atol=1e-5)


def test_control_with_casadi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CasADi's own derivatives of the equations give the same Jacobians, acados functions and controlled path."""
    ca = pytest.importorskip("casadi", reason="casadi is not installed")
    names = run_blocks("tutorials/casadi.md", folder, monkeypatch)
    assert names["violation"] < 1e-8

    x, u, lam = ca.MX.sym("x", 2), ca.MX.sym("u"), ca.MX.sym("lam", 2)
    velocity = x[1] + 0.1 * (u - 9.81 * ca.sin(x[0]) - 0.1 * x[1])
    after = ca.vertcat(x[0] + 0.1 * velocity, velocity)
    step = ca.Function("step", [x, u], [after], ["x", "u"], ["next"])
    theirs, ours = step.jacobian(), names["step"].jacobian()
    assert (ours.name_in(), ours.name_out()) == (theirs.name_in(), theirs.name_out())
    for mine, other in zip(ours([1, 2], 3, [0, 0]), theirs([1, 2], 3, [0, 0]), strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=1e-12)

    ux = ca.vertcat(u, x)  # as acados orders them in its function dyn_disc_phi_fun_jac_hess
    both = ca.Function("acados", [x, u, lam], [ca.jacobian(after, ux), ca.hessian(ca.dot(lam, after), ux)[0]])
    jacobian, hessian = both([1, 2], 3, [0.5, -1])
    by_x, by_u, _ = run("jacobian.onnx", x=np.array([[1.0, 2.0]]), u=np.array([[3.0]]))
    np.testing.assert_allclose(np.hstack([by_u[0], by_x[0]]), np.array(jacobian), rtol=1e-12)
    np.testing.assert_allclose(names["hessian"], np.array(hessian), atol=1e-12)

    assert control(ca, step) == pytest.approx(names["state"], abs=1e-3)


def control(ca: Any, step: Any) -> Array:
    """Return the state that the page ends with, from CasADi's exact Hessians of the equations."""
    opti = ca.Opti()
    x, u, first = opti.variable(2, 21), opti.variable(1, 20), opti.parameter(2)
    opti.subject_to(x[:, 0] == first)
    opti.subject_to(x[:, 1:] == step.map(20)(x[:, :-1], u))
    opti.subject_to(opti.bounded(-12, u, 12))
    opti.minimize(ca.sumsqr(x[0, 1:] - np.pi) + 0.1 * ca.sumsqr(x[1, 1:]) + 0.01 * ca.sumsqr(u))
    opti.solver("ipopt", {"print_time": False}, {"print_level": 0, "sb": "yes"})
    state = np.zeros(2)
    for _ in range(31):
        opti.set_value(first, state)
        solution = opti.solve()
        opti.set_initial(solution.value_variables())
        state = np.array(step(state, solution.value(u)[0])).ravel()
    return state


def test_kalman_filter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Jacobians match PyTorch's. The errors are near those of a filter that knows the equations of the pendulum."""
    names = run_blocks("tutorials/kalman-filter.md", folder, monkeypatch)
    states, measured = torch.tensor(names["states"]), torch.tensor(names["measured"])

    w = weights("transition.onnx")

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w["w1"]) @ w["w2"] + x @ w["w3"]

    def pendulum(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            velocity = x[1] - 0.01 * (9.81 * torch.sin(x[0]) + 0.1 * x[1])
            x = torch.stack([x[0] + 0.01 * velocity, velocity])
        return x

    jacobians = run("predict.onnx", x=names["states"][0].astype("f"))[0]
    np.testing.assert_allclose(jacobians, torch.vmap(torch.func.jacrev(network))(states[0]), atol=1e-5)

    x, P = torch.tensor([[1.0, 0.0]]).double().repeat(50, 1), 0.09 * torch.eye(2).double().repeat(50, 1, 1)
    estimates = []
    for z in measured:
        F, x = torch.vmap(torch.func.jacrev(pendulum))(x), torch.vmap(pendulum)(x)
        P = F @ P @ F.mT + torch.diag(torch.tensor([1e-4, 25e-4]).double())
        H = torch.stack([torch.cos(x[:, :1]), torch.zeros(50, 1)], 2)
        K = P @ H.mT / (H @ P @ H.mT + 0.01)
        x = x + (K @ (z - torch.sin(x[:, :1]))[..., None])[..., 0]
        P = P - K @ H @ P
        estimates.append(x)
    ideal = (torch.stack(estimates) - states).square().mean((0, 1)).sqrt()
    found = np.sqrt(np.mean((np.array(names["estimates"]) - names["states"]) ** 2, (0, 1)))
    assert (found < 1.2 * ideal.numpy()).all()
    assert (found > 0.9 * ideal.numpy()).all()
    assert 1.5 < names["squared"] < 4


def test_sensitivities_of_an_ode_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of Jacobians, the tangent and the gradients match PyTorch's derivatives of all 50 steps."""
    names = run_blocks("tutorials/ode-sensitivities.md", folder, monkeypatch)
    w = {name: torch.tensor(value, requires_grad=True) for name, value in names["weights"].items()}

    def solve(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ w["w1"] + w["b1"]) @ w["w2"]

        for _ in range(50):
            k1 = f(x)
            k2 = f(x + 0.05 * k1)
            k3 = f(x + 0.05 * k2)
            k4 = f(x + 0.1 * k3)
            x = x + 0.1 * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return x

    start = torch.tensor(names["start"])
    product = torch.vmap(torch.func.jacrev(lambda x: solve(x, w)))(start).detach()
    np.testing.assert_allclose(names["product"], product, rtol=1e-9, atol=1e-12)
    direction = {name: torch.tensor(value) for name, value in names["direction"].items()}
    _, tangent = torch.func.jvp(lambda w: solve(start, w), (w,), (direction,))
    np.testing.assert_allclose(names["tangent"], tangent.detach(), rtol=1e-9)
    (solve(start, w).square().sum() / 2).backward()
    for name, gradient in names["gradients"].items():
        np.testing.assert_allclose(gradient, w[name].grad, rtol=1e-9, atol=1e-9)


def test_gradient_penalty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training converges to the known minimum. Gradients and both penalties match PyTorch's."""
    names = run_blocks("tutorials/gradient-penalty.md", folder, monkeypatch)
    assert names["length"].mean() == pytest.approx(1.1, abs=0.02)
    assert names["real"] - names["generated"] == pytest.approx(2.2, abs=0.1)

    data = {name: torch.tensor(value).double() for name, value in np.load("test.npz").items()}

    def critic(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]) @ w["w3"]

    def slope(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        (found,) = torch.autograd.grad(critic(x, w).sum(), x, create_graph=True)
        return found

    between = (data["x"] + data["share"] * (data["generated"] - data["x"])).requires_grad_()
    found = slope(between, weights("critic.onnx")).detach()
    np.testing.assert_allclose(names["slope"][:, 0], found, atol=1e-4)

    w = {name: value.requires_grad_() for name, value in weights("untrained.onnx").items()}
    x, label = data["x"].requires_grad_(), data["share"]
    loss = ((critic(x, w) - label) ** 2)[:, 0] + 0.05 * (slope(x, w) ** 2).sum(1)
    loss.mean().backward()
    trained = onnxruntime.InferenceSession("smooth.train.onnx", providers=["CPUExecutionProvider"])
    feeds = {"x": x.detach().float().numpy(), "label": label.float().numpy()}
    for name, value in w.items():
        np.testing.assert_allclose(trained.run([f"{name}_grad"], feeds)[0], value.grad, rtol=1e-3, atol=1e-5)


def test_laplace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error bars match those of PyTorch's Hessian of the last layer's loss, and of its Jacobians of all layers."""
    names = run_blocks("tutorials/laplace.md", folder, monkeypatch)
    assert 0.9 < names["inside"] <= 1
    data = {name: torch.tensor(value).double() for name, value in np.load("train.npz").items()}
    points = torch.tensor(names["points"]).double()
    w = weights("net.onnx")

    def network(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]) @ w["w3"] + w["b3"]

    def rows(x: torch.Tensor, of: tuple[str, ...]) -> torch.Tensor:
        found = torch.func.jacrev(lambda part: network(w | part, x))({name: w[name] for name in of})
        return torch.cat([found[name].reshape(len(x), -1) for name in of], 1)

    def loss(last: torch.Tensor) -> torch.Tensor:
        y = network(w | {"w3": last[:-1, None], "b3": last[-1:]}, data["x"])
        return ((y - data["label"]) ** 2).sum() / (2 * 0.1**2) + (last**2).sum() / 2

    def deviation(covariance: torch.Tensor, of: tuple[str, ...]) -> torch.Tensor:
        row = rows(points, of)
        return ((row @ covariance * row).sum(1) + 0.1**2).sqrt()

    hessian = torch.func.hessian(loss)(torch.cat([w["w3"][:, 0], w["b3"]]))
    last = deviation(torch.linalg.inv(hessian), ("w3", "b3"))
    np.testing.assert_allclose(names["deviations"]["last"], last, rtol=1e-3)
    every = tuple(w)
    J = rows(data["x"], every)
    precision = J.T @ J / 0.1**2 + torch.eye(J.shape[1]).double()
    expected = deviation(torch.linalg.inv(precision), every)
    np.testing.assert_allclose(names["deviations"]["all"], expected, rtol=1e-2)
    assert (expected[1::2] > 5 * expected[::2]).all()  # far from the data, and near them
