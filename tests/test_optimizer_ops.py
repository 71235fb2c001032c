"""One step of each optimizer operator and its gradient, beside PyTorch; the settings are exact in float32."""

import numpy as np
import pytest
import torch

from tests.nodes import compare, normal

RATE, STEP = np.array(0.1), np.array(3)


def tensors(*kinds: str, count: int = 2) -> dict[str, np.ndarray]:
    found = {f"{kind}{i}": normal(2 + i, 3, seed=ord(kind)) for kind in kinds for i in range(count)}
    return {name: np.abs(x) if name[0] == "h" else x for name, x in found.items()}


def names(*kinds: str, count: int = 2) -> list[str]:
    return [f"new_{kind}{i}" for kind in kinds for i in range(count)]


def test_adagrad() -> None:
    attributes = {"norm_coefficient": 0.375, "decay_factor": 0.0625, "epsilon": 2**-10}

    def step(rate, step, **values):
        new = {}
        for i in range(2):
            x, g, h = (values[f"{kind}{i}"] for kind in "xgh")
            g = g + 0.375 * x
            new[f"h{i}"] = h + g**2
            new[f"x{i}"] = x - rate / (1 + 0.0625 * step) * g / (new[f"h{i}"].sqrt() + 2**-10)
        return [new[name[4:]] for name in names("x", "h")]

    feeds = {"rate": RATE, "step": STEP, **tensors("x", "g", "h")}
    compare(step, "Adagrad", feeds, names("x", "h"), attributes, 1e-9, domain="ai.onnx.preview.training", opset=18)
    x, h = (torch.tensor(feeds[name]) for name in ("x0", "h0"))
    x.grad = torch.tensor(feeds["g0"])
    optimizer = torch.optim.Adagrad([x], lr=0.1, lr_decay=0.0625, weight_decay=0.375, eps=2**-10)
    optimizer.state[x].update(sum=h, step=torch.tensor(3.0))  # it counts from 1, and takes what it had before
    before = x.clone()
    optimizer.step()
    ours = step(RATE, 3, **{name: torch.tensor(value) for name, value in feeds.items() if name[0] in "xgh"})[0]
    assert not torch.equal(before, x)
    torch.testing.assert_close(ours, x)


@pytest.mark.parametrize("mode", ["standard", "nesterov"])
@pytest.mark.parametrize("count", [0, 3])
def test_momentum(mode: str, count: int) -> None:
    attributes = {"alpha": 0.875, "beta": 0.75, "mode": mode, "norm_coefficient": 0.25}

    def step(rate, step, **values):
        new = {}
        for i in range(2):
            x, g, v = (values[f"{kind}{i}"] for kind in "xgv")
            g = g + 0.25 * x
            new[f"v{i}"] = 0.875 * v + (0.75 if count else 1) * g
            new[f"x{i}"] = x - rate * (g + 0.875 * new[f"v{i}"] if mode == "nesterov" else new[f"v{i}"])
        return [new[name[4:]] for name in names("x", "v")]

    feeds = {"rate": RATE, "step": np.array(count), **tensors("x", "g", "v")}
    domain = "ai.onnx.preview.training"
    compare(step, "Momentum", feeds, names("x", "v"), attributes, 1e-9, domain=domain, opset=18)


@pytest.mark.parametrize("count", [0, 3])
def test_adam(count: int) -> None:
    attributes = {
        "alpha": 0.75,
        "beta": 0.875,
        "norm_coefficient": 0.25,
        "norm_coefficient_post": 0.125,
        "epsilon": 2**-10,
    }

    def step(rate, step, **values):
        new = {}
        for i in range(2):
            x, g, v, h = (values[f"{kind}{i}"] for kind in "xgvh")
            g = g + 0.25 * x
            new[f"v{i}"], new[f"h{i}"] = 0.75 * v + 0.25 * g, 0.875 * h + 0.125 * g**2
            r = rate * (1 - 0.875**count) ** 0.5 / (1 - 0.75**count) if count else rate
            new[f"x{i}"] = 0.875 * (x - r * new[f"v{i}"] / (new[f"h{i}"].sqrt() + 2**-10))
        return [new[name[4:]] for name in names("x", "v", "h")]

    feeds = {"rate": RATE, "step": np.array(count), **tensors("x", "g", "v", "h")}
    domain = "ai.onnx.preview.training"
    compare(step, "Adam", feeds, names("x", "v", "h"), attributes, 1e-9, domain=domain, opset=18)
