"""Data in a folder of pictures: each class is a folder in it, called by its name, as in torchvision's ImageFolder.

Folders that are called by numbers alone are the classes of these numbers, and not sorted as text.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words, is_float, shape_of
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.picture_layout import Layout, layout_of
from onnxgrad_cli.training.data.pictures import SUFFIXES, Pictures, check_size
from onnxgrad_cli.training.data.reading import Found, check_regular, reading

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})
"""What folders are called that are data of their own, and no classes."""

AS_CLASSES = "put pictures into folders that are called as their classes: FOLDER/cat/1.png"


def is_picture_folder(path: Path) -> bool:
    """Whether a folder holds pictures, in itself or in the folders in it."""
    return any(_is_picture(file) for _, _, files in _walk(path) for file in files)


def read(path: Path, inputs: InputTypes, labels: Collection[str], resize: Resize, tell: Tell) -> Found:
    """The pictures of a folder, and the names of their classes or their numbers.

    Args:
        path: the folder.
        inputs: what is fed: one input of pictures, and perhaps one label, which is the number of a class.
        labels: which of the inputs are labels.
        resize: what becomes of pictures of other proportions.
        tell: takes what is narrated.

    Raises:
        UsageError: the inputs are others, a link leads out of the folder, or there is no picture of a class.
    """
    name, layout = _input(path, inputs, labels)
    with reading(path, "a folder of pictures", "check its permissions"):
        files = _files(path, tell)
    pictures = Pictures(path, files, layout, resize)
    pictures.check()
    wanted = [each for each in inputs if each in labels]
    if not wanted:
        return Found({name: pictures}, [])
    label = _label(path, wanted, inputs)
    return Found({name: pictures, label: _classes(path, files)}, [])


def read_one(path: Path, inputs: InputTypes, labels: Collection[str], resize: Resize) -> Found:
    """A single picture, which tells no class; see `read`.

    Raises:
        UsageError: it is none, or the inputs are others.
    """
    name, layout = _input(path, inputs, labels)
    picture = Pictures(path, [path], layout, resize)
    picture.check()
    return Found({name: picture}, [])


def _input(path: Path, inputs: InputTypes, labels: Collection[str]) -> tuple[str, Layout]:
    """The one input that takes pictures, and how."""
    names = [name for name in inputs if name not in labels]
    if len(names) != 1:
        raise UsageError(
            f"'{path}' holds pictures, the model is fed {', '.join(names)}", "save an array for each input"
        )
    return names[0], check_size(names[0], layout_of(inputs[names[0]]), in_words(inputs[names[0]]))


def _label(path: Path, labels: list[str], inputs: InputTypes) -> str:
    """The one label, which is the number of a class."""
    if len(labels) > 1:
        raise UsageError(f"'{path}' tells one class a picture, the model is fed {', '.join(labels)}", "save arrays")
    if is_float(inputs[labels[0]]) or len(shape_of(inputs[labels[0]]) or ()) != 1:
        raise UsageError(
            f"'{path}' tells classes by its folders, the label '{labels[0]}' is {in_words(inputs[labels[0]])}",
            "take a loss of classes: `losses='cross-entropy'`",
        )
    return labels[0]


def _classes(path: Path, files: list[Path]) -> np.ndarray:
    """The class of each picture: the number that its folder is called by, or its name."""
    loose = next((file for file in files if file.parent == path), None)
    if loose is not None:
        raise UsageError(f"'{loose}' lies in no folder of a class", AS_CLASSES)
    found = [file.relative_to(path).parts[0] for file in files]
    names = set(found)
    deep = {file.relative_to(path).parts[0] for file in files if len(file.relative_to(path).parts) > 2}
    if names == deep and {name.lower() for name in names} <= SPLITS:
        first = min(names)
        raise UsageError(
            f"'{path}' has the folders {', '.join(sorted(names))}, which are no classes",
            f"name one of them: '{path / first}', and another with `val`",
        )
    empty = [each.name for each in sorted(path.iterdir()) if each.is_dir() and each.name not in names]
    empty = [name for name in empty if not name.startswith(".")]
    if empty:
        raise UsageError(f"'{path / empty[0]}' has no pictures", "put some in, or remove the folder")
    numbers = {name: number for name in sorted(names) if (number := number_in(name)) is not None}
    if len(numbers) < len(names):
        return np.array(found, object)
    called = {number: name for name, number in numbers.items()}
    twice = next((name for name, number in numbers.items() if called[number] != name), None)
    if twice is not None:
        raise UsageError(
            f"'{path / twice}' and '{path / called[numbers[twice]]}' are one class, {numbers[twice]}",
            "move their pictures into one folder, or give both a name that is no number",
        )
    return np.array([numbers[name] for name in found], np.int64)


def _files(path: Path, tell: Tell) -> list[Path]:
    """The pictures in a folder, sorted by class and name; what else there is is told."""
    root, found, others = path.resolve(), list[Path](), 0
    for folder, inner, files in _walk(path):
        for name in [*inner, *files]:
            file = folder / name
            if file.is_symlink():
                _check_link(file, root, name in inner)
        for name in files:
            if _is_picture(name):
                check_regular(folder / name)
                found.append(folder / name)
            else:
                others += not name.startswith(".")
    if others:
        tell(f"'{path}': {others:,} files are no png or jpeg, left out", 0)
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _check_link(file: Path, root: Path, is_folder: bool) -> None:
    if is_folder:
        raise UsageError(f"'{file}' is a link to a folder, which is not followed", "put the folder there itself")
    if not file.resolve().is_relative_to(root):
        raise UsageError(f"'{file}' is a link that leaves '{root}'", "copy the file there")


def _walk(path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, inner, files in os.walk(path, onerror=_raise):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield Path(folder), inner, files


def _raise(error: OSError) -> None:
    raise error


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
