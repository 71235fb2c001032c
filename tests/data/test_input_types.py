"""What a model takes: the types of its inputs and the ranges of their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.data import Range, input_types_of, open_data, ranges_of
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import LOSS, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.feeds import DescribedModel, random_feeds
from tests.data.test_dataset import to_npz
from tests.facts import raises

EMBEDDING = """
<ir_version: 8, opset_import: ["": 17]>
words (int64[batch, seq] ids) => (float[batch, 4] logits)
<float[11, 4] table = {0}>
{
  found = Gather(table, ids)
  logits = ReduceMean<axes=[1], keepdims=0>(found)
}
"""


def words(**options: Any) -> onnx.ModelProto:
    model = parser.parse_model(EMBEDDING.replace("{0}", "{" + ", ".join("0.5" for _ in range(44)) + "}"))
    return build(model, Options(losses=(LossSpec("cross-entropy"),), label="y", **options)).model


def test_the_model_says_what_it_is_fed_and_what_may_be_in_it() -> None:
    model = words(optimizer="sgd", sample_weight="share")
    assert list(input_types_of(model)) == ["ids", "y", "share"]
    ranges = ranges_of(model)
    assert (ranges["ids"].low, ranges["ids"].high) == (-11, 10)
    assert (ranges["y"].low, ranges["y"].high, ranges["y"].besides) == (0, 3, {-100})
    assert ranges_of(words(loss_options={"ignore_index": 7}))["y"].besides == {7}


def test_a_model_of_a_version_that_did_not_write_the_ignored_label() -> None:
    model = words()
    entry = next(entry for entry in model.metadata_props if entry.key == LOSS)
    described = json.loads(entry.value)
    assert described["terms"][0].pop("ignore_index") == -100
    entry.value = json.dumps(described)
    assert describe(model).losses[0].ignore_index is None
    assert ranges_of(model)["y"] == Range(0, 3, why="there are 4 classes")


def test_what_is_drawn_counts() -> None:
    """A batch of nothing but ignored labels has no mean, and proves nothing."""
    model = words(loss_options={"ignore_index": 1}, shapes={"ids": (1, 2)})
    described = DescribedModel(model, describe(model))
    drawn = [random_feeds(described, np.random.default_rng(seed), {})["y"] for seed in range(40)]
    assert {int(labels[0]) for labels in drawn} == {0, 2, 3}


def test_tokens_are_of_the_vocabulary_and_some_of_those_drawn_do_not_count() -> None:
    """The first label of a sequence is predicted by nothing, so that the second one has to count."""
    text = EMBEDDING.replace("[batch, 4] logits", "[batch, seq, 4] logits")
    text = text.replace("found = Gather(table, ids)", "logits = Gather(table, ids)").replace(
        " logits = ReduceMean", "#"
    )
    model = parser.parse_model(text.partition("#")[0].replace("{0}", "{" + ", ".join(["0.5"] * 44) + "}") + "}")
    model = build(model, Options(losses=(LossSpec("causal-lm"),), label="y")).model
    assert (describe(model).losses[0].classes, describe(model).losses[0].class_axis) == (4, -1)
    assert ranges_of(model)["y"] == Range(0, 3, frozenset({-100}), "there are 4 classes")
    feeds = random_feeds(DescribedModel(model, describe(model)), np.random.default_rng(0), {"batch": 2, "seq": 8})
    assert feeds["y"].shape == (2, 8)
    assert (feeds["y"].reshape(-1)[:2] >= 0).all() and (feeds["y"] == -100).sum() == 3 and feeds["y"].max() == 3


def test_the_ranges_are_told(tmp_path: Path) -> None:
    model = words()
    for ids, label, said in (
        (11, 0, ("ids", "11", "0", "0", "0", "-11", "10", "11")),
        (10, 4, ("y", "4", "0", "0", "0", "3", "-100", "4")),
    ):
        path = to_npz(tmp_path, {"ids": np.full((5, 2), ids), "y": np.full(5, label)})
        with raises(UsageError, "wrong_value", "data.npz", *said):
            open_data(path, input_types_of(model), ranges_of(model))


def test_ranges_meet() -> None:
    met = Range(0, 9, frozenset({-100, -1}), "a") & Range(-128, None, frozenset(), "b")
    assert met == Range(0, 9, frozenset({-100, -1}), "a and b")
    assert (Range(0, 9, frozenset({-100})) & Range(0, 4)).besides == frozenset()
    assert 5 in met and -1 in met and -2 not in met
