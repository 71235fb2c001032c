"""A folder of 1,000 pictures to a trained model by the command, cut off and gone on with bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli.data import open_data
from onnxgrad_cli.data.preprocessing import FILE, Preprocessing
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.run.folder import CHECKPOINT
from tests.cli_harness import Shell
from tests.data.test_pictures import opened, ports, save, term
from tests.facts import raises

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
NAMES = ["disc", "frame", "cross", "bars"]


def drawn(kind: str, random: np.random.Generator) -> np.ndarray:
    """A bright shape on noise, uint8 (28, 36, 3)."""
    rows, columns = np.mgrid[-14:14, -18:18]
    far = np.maximum(abs(rows), abs(columns))
    shape = {
        "disc": rows**2 + columns**2 < 81, "frame": (far > 6) & (far < 10),
        "cross": np.minimum(abs(rows), abs(columns)) < 3, "bars": columns % 6 < 3,
    }[kind]  # fmt: skip
    return (random.integers(0, 100, (28, 36, 3)) + 120 * shape[..., None]).astype(np.uint8)


def write(folder: Path, count: int) -> None:
    """Pictures of four classes, of which the first has most, as png and jpeg, and a small CNN."""
    random = np.random.default_rng(0)
    for number in range(count):
        kind = NAMES[number % 4 if number % 3 else 0]
        (folder / "shapes" / kind).mkdir(parents=True, exist_ok=True)
        file = folder / "shapes" / kind / f"{number}.{'jpg' if number % 5 == 0 else 'png'}"
        Image.fromarray(drawn(kind, random)).save(file)
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        shapes (float[n, 3, 24, 24] image) => (float[n, 4] logits) {
          a = Conv<strides = [2, 2]>(image, w) b = Relu(a) c = Conv<strides = [2, 2]>(b, v) d = Relu(c)
          e = GlobalMaxPool(d) f = Flatten(e) logits = Gemm<transB = 1>(f, u, t) }""")
    for name, shape in {"w": (12, 3, 5, 5), "v": (16, 12, 3, 3), "u": (4, 16), "t": (4,)}.items():
        fan = int(np.prod(shape[1:]))
        values = random.normal(0, (2 / fan) ** 0.5, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, folder / "shapes.onnx")


OPTIONS = (
    *("--data", "shapes", "--val", "0.2", "--loss", "cross-entropy", "--normalize", "auto", "--augment", "flip,crop"),
    *("--balance", "--learning-rate", "0.01", "--seed", "3"),
)


@pytest.mark.slow
def test_a_folder_of_a_thousand_pictures(shell: Shell) -> None:
    write(Path(), 1000)
    done = shell("train", "shapes.onnx", *OPTIONS, "--epochs", "6", "-o", "a.onnx", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    epochs = found.get("result", found)["epochs"]
    assert max(epoch["val_accuracy"] for epoch in epochs) > 0.9
    known = Preprocessing.of_model(onnx.load("a.onnx"))
    assert known.classes == {"logits": tuple(sorted(NAMES))}
    session, hits = onnxruntime.InferenceSession("a.onnx"), 0
    files = sorted(Path("shapes").rglob("*.png"))[:200:4]
    for file in files:
        picture = Image.open(file).resize((31, 24), Image.Resampling.BILINEAR).crop((4, 0, 28, 24))
        image = known.normal["image"](np.asarray(picture).transpose(2, 0, 1)[None])
        (logits,) = session.run(None, {"image": image})
        hits += known.classes["logits"][logits.argmax()] == file.parent.name
    assert hits > 0.9 * len(files)


@pytest.mark.slow
def test_a_run_on_pictures_goes_on_bit_for_bit(shell: Shell) -> None:
    """Ended after an epoch and gone on with; names and normalization are those that it was begun with."""
    write(Path(), 48)
    whole = ("train", "shapes.onnx", *OPTIONS, "--batch-size", "8", "--save-every", "2")
    assert shell(*whole, "--epochs", "3", "-o", "a.onnx").code == 0
    assert shell(*whole, "--epochs", "1", "-o", "b.onnx").code == 0
    assert shell(*whole, "--epochs", "3", "-o", "b.onnx", "--resume").code == 0
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    assert (Path("a.onnx.run") / CHECKPOINT).exists() and (Path("a.onnx.run") / FILE).exists()
    for changed in (("--normalize", "imagenet"), ("--augment", "flip")):
        refused = shell(*whole, *changed, "--epochs", "4", "-o", "b.onnx", "--resume")
        assert refused.code == 2 and "options" in refused.err
    shutil.rmtree("shapes/disc")
    refused = shell(*whole, "--epochs", "4", "-o", "b.onnx", "--resume")
    assert refused.code == 2 and "training data" in refused.err
    exported = shell("export", "b.onnx.run", "--model", "shapes.onnx", "-o", "c.onnx")
    assert exported.code == 0 and Path("c.onnx").read_bytes() == Path("b.onnx").read_bytes()


random = np.random.default_rng(0)


def test_classes_are_folders_sorted_and_numbers_are_numbers(tmp_path: Path) -> None:
    save(tmp_path / "named", "dog/2.png", "dog/deep/1.jpg", "Cat/1.JPEG", "emu/1.png")
    (tmp_path / "named" / "dog" / "notes.txt").write_text("x")
    (tmp_path / "named" / ".hidden").mkdir()
    told: list[str] = []
    data = open_data(tmp_path / "named", ports(3, 8, 8), terms=[term()], tell=lambda text, level: told.append(text))
    assert data.batch(np.arange(4))["y"].tolist() == [0, 1, 1, 2]
    assert data.preprocessing([term()]).classes == {"logits": ("Cat", "dog", "emu")}
    assert told[0].startswith("ignoring 1 files in ")
    assert told[1] == "classes of 'y': Cat, dog, emu"
    save(tmp_path / "numbers", "10/1.png", "9/1.png", "0/1.png")
    data = opened(tmp_path / "numbers", ports(3, 8, 8))
    assert data.batch(np.arange(3))["y"].tolist() == [0, 10, 9] and not data.names
    save(tmp_path / "large", "9/1.png", f"{10**20}/1.png")
    data = open_data(tmp_path / "large", ports(3, 8, 8), terms=[term()])
    assert data.preprocessing([term()]).classes == {"logits": (f"{10**20}", "9")}


def test_other_data_are_numbered_as_the_training_data(tmp_path: Path) -> None:
    save(tmp_path / "train", "cat/1.png", "dog/1.png", "emu/1.png")
    save(tmp_path / "val", "dog/1.png", "emu/1.png")
    known = opened(tmp_path / "train", ports(3, 8, 8)).preprocessing([term()])
    data = open_data(tmp_path / "val", ports(3, 8, 8), terms=[term()], known=known)
    assert data.batch(np.arange(2))["y"].tolist() == [1, 2]
    save(tmp_path / "val", "gnu/1.png")
    with raises(UsageError, "unknown_name", "val", "2", "0", "y", "gnu", "3"):
        open_data(tmp_path / "val", ports(3, 8, 8), terms=[term()], known=known)


def test_pictures_without_labels_are_read_for_a_model_alone(tmp_path: Path) -> None:
    save(tmp_path, "1.png", "2.png")
    inputs = {"x": ports(3, 8, 8)["x"]}
    assert open_data(tmp_path, inputs).batch(np.arange(2))["x"].shape == (2, 3, 8, 8)


def test_a_class_without_pictures_is_told(tmp_path: Path) -> None:
    save(tmp_path, "a/1.png")
    (tmp_path / "b").mkdir()
    with raises(UsageError, "no_data", "b"):
        opened(tmp_path, ports(3, 8, 8))
