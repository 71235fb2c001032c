"""Who asks what a prediction comes from: by pixels, by maps, by tokens; who wants forces, Jacobians, attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser

from onnxgrad_cli.ir.types import Arrays
from tests.cli_harness import Shell
from tests.explanations import nets

pytestmark = pytest.mark.slow
SAMPLES = Path(__file__).parents[2] / "sample_models"
LABELS = np.array([3, 0, 4, 1, 1])


ENERGY = """<ir_version: 10, opset_import: ["": 18]>
    energy (float[5, 3] r) => (float e)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {2}, float[1] near = {0.5}>
    {
      a = Unsqueeze(r, zero) b = Unsqueeze(r, one) d = Sub(a, b) squares = Mul(d, d)
      far = ReduceSum<keepdims = 0>(squares, last) softened = Add(far, near) pull = Reciprocal(softened)
      pulls = ReduceSum<keepdims = 0>(pull) size = ReduceSum<keepdims = 0>(far) bound = Log(size) e = Add(pulls, bound)
    }"""


def run(path: str, **feeds: Any) -> Arrays:
    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def done(shell: Shell, *words: object) -> str:
    result = shell(*words)
    assert result.code == 0, result.err
    return result.out + result.err


def test_pictures(shell: Shell) -> None:
    """Saliency, Grad-CAM beside a hook of PyTorch, integrated gradients that add up, and FGSM."""
    nets.save(Path(), y=LABELS)
    x, data = torch.tensor(nets.samples()), ("--data", "data.npz", "--label", "y")
    asked = (*data, "--class", "label", "-o", "why.npz")
    done(shell, "explain", "net.onnx", *asked, "--method", "saliency")
    gradient = nets.gradients(x.numpy(), LABELS)
    np.testing.assert_allclose(np.load("why.npz")["attributions"], np.abs(gradient), rtol=1e-5, atol=1e-5)

    twin, kept = nets.Twin(), {}
    twin.layer.register_forward_hook(lambda module, given, made: kept.update(a=made))
    score = twin(x)[range(5), LABELS].sum()
    (by_maps,) = torch.autograd.grad(score, kept["a"])
    cam = torch.relu((by_maps.mean((2, 3), keepdim=True) * kept["a"]).sum(1)).detach().numpy()
    done(shell, "explain", "net.onnx", *asked, "--method", "grad-cam")
    np.testing.assert_allclose(np.load("why.npz")["attributions"], cam, rtol=1e-5, atol=1e-5)
    done(shell, "derive", "net.onnx", "--class", "label", "--wrt", "layer", "-o", "cam.onnx")
    found = run("cam.onnx", x=x.numpy(), label=LABELS)
    np.testing.assert_allclose(found["layer_grad"], by_maps.numpy(), rtol=1e-5, atol=1e-5)

    done(shell, "explain", "net.onnx", *asked, "--method", "integrated-gradients", "--steps", "300")
    whole = np.load("why.npz")
    baseline = nets.Twin()(torch.zeros_like(x[:1])).detach().numpy()[0, LABELS]
    change = nets.Twin()(x).detach().numpy()[range(5), LABELS] - baseline
    np.testing.assert_allclose(whole["attributions"].sum((1, 2, 3)), change, rtol=5e-3, atol=1e-3)

    told = done(shell, "attack", "net.onnx", *data, "--method", "fgsm", "--epsilon", "0.1", "-o", "fooled.npz")
    assert "success" in told
    x.requires_grad_()
    loss = torch.nn.functional.cross_entropy(nets.Twin()(x), torch.tensor(LABELS), reduction="sum")
    (up,) = torch.autograd.grad(loss, x)
    low, high = float(x.detach().min()), float(x.detach().max())
    fooled = (x + 0.1 * up.sign()).detach().clamp(low, high).numpy()
    np.testing.assert_allclose(np.load("fooled.npz")["x"], fooled, rtol=1e-5, atol=1e-5)


def test_tokens(shell: Shell) -> None:
    """What each token adds, by its embedding; together they are the change of the score."""
    model, data = SAMPLES / "tiny_transformer.onnx", SAMPLES / "tiny_transformer.npz"
    words = ("explain", model, "--data", data, "--map", "test_x=input_ids", "--method", "integrated-gradients")
    result = shell(*words, "--sample", "0", "--steps", "300", "--json", "-o", "tokens.npz")
    assert result.code == 0, result.err
    tokens = np.load("tokens.npz")
    assert len(tokens["attributions"][0]) == np.load(data)["test_x"].shape[1]
    session = onnxruntime.InferenceSession(model)
    (scores,) = session.run(None, {"input_ids": np.load(data)["test_x"][:1]})
    assert scores[0].max() == pytest.approx(float(tokens["scores"][0]), abs=1e-5)


def test_forces_and_curvature(shell: Shell) -> None:
    """The energy of a molecule: forces, and products with its Hessian, beside torch.func."""
    onnx.save(parser.parse_model(ENERGY), "energy.onnx")

    def energy(r: torch.Tensor) -> torch.Tensor:
        far = ((r[None] - r[:, None]) ** 2).sum(2)
        return (1 / (far + 0.5)).sum() + torch.log(far.sum())

    r, way = torch.randn(2, 5, 3).unbind()
    done(shell, "derive", "energy.onnx", "--wrt", "r", "-o", "forces.onnx")
    forces = run("forces.onnx", r=r.numpy(), e_grad=np.array(1, np.float32))
    np.testing.assert_allclose(forces["r_grad"], torch.func.grad(energy)(r), rtol=1e-4, atol=1e-5)
    done(shell, "derive", "energy.onnx", "--kind", "hvp", "-o", "hvp.onnx")
    curve = run("hvp.onnx", r=r.numpy(), r_vector=way.numpy())
    wanted = torch.func.jvp(torch.func.grad(energy), (r,), (way,))[1]
    np.testing.assert_allclose(curve["r_hvp"], wanted, rtol=1e-3, atol=1e-4)
    done(shell, "derive", "energy.onnx", "--kind", "jvp", "-o", "jvp.onnx")
    slope = run("jvp.onnx", r=r.numpy(), r_tangent=way.numpy())
    np.testing.assert_allclose(slope["e_tangent"], torch.func.jvp(energy, (r,), (way,))[1], rtol=1e-4)


def test_each_sample(shell: Shell) -> None:
    """The Jacobian of each sample and its gradient by a weight, beside torch.func."""
    nets.save(Path())
    x, twin = torch.tensor(nets.samples()), nets.Twin()
    weights = dict(twin.named_parameters())
    done(shell, "derive", "net.onnx", "--kind", "jacobian", "--per-sample", "--wrt", "x", "-o", "each.onnx")

    def one(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(twin, weights, (sample[None],))[0]

    jacobian = torch.func.vmap(torch.func.jacrev(one, argnums=1), (None, 0))(weights, x)
    found = run("each.onnx", x=x.numpy())
    np.testing.assert_allclose(found["logits_jacobian_x"], jacobian.detach(), rtol=1e-4, atol=1e-5)
    words = ("--class", "label", "--per-sample", "--wrt", "w1", "--wrt", "b3", "-o", "scores.onnx")
    done(shell, "derive", "net.onnx", *words)

    def score(weights: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return one(weights, sample).gather(0, label[None])[0]

    gradients = torch.func.vmap(torch.func.grad(score), (None, 0, 0))(weights, x, torch.tensor(LABELS))
    found = run("scores.onnx", x=x.numpy(), label=LABELS)
    for ours, theirs in {"w1_grad": "first.weight", "b3_grad": "head.bias"}.items():
        np.testing.assert_allclose(found[ours], gradients[theirs].detach(), rtol=1e-4, atol=1e-5)
