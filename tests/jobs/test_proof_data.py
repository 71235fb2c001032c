"""Data on which a build is proved: given ones, those to train on, and text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli_harness import Shell, save


def test_proof_on_given_data(shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((7, 4), np.float32), more=np.zeros(1))
    result = shell("build", "mlp.onnx", "--test-data", "d.npz", "--json")
    assert result.code == 0, result.err
    assert "x [7, 4]" in json.dumps(result.json["proof"])
    assert "ignored: more\n" in result.err and "random: label\n" in result.err


@pytest.mark.parametrize("form", ["csv", "jsonl", "npy"])
def test_proof_on_the_first_samples_of_data_to_train_on(shell: Shell, form: str) -> None:
    x = np.arange(28, dtype=np.float32).reshape(7, 4) / 10
    if form == "csv":
        rows = "\n".join(",".join(map(str, row)) for row in x)
        Path("d.csv").write_text(f"x_0,x_1,x_2,x_3\n{rows}\n")
    elif form == "jsonl":
        Path("d.jsonl").write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in x))
    else:
        Path("d.npy").mkdir()
        np.save("d.npy/x.npy", x)
    result = shell("build", "mlp.onnx", "--test-data", f"d.{form}", "--verify", "--json")
    assert result.code == 0, result.err
    assert "x [4, 4]" in json.dumps(result.json["proof"])
    assert "4 of 7 samples" in result.err and "random: label\n" in result.err
    assert shell("check", "mlp.train.onnx", "--data", f"d.{form}").code == 0
    derived = shell("derive", "mlp.onnx", "--test-data", f"d.{form}", "--verify", "-o", "v.onnx")
    assert derived.code == 0 and "the first 4 of 7" in derived.err


TOKENS = """
<ir_version: 8, opset_import: ["": 17]>
words (int64[batch, T] ids, int64[batch, T] attention_mask) => (float[batch, 2] y)
<float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1}, int64[1] along = {1}, int64[1] last = {2}>
{
  rows = Gather(table, ids)
  seen = Cast<to = 1>(attention_mask)
  wide = Unsqueeze(seen, last)
  kept = Mul(rows, wide)
  y = ReduceSum<keepdims = 0>(kept, along)
}
"""


def test_proof_on_text(shell: Shell) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "good": 1, "bad": 2, "film": 3, "very": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    save(TOKENS, Path("words.onnx"))
    Path("d.jsonl").write_text('{"text": "good film", "label": 1}\n{"text": "very very bad film", "label": 0}\n')
    on = ("--test-data", "d.jsonl", "--tokenizer", "tokenizer.json", "--verify")
    built = shell("build", "words.onnx", "--loss", "cross-entropy", *on, "--json")
    assert built.code == 0, built.err
    assert "ids [2, 4], attention_mask [2, 4], label [2]" in json.dumps(built.json["proof"])
    assert "random: " not in built.err, "a mask follows from the tokens"
    checked = shell("check", "words.train.onnx", "--data", "d.jsonl", "--tokenizer", "tokenizer.json", "--json")
    assert checked.code == 0 and "ids [2, 4]" in json.dumps(checked.json), checked.err
    derived = shell("derive", "words.onnx", *on, "--kind", "jacobian", "--wrt", "table", "-o", "v.onnx")
    assert derived.code == 0 and "random: " not in derived.err, derived.err
    alone = shell("check", "words.train.onnx", "--tokenizer", "tokenizer.json")
    assert alone.code == 2 and alone.facts == ("conflict", "tokenizer")


def test_data_are_fitted_or_refused(shell: Shell) -> None:
    def code(**arrays: np.ndarray) -> int:
        np.savez("d.npz", **arrays)
        return shell("build", "mlp.onnx", "--test-data", "d.npz").code

    assert code(x=np.ones((7, 4))) == 0, "float64 is cast to the model's float32"
    assert code(x=np.ones((7, 5), np.float32)) == 2
    assert code(x=np.ones(4, np.float32)) == 2
    assert code(x=np.ones((7, 4), np.complex64)) == 2
    assert code(x=np.ones((7, 4), np.float32), label=np.ones((6, 2), np.float32)) == 2, "two sizes of one symbol"
