"""What is explained: layers and values in between, samples that may mix, and batches of a fixed size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.subject import the_layer, typed
from onnxgrad_cli.jobs.explain import run_explain
from onnxgrad_cli.options import Options
from tests.explanations import nets
from tests.facts import raises

X = nets.samples()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=X)
    return tmp_path / "data.npz"


def test_what_is_explained_is_in_the_mode_that_is_differentiated(data: Path) -> None:
    text = nets.TEXT.replace("layer = Relu(deep)", "kept = Relu(deep)\n  half = Constant<value_float = 0.5>()\n"
                             "  on = Cast<to = 9>(half)\n  layer = Dropout(kept, half, on)")  # fmt: skip
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in nets.weights().items())
    found = run_explain(model, data, options=Options(mode="eval"), verify=False)
    expected = run_explain(nets.model(), data, verify=False)
    np.testing.assert_array_equal(found.classes, expected.classes)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-6)


def test_a_value_in_between_is_explained_as_pytorch_does(data: Path) -> None:
    twin = nets.Twin()
    inner = torch.nn.functional.softplus(twin.first(torch.tensor(X))).detach().requires_grad_()
    rest = twin.head(twin.layer(twin.second(torch.nn.functional.avg_pool2d(inner, 2))).flatten(1))
    (expected,) = torch.autograd.grad(rest[:, 2].sum(), inner)
    found = run_explain(nets.model(), data, class_=2, wrt="soft", verify=True)
    np.testing.assert_allclose(found.values, expected.abs().numpy(), rtol=1e-5, atol=1e-6)
    assert found.proof[0] == "proved"
    whole = run_explain(nets.model(), data, None, Method("integrated-gradients", steps=100), wrt="soft", verify=False)
    assert whole.gaps is not None and whole.gaps.max() < 0.02


@pytest.mark.parametrize(("tail", "layer"), [
    ("p = GlobalAveragePool(r)\n f = Flatten(p)", "r"),
    ("p = MaxPool<kernel_shape = [2, 2]>(r)\n f = Flatten(p)", "p"),
    ("t = Transpose<perm = [0, 2, 3, 1]>(r)\n u = Relu(t)\n f = Flatten(u)", "r"),
])  # fmt: skip
def test_the_last_layer_with_places(tail: str, layer: str) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
    net (float[N, 1, 6, 6] x) => (float[N, M] f) <float[1, 1, 1, 1] w = {{2}}> {{
      c = Conv(x, w)
      r = Relu(c)
      {tail}
    }}""")
    assert the_layer(model, None, typed(model, None, Options()), None).name == layer


def test_the_patches_of_a_transformer_are_no_last_layer() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
    net (float[N, 1, 6, 6] x) => (float[N, 4] f) <int64[1] one = {1}, int64[3] s = {0, 3, 9}> {
      c = Conv<strides = [2, 2]>(x, w)
      tokens = Reshape(c, s)
      t = Transpose<perm = [0, 2, 1]>(tokens)
      m = MatMul(t, v)
      f = ReduceMean<keepdims = 0>(m, one)
    }"""
    )
    for name, shape in (("w", (3, 1, 2, 2)), ("v", (3, 4))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    with raises(UsageError, "missing_value", "layer", "c"):
        the_layer(model, None, typed(model, None, Options()), None)
    assert the_layer(model, None, typed(model, None, Options()), "c").name == "c"
