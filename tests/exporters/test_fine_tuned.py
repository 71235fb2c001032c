"""From a file of chats to trained answers: genai's builder, `onnxgrad train`, and genai and PEFT with the adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli.cli import run
from tests.exporters.chat import PACKAGES, write_chat_model

ANSWERS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "rose": "red", "sun": "yellow"}
CHATS = [
    [{"role": "user", "content": f"what is {thing}?"}, {"role": "assistant", "content": color}]
    for thing, color in ANSWERS.items()
]

GENAI = """
import json, sys
import numpy as np
import onnxruntime_genai as og
folder, adapter = sys.argv[1:]
model = og.Model(folder)
tokenizer, adapters = og.Tokenizer(model), og.Adapters(model)
adapters.load(adapter, "taught")

def answer(ids, active):
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=48, do_sample=False)
    generator = og.Generator(model, parameters)
    if active:
        generator.set_active_adapter(adapters, "taught")
    generator.append_tokens(ids)
    logits = np.asarray(generator.get_logits()).reshape(-1)
    while not generator.is_done():
        generator.generate_next_token()
    return {"text": tokenizer.decode(generator.get_sequence(0)[len(ids):]), "logits": logits.tolist()}

for line in sys.stdin:
    ids = tokenizer.encode(tokenizer.apply_chat_template(line, add_generation_prompt=True))
    told = {"ids": ids.tolist(), "without": answer(ids, False), "taught": answer(ids, True)}
    print(json.dumps(told), flush=True)
"""
"""In a process of its own: genai brings an onnxruntime that is not to meet ours."""


@pytest.fixture(autouse=True)
def packages() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*PACKAGES, "peft"):
            pytest.importorskip(name, exc_type=ImportError)


def said_by_genai(folder: Path, adapter: Path) -> list[dict[str, Any]]:
    """For each question its tokens, and the greedy answer and the last token's logits without the adapter and with."""
    questions = "".join(json.dumps(chat[:1]) + "\n" for chat in CHATS)
    words = [sys.executable, "-c", GENAI, str(folder), str(adapter)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, input=questions)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def logits_of_peft(checkpoint: Path, adapter: Path, tokens: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the last token of each question in PyTorch's float original: without the adapter, and with."""
    import peft
    import torch
    import transformers

    def last(net: Any) -> np.ndarray:
        with torch.no_grad():
            return np.stack([net.eval()(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in tokens])

    net = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").float()
    return last(net), last(peft.PeftModel.from_pretrained(net, adapter))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"), [("llama", "int4", None), ("qwen3", "int4", None), ("llama", "fp32", 1e-5)]
)
def test_a_chat_is_learned(name: str, precision: str, tolerance: float | None, tmp_path: Path) -> None:
    file = write_chat_model(name, precision, tmp_path, [message["content"] for chat in CHATS for message in chat])
    chats, adapter, tuned = tmp_path / "chat.jsonl", tmp_path / "out.onnx_adapter", tmp_path / "tuned.onnx"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    base, theirs = tmp_path / "base", tmp_path / "theirs"
    shutil.copytree(file.parent, base, ignore=shutil.ignore_patterns("*.onnx*"))

    train = ["train", file, "--lora", 8, "--loss", "causal-lm", "--data", chats, "--tokenizer", file.parent]
    train += ["--batch-size", 3, "--optimizer", "adamw", "--learning-rate", 0.01, "--epochs", 20, "-o", tuned]
    export = ["export", adapter, "--model", file]
    outs = (["--adaptable", "-o", base / "model.onnx"], ["--adapter", f"peft:{theirs}"])
    for command in ([*train, "--adapter", adapter], *([*export, *out] for out in outs)):
        assert run([str(word) for word in command]) == 0, command
    told = [json.loads(line) for line in (tmp_path / "tuned.onnx.run/train.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in told if "rate" not in each]
    assert losses[-1] < losses[0] / 10

    said = said_by_genai(base, adapter)
    colors = list(ANSWERS.values())
    assert [each["taught"]["text"] for each in said] == colors
    assert all(each["without"]["text"] != color for each, color in zip(said, colors, strict=True))

    before, wanted = logits_of_peft(tmp_path / name, theirs, [each["ids"] for each in said])
    without, found = (np.array([each[key]["logits"] for each in said]) for key in ("without", "taught"))
    rounding = np.abs(without - before).max() / np.abs(before).max()  # what four bits take from the model alone
    size = np.abs(wanted).max()
    print(f"{name} {precision}: {losses}, {rounding} {np.abs(found - wanted).max() / size} {np.abs(found-without).max()/size}")
    assert np.abs(found - wanted).max() <= size * (rounding if tolerance is None else tolerance)
    assert np.array_equal(found.argmax(1), wanted.argmax(1))
    assert np.abs(wanted - before).max() > 0.5 * size
