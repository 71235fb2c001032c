"""A model and a run keep how their samples were prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto

from onnxgrad_cli.data.normalization import Normalization
from onnxgrad_cli.data.preprocessing import CLASSES, INPUTS, Preprocessing
from onnxgrad_cli.errors import OnnxgradError
from tests.data.leading_facts import raises_first


def test_a_model_and_a_run_keep_what_was_done(tmp_path: Path) -> None:
    normal = {"x": Normalization(255.0, (0.1, 0.2), (1.0, 2.0), 1)}
    found, model = Preprocessing({"p": ("a", "b")}, normal, "stretch"), ModelProto()
    model.metadata_props.add(key="mine", value="kept")
    for _ in range(2):
        found.write_to(model)
    assert Preprocessing.of_model(model) == found and len(model.metadata_props) == 3
    found.write_to_run(tmp_path)
    begun = Preprocessing.of_run(tmp_path)
    assert begun is not None and begun.settled and begun.normal == found.normal and begun.classes == found.classes
    Preprocessing().write_to(model)
    assert [entry.key for entry in model.metadata_props] == ["mine"]
    assert Preprocessing.of_run(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (CLASSES, "3"), (CLASSES, '{"p": ["a", "a"]}'), (CLASSES, '{"p": [1]}'), (CLASSES, "["), (INPUTS, "[]"),
        (CLASSES, '{"p": "cat"}'), (CLASSES, "[]"), (INPUTS, '{"": {"columns": {"x": "ab"}}}'), (INPUTS, '{"": []}'),
        (INPUTS, '{"x": {"scale": 1, "mean": "12", "std": [1, 1], "axis": 1}}'), (INPUTS, '{"x": [1]}'),
        (INPUTS, '{"": {"resize": "cut"}}'), (INPUTS, '{"x": {"scale": 0, "mean": [0], "std": [1], "axis": 1}}'),
        (INPUTS, '{"x": {"scale": 1, "mean": [0], "std": [0], "axis": 1}}'),
        (INPUTS, '{"x": {"scale": 1, "mean": [0, 1], "std": [1], "axis": 1}}'),
        (INPUTS, '{"x": {"scale": 1, "mean": [0], "std": [1], "axis": 7}}'), (INPUTS, '{"x": 3}'),
    ],
)  # fmt: skip
def test_what_a_strangers_model_says_is_not_believed(key: str, text: str) -> None:
    model = ModelProto()
    model.metadata_props.add(key=key, value=text)
    with raises_first(OnnxgradError, "unreadable_file") as told:
        Preprocessing.of_model(model)
    assert CLASSES in (told.value.hint or "")
