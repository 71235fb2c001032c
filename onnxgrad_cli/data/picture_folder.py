"""Read pictures from a folder with a subfolder for each class, named after the class, like torchvision's ImageFolder.

If the names of all subfolders are numbers, they are class numbers. Otherwise they are class names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import LoadedColumns
from onnxgrad_cli.data.pictures import SUFFIXES, PictureLayout, Pictures, check_size, layout_of
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import ambiguous, mismatch, missing_value, no_data, wrong_type, wrong_value
from onnxgrad_cli.ir.types import in_words, is_float, shape_of

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})
"""Names of subfolders that are splits of the data, not classes."""


def is_picture_folder(path: Path) -> bool:
    """Return True if there are pictures in a folder or in its subfolders."""
    return any(_is_picture(file) for _, _, files in _walk(path) for file in files)


def read(path: Path, inputs: InputTypes, labels: Collection[str], resize: Resize, tell: Tell) -> LoadedColumns:
    """Read the pictures in a folder with their class names or numbers, or a single picture, which has no class.

    Args:
        path: the folder, or the picture.
        inputs: one input of pictures, and at most one label of class numbers, with their types.
        labels: the names of the inputs that are labels.
        resize: how to resize pictures whose aspect ratio differs from the input's.
        tell: receives log messages.

    Raises:
        UsageError: the inputs can't take pictures and classes, a file can't be read, a link leads out of the folder, or
            a class has no pictures.
    """
    name, layout = _input(path, inputs, labels)
    with reading(path, "a folder of pictures", "check its permissions"):
        files = _files(path, tell) if path.is_dir() else [path]
    pictures = Pictures(path, files, layout, resize)
    pictures.check()
    wanted = [each for each in inputs if each in labels]
    if not wanted or not path.is_dir():
        return LoadedColumns({name: pictures}, [])
    label = _label(path, wanted, inputs)
    return LoadedColumns({name: pictures, label: _classes(path, files)}, [])


def _input(path: Path, inputs: InputTypes, labels: Collection[str]) -> tuple[str, PictureLayout]:
    """Return the input that takes the pictures, and its layout.

    Raises:
        UsageError: there are several inputs, or the input can't take pictures.
    """
    names = [name for name in inputs if name not in labels]
    if len(names) != 1:
        hint = "save an array for each input"
        raise mismatch(f"'{path}' holds pictures for one input, but the model takes {', '.join(names)}", hint)
    return names[0], check_size(names[0], layout_of(inputs[names[0]]), in_words(inputs[names[0]]))


def _label(path: Path, labels: list[str], inputs: InputTypes) -> str:
    """Return the label that takes the class numbers.

    Raises:
        UsageError: there are several labels, or the label does not take class numbers.
    """
    if len(labels) > 1:
        message = f"'{path}' gives one label for each picture, but the model takes {', '.join(labels)}"
        raise mismatch(message, "save an array for each input and label")
    if is_float(inputs[labels[0]]) or len(shape_of(inputs[labels[0]]) or ()) != 1:
        message = f"the folders in '{path}' are classes, but the label '{labels[0]}' is {in_words(inputs[labels[0]])}"
        raise wrong_type(message, "use a classification loss: `losses='cross-entropy'`")
    return labels[0]


def _classes(path: Path, files: list[Path]) -> np.ndarray:
    """Return the class of each picture: numbers, int64 (N,), if all subfolders have numbers as names, otherwise names.

    Raises:
        UsageError: a picture is not in the subfolder of a class, a class has no pictures, two subfolders have the same
            number, or the subfolders are splits of the data.
    """
    places = [file.relative_to(path).parts for file in files]
    for file, place in zip(files, places, strict=True):
        if len(place) == 1:
            hint = "put the pictures into folders with the names of their classes: FOLDER/cat/1.png"
            raise missing_value(f"'{file}' is not in a class folder", hint)
    found = [place[0] for place in places]
    names, deep = set(found), {place[0] for place in places if len(place) > 2}
    if names == deep and {name.lower() for name in names} <= SPLITS:
        hint = f"choose one of them, such as '{path / min(names)}', and another with `val`"
        raise ambiguous(f"the folders in '{path}' are not classes but splits: {', '.join(sorted(names))}", hint)
    for each in sorted(path.iterdir()):
        if each.is_dir() and each.name not in names and not each.name.startswith("."):
            raise no_data(f"'{each}' has no pictures", "add pictures, or remove the folder")
    numbers = {name: number for name in sorted(names) if (number := number_in(name)) is not None}
    if len(numbers) < len(names):
        return np.array(found, object)
    folders = {number: name for name, number in numbers.items()}
    for name, number in numbers.items():
        if folders[number] != name:
            message = f"'{path / name}' and '{path / folders[number]}' are the same class, {number}"
            raise ambiguous(message, "move their pictures into one folder, or give both a name that is not a number")
    return np.array([numbers[name] for name in found], np.int64)


def _files(path: Path, tell: Tell) -> list[Path]:
    """Return the pictures in a folder, sorted by class and name. Report the number of other files.

    Raises:
        UsageError: a link leads to a folder or out of the folder.
    """
    root, found, others = path.resolve(), list[Path](), 0
    for folder, inner, names in _walk(path):
        for link in (folder / name for name in inner if (folder / name).is_symlink()):
            raise wrong_type(
                f"'{link}' is a link to a folder, which is not followed", "replace the link by a copy of the folder"
            )
        for file in map(folder.joinpath, names):
            if file.is_symlink() and not file.resolve().is_relative_to(root):
                raise wrong_value(f"'{file}' is a link to a file outside of '{root}'", "copy the file there")
            if _is_picture(file.name):
                check_regular(file)
                found.append(file)
            else:
                others += not file.name.startswith(".")
    if others:
        tell(f"ignoring {others:,} files in '{path}' that are not PNG or JPEG", 0)
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _walk(path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, inner, files in os.walk(path, onerror=_raise):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield Path(folder), inner, files


def _raise(error: OSError) -> None:
    raise error


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
