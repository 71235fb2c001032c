"""`onnxgrad train` on language models as they are deployed: what is made of the data is what the model wants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.data import input_types_of, open_data, ranges_of
from onnxgrad_cli.data.empty_kv_cache import with_empty_pasts, with_sizes_of_pasts
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.training.trainer import Trainer
from tests.cli_harness import Shell
from tests.facts import raises
from tests.genai_form import KEYS, SIZE, decoder

WORDS = 40
ROWS = [[int(token) for token in np.random.default_rng(at).integers(0, WORDS, 3 + 2 * at)] for at in range(4)]
ASKED = Options(losses=(LossSpec("causal-lm"),), lora=LoraSpec(2), optimizer="sgd")


def to_lines(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    return folder / "rows.jsonl"


def alone(model: ModelProto, row: list[int]) -> torch.Tensor:
    """The logits of onnxruntime on one sample without padding."""
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)}
    for value in session.get_inputs():
        if "past" in value.name:
            feeds[value.name] = np.zeros((1, KEYS, 0, SIZE), np.float32)
    return torch.tensor(session.run(["logits"], feeds)[0][0])


@pytest.mark.slow
def test_padding_changes_nothing(tmp_path: Path) -> None:
    """The loss of a padded batch is PyTorch's mean over all tokens, each sample run by itself without padding."""
    model, told = decoder(WORDS), []
    options = with_empty_pasts(model, ASKED, lambda: ["input_ids"], lambda text, _: told.append(text))
    assert options.dims == {"past_sequence_length": 0} and "using 0 for past_sequence_length" in told[0]
    built = build(model, options)
    inputs = with_sizes_of_pasts(input_types_of(built.model), built.graph)
    terms = Trainer(built).roles.losses
    data = open_data(to_lines(tmp_path), inputs, ranges_of(built.model), terms=terms)
    batch = data.batch(np.arange(4))
    assert batch["past_key_values.0.key"].shape == (4, KEYS, 0, SIZE)
    found = Trainer(built).step(batch, 0.0)
    logits = torch.cat([alone(model, row)[:-1] for row in ROWS])
    following = torch.tensor([token for row in ROWS for token in row[1:]])
    np.testing.assert_allclose(found, torch.nn.functional.cross_entropy(logits, following), rtol=1e-5)


def test_a_past_that_somebody_speaks_of_is_left_alone() -> None:
    model = decoder(WORDS)
    for asked in (
        Options(dims={"past_sequence_length": 4}),
        Options(shapes={"past_key_values.0.key": ("batch_size", 2, 4, 16)}),
    ):
        assert with_empty_pasts(model, asked, list, lambda text, _: None) is asked
    held = with_empty_pasts(model, Options(), lambda: ["input_ids", "past_key_values.1.value"], lambda text, _: None)
    assert not held.dims
    plain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[n] x) => (float[n] y) { y = Abs(x) }'
    )
    assert not with_empty_pasts(plain, Options(), lambda: pytest.fail("asked"), lambda text, _: None).dims


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    to_lines(tmp_path)
    return Shell(tmp_path, capsys)


WORDS_OF_TRAINING = (
    "--loss", "causal-lm", "--lora", "4", "--data", "rows.jsonl", "--batch-size", "4", "--epochs", "12",
    "--learning-rate", "0.1", "--json",
)  # fmt: skip


def narrow_decoder(kind: int) -> ModelProto:
    """A small decoder whose weights and logits are of a type of 16 bits."""
    rng = np.random.default_rng(0)
    stored = {
        "table": rng.standard_normal((WORDS, 16)),
        "w": rng.standard_normal((16, 16)),
        "head": rng.standard_normal((16, WORDS)),
    }
    narrow = helper.tensor_dtype_to_np_dtype(kind)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["m"], name="mix"),
        helper.make_node("Tanh", ["m"], ["t"]),
        helper.make_node("MatMul", ["t", "head"], ["logits"], name="head_product"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "t"])],
        [helper.make_tensor_value_info("logits", kind, ["n", "t", WORDS])],
        [numpy_helper.from_array(array.astype(narrow), name) for name, array in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("scale", ["1024", "dynamic"])
@pytest.mark.thinned(2)
def test_bases_of_float16(shell: Shell, scale: str) -> None:
    """Adapters are trained on lists of different lengths; where nothing is scaled the losses are nearly the same."""
    onnx.save(narrow_decoder(TensorProto.FLOAT16), "m.onnx")
    done = shell("train", "m.onnx", *WORDS_OF_TRAINING, "--loss-scale", scale, "-o", "t.onnx")
    assert done.code == 0, done.err
    losses = [epoch["loss"] for epoch in done.json["epochs"]]
    assert losses[-1] < losses[0] / 2
    plain = shell("train", "m.onnx", *WORDS_OF_TRAINING, "--epochs", "5", "-o", "u.onnx")
    np.testing.assert_allclose([epoch["loss"] for epoch in plain.json["epochs"]], losses[:5], rtol=1e-2)


def test_a_base_of_bfloat16_without_kernels_is_told(shell: Shell) -> None:
    onnx.save(narrow_decoder(TensorProto.BFLOAT16), "m.onnx")
    done = shell("train", "m.onnx", *WORDS_OF_TRAINING, "-o", "t.onnx")
    if done.code != 0:  # an onnxruntime that has the kernels trains it
        assert done.code == 1 and "few CPU kernels for bfloat16" in done.document["error"]["hint"], done.out


def test_text_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    inputs = {"input_ids": tensor_type(TensorProto.INT64, ["n", "t"])}
    with raises(UsageError, "missing_value", "a.jsonl", "input_ids") as told:
        open_data(tmp_path / "a.jsonl", inputs)
    assert told.value.hint == "pass a `tokenizer` for the text in messages"
