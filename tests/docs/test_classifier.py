"""The tutorial of classifiers of text: its blocks run on a small BERT that PyTorch has exported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.docs.test_language_model import a_tokenizer
from tests.docs.test_pages import run_in_turn, write_files

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
PAGE = "tutorials/classifier.md"
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


class Layer(nn.Module):
    """Attention and a perceptron, each normalized behind its sum with what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask, -1) @ v
        x = self.first(x + self.output(seen.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Bert(nn.Module):
    """J. Devlin et al., BERT, 2019, arXiv:1810.04805, with a classifier behind its pooler."""

    def __init__(self, words: int = 80, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        self.word, self.position, self.kind = (nn.Embedding(size, width) for size in (words, 64, 2))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(2))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        places = self.position(torch.arange(input_ids.shape[1]))
        x = self.norm(self.word(input_ids) + places + self.kind(token_type_ids))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def export(path: Path) -> None:
    """Write it as optimum does, by TorchScript."""
    torch.manual_seed(0)
    ids = torch.ones(2, 5, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "sequence"} for name in INPUTS} | {"logits": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Bert().eval(), (ids, ids, ids * 0), str(path), dynamo=False, opset_version=17, input_names=INPUTS,
            output_names=["logits"], dynamic_axes=axes,
        )  # fmt: skip


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier tells in the end what it was taught, as the page's own program asserts."""
    monkeypatch.chdir(tmp_path)
    write_files(PAGE)
    a_tokenizer(tmp_path, [json.loads(line)["text"] for line in Path("reviews.jsonl").read_text().splitlines()])
    export(tmp_path / "model.onnx")
    run_in_turn(PAGE)
