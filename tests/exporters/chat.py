"""A language model that can be talked with, by onnxruntime-genai's builder: random weights, a tokenizer, a template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.exporters.genai import SIZE, WORDS, write_checkpoint, write_model

TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, as Qwen's models have it."""

PACKAGES = ("onnxruntime_genai", "onnx_ir", "transformers", "tokenizers", "safetensors", "torch")


def write_chat_model(name: str, precision: str, folder: Path, texts: Iterable[str]) -> Path:
    """The builder's file of a model whose tokenizer knows `texts`; the checkpoint stands in folder / name.

    Its weights are large enough for its layers to matter: at transformers' 0.02, a model this small passes on its
    embeddings alone.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    write_checkpoint(name, folder / name, initializer_range=SIZE**-0.5)
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {"pad_token": "<pad>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=[*marks.values()], show_progress=False)
    tokens.train_from_iterator([*texts, "user\nassistant\n"], trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **marks)
    made.save_pretrained(folder / name)
    return write_model(name, precision, folder)
