"""Each method against another implementation of it: PyTorch's autograd and hooks, or a plain loop in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser

from onnxgrad_cli.common.choices import Explanation
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.jobs.explain import Explained, run_explain
from tests.cli_harness import Shell
from tests.data.leading_facts import raises_first
from tests.explanations import nets

X = nets.samples()
LABELS = np.array([3, 0, 4, 1, 1])
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.save(tmp_path_factory.mktemp("net"), y=LABELS)


def explained(files: tuple[Path, Path], name: Explanation, class_: int | str = "label", **settings: Any) -> Explained:
    return run_explain(*files, method=Method(name, **settings), class_=class_, label="y", verify=False)


def test_windows_in_volumes_do_not_overlap(shell: Shell, tmp_path: Path) -> None:
    """By halves, as in pictures, they would be thousands."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n,1,8,16,16] x) => (float[n,1] y) { p = GlobalAveragePool(x) y = Flatten(p) }""")
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((1, 1, 8, 16, 16), np.float32))
    said = shell("explain", "m.onnx", "--data", "d.npz", "--method", "occlusion", "--class", "0", "--no-verify").out
    assert "windows of 1 x 2 x 2 every 1 x 2 x 2" in said


@pytest.mark.parametrize("which", [2, "argmax", "label"])
def test_saliency_is_the_magnitude_of_pytorchs_gradient(files: tuple[Path, Path], which: int | str) -> None:
    scores = nets.Twin()(torch.tensor(X)).detach().numpy()
    classes = {"argmax": scores.argmax(1), "label": LABELS}.get(str(which), np.full(5, 2))
    found = explained(files, "saliency", which)
    np.testing.assert_array_equal(found.classes, classes)
    np.testing.assert_allclose(found.scores, scores[range(5), classes], **CLOSE)
    np.testing.assert_allclose(found.values, np.abs(nets.gradients(X, classes)), **CLOSE)


def test_smoothgrad_is_the_mean_of_pytorchs_gradients_under_the_same_noise(files: tuple[Path, Path]) -> None:
    expected = []
    for row, x in enumerate(X):
        random = np.random.default_rng([7, row])
        noise = [random.standard_normal(x.shape) * 0.2 * (x.max() - x.min()) for _ in range(6)]
        rows = np.float32(x + np.stack(noise))
        expected.append(nets.gradients(rows, np.full(6, LABELS[row])).mean(0))
    found = explained(files, "smoothgrad", repeats=6, noise=0.2, seed=7)
    np.testing.assert_allclose(found.values, expected, **CLOSE)
    alone = run_explain(*files, method=Method("smoothgrad", 6, 0.2, 7), class_="label", label="y", sample=[3, 1])
    np.testing.assert_allclose(alone.values, found.values[[3, 1]], **CLOSE)


def test_integrated_gradients_are_those_of_pytorch_and_complete(files: tuple[Path, Path], tmp_path: Path) -> None:
    base = np.float32(np.random.default_rng(5).uniform(0, 1, X.shape[1:]))
    np.save(tmp_path / "base.npy", base)
    grids = [nets.gradients(np.float32(base + (k + 0.5) / 20 * (X - base)), LABELS) for k in range(20)]
    found = explained(files, "integrated-gradients", steps=20, baseline=tmp_path / "base.npy")
    np.testing.assert_allclose(found.values, (X - base) * np.mean(grids, 0), **CLOSE)
    scores = nets.Twin()(torch.tensor(np.stack([*X, base]))).detach().numpy()
    fine = explained(files, "integrated-gradients", steps=400, baseline=tmp_path / "base.npy")
    change = scores[range(5), LABELS] - scores[5, LABELS]
    np.testing.assert_allclose(fine.values.sum((1, 2, 3)), change, rtol=2e-3, atol=2e-4)
    assert fine.gaps is not None and fine.gaps.max() < 5e-3


def test_what_does_not_add_up_is_told(files: tuple[Path, Path]) -> None:
    told: list[str] = []
    method = Method("integrated-gradients", steps=1, baseline="mean")
    found = run_explain(*files, method=method, class_=0, verify=False, tell=lambda text, level: told.append(text))
    assert found.gaps is not None and found.gaps.max() > 0.05
    assert any(text.startswith("caution: ") and "`steps`" in text for text in told)


@pytest.mark.parametrize("layer", [None, "layer", "soft"])
def test_grad_cam_is_that_of_a_pytorch_hook(files: tuple[Path, Path], layer: str | None) -> None:
    twin, kept = nets.Twin(), {}
    if layer == "soft":
        twin.first.register_forward_hook(lambda module, given, made: kept.update(a=made))
    else:
        twin.layer.register_forward_hook(lambda module, given, made: kept.update(a=made))
    scores = twin(torch.tensor(X))[range(5), LABELS].sum()
    a = kept["a"]
    if layer == "soft":  # which comes right behind
        a = torch.nn.functional.softplus(a).detach().requires_grad_()
        rest = twin.head(twin.layer(twin.second(torch.nn.functional.avg_pool2d(a, 2))).flatten(1))
        scores = rest[range(5), LABELS].sum()
    (gradient,) = torch.autograd.grad(scores, a)
    expected = torch.relu((gradient.mean((2, 3), keepdim=True) * a).sum(1)).detach().numpy()
    found = explained(files, "grad-cam", layer=layer)
    np.testing.assert_allclose(found.values, expected, **CLOSE)
    assert f"with respect to '{layer or 'layer'}'" in found.words


def test_occlusion_is_that_of_a_plain_loop(files: tuple[Path, Path]) -> None:
    session = onnxruntime.InferenceSession(files[0])

    def score(x: np.ndarray) -> np.ndarray:
        return session.run(None, {"x": x})[0][range(5), LABELS]

    total, count = np.zeros((5, 8, 8)), np.zeros((8, 8))
    for top in (0, 3, 5):  # the last window ends with the picture
        for left in (0, 2, 4, 6):
            hidden = X.copy()
            hidden[:, :, top : top + 3, left : left + 2] = X.mean(0)[:, top : top + 3, left : left + 2]
            total[:, top : top + 3, left : left + 2] += (score(X) - score(hidden))[:, None, None]
            count[top : top + 3, left : left + 2] += 1
    found = explained(files, "occlusion", baseline="mean", window=(3, 2), stride=(3, 2))
    np.testing.assert_allclose(found.values[:, 0], total / count, **CLOSE)


@pytest.mark.slow
def test_captum_says_the_same(files: tuple[Path, Path]) -> None:
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    twin, x, target = nets.Twin(), torch.tensor(X), torch.tensor(LABELS)
    for name, theirs in {
        "saliency": attr.Saliency(twin).attribute(x, target=target),
        "integrated-gradients": attr.IntegratedGradients(twin).attribute(
            x, target=target, n_steps=50, method="riemann_middle"
        ),
        "grad-cam": attr.LayerGradCam(twin, twin.layer).attribute(x, target=target, relu_attributions=True)[:, 0],
        "occlusion": attr.Occlusion(twin).attribute(x, (2, 2, 2), strides=(2, 2, 2), target=target)[:, :1],
    }.items():
        settings = {"window": (2,), "stride": (2,)} if name == "occlusion" else {}
        ours: Any = explained(files, name, **settings)  # type: ignore[arg-type]
        np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "gradcam"}, "grad-cam"),
        ({"name": "occlusion", "window": (9,)}, "has only 8 positions"),
        ({"name": "occlusion", "window": (1, 1, 1)}, "3 sizes"),
        ({"name": "smoothgrad", "repeats": 0}, "repeats"),
        ({"name": "integrated-gradients", "baseline": "none.npy"}, "no such file"),
        ({"name": "grad-cam", "layer": "flat"}, "must have channels"),
        ({"name": "grad-cam", "layer": "laier"}, "layer"),
    ],
)
def test_what_does_not_fit_is_refused(files: tuple[Path, Path], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(OnnxgradError) as caught:
        run_explain(*files, method=Method(**settings), verify=False)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_files_that_hold_no_baseline(files: tuple[Path, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=np.zeros(1), b=np.zeros(1))
    (tmp_path / "none.npy").write_bytes(b"no array")
    (tmp_path / "none.npz").write_bytes(b"no archive")
    for name, says in (
        ("two.npz", ("unknown_name", "baseline", "two.npz", "x")),
        ("none.npy", ("unreadable_file", "none.npy")),
        ("none.npz", ("unreadable_file", "none.npz")),
    ):
        with raises_first(OnnxgradError, *says) as caught:
            run_explain(*files, method=Method(name="integrated-gradients", baseline=tmp_path / name), verify=False)
        assert "pickle" not in caught.value.message
