"""DoRA: PyTorch's gradients with the norm held, the proof of them, and what is written when they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.adapters.own_file import load_adapter
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import Adapter, describe
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.verification.proof import prove
from tests.cli_harness import Shell
from tests.facts import raises
from tests.passes import test_quantized_adapters as quantized
from tests.passes.test_quantized_adapters import BIAS, RANK, Form, K, N, X, with_factors

Array = np.ndarray
RNG = np.random.default_rng(5)
MATRIX = RNG.standard_normal((K, N)).astype(np.float32) / 5
DORA = Options(lora=LoraSpec(RANK, 6.0), lora_dora=True, keep_outputs=True)

FORMS = {name: form for name, form in quantized.FORMS.items() if "left" not in name} | {
    "floats": Form([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], {"w": MATRIX}, MATRIX, weight="w"),
    "floats and a bias": Form(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="product", transB=1, alpha=0.5, beta=3.0)],
        {"w": np.ascontiguousarray(MATRIX.T), "b": BIAS}, MATRIX, 3 * BIAS, 0.5, "w",
    ),
    "a convolution": Form(
        [
            helper.make_node("Unsqueeze", ["x", "axis"], ["image"]),
            helper.make_node("Conv", ["image", "w", "b"], ["z"], name="product"),
            helper.make_node("Squeeze", ["z", "axis"], ["y"]),
        ],
        {"w": np.ascontiguousarray(MATRIX.T)[..., None], "b": BIAS, "axis": np.array([2])}, MATRIX, BIAS, 1.0, "w",
    ),
}  # fmt: skip


def options_for(name: str) -> Options:
    return replace(DORA, lora_target=("w",)) if name == "a convolution" else DORA


def off_their_start(model: ModelProto, adapter: Adapter) -> dict[str, Array]:
    """Values for all that is trained: B is not zero, and magnitudes are no norms."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values = {name: RNG.standard_normal(stored[name].shape).astype(np.float32) / 5 for name in (adapter.a, adapter.b)}
    lengths = stored[adapter.magnitude] * RNG.uniform(0.5, 1.5, N)
    return {**values, adapter.magnitude: lengths.astype(np.float32)}


def by_torch(form: Form, adapter: Adapter, values: Mapping[str, Array]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result, by the paper's equation 5 with the norm as section 4.3 has it, and the leaves."""
    leaves = {name: torch.tensor(each.astype(np.float64), requires_grad=True) for name, each in values.items()}
    a, b = (leaves[name].reshape(leaves[name].shape[:2]) for name in (adapter.a, adapter.b))
    a, b = (a if a.shape == (K, RANK) else a.T), (b if b.shape == (RANK, N) else b.T)
    v = torch.tensor(form.matrix.astype(np.float64)) + 2.0 * a @ b
    w = v * (leaves[adapter.magnitude] / v.norm(dim=0).detach())
    return form.scale * torch.tensor(X.astype(np.float64)) @ w + torch.tensor(form.bias), leaves


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_pytorchs_with_the_norm_held(name: str) -> None:
    form = FORMS[name]
    model = quantized.model_of(form)
    built = build(quantized.model_of(form), options_for(name))
    (adapter,) = describe(built.model).adapters
    label = RNG.standard_normal((5, N)).astype(np.float32)
    begun = Executor(built.model, fallback=False)({"x": X, "label": label})["y"]
    before = Executor(model, fallback=False)({"x": X})["y"]
    np.testing.assert_allclose(begun, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())

    values = off_their_start(built.model, adapter)
    found = Executor(with_factors(built.model, values), fallback=False)({"x": X, "label": label})
    y, leaves = by_torch(form, adapter, values)
    torch.nn.functional.mse_loss(y, torch.tensor(label, dtype=torch.float64)).backward()
    limit = 1e-5 * float(y.detach().abs().max())
    np.testing.assert_allclose(found["y"], y.detach(), rtol=0, atol=limit)
    for trained, leaf in leaves.items():
        assert leaf.grad is not None
        gradient = leaf.grad.numpy()
        np.testing.assert_allclose(found[f"{trained}_grad"], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max())

    written = merge(model, [adapter], values)
    onnx.checker.check_model(written, full_check=True)
    np.testing.assert_allclose(Executor(written, fallback=False)({"x": X})["y"], y.detach(), rtol=0, atol=limit)


def test_the_proof_holds_the_norm() -> None:
    """The gradients are the slopes while the norm stays; those of the loss as it is are others, as the proof sees."""
    form = FORMS["4 bits"]
    model = build(quantized.model_of(form), DORA).model
    roles = describe(model)
    (adapter,) = roles.adapters
    assert prove(model, roles, original=quantized.model_of(form)).verdict == "proved"
    moved = with_factors(model, off_their_start(model, adapter))
    assert prove(moved, roles).verdict == "proved"
    assert prove(moved, replace(roles, held=())).verdict == "failed"


def test_a_model_of_identifiers_is_proved() -> None:
    """Its norm bears another name, which the description has."""
    model = build(quantized.model_of(FORMS["gemm"]), replace(DORA, identifiers=True)).model
    roles = describe(model)
    assert len(roles.held) == 1 and prove(model, roles).verdict == "proved"


@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "ema": 0.9}, {"loss_scale": "dynamic"}])
def test_a_step_of_an_optimizer_is_proved(more: dict[str, Any]) -> None:
    """Its state has values, and is neither fed nor a weight."""
    model = build(quantized.model_of(FORMS["floats"]), replace(DORA, optimizer="adamw", **more)).model
    roles = describe(model)
    assert roles.held and "state" in roles.inputs.values() and prove(model, roles).verdict == "proved"


def zero_output() -> Form:
    matrix = MATRIX.copy()
    matrix[:, 3] = 0
    return replace(FORMS["floats"], stored={"w": matrix})


@pytest.mark.parametrize(
    ("form", "options", "why"),
    [
        (zero_output(), {}, "all weights of its output 3 are zero, so they have no direction"),
        (quantized.FORMS["on the left"], {}, "multiplies by it from the left"),
        (FORMS["floats"], {"as_gradient_op": True}, "`as_gradient_op` can't be combined with `lora_dora`"),
        (FORMS["floats"], {"lora": None}, "`lora_dora` requires adapters"),
    ],
)
def test_what_is_refused(form: Form, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as raised:
        build(quantized.model_of(form), replace(DORA, **options))
    assert why in f"{raised.value} {raised.value.details}"


def test_dropout_is_refused() -> None:
    with raises(UsageError, "conflict", "lora_dora", "lora_dropout"):
        Options(lora=LoraSpec(2), lora_dora=True, lora_dropout=0.1)


@pytest.mark.slow
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, read back in both forms that have a place for magnitudes, gone on with, rounded; the others refuse."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    model = quantized.language_model()
    onnx.save(model, "lm.onnx")
    ids = (np.arange(24)[:, None] + np.arange(7)) % 12
    np.savez("text.npz", ids=ids, label=ids)
    words = ("--loss", "causal-lm", "--data", "text.npz", "--threads", "1", "--learning-rate", "0.02")
    train = ("train", "lm.onnx", *words, "--lora", "4:8", "--lora-dora", "--epochs")
    result = shell(*train, "20", "-o", "taught.onnx", "--adapter", "a.safetensors", "--json")
    assert result.code == 0, result.err
    losses = [epoch["loss"] for epoch in result.json["epochs"]]
    assert losses[-1] < losses[0] / 2
    adapters, values = load_adapter(Path("a.safetensors"))
    begun = build(model, replace(DORA, lora=LoraSpec(4, 8.0))).graph.initializers
    for adapter in adapters:
        first = numpy_helper.to_array(begun[adapter.magnitude])
        assert np.abs(values[adapter.magnitude] / first - 1).max() > 0.01

    def logits(name: str) -> Array:
        return Executor(onnx.load(name), fallback=False)({"ids": np.arange(12)[None]})["logits"]

    wanted = logits("taught.onnx")
    assert shell("export", "a.safetensors", "--model", "lm.onnx", "--adapter", "folder").code == 0
    for form in ("a.safetensors", "folder"):
        assert shell("export", form, "--model", "lm.onnx", "-o", "again.onnx", "--force").code == 0
        np.testing.assert_allclose(logits("again.onnx"), wanted, rtol=1e-5, atol=1e-5)
        slow = ("--learning-rate", "1e-9", "--epochs", "1", "--adapter-from", form, "--run", f"{form}.run")
        on = shell("train", "lm.onnx", *words, *slow, "-o", "on.onnx", "--force")
        assert on.code == 0, on.err
        np.testing.assert_allclose(logits("on.onnx"), wanted, rtol=1e-5, atol=1e-5)
    assert shell("export", "folder", "--model", "lm.onnx", "--merge", "-o", "merged.onnx").code == 0
    assert np.abs(logits("merged.onnx") - wanted).max() < np.abs(logits("lm.onnx") - wanted).max() / 3

    refused = shell(*train, "1", "-o", "other.onnx", "--adapter", "a.onnx_adapter")
    assert refused.code == 2 and "DoRA adapters also have magnitudes" in refused.err and not Path("other.onnx").exists()
    refused = shell("export", "folder", "--model", "lm.onnx", "--adaptable", "-o", "base.onnx")
    assert refused.code == 2 and "DoRA adapters also have magnitudes" in refused.err and not Path("base.onnx").exists()
    refused = shell("train", "lm.onnx", *words, "--lora", "4:8", "--adapter-from", "folder", "-o", "b.onnx")
    assert refused.code == 2 and "--lora-dora" in refused.err
