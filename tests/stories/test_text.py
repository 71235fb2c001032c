"""Who adapts a classifier of text with adapters: tables as data, a run that is interrupted, killed and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from tests.cli_harness import PROGRAM, Shell
from tests.docs.test_classifier import export
from tests.docs.test_language_model import a_tokenizer

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

pytestmark = pytest.mark.slow
SIDES = {"good": ("great", "fine", "lovely"), "bad": ("poor", "awful", "dull")}
TRAIN = (
    *("train", "model.onnx", "--loss", "cross-entropy", "--tokenizer", "tokenizer.json", "--lora", "4"),
    *("--optimizer", "adamw", "--learning-rate", "0.01", "--batch-size", "8", "--seed", "1", "--threads", "1"),
)


def write_reviews() -> list[tuple[str, int]]:
    """Reviews and whether they are good, as a table of csv and of parquet; a BERT and its tokenizer."""
    import csv

    import pyarrow

    things = ("the film", "a plot", "what actors", "its music", "the end")
    rows = [
        (f"{thing} is {word}", side) for side, words in enumerate(SIDES.values()) for word in words for thing in things
    ]
    with open("reviews.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    texts, labels = zip(*rows, strict=True)
    parquet.write_table(pyarrow.table({"text": list(texts), "label": list(labels)}), "reviews.parquet")
    Path("reviews.jsonl").write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    a_tokenizer(Path(), list(texts))
    export(Path("model.onnx"))
    return rows


@pytest.mark.parametrize("data", ["reviews.jsonl", "reviews.csv", "reviews.parquet"])
def test_adapters_tell_good_from_bad(shell: Shell, data: str) -> None:
    """By plain onnxruntime all reviews are told apart; of the base only the matrices that were adapted differ."""
    from tokenizers import Tokenizer

    rows = write_reviews()
    done = shell(*TRAIN, "--data", data, "--epochs", "12", "-o", "tuned.onnx", "--adapter", "reviews.safetensors")
    assert done.code == 0, done.err
    tokenizer, session = Tokenizer.from_file("tokenizer.json"), onnxruntime.InferenceSession("tuned.onnx")
    for text, side in rows:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        fed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        assert session.run(None, fed)[0].argmax() == side, text
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for path in ("model.onnx", "tuned.onnx")
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and all(before[name].ndim == 2 for name in changed)
    assert Path("reviews.safetensors").stat().st_size < Path("model.onnx").stat().st_size / 2


def test_interrupted_and_killed_it_ends_where_it_would_have(shell: Shell) -> None:
    """Ctrl-C after an epoch, then a kill that nothing can catch, then to the end: bit for bit the run of one piece."""
    write_reviews()
    command = [*TRAIN, "--data", "reviews.jsonl", "--epochs", "40"]
    assert shell(*command, "-o", "whole.onnx").code == 0
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    log = Path("parts.onnx.run/train.jsonl")
    for number, more in ((signal.SIGINT, []), (signal.SIGKILL, ["--resume"])):
        begun = epochs(log)
        with subprocess.Popen(
            [*PROGRAM, *command, "-o", "parts.onnx", *more], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            while epochs(log) < begun + 3:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            process.send_signal(number)
            said = process.communicate()[1]
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert number == signal.SIGKILL or "--resume continues the run" in said
        assert not Path("parts.onnx").exists(), "nothing is half-written"
    assert 0 < epochs(log) < 40
    assert shell(*command, "-o", "parts.onnx", "--resume").code == 0
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def epochs(log: Path) -> int:
    """How many epochs a run has been through, by its log."""
    return sum('"rate"' not in line for line in log.read_text().splitlines()) if log.exists() else 0
