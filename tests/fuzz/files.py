"""Mutated models through every command: `python -m tests.fuzz.files --cases 1000 --seed 1`, or `make fuzz-files`."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper
from safetensors.numpy import save_file

import onnxgrad_cli
from onnxgrad_cli.execution.session import load_onnxruntime
from tests.fuzz import campaign, case, commands, hostile, models, raw
from tests.fuzz.corpus import Corpus, Seed


def imported() -> None:
    """Import all that the command might: a fork of this process has it then, and shares its memory."""
    for module in pkgutil.walk_packages(onnxgrad_cli.__path__, "onnxgrad_cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    load_onnxruntime()
    for name in (
        "onnx.version_converter",
        "onnx.inliner",
        "onnx.reference",
        "safetensors.numpy",
        "rich.console",
    ):
        importlib.import_module(name)
    gc.disable()  # as the command does
    gc.freeze()


class Files:
    """Draws a model, mutates it, and sends it through a command."""

    def __init__(self, folder: Path | None) -> None:
        self._corpus = Corpus(folder)

    def __call__(self, rng: Random, place: Path) -> campaign.Played:
        """Play one case: of seven models one is mutated as bytes, and one is left as it is, for options to meet."""
        seed = self._corpus.draw(rng)
        name, way = seed.name, rng.random()
        story = self._mutated(seed, rng) if way < 0.7 else []
        data = hostile.with_broken_text(seed.model.SerializeToString())
        for _ in range(rng.choice((1, 1, 2, 5)) if way > 0.85 else 0):
            data, how = raw.mutate(data, rng, self._corpus.draw(rng).model.SerializeToString())
            story.append(how)
        file = rng.choice(hostile.FILES) if rng.random() < 0.1 else "model.onnx"
        has_data = _write(seed, data, place / "in", file)
        has_data &= not any("a loop of 1000000 " in each for each in story)  # each step may well take seconds
        words, written = commands.draw(rng, seed, file, has_data)
        outcome = case.run(words, place, written)
        failed = outcome.kind == "exit 4" and words[0] in ("build", "train")
        if failed and not story and not _as_asked(words, seed.model, outcome.told):
            outcome.faults.append(f"gradients of what nobody has changed failed a check: {words[0]}: {name}")
        shown = " ".join(words).replace("*", "'*'")
        return campaign.Played(outcome, f"{name}\n" + "\n".join(story) + f"\ncd out; onnxgrad {shown}")

    @staticmethod
    def _mutated(seed: Seed, rng: Random) -> list[str]:
        """Mutate the model; mostly until the checker accepts what comes of it, for the checker has been tested."""
        original = ModelProto()
        original.CopyFrom(seed.model)
        for _ in range(rng.choice((1, 6, 6))):
            seed.model.CopyFrom(original)
            story = models.mutate(seed, rng)
            if case.survives(lambda: onnx.checker.check_model(seed.model)):
                break
        return story


def _write(seed: Seed, data: bytes, folder: Path, file: str) -> bool:
    """Write the model, what it needs, and what hostile references may lead to; whether there are data to train on."""
    for name, content in seed.beside.items():
        (folder / name).write_bytes(content)
    for name in ("folder", "sub"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("data.bin", "../../evil.bin", "../evil.bin", "sub/data.bin"):
        if not (folder / name).exists():
            (folder / name).write_bytes(b"\x00\x00\x80\x3f" * 64)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "link.bin").symlink_to("../evil.bin")
    (folder / file).write_bytes(data)
    _write_weights(seed, folder)
    return _write_data(seed, folder)


def _as_asked(words: Sequence[str], model: ModelProto, told: str) -> bool:
    """Whether a check of a right model fails by what was asked for: a proof of what draws random numbers, or gradients
    by all that is stored, or by an exponent: of negative numbers there are none."""
    unproved = "--verify" in words and "the requested proof of " in told
    by_exponents = "*" in words or any(node.op_type == "Pow" for node in model.graph.node)
    return unproved or (by_exponents and "finite: not finite" in told)


def _write_weights(seed: Seed, folder: Path) -> None:
    """What `export` puts in the place of the weights."""
    weights = {}
    for tensor in seed.model.graph.initializer:
        with suppress(Exception):  # it is no tensor any longer
            weights[tensor.name] = numpy_helper.to_array(tensor, str(folder))
    floats = {name: -x for name, x in weights.items() if x.dtype == np.float32}
    with suppress(Exception):  # nor is its name a text
        save_file(floats, folder / "weights.safetensors")


def _write_data(seed: Seed, folder: Path) -> bool:
    """Arrays that fit the model as it was, if they are known."""
    outputs = [value.name for value in seed.model.graph.output if value.name in seed.arrays]
    label = seed.arrays.get("label", seed.arrays[outputs[0]] if outputs else None)
    arrays = {name: x for name, x in seed.arrays.items() if name not in (*outputs, "label", "file")}
    if label is None or not arrays:
        return False
    try:
        np.savez(folder / "data.npz", allow_pickle=False, **arrays, label=label)
    except (ValueError, OSError, UnicodeError):
        return False
    return True


def main() -> int:
    """Play as many cases as asked for."""
    parser = campaign.arguments(__doc__, 1000)
    parser.add_argument("--folder", type=Path, help="mutate the models in it, too")
    asked = parser.parse_args()
    if asked.folder and not asked.folder.is_dir():
        parser.error(f"there is no folder '{asked.folder}'")
    imported()
    return campaign.main("files", Files(asked.folder), asked)


if __name__ == "__main__":
    sys.exit(main())
