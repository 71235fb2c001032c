"""A tokenizer for the tests of text and of chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MARKS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "\n"]
WORDS = [*MARKS, *"what is the sky ? blue grass green it and user assistant system".split()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of whole words, that puts <s> in front, in a folder with its settings."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made.add_special_tokens(MARKS)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(3)  # as some are published: what we read is never cut by them
    made.enable_padding(length=64)
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "pad_token": "<pad>", "bos_token": "<s>"}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "tok"
