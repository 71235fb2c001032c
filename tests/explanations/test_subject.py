"""What is explained: layers, embeddings and values in between, samples that may mix, and batches of a fixed size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.data import SequenceOptions
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.subject import the_layer, typed
from onnxgrad_cli.jobs.explain import run_explain
from onnxgrad_cli.options import Options
from tests.explanations import nets

X = nets.samples()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=X)
    return tmp_path / "data.npz"


def fixed(model: ModelProto, size: int) -> ModelProto:
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


def mixing() -> ModelProto:
    """The scores are those beyond the batch's mean."""
    text = nets.TEXT.replace("logits = Gemm", "raw = Gemm").replace(
        "(flat, w3, b3)", "(flat, w3, b3)\n  zero = Constant<value_ints = [0]>()\n  mean = ReduceMean(raw, zero)\n"
        "  half = Constant<value_float = 0.5>()\n  part = Mul(mean, half)\n  logits = Sub(raw, part)"
    )  # fmt: skip
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in nets.weights().items())
    return model


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_fixed_batch_changes_nothing(data: Path, size: int) -> None:
    found = run_explain(fixed(nets.model(), size), data, verify=False)
    np.testing.assert_allclose(found.values, run_explain(nets.model(), data, verify=False).values, atol=1e-6)


def test_samples_that_mix_are_run_one_by_one_or_refused(data: Path) -> None:
    told: list[str] = []
    found = run_explain(mixing(), data, class_=1, verify=False, tell=lambda text, level: told.append(text))
    alone = np.abs(nets.gradients(X, np.ones(5, int))) / 2
    np.testing.assert_allclose(found.values, alone, rtol=1e-5, atol=1e-6)
    assert any("one by one" in text for text in told)
    with pytest.raises(UnsupportedError, match="3 samples at once"):
        run_explain(fixed(mixing(), 3), data, verify=False)


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


def of_tokens() -> tuple[ModelProto, np.ndarray, np.ndarray]:
    """A model of tokens, with the table of their embeddings and the weights of the classes."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    net (int64[N, L] ids) => (float[N, 3] y)
    <int64[1] one = {1}> {
      rows = Gather(table, ids)
      bent = Tanh(rows)
      mean = ReduceMean<keepdims = 0>(bent, one)
      y = MatMul(mean, w)
    }""")
    random = np.random.default_rng(0)
    table, w = (np.float32(random.standard_normal(shape)) for shape in ((7, 4), (4, 3)))
    table[0] = 0
    model.graph.initializer.extend([numpy_helper.from_array(table, "table"), numpy_helper.from_array(w, "w")])
    return model, table, w


def test_tokens_are_explained_by_their_embeddings(tmp_path: Path) -> None:
    model, table, w = of_tokens()
    random = np.random.default_rng(1)
    ids = random.integers(0, 7, (3, 5))
    np.savez(tmp_path / "ids.npz", ids=ids)
    method = Method("integrated-gradients", steps=300)
    found = run_explain(model, tmp_path / "ids.npz", method=method, class_=1, verify=False)
    np.testing.assert_allclose(found.of_places(2), np.tanh(table[ids]) @ w[:, 1] / 5, rtol=1e-4, atol=1e-5)
    assert found.tokens is not None and (found.tokens == ids).all()
    hidden = run_explain(model, tmp_path / "ids.npz", method=Method("occlusion"), class_=1, verify=False)
    np.testing.assert_allclose(hidden.values[..., 0], np.tanh(table[ids]) @ w[:, 1] / 5, rtol=1e-4, atol=1e-5)


WORDS = "<pad> good bad film very the not".split()


def tokenizer(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_text_is_explained_token_by_token(tmp_path: Path) -> None:
    """Samples of different lengths, each as long as it is: this model is not told where they end."""
    model, table, w = of_tokens()
    onnx.save(model, tmp_path / "net.onnx")
    file, texts = tokenizer(tmp_path), ["the film", "not very good film", "bad"]
    (tmp_path / "d.csv").write_text("text\n" + "\n".join(texts))
    how: dict[str, Any] = {"class_": 1, "verify": False, "sequences": SequenceOptions(tokenizer=file)}
    method = Method("integrated-gradients", steps=300)
    found = run_explain(model, tmp_path / "d.csv", tmp_path / "e.npz", method, **how)
    assert found.texts == [text.split() for text in texts]
    rows = found.of_tokens()
    assert rows is not None
    for tokens, text in zip(rows, texts, strict=True):
        words = text.split()
        wanted = np.tanh(table[[WORDS.index(word) for word in words]]) @ w[:, 1] / len(words)
        assert [token.text for token in tokens] == words
        np.testing.assert_allclose([token.attribution for token in tokens], wanted, rtol=1e-4, atol=1e-5)
    with np.load(tmp_path / "e.npz") as held:
        assert held["texts"].tolist()[2] == ["bad", "", "", ""] and held["tokens"].shape == (3, 4)
    np.savez(tmp_path / "d.npz", ids=[[3, 5, 0]])
    assert run_explain(model, tmp_path / "d.npz", method=method, **how).texts == [["film", "the", "<pad>"]]


def test_a_page_of_tokens_holds_what_they_add(tmp_path: Path) -> None:
    model, *_ = of_tokens()
    file = tokenizer(tmp_path)
    (tmp_path / "d.csv").write_text("text\nthe film")
    done = run_explain(model, tmp_path / "d.csv", tmp_path / "e.html", sequences=SequenceOptions(tokenizer=file))
    text = (tmp_path / "e.html").read_text()
    rows = done.of_tokens()
    assert rows is not None and text.count("<span") == 2
    for token in rows[0]:
        assert f'title="{token.number}: {token.attribution:.4g}">{token.text}</span>' in text
    assert "rgba(214, 39, 40, 1.000)" in text and "script" not in text


def test_a_tokenizer_is_of_tokens(data: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    how = SequenceOptions(tokenizer=tokenizer(data.parent))
    with pytest.raises(UsageError, match="is not tokens"):
        run_explain(nets.model(), data, sequences=how, verify=False)
    with pytest.raises(UsageError, match="is for tokens"):
        run_explain(nets.model(), data, data.with_name("e.html"), verify=False)


@pytest.mark.slow
def test_tokens_are_explained_as_captum_does(tmp_path: Path) -> None:
    """By the layer of embeddings, from the token whose embedding is zero."""
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    model, table, w = of_tokens()

    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Embedding.from_pretrained(torch.tensor(table))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.rows(ids)).mean(1) @ torch.tensor(w)

    ids, twin = np.random.default_rng(2).integers(1, 7, (4, 6)), Twin()
    np.savez(tmp_path / "d.npz", ids=ids)
    found = run_explain(model, tmp_path / "d.npz", method=Method("integrated-gradients", steps=50), class_=2)
    layer = attr.LayerIntegratedGradients(twin, twin.rows)
    given, nothing = torch.tensor(ids), torch.zeros(ids.shape, dtype=torch.int64)
    wanted = layer.attribute(given, nothing, target=2, n_steps=50, method="riemann_middle")
    np.testing.assert_allclose(found.values, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


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
    with pytest.raises(UsageError, match="followed by layers of tokens"):
        the_layer(model, None, typed(model, None, Options()), None)
    assert the_layer(model, None, typed(model, None, Options()), "c").name == "c"


def test_a_picture_is_drawn_of_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    net (float[N, 3, 8, 8] x) => (float[N, M] f) { c = Conv(x, w)
      p = GlobalMaxPool(c)
      f = Flatten(p) }""")
    model.graph.initializer.append(
        numpy_helper.from_array(np.float32(np.random.default_rng(0).random((2, 3, 3, 3))), "w")
    )
    onnx.save(model, tmp_path / "m.onnx")
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "in.png")
    for name in ("saliency", "grad-cam", "occlusion"):
        found = run_explain(tmp_path / "m.onnx", tmp_path / "in.png", tmp_path / "out.png", Method(name), verify=False)  # type: ignore[arg-type]
        with image.open(tmp_path / "out.png") as drawn:
            left = np.asarray(drawn)[8:128:16, 8:128:16]
            assert drawn.size == (260, 128) and drawn.info["Description"] == found.words
        stretched = (pixels - float(pixels.min())) / np.ptp(pixels) * 255
        assert np.abs(left - stretched).max() < 1.01
    with pytest.raises(UsageError, match="labels"):
        run_explain(tmp_path / "m.onnx", tmp_path / "in.png", class_="label", label="labels")
