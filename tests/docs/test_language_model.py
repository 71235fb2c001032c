"""The tutorial of language models: its blocks run on a small model in the form of onnxruntime-genai."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.docs.test_pages import run_in_turn, write_files
from tests.exporters.chat import PACKAGES, write_chat_model
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


def by_us(folder: Path, texts: list[str]) -> None:
    """Write model/ with what onnxgrad needs of it."""
    model = folder / "model"
    model.mkdir()
    onnx.save(decoder(80), model / "model.onnx")
    a_tokenizer(model, texts)


def by_genai(folder: Path, texts: list[str]) -> None:
    """Write model/ by genai's builder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PACKAGES:
            pytest.importorskip(name, exc_type=ImportError)
    write_chat_model("llama", "int4", folder, texts).parent.rename(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("write", [by_us, by_genai])
def test_every_block_runs(
    write: Callable[[Path, list[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls to a tenth by the command of the page, and with genai the program of the page gives the answer."""
    monkeypatch.chdir(tmp_path)
    write_files(PAGE)
    chats = [json.loads(line)["messages"] for line in Path("chat.jsonl").read_text().splitlines()]
    write(tmp_path, [message["content"] for chat in chats for message in chat])
    run_in_turn(PAGE)
    epochs = [json.loads(line) for line in Path("tuned.onnx.run/train.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in epochs if "rate" not in line]
    assert len(losses) == 20 and losses[-1] < losses[0] / 10
    if write is by_genai:  # in a process of its own: genai brings an onnxruntime that is not to meet ours
        done = subprocess.run([sys.executable, "chat.py"], check=False, capture_output=True, text=True)
        assert done.stdout.strip() == chats[0][1]["content"], done.stderr[-2000:]
