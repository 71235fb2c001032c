"""How data become samples: names of classes, columns, normalization, balance, changes at random, a user's function."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, TypeProto

from onnxgrad_cli.data import (
    Batches,
    BatchShard,
    Data,
    Range,
    SampleOptions,
    balance,
    held_out,
    open_data,
    prepared,
)
from onnxgrad_cli.data.augmentation import augmentations
from onnxgrad_cli.data.normalization import IMAGENET, Normalization
from onnxgrad_cli.data.preprocessing import CLASSES, INPUTS, Preprocessing
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Role, Roles, Term

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
random = np.random.default_rng(0)
PORTS = {"x": tensor_type(FLOAT, ["n", 3]), "y": tensor_type(INT64, ["n"])}
PICTURES = {"x": tensor_type(FLOAT, ["n", 3, 16, 8]), "y": tensor_type(INT64, ["n"])}
TERM = Term("cross-entropy", "logits", "y", 1.0, 3, -100, 1)
ROLES = Roles("", (TERM,), "mean", {"x": "model input", "y": "label"}, {"loss": Role("loss")}, False, (), "", (), {})
X = random.normal(size=(12, 3)) * [1, 10, 0.1] + [1e6, 0, 5]
NAMES = ["pear", "apple", "fig"] * 4


def to_csv(path: Path, names: list[Any], label: str = "y") -> Path:
    rows = [",".join([*map(repr, row), str(name)]) for row, name in zip(X.tolist(), names, strict=True)]
    path.write_text("\n".join([f"x_0,x_1,x_2,{label}", *rows]) + "\n")
    return path


def to_lines(path: Path, names: list[Any], label: str = "y") -> Path:
    rows = zip(X.tolist(), names, strict=True)
    path.write_text("".join(json.dumps({"x": row, label: name}) + "\n" for row, name in rows))
    return path


def to_parquet(path: Path, names: list[Any], label: str = "y") -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    column = arrow.array(names)
    column = column.dictionary_encode() if isinstance(names[0], str) else column
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"x": X.tolist(), label: column}), path)
    return path


WRITERS = {"csv": to_csv, "jsonl": to_lines, "parquet": to_parquet}


def opened(
    path: Path, inputs: dict[str, TypeProto] = PORTS, known: Preprocessing | None = None, **options: Any
) -> Data:
    how = SampleOptions(**options)
    return open_data(path, inputs, {"y": Range(0, 2)}, terms=[TERM], samples=how, known=known)


def ready(
    data: Data, inputs: dict[str, TypeProto] = PORTS, val: Data | None = None, **options: Any
) -> tuple[Data, Data]:
    known = Preprocessing()
    found = prepared(data, val, inputs, ROLES, SampleOptions(**options), known, 3, lambda text, level: None)
    return found[0], found[1] or found[0]


# -- names of classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITERS)
def test_names_of_classes_become_numbers_in_their_order(tmp_path: Path, form: str) -> None:
    data = opened(WRITERS[form](tmp_path / f"a.{form}", NAMES))
    assert data.batch(np.arange(4))["y"].tolist() == [2, 0, 1, 2]
    assert data.preprocessing([TERM]).classes == {"logits": ("apple", "fig", "pear")}
    few = WRITERS[form](tmp_path / f"b.{form}", ["pear"] * 12)
    assert opened(few, known=data.preprocessing([TERM])).batch(np.arange(2))["y"].tolist() == [2, 2]
    other = WRITERS[form](tmp_path / f"c.{form}", ["pear"] * 11 + ["fix"])
    with pytest.raises(UsageError, match=r"sample 11 .* 'y' is 'fix', which is not one of the 3 classes") as failure:
        opened(other, known=data.preprocessing([TERM]))
    assert failure.value.hint == "did you mean fig?"


@pytest.mark.parametrize(
    ("form", "names", "said"),
    [
        ("csv", [*NAMES[:11], 7], "'pear' is not a whole number, but other lines have whole numbers"),
        ("csv", [7, *NAMES[1:]], "'apple' is not a whole number, but other lines have whole numbers"),
        ("csv", [*NAMES[:11], ""], "is not a whole number|the cell is empty"),
        ("csv", [0.5] * 12, "'0.5' is not a whole number"),
        ("jsonl", [*NAMES[:11], 7], "line 12: 'y' is not a name, but was a name on the lines before"),
        ("parquet", [Decimal(1)] * 12, r"sample 0 .* 'y' is Decimal\('1'\), which is not a class name"),
        ("parquet", [b"pear"] * 12, "sample 0 .* 'y' is b'pear', which is not a class name"),
        ("jsonl", [7, 8, *NAMES[:10]], "line 3: 'y' is a name, but was not a name on the lines before"),
        ("jsonl", [*NAMES[:9], "a", "b", "c"], r"6 classes \(a, apple, b, c, fig, pear\), but the model has 3"),
    ],
)
def test_a_mistyped_number_is_no_name(tmp_path: Path, form: str, names: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        opened(WRITERS[form](tmp_path / f"a.{form}", names))


def to_npz(path: Path, names: list[Any]) -> Path:
    np.savez(path, x=X, y=np.array(names))
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "npz"])
@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        ([*map(str, range(11)), "10"], [*range(11), 10]),
        (["2", "7"] * 6, [2, 7] * 6),
        (["007", " 3", "+3", "3.0", "1.", "12 "] * 2, [7, 3, 3, 3, 1, 12] * 2),
        (["True", "false"] * 6, [1, 0] * 6),
        (["pear", *"12345678901"], None),
        (["1.5", "2"] * 6, None),
        (["1_0", "2"] * 6, None),
        ([str(10**20), "2"] * 6, None),
        (["", "2"] * 6, None),
        (["nan"] * 12, None),
    ],
)
def test_whole_numbers_as_text_are_the_same_classes_in_every_format(
    tmp_path: Path, form: str, texts: list[str], numbers: list[int] | None
) -> None:
    path = {**WRITERS, "npz": to_npz}[form](tmp_path / f"a.{form}", texts)
    if numbers is None:
        with pytest.raises(UsageError, match=r"not a whole number|the cell is empty"):
            open_data(path, PORTS, terms=[TERM])
        return
    for known in (None, Preprocessing({"logits": tuple(sorted(set(NAMES)))})):
        data = open_data(path, PORTS, terms=[TERM], known=known)
        assert data.batch(np.arange(12))["y"].tolist() == numbers
        assert data.names == ({} if known is None else {"y": ("apple", "fig", "pear")})


def test_a_number_that_a_class_is_called_by_is_its_name(tmp_path: Path) -> None:
    known = Preprocessing({"logits": ("7", "cat", "3")})
    data = opened(to_lines(tmp_path / "a.jsonl", ["3", "7", "cat"] * 4), known=known)
    assert data.batch(np.arange(3))["y"].tolist() == [2, 0, 1]


def test_a_number_with_a_character_that_is_not_seen_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a whole number, but other samples have whole numbers"):
        opened(to_lines(tmp_path / "a.jsonl", ["1", "2\0"] * 6))


def test_names_and_numbers_far_apart_in_a_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,x_0,x_1,x_2\n" + "pear,1,2,3\n" * 4096 + "1,1,2,3\n")
    with pytest.raises(UsageError, match="some lines have names, such as 'pear', others numbers"):
        opened(path)


def test_text_where_the_model_takes_numbers_is_refused(tmp_path: Path) -> None:
    path = to_lines(tmp_path / "a.jsonl", NAMES)
    with pytest.raises(UsageError, match="'y' holds text, but the model takes"):
        open_data(path, PORTS)


# -- columns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITERS)
def test_a_column_may_be_called_otherwise(tmp_path: Path, form: str) -> None:
    data = opened(WRITERS[form](tmp_path / f"a.{form}", NAMES, "fruit"), columns={"fruit": "y"})
    assert data.batch(np.arange(4))["y"].tolist() == [2, 0, 1, 2]
    for columns, said in (
        ({"frut": "y"}, "has no column 'frut'"),
        ({"fruit": "z"}, "the model has no input or label 'z'"),
    ):
        with pytest.raises(UsageError, match=said):
            opened(data.source, columns=columns)
    with pytest.raises(UsageError, match="two columns are mapped to 'y'"):
        SampleOptions(columns={"a": "y", "b": "y"})


def test_arrays_may_be_called_otherwise_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=X, y=np.arange(12) % 3)
    np.testing.assert_allclose(opened(tmp_path / "a.npz", columns={"image": "x"}).batch(np.arange(12))["x"], X)


# -- normalization -------------------------------------------------------------------------------------


def test_auto_is_of_the_training_data_alone_and_exact_far_from_zero(tmp_path: Path) -> None:
    data = opened(to_csv(tmp_path / "a.csv", NAMES), normalize=("auto",))
    rest, kept = held_out(data, 0.25)
    training, validation = ready(rest, val=kept, normalize=("auto",))
    raw = np.concatenate(list(training.column("x")))
    wanted = (X - raw.mean(0)) / raw.std(0)
    for part in (training, validation):
        found = part.batch(np.arange(len(part)))["x"]
        np.testing.assert_allclose(found, wanted[part.rows(np.arange(len(part)))], rtol=1e-5, atol=1e-6)
    assert abs(training.batch(np.arange(9))["x"].mean()) < 1e-6
    assert training.normal == validation.normal


def pixels(tmp_path: Path, dtype: type = np.uint8) -> Path:
    x = random.integers(0, 256, (12, 3, 16, 8)).astype(dtype)
    np.savez(tmp_path / "p.npz", x=x, y=np.arange(12) % 3)
    return tmp_path / "p.npz"


def test_imagenet_is_what_torchvision_does(tmp_path: Path) -> None:
    """ToTensor and Normalize of torchvision, written out in torch."""
    path = pixels(tmp_path)
    data, _ = ready(opened(path, PICTURES, normalize=("imagenet",)), PICTURES, normalize=("imagenet",))
    tensor = torch.tensor(np.load(path)["x"]).to(torch.float32).div(255)
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in IMAGENET)
    np.testing.assert_array_equal(data.batch(np.arange(12))["x"], ((tensor - mean) / std).numpy())


def test_auto_of_pictures_is_by_channel(tmp_path: Path) -> None:
    path = pixels(tmp_path)
    data, _ = ready(opened(path, PICTURES, normalize=("auto",)), PICTURES, normalize=("auto",))
    found = data.batch(np.arange(12))["x"]
    np.testing.assert_allclose(found.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(found.std((0, 2, 3)), 1, rtol=1e-6)


def test_numbers_that_are_given(tmp_path: Path) -> None:
    path = to_csv(tmp_path / "a.csv", NAMES)
    for text in ("1/2", "x:1/2", "1,1,1/2,2,2", "1/2,2,2"):
        data, _ = ready(opened(path, normalize=(text,)), normalize=(text,))
        np.testing.assert_allclose(data.batch(np.arange(12))["x"], ((X - 1) / 2).astype(np.float32), rtol=1e-6)
    data, _ = ready(opened(path, normalize=("none",)), normalize=("none",))
    np.testing.assert_array_equal(data.batch(np.arange(12))["x"], X.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imagenet", "no input takes pictures of 3 channels"),
        ("0", "is not a known normalization"),
        ("1/0", "means must be finite, deviations finite and above 0"),
        ("1/nan", "means must be finite, deviations finite and above 0"),
        ("1,2/3,4", "'1,2/3,4' has 2 numbers"),
        ("z:auto", "there is no float input 'z'"),
        ("y:auto", "there is no float input 'y'"),
    ],
)
def test_a_normalization_that_does_not_fit_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ready(opened(to_csv(tmp_path / "a.csv", NAMES)), normalize=(text,))


def test_imagenet_is_not_done_twice_nor_to_numbers_beyond_one(tmp_path: Path) -> None:
    path = pixels(tmp_path, np.float32)
    with pytest.raises(UsageError, match="imagenet needs pixels from 0 to 1"):
        ready(opened(path, PICTURES), PICTURES, normalize=("imagenet",))


def test_a_column_that_never_changes_keeps_its_scale(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[7.0, 1, 2], [7, 3, 4]]), y=np.arange(2))
    data, _ = ready(opened(tmp_path / "a.npz", normalize=("auto",)), normalize=("auto",))
    np.testing.assert_array_equal(data.batch(np.arange(2))["x"], [[0, -1, -1], [0, 1, 1]])


# -- what a trained model keeps ------------------------------------------------------------------------


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
    with pytest.raises(OnnxgradError, match="the preprocessing stored in the model can't be read") as told:
        Preprocessing.of_model(model)
    assert "argument" not in told.value.message and "indices" not in told.value.message


@pytest.mark.parametrize("axis", [1, 3])
def test_a_normalization_of_a_strangers_model_that_does_not_fit(axis: int) -> None:
    """Nobody has typed it."""
    known = Normalization.of_json({"scale": 1, "mean": [0, 0], "std": [1, 1], "axis": axis})
    with pytest.raises(UsageError, match=rf"2 numbers for axis {axis}, but a batch is \[5, 4\]"):
        known(np.zeros((5, 4), np.float32))


# -- at random -----------------------------------------------------------------------------------------


def test_classes_are_drawn_alike_often_as_by_pytorchs_sampler(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    np.savez(tmp_path / "a.npz", x=np.zeros((1000, 3)), y=labels)
    data = opened(tmp_path / "a.npz")
    weights = balance(data, "y", None, lambda text, level: None)
    batches = Batches(data, 100, 5, weights=weights)
    drawn = [labels[part.indices] for _ in range(3) for part in batches]
    counts = np.bincount(np.concatenate(drawn))
    torch.manual_seed(0)
    sampler = torch.utils.data.WeightedRandomSampler((1 / np.bincount(labels))[labels].tolist(), 3000)
    wanted = np.bincount(labels[list(sampler)])
    assert np.abs(counts - 1000).max() < 100 and np.abs(wanted - 1000).max() < 100
    again = Batches(data, 100, 5, weights=weights)
    assert all((labels[part.indices] == row).all() for part, row in zip(again, drawn, strict=False))
    with pytest.raises(UsageError, match="'x' does not hold one class per sample"):
        balance(data, "x", None, lambda text, level: None)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_yes_and_no_are_classes_to_balance(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As the losses of yes and no take them: floats, in the output's shape."""
    inputs = {"x": PORTS["x"], "y": tensor_type(TensorProto.FLOAT, ["N", *shape[1:]])}
    for labels, fit in (([0, 1, 0, 0, 0, 1], True), ([0, 1, 0, 0.5, 0, 1], False)):
        np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.array(labels).reshape(shape))
        data = open_data(tmp_path / "a.npz", inputs)
        if fit:
            weights = balance(data, "y", None, lambda text, level: None)
            np.testing.assert_allclose(weights, [1 / 8, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 4])
        else:
            with pytest.raises(UsageError, match="'y' does not hold one class per sample"):
                balance(data, "y", None, lambda text, level: None)


def test_balance_never_draws_samples_whose_label_does_not_count(tmp_path: Path) -> None:
    inputs = {"x": PORTS["x"], "y": tensor_type(TensorProto.INT64, ["N"])}
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.array([0, 0, -100, 1, 0, -100]))
    lines: list[str] = []
    weights = balance(open_data(tmp_path / "a.npz", inputs), "y", -100, lambda text, level: lines.append(text))
    np.testing.assert_allclose(weights, [1 / 6, 1 / 6, 0, 1 / 2, 1 / 6, 0])
    assert lines == [
        "2 classes of 1 to 3 samples are drawn equally often",
        "2 samples have the label -100, which does not count in the loss: they are not drawn",
    ]


def test_one_class_is_not_balanced_unsaid(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.zeros(6, np.int64))
    told: list[str] = []
    balance(opened(tmp_path / "a.npz"), "y", None, lambda text, level: told.append(text))
    assert told == ["caution: all samples have the same class: there is nothing to balance"]


def test_names_where_a_loss_takes_numbers_are_told_what_they_are_for(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(TensorProto.FLOAT, ["N", 1]), "y": tensor_type(TensorProto.FLOAT, ["N", 1])}
    (tmp_path / "a.csv").write_text("x,y\n1,no\n2,yes\n")
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": "no"}\n{"x": 2, "y": "yes"}\n')
    for name in ("a.csv", "a.jsonl"):
        with pytest.raises(UsageError, match="for class names use a classification loss, `losses="):
            open_data(tmp_path / name, inputs)
    (tmp_path / "a.csv").write_text("x,y\n1,1\n2,yes\n")
    with pytest.raises(UsageError, match="correct the cell"):
        open_data(tmp_path / "a.csv", inputs)


@pytest.mark.parametrize("name", ["empty", "empty.jsonl"])
def test_what_is_empty_is_said_to_be(tmp_path: Path, name: str) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="hint: there are no data; the model takes x, y") as caught:
        opened(tmp_path / name)
    assert ("pictures in folders" in str(caught.value.hint)) == (name == "empty")


def test_pictures_are_flipped_and_moved_alike_again(tmp_path: Path) -> None:
    data, _ = ready(opened(pixels(tmp_path), PICTURES), PICTURES, augment=("flip", "crop"))
    plain = data.batch(np.arange(12))["x"]
    parts = [BatchShard(np.arange(12), 12, epoch, 0) for epoch in (0, 0, 1)]
    first, again, other = (data.batch(part.indices, part)["x"] for part in parts)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != plain).any()
    halves = [BatchShard(np.arange(start, start + 6), 12, 0, start) for start in (0, 6)]  # of two ranks
    np.testing.assert_array_equal(first, np.concatenate([data.batch(part.indices, part)["x"] for part in halves]))
    for row in range(12):
        assert _is_moved(first[row], plain[row])


def _is_moved(found: np.ndarray, picture: np.ndarray) -> bool:
    """Whether a picture is another one, flipped or not, moved by at most 2 and 1 with black behind it."""
    for source in (picture, picture[:, :, ::-1]):
        room = np.pad(source, [(0, 0), (2, 2), (1, 1)])
        for down in range(5):
            for right in range(3):
                if (found == room[:, down : down + 16, right : right + 8]).all():
                    return True
    return False


def test_changes_that_labels_would_have_to_follow_are_refused(tmp_path: Path) -> None:
    masks = {"y": tensor_type(INT64, ["n", 16, 8])}
    with pytest.raises(UsageError, match="can't change the label 'y'"):
        augmentations(("flip",), {"x": PICTURES["x"]}, masks, 0)
    with pytest.raises(UsageError, match="no input takes pictures"):
        augmentations(("flip",), {"x": PORTS["x"]}, {}, 0)


# -- a user's function ---------------------------------------------------------------------------------


def test_a_function_changes_batches_and_draws_in_training_alone(tmp_path: Path) -> None:
    def noisy(batch: dict[str, np.ndarray], draw: np.random.Generator | None) -> dict[str, np.ndarray]:
        noise = 0 if draw is None else draw.normal(size=batch["x"].shape)
        return {**batch, "x": batch["x"] + noise}

    data, _ = ready(opened(to_csv(tmp_path / "a.csv", NAMES)), transform=noisy)
    part = BatchShard(np.arange(12), 12, 1, 0)
    np.testing.assert_array_equal(data.batch(part.indices, part)["x"], data.batch(part.indices, part)["x"])
    assert (data.batch(part.indices, part)["x"] != data.batch(part.indices)["x"]).any()
    assert data.batch(part.indices, part)["x"].dtype == np.float32
    assert data.prepared_by(SampleOptions()) != opened(data.source).prepared_by(SampleOptions())


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "an error": (lambda batch: batch["z"], "`transform` fails: KeyError: 'z'"),
    "nothing": (lambda batch: None, "returns NoneType, but the model takes x, y"),
    "too little": (lambda batch: {"x": batch["x"]}, "returns x, but the model takes x, y"),
    "fewer samples": (lambda batch: {**batch, "x": batch["x"][1:]}, "changes the shape of 'x' from "),
    "another rank": (lambda batch: {**batch, "x": batch["x"][..., None]}, "changes the shape of 'x' from "),
    "floats for classes": (lambda batch: {**batch, "y": batch["y"] * 0.5}, "returns 'y' as float64"),
    "three arguments": (lambda batch, draw, more: batch, "takes 3 arguments"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_is_wrong_is_told_before_the_first_step(tmp_path: Path, case: str) -> None:
    function, said = WRONG[case]
    with pytest.raises(UsageError, match=said):
        ready(opened(to_csv(tmp_path / "a.csv", NAMES)), transform=function)


def test_a_normalization_by_no_number_is_told() -> None:
    said = {"x": {"scale": 1, "mean": [10**400], "std": [1], "axis": None}}
    with pytest.raises(OnnxgradError, match="the preprocessing stored in the model can't be read"):
        Preprocessing.of_json({INPUTS: json.dumps(said)}, "the model")
