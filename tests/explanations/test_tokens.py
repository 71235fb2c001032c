"""Tokens are explained by their embeddings, and written as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.data import SequenceOptions
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.jobs.explain import run_explain
from tests.explanations import nets
from tests.facts import raises

X = nets.samples()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=X)
    return tmp_path / "data.npz"


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
    with raises(UsageError, "conflict", "tokenizer"):
        run_explain(nets.model(), data, sequences=how, verify=False)
    with raises(UsageError, "conflict", "e.html"):
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
