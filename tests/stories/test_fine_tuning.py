"""Who adapts a network of pictures: a folder of them, five commands; other classes on a frozen backbone; int8 after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from onnxgrad_cli.data.preprocessing import Preprocessing
from tests.cli_harness import Shell

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
from tests.data.test_picture_folder import NAMES, drawn, write  # noqa: E402

pytestmark = pytest.mark.slow


def values(path: str) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def as_fed(model: str, file: Path) -> np.ndarray:
    """A picture cut to its middle, sized, and normalized as the model says of itself."""
    picture = Image.open(file).resize((31, 24), Image.Resampling.BILINEAR).crop((4, 0, 28, 24))
    known = Preprocessing.of_model(onnx.load(model))
    return known.normal["image"](np.asarray(picture).transpose(2, 0, 1)[None])


def test_a_thousand_pictures_in_five_commands(shell: Shell) -> None:
    """Trained, evaluated, asked, explained, attacked: each figure is held against plain onnxruntime."""
    write(Path(), 1000)
    held = [file for kind in NAMES for file in sorted(Path("shapes", kind).iterdir())[::5]]
    for file in held:
        (Path("held") / file.parent.name).mkdir(parents=True, exist_ok=True)
        file.rename(Path("held", *file.parts[1:]))
    held = sorted(Path("held").rglob("*.*"))
    assert len(held) + len(list(Path("shapes").rglob("*.*"))) == 1000

    train = (
        "--val",
        "0.2",
        "--epochs",
        "6",
        "--learning-rate",
        "0.01",
        "--normalize",
        "auto",
        "--balance",
        "--seed",
        "3",
    )
    commands = [
        ("train", "shapes.onnx", "--data", "shapes", "--loss", "cross-entropy", *train, "-o", "trained.onnx"),
        ("evaluate", "trained.onnx", "--data", "held", "--loss", "cross-entropy", "--json"),
        ("predict", "trained.onnx", "--data", "held", "-o", "answers.csv"),
        ("explain", "trained.onnx", "--data", held[0], "--method", "grad-cam", "-o", "why.png"),
        ("attack", "trained.onnx", "--data", "held", "--method", "fgsm", "--epsilon", "0.5", "--json"),
    ]
    said = [shell(*command) for command in commands]
    assert [each.code for each in said] == [0] * 5, [each.err for each in said]

    session = onnxruntime.InferenceSession("trained.onnx")
    answers = [session.run(None, {"image": as_fed("trained.onnx", file)})[0].argmax() for file in held]
    names = Preprocessing.of_model(onnx.load("trained.onnx")).classes["logits"]
    right = np.array([names[answer] == file.parent.name for answer, file in zip(answers, held, strict=True)])
    evaluated = said[1].json
    assert evaluated["samples"] == len(held) and right.mean() > 0.9
    assert evaluated["results"]["accuracy"] == pytest.approx(right.mean(), abs=0.006)  # one may lie on the edge
    assert Path("answers.csv").read_text().count("\n") >= len(held)
    picture = Image.open("why.png")
    assert picture.width > 24 and np.ptp(np.asarray(picture.convert("L"))) > 50
    fooled = said[4].json["accuracy"]
    assert fooled["after"] < fooled["before"]


class Calibration(CalibrationDataReader):
    def __init__(self, files: list[Path]) -> None:
        self.rest = iter(files)

    def get_next(self) -> dict[str, np.ndarray] | None:
        file = next(self.rest, None)
        return None if file is None else {"image": as_fed("tuned.onnx", file)}


def test_other_classes_on_a_frozen_backbone_and_int8_after(shell: Shell) -> None:
    """Two classes in place of four, weighted; the run ends early; what was frozen is the same bit for bit."""
    write(Path(), 600)
    two = {"disc": "round", "cross": "straight"}
    random = np.random.default_rng(5)
    for kind, name in two.items():
        (Path("two") / name).mkdir(parents=True)
        for number in range(40 if kind == "disc" else 20):
            Image.fromarray(drawn(kind, random)).save(f"two/{name}/{number}.png")
    first = ("--data", "shapes", "--epochs", "8", "--learning-rate", "0.01", "--normalize", "auto")
    assert shell("train", "shapes.onnx", *first, "--loss", "cross-entropy", "-o", "base.onnx").code == 0
    more = (
        *("--classes", "2", "--freeze", "w", "--freeze", "v", "--loss-option", "class-weights=0.5,1", "--val", "0.25"),
        *("--metric", "accuracy", "--patience", "3", "--epochs", "60", "--learning-rate", "0.05", "--seed", "1"),
    )
    done = shell("train", "base.onnx", "--data", "two", "--loss", "cross-entropy", *more, "-o", "tuned.onnx", "--json")
    assert done.code == 0, done.err
    epochs = done.json["epochs"]
    assert len(epochs) < 60, "it ends after three epochs without a better one"
    before, after = values("base.onnx"), values("tuned.onnx")
    for name in ("w", "v"):
        np.testing.assert_array_equal(before[name], after[name])
    assert after["u"].shape == (2, 16)
    files = sorted(Path("two").rglob("*.png"))
    names = Preprocessing.of_model(onnx.load("tuned.onnx")).classes["logits"]
    quantize_static(
        "tuned.onnx",
        "int8.onnx",
        Calibration(files[::3]),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    accuracy = {}
    for model in ("tuned.onnx", "int8.onnx"):
        session = onnxruntime.InferenceSession(model)
        found = [names[session.run(None, {"image": as_fed("tuned.onnx", file)})[0].argmax()] for file in files]
        accuracy[model] = np.mean([name == file.parent.name for name, file in zip(found, files, strict=True)])
    assert accuracy["tuned.onnx"] > 0.9 and accuracy["int8.onnx"] > accuracy["tuned.onnx"] - 0.05
