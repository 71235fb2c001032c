"""The tutorial of language models: its blocks run on a small model in the form of onnxruntime-genai."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import onnx
import pytest

from onnxgrad_cli.cli import run
from tests.docs.test_pages import blocks
from tests.genai_form import decoder

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
PAGE = "tutorials/language-model.md"


def a_tokenizer(folder: Path, texts: list[str]) -> None:
    """Write a tokenizer of 80 tokens in the form in which they are published."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    marks = ["<pad>", "<|im_start|>", "<|im_end|>", "\n"]
    made.train_from_iterator([*texts, "user assistant"], trainers.BpeTrainer(vocab_size=80, special_tokens=marks))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<|im_end|>"}))


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loss falls to a tenth by the command of the page."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    onnx.save(decoder(80), "model/model.onnx")
    for language, title, text in blocks(PAGE):
        if title:
            Path(title).write_text(text)
            said = [message["content"] for line in text.splitlines() for message in json.loads(line)["messages"]]
            a_tokenizer(Path("model"), said)
        elif language == "python":
            exec(compile(text, PAGE, "exec"), {})
        elif language == "sh":
            for command in text.replace("\\\n", " ").splitlines():
                assert run(shlex.split(command)[1:]) == 0, command
    epochs = [json.loads(line) for line in Path("tuned.onnx.run/train.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in epochs if "rate" not in line]
    assert len(losses) == 20 and losses[-1] < losses[0] / 10
