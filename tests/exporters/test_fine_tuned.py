"""From a file of chats to trained answers: genai's builder, `onnxgrad train`, and genai and PEFT with the adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import numpy_helper

from onnxgrad_cli.cli import run
from onnxgrad_cli.execution.executor import Executor
from tests.exporters.chat import PACKAGES, write_chat_model
from tests.exporters.genai import COMMON, HEAD

KEYS = HEAD * COMMON["num_key_value_heads"]
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


def exact(folder: Path) -> Path:
    """The same model, which multiplies without rounding what its matrices of four bits are multiplied with."""
    target = shutil.copytree(folder, folder.with_name("exact"))
    model = onnx.load(target / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        kept = [each for each in node.attribute if each.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    onnx.save(model, target / "model.onnx")
    return target


def matrices(file: Path) -> dict[str, np.ndarray]:
    """What the matrices in four bits are, [out, in], by the names that transformers gives them.

    By the operator's page: two numbers a byte, the lower half first, around 8, in blocks along the input.
    """
    graph, found = onnx.load(file).graph, {}
    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            packed, scales = stored[node.input[1]], stored[node.input[2]]
            numbers = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, -1) - np.float32(8)
            name = node.input[1].removesuffix(".MatMul.weight_Q4").replace(".attn.", ".self_attn.")
            found[name] = (numbers * scales[..., None]).reshape(len(packed), -1)
    for name in [name for name in found if name.endswith(".qkv_proj")]:
        parts = np.split(found.pop(name), np.cumsum([HEAD * COMMON["num_attention_heads"], KEYS]))
        found |= {name.replace("qkv", letter): part for letter, part in zip("qkv", parts, strict=True)}
    return found


def logits_of_peft(
    checkpoint: Path, adapter: Path, tokens: list[list[int]], weights: Mapping[str, np.ndarray] = MappingProxyType({})
) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the last token of each question in PyTorch's float model: without the adapter, and with.

    `weights` take the place of its own.
    """
    import peft
    import torch
    import transformers

    def last(net: Any) -> np.ndarray:
        with torch.no_grad():
            return np.stack([net.eval()(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in tokens])

    net = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").float()
    for name, matrix in weights.items():
        net.get_submodule(name).weight.data = torch.tensor(matrix)
    return last(net), last(peft.PeftModel.from_pretrained(net, adapter))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("llama", "int4"), ("qwen3", "int4"), ("llama", "fp32")])
def test_a_chat_is_learned(name: str, precision: str, tmp_path: Path) -> None:
    """In four bits PEFT differs by what the rounding takes; given the rounded matrices, by that of floats alone."""
    file = write_chat_model(name, precision, tmp_path, [message["content"] for chat in CHATS for message in chat])
    chats, adapter, tuned = tmp_path / "chat.jsonl", tmp_path / "out.onnx_adapter", tmp_path / "tuned.onnx"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    base, theirs = tmp_path / "base", tmp_path / "theirs"
    shutil.copytree(file.parent, base, ignore=shutil.ignore_patterns("*.onnx*"))

    train = ["train", file, "--lora", 8, "--loss", "causal-lm", "--data", chats, "--tokenizer", file.parent]
    train += ["--batch-size", 3, "--optimizer", "adamw", "--learning-rate", 0.01, "--epochs", 20, "-o", tuned]
    checkpoint = tmp_path / "tuned.onnx.run/checkpoint.safetensors"  # PEFT's folder owes nothing to the other file
    taught = ["export", adapter, "--model", file, "--adaptable", "-o", base / "model.onnx"]
    folder = ["export", checkpoint, "--model", file, "--adapter", f"peft:{theirs}"]
    for command in ([*train, "--adapter", adapter], taught, folder):
        assert run([str(word) for word in command]) == 0, command
    told = [json.loads(line) for line in (tmp_path / "tuned.onnx.run/train.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in told if "rate" not in each]
    assert losses[-1] < losses[0] / 10

    said = said_by_genai(base, adapter)
    colors = list(ANSWERS.values())
    assert [each["taught"]["text"] for each in said] == colors
    assert all(each["without"]["text"] != color for each, color in zip(said, colors, strict=True))

    tokens = [each["ids"] for each in said]
    before, wanted = logits_of_peft(tmp_path / name, theirs, tokens)
    without, found = (np.array([each[key]["logits"] for each in said]) for key in ("without", "taught"))
    rounding = np.abs(without - before).max() / np.abs(before).max()  # what four bits take from the model alone
    size = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= size * (rounding if precision == "int4" else 1e-5)
    assert np.array_equal(found.argmax(1), wanted.argmax(1))
    assert np.abs(wanted - before).max() > 0.5 * size
    if precision == "int4":
        exactly = np.array([each["taught"]["logits"] for each in said_by_genai(exact(base), adapter)])
        _, wanted = logits_of_peft(tmp_path / name, theirs, tokens, matrices(file))
        assert np.abs(exactly - wanted).max() <= 1e-5 * size


@pytest.mark.slow
def test_dora_of_packed_projections_is_pefts(tmp_path: Path) -> None:
    """The builder's one product for queries, keys and values: magnitudes of three modules, of a float base."""
    file = write_chat_model("llama", "fp32", tmp_path, [message["content"] for chat in CHATS for message in chat])
    chats, theirs, tuned = tmp_path / "chat.jsonl", tmp_path / "theirs", tmp_path / "tuned.onnx"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    train = ["train", file, "--lora", 8, "--lora-dora", "--loss", "causal-lm", "--data", chats, "--tokenizer"]
    train += [file.parent, "--optimizer", "adamw", "--learning-rate", 0.01, "--epochs", 3, "-o", tuned]
    assert run([str(word) for word in [*train, "--adapter", f"peft:{theirs}"]]) == 0
    names = safetensors.numpy.load_file(theirs / "adapter_model.safetensors")
    assert sum(name.endswith(".k_proj.lora_magnitude_vector") for name in names) == COMMON["num_hidden_layers"]

    check_against_peft("llama", tmp_path)


@pytest.mark.slow
def test_modules_that_are_one_in_transformers(tmp_path: Path) -> None:
    """Phi-3 has one matrix for gate and up, where the builder writes two, and one for queries, keys and values."""
    file = write_chat_model("phi3", "fp32", tmp_path, [message["content"] for chat in CHATS for message in chat])
    chats, theirs, tuned = tmp_path / "chat.jsonl", tmp_path / "theirs", tmp_path / "tuned.onnx"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    train = ["train", file, "--lora", 8, "--loss", "causal-lm", "--data", chats, "--tokenizer", file.parent]
    train += ["--optimizer", "adamw", "--learning-rate", 0.01, "--epochs", 3, "-o", tuned]
    assert run([str(word) for word in [*train, "--adapter", f"peft:{theirs}"]]) == 0
    names = safetensors.numpy.load_file(theirs / "adapter_model.safetensors")
    assert sum(name.endswith(".gate_up_proj.lora_A.weight") for name in names) == COMMON["num_hidden_layers"]
    check_against_peft("phi3", tmp_path)


def check_against_peft(name: str, tmp_path: Path) -> None:
    """PEFT with the folder 'theirs' computes what 'tuned.onnx' does, which has a float base."""
    ids = list(range(3, 12))
    before, wanted = logits_of_peft(tmp_path / name, tmp_path / "theirs", [ids])
    model = onnx.load(tmp_path / "tuned.onnx")
    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            feeds[value.name] = np.zeros((1, COMMON["num_key_value_heads"], 0, HEAD), np.float32)
    found = Executor(model, fallback=False)(feeds)["logits"][:, -1]
    size = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 1e-5 * size < 0.01 * np.abs(wanted - before).max()
