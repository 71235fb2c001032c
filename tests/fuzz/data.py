"""Damaged data, checkpoints and settings: `python -m tests.fuzz.data --cases 500 --seed 1`, or `make fuzz-data`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.checkpoints.tensors import CHECKSUMS
from tests.fuzz import arrays, campaign, case, hostile, models, raw, strangers
from tests.fuzz.corpus import sample
from tests.fuzz.files import imported
from tests.fuzz.json_values import change
from tests.fuzz.made import run

MODEL, MLP = Path("sample_models/linear_regression.onnx"), Path("sample_models/digits_mlp.onnx")
TRAIN = ["train", "../in/model.onnx", "--epochs", "2", "--batch-size", "4", "-o", "out.onnx", "--threads", "1"]


def play(rng: Random, place: Path) -> campaign.Played:
    """Play one case: data, a checkpoint, settings, or what else a stranger may give."""
    shutil.copyfile(MODEL, place / "in" / "model.onnx")
    way = rng.choice(
        (
            *(
                data,
                data,
                data,
                proof_data,
                checkpoint,
                checkpoint,
                checkpoint,
                other_data,
                model,
                adapter,
                log,
                settings,
            ),
            *strangers.WAYS,
        )
    )
    return way(rng, place)


# -- data ----------------------------------------------------------------------------------------------------------


def _damaged(
    rng: Random, folder: Path, formats: tuple[Callable[[arrays.Arrays, Path], str], ...]
) -> tuple[str, list[str]]:
    """Damaged data in a folder, and what is wrong with them."""
    values, story = arrays.good(), []
    how = rng.choice(("values", "values", "bytes", "bytes", "header", "nothing"))
    if how == "values":
        story = [arrays.damage(values, rng) for _ in range(rng.choice((1, 1, 2, 3))) if values]
    form = rng.choice(formats)
    try:
        name = form(values, folder)
    except Exception as error:  # the format has no such data
        story.append(f"({form.__name__}: {error})")
        name = arrays.npz(arrays.good(), folder)
    file = rng.choice(
        [path for path in [folder / name, *(folder / name).rglob("*")] if path.is_file()] or [folder / name]
    )
    if how in ("bytes", "header") and file.is_file():
        content = file.read_bytes()
        for _ in range(rng.choice((1, 1, 2, 8)) if how == "bytes" else 0):
            content, done = raw.mutate(content, rng, MODEL.read_bytes())
            story.append(done)
        file.write_bytes(content if how == "bytes" else arrays.header_lie(content, rng))
    return name, [form.__name__, *story]


def data(rng: Random, place: Path) -> campaign.Played:
    """Train on damaged data."""
    name, story = _damaged(rng, place / "in", arrays.FORMATS)
    words = [*TRAIN, "--data", f"../in/{name}", *rng.choice(([], [], ["--val", "0.25"], ["--val", f"../in/{name}"]))]
    outcome = case.run(words, place, ["out.onnx"])
    if outcome.kind == "exit 0" and not _all_finite(place / "out" / "out.onnx"):
        outcome.faults.append(f"exit 0, and weights are not finite: {story[0]}")
    return campaign.Played(outcome, "\n".join([*story, " ".join(words)]))


def proof_data(rng: Random, place: Path) -> campaign.Played:
    """Prove on damaged data."""
    name, story = _damaged(rng, place / "in", (arrays.npz,))
    if rng.random() < 0.5:
        words, written = ["build", "../in/model.onnx", "--test-data", f"../in/{name}", "-o", "out.onnx"], ["out.onnx"]
    else:
        (place / "in" / "model.onnx").write_bytes(_made()["train.onnx"])
        words, written = ["check", "../in/model.onnx", "--data", f"../in/{name}"], []
    return campaign.Played(case.run(words, place, written), "\n".join([*story, " ".join(words)]))


# -- what a run leaves ---------------------------------------------------------------------------------------------


@cache
def _made() -> Mapping[str, bytes]:
    """A run of two epochs, what it comes to after four, a training model and an adapter, by file name."""

    with tempfile.TemporaryDirectory() as top:
        place = Path(top)
        np.savez(place / "data.npz", **arrays.good())
        with np.load("sample_models/digits.npz") as digits:
            np.savez(place / "mlp.npz", x=digits["train_x"][:32], y=digits["train_y"][:32])
        adapted = ["--epochs", "1", "-o", "lora.onnx", "--adapter", "a.safetensors"]
        made = [
            ["build", "model.onnx", "-o", "train.onnx", "--no-report", "--no-verify"],
            _resumable(2, "data.npz"),
            [
                "train",
                "mlp.onnx",
                "--loss",
                "cross-entropy",
                "--label",
                "y",
                "--data",
                "mlp.npz",
                "--lora",
                "1",
                *adapted,
            ],
        ]
        shutil.copyfile(MODEL, place / "model.onnx")
        shutil.copyfile(MLP, place / "mlp.onnx")
        for words in made:
            run([word.replace("../in/", "") for word in words], place)
        files = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        run([word.replace("../in/", "") for word in (*_resumable(4, "data.npz"), "--resume")], place)
        return {**files, "resumed.onnx": (place / "out.onnx").read_bytes()}


def _resumable(epochs: int, data: str) -> list[str]:
    words = [*TRAIN, "--data", data, "--optimizer", "adam", "--ema", "0.9", "--run", "run"]
    words[words.index("--epochs") + 1] = str(epochs)
    return words


def checkpoint(rng: Random, place: Path) -> campaign.Played:
    """Go on from a damaged checkpoint, or export it: no other model than the right one may come out."""
    made, run = _made(), place / "out" / "run"
    np.savez(place / "in" / "data.npz", **arrays.good())
    for name in ("checkpoint.safetensors", "train.jsonl"):
        run.mkdir(exist_ok=True)
        (run / name).write_bytes(made[f"run/{name}"])
    file = run / "checkpoint.safetensors"
    whole = file.read_bytes()
    damaged, story = _damaged_tensors(whole, rng)
    file.write_bytes(damaged)
    (place / "in" / "checkpoint.safetensors").write_bytes(damaged)
    if rng.random() < 0.6:
        words, right = [*_resumable(4, "../in/data.npz"), "--resume"], made["resumed.onnx"]
    else:
        words, right = (
            ["export", "run/checkpoint.safetensors", "--model", "../in/model.onnx", "-o", "out.onnx"],
            made["out.onnx"],
        )
    outcome = case.run(words, place, ["out.onnx"])
    believed = CHECKSUMS.encode() not in damaged
    if (
        outcome.kind == "exit 0"
        and not believed
        and damaged != whole
        and not _same_weights(place / "out" / "out.onnx", right)
    ):
        outcome.faults.append(f"a damaged checkpoint makes another model: {words[0]}: {story.split(' at byte')[0]}")
    return campaign.Played(outcome, f"{story}\n{' '.join(words)}")


def _damaged_tensors(data: bytes, rng: Random) -> tuple[bytes, str]:
    """A safetensors file that is damaged: in a byte, or in what its header says."""
    if rng.random() < 0.4:
        return raw.mutate(data, rng, data)
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    words = head.get("__metadata__", {})
    if rng.random() < 0.6:
        words.pop(CHECKSUMS, None)  # what has none is believed, and must make no fault of ours either
    where = rng.choice(("words", "words", "words", "tensor", "tensor"))
    if where == "words" and words:
        key = rng.choice(sorted(words))
        said = json.loads(words[key])
        inside = isinstance(said, (dict, list)) and said and rng.random() < 0.8
        story = f"{key}: {change(said, rng) if inside else 'other'}"
        words[key] = (
            json.dumps(said) if not story.endswith(" other") else rng.choice(("null", "[]", "{}", "1", "x", "", '"a"'))
        )
    else:
        tensor = rng.choice([name for name in head if name != "__metadata__"])
        story = f"{tensor}: {change(head[tensor], rng)}"
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :], story


def log(rng: Random, place: Path) -> campaign.Played:
    """Go on with a damaged log."""
    made, run = _made(), place / "out" / "run"
    np.savez(place / "in" / "data.npz", **arrays.good())
    run.mkdir()
    (run / "checkpoint.safetensors").write_bytes(made["run/checkpoint.safetensors"])
    content, story = raw.mutate(made["run/train.jsonl"], rng, b'{"step": null}\n[]\nnull\n{"a": 1}\n')
    (run / "train.jsonl").write_bytes(content)
    (place / "in" / "train.jsonl").write_bytes(content)
    words = [*_resumable(4, "../in/data.npz"), "--resume"]
    outcome = case.run(words, place, ["out.onnx"])
    if outcome.kind == "exit 0" and not _same_weights(place / "out" / "out.onnx", made["resumed.onnx"]):
        outcome.faults.append(f"a damaged log makes another model: {story.split(' at byte')[0]}")
    return campaign.Played(outcome, f"{story}\n{' '.join(words)}")


def other_data(rng: Random, place: Path) -> campaign.Played:
    """Go on with other data than those that the run began with: that is no continuation, and must not pass for one."""
    made, run = _made(), place / "out" / "run"
    run.mkdir()
    for name in ("checkpoint.safetensors", "train.jsonl"):
        (run / name).write_bytes(made[f"run/{name}"])
    values = arrays.good()
    story = arrays.damage(values, rng)
    for _ in range(2):
        story += f", {arrays.damage(values, rng)}" if values and rng.random() < 0.2 else ""
    try:
        np.savez(place / "in" / "data.npz", **values)
    except ValueError as error:
        story += f" ({error})"
    words = [*_resumable(4, "../in/data.npz"), "--resume"]
    outcome = case.run(words, place, ["out.onnx"])
    if outcome.kind == "exit 0" and not _same_weights(place / "out" / "out.onnx", made["resumed.onnx"]):
        outcome.faults.append(f"other data make another model: {story.split()[0]}")
    return campaign.Played(outcome, f"{story}\n{' '.join(words)}")


def model(rng: Random, place: Path) -> campaign.Played:
    """Write the weights of a checkpoint into a mutated model."""
    seed = sample(MODEL)
    story = models.mutate(seed, rng)
    (place / "in" / "model.onnx").write_bytes(hostile.with_broken_text(seed.model.SerializeToString()))
    (place / "in" / "c.safetensors").write_bytes(_made()["run/checkpoint.safetensors"])
    words = ["export", "../in/c.safetensors", "--model", "../in/model.onnx", "-o", "out.onnx"]
    return campaign.Played(case.run(words, place, ["out.onnx"]), "\n".join([*story, " ".join(words)]))


def adapter(rng: Random, place: Path) -> campaign.Played:
    """Merge a damaged adapter."""
    content, story = _damaged_tensors(_made()["a.safetensors"], rng)
    (place / "in" / "a.safetensors").write_bytes(content)
    shutil.copyfile(MLP, place / "in" / "model.onnx")
    words = ["export", "../in/a.safetensors", "--model", "../in/model.onnx", "-o", "out.onnx"]
    outcome = case.run(words, place, ["out.onnx"])
    if outcome.kind == "exit 0" and not _all_finite(place / "out" / "out.onnx"):
        outcome.faults.append("exit 0, and weights are not finite: adapter")
    return campaign.Played(outcome, f"{story}\n{' '.join(words)}")


# -- settings ------------------------------------------------------------------------------------------------------

SETTINGS = """\
loss = "mse"
label = "label"
seed = 3
optimizer = "adam"
optimizer-option = {beta1 = 0.9}
epochs = 1
learning-rate = 0.1
schedule = "cosine:warmup=2"
train = ["*"]
group = ["*:lr=0.5"]
clip-norm = 1.0
dim = {batch = 4}
"""

TUNED = """\
[scatter_add]
"*" = "elements"
"""


def settings(rng: Random, place: Path) -> campaign.Played:
    """Damaged TOML as --config or --tuned."""
    np.savez(place / "in" / "data.npz", **arrays.good())
    as_config = rng.random() < 0.7
    text = SETTINGS if as_config else TUNED
    lines, story = text.splitlines(), ""
    if rng.random() < 0.6:
        where = rng.randrange(len(lines))
        key = lines[where].split("=")[0]
        value = rng.choice(
            (
                "1",
                "-1",
                "1e400",
                "nan",
                "inf",
                "true",
                '"x"',
                "[]",
                "{}",
                "[[1]]",
                '[""]',
                "1979-05-27",
                "10" * 40,
                json.dumps(hostile.string(rng)),
                "{a = {b = 1}}",
            )
        )
        lines[where] = f"{key}= {value}"
        content, story = "\n".join(lines).encode("utf-8", "replace"), f"{key}= {value[:40]}"
    else:
        content, story = raw.mutate(text.encode(), rng)
    (place / "in" / "s.toml").write_bytes(content)
    kind = rng.choice(("train", "build", "inspect")) if as_config else "build"
    words = [kind, "../in/model.onnx", "--config" if as_config else "--tuned", "../in/s.toml"]
    words += {"train": ["--data", "../in/data.npz", "-o", "out.onnx"], "build": ["-o", "out.onnx"], "inspect": []}[kind]
    outcome = case.run(words, place, ["out.onnx"] if kind != "inspect" else [])
    return campaign.Played(outcome, f"{story}\n{' '.join(words)}")


# -- models --------------------------------------------------------------------------------------------------------


def _weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _same_weights(path: Path, right: bytes) -> bool:
    found, wanted = _weights(onnx.load(path)), _weights(onnx.load_model_from_string(right))
    return found.keys() == wanted.keys() and all(np.array_equal(x, wanted[name]) for name, x in found.items())


def _all_finite(path: Path) -> bool:
    return all(np.isfinite(x).all() for x in _weights(onnx.load(path)).values() if x.dtype.kind == "f")


def main() -> int:
    """Play as many cases as asked for."""
    asked = campaign.arguments(__doc__, 500).parse_args()
    imported()
    return campaign.main("data", play, asked)


if __name__ == "__main__":
    sys.exit(main())
