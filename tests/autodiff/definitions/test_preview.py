"""The optimizer operators: a step and its gradient beside PyTorch (the settings are exact in float32), the tests that
onnx publishes, and every attribute beside onnx.reference."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.jobs.expand import run_expand
from tests.facts import raises
from tests.nodes import compare, normal, one_node
from tools.verify_op.examples import published_cases

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


# -- as the onnx package has them ------------------------------------------------------------------------------------

PREVIEW = "ai.onnx.preview.training"
PUBLISHED = {
    "adagrad": ("test_adagrad", "test_adagrad_multiple"),
    "adam": ("test_adam", "test_adam_multiple"),
    "momentum": ("test_momentum", "test_momentum_multiple", "test_nesterov_momentum"),
}


def on_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path) -> list[np.ndarray]:
    """What a model's file computes after `onnxgrad expand`, on the stock onnxruntime."""
    onnx.save(model, folder / "model.onnx")
    (piece,) = run_expand(folder / "model.onnx")
    expanded = onnx.load(piece.path)
    onnx.checker.check_model(expanded, full_check=True)
    assert {node.domain for node in expanded.graph.node} == {""}
    assert {entry.domain for entry in expanded.opset_import} == {""}
    return ort.InferenceSession(piece.path).run(None, feeds)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in PUBLISHED.items() for name in names])
def test_published(file: str, name: str, tmp_path: Path) -> None:
    (case,) = [case for case in published_cases(file) if case.name == name]
    assert PREVIEW in {node.domain for node in case.model.graph.node}
    for inputs, expected in case.data_sets:
        feeds = {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=True)}
        for result, array in zip(on_onnxruntime(case.model, feeds, tmp_path), expected, strict=True):
            assert result.dtype == array.dtype
            np.testing.assert_allclose(result, array, rtol=case.rtol, atol=case.atol)


ATTRIBUTES = {
    "Adagrad": {"norm_coefficient": 0.1, "decay_factor": 0.2, "epsilon": 1e-3},
    "Adam": {"alpha": 0.8, "beta": 0.95, "norm_coefficient": 0.1, "norm_coefficient_post": 0.25, "epsilon": 1e-3},
    "Momentum": {"alpha": 0.8, "beta": 0.7, "norm_coefficient": 0.1},
}
STATE = {"Adagrad": "h", "Adam": "vh", "Momentum": "v"}
CASES = [
    (op, each, mode)
    for op, given in ATTRIBUTES.items()
    for each in (None, *given)
    for mode in (("standard", "nesterov") if op == "Momentum" else ("",))
]


@pytest.mark.parametrize(("op", "alone", "mode"), CASES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("step", [0, 1, 500])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.thinned(6, 4)
def test_attributes(op: str, alone: str | None, mode: str, count: int, step: int, dtype: str, tmp_path: Path) -> None:
    """All attributes at once, and each with the others at their defaults, beside onnx.reference."""
    required = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": mode} if op == "Momentum" else {}
    given = ATTRIBUTES[op] if alone is None else {alone: ATTRIBUTES[op][alone]}
    kinds = f"xg{STATE[op]}"
    arrays = {name: value.astype(dtype) for name, value in tensors(*kinds, count=count).items()}
    feeds = {"rate": np.array(10.0, dtype), "step": np.array(step), **arrays}
    outputs = [name for kind in f"x{STATE[op]}" for name in names(kind, count=count)]
    model, _ = one_node(op, feeds, outputs, {**required, **given}, opset=17, domain=PREVIEW)
    for value, kind in zip(model.graph.output, [f"{k}{i}" for k in f"x{STATE[op]}" for i in range(count)], strict=True):
        value.CopyFrom(onnx.helper.make_tensor_value_info(
            value.name, onnx.helper.np_dtype_to_tensor_dtype(arrays[kind].dtype), arrays[kind].shape
        ))  # fmt: skip
    expected = ReferenceEvaluator(model).run(None, feeds)
    results = on_onnxruntime(model, feeds, tmp_path)
    narrow = dtype == "float32" or (op == "Adam" and count > 1)  # the reference rounds several tensors to float32
    for result, array in zip(results, expected, strict=True):
        assert result.dtype == np.dtype(dtype)
        np.testing.assert_allclose(result, array, rtol=2e-6 if narrow else 1e-12, atol=2e-6 if narrow else 1e-12)


def test_a_node_that_no_type_is_known_of_is_refused(tmp_path: Path) -> None:
    model, _ = one_node("Adagrad", {"rate": RATE, "step": STEP, **tensors("x", "g", "h", count=1)},
                        names("x", "h", count=1), {}, domain=PREVIEW, opset=17)  # fmt: skip
    model.opset_import.add(domain="own", version=1)
    model.graph.node.insert(0, onnx.helper.make_node("Unknown", ["g0"], ["g1"], domain="own"))
    model.graph.node[1].input[3] = "g1"
    for value, name in zip(model.graph.output, ("x0", "h0"), strict=True):
        value.type.CopyFrom(next(given.type for given in model.graph.input if given.name == name))
    onnx.save(model, tmp_path / "model.onnx")
    with raises(UnsupportedError, "refused", "node", "Adagrad", "g1"):
        run_expand(tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
