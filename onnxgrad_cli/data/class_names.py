"""Convert class names to class numbers, parse numbers in text columns, and read class names from a model's metadata.

Names are sorted, as torchvision's ImageFolder and Keras sort them, and numbered from 0. The trained model stores the
names, so other data get the same numbers. Integer labels are used as class numbers unchanged, even if they are written
as text. A column of text holds numbers if each cell is a number, and names if no cell is a number. A mixture is an
error, so that a mistyped number never becomes a class.

The metadata entry `onnxgrad.classes` is a JSON object that maps the name of an output or label to its class names, in
the order of their numbers. Ultralytics writes an entry `names` instead: a Python dict literal of number -> name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.errors import suggest, unknown_name, wrong_type


def numbers_in(cells: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert cells of text to numbers. A cell such as 2024_01 is an error, although numpy would ignore the underscore.

    Raises:
        ValueError: a cell is not a number of this type.
        OverflowError: a number is too large for this type.
    """
    if (np.char.find(cells, "_") >= 0).any():
        raise ValueError("an underscore")
    try:
        return cells.astype(dtype)
    except ValueError:
        return np.vectorize(_plain, otypes=[object])(cells).astype(str).astype(dtype)


def _plain(cell: str) -> str:
    """Return a cell in a form that numpy parses as an integer: True and False become 1 and 0, and 1.0 becomes 1."""
    word = cell.strip()
    whole = re.fullmatch(r"([+-]?\d+)\.0*", word)
    return whole[1] if whole else {"true": "1", "false": "0"}.get(word.lower(), word)


def is_number(cell: str, dtype: np.dtype) -> bool:
    """Return True if a cell is a number of the dtype.

    A cell with a NUL is not a number here, although numpy ignores NULs at the end.
    """
    if "\0" in cell:
        return False
    try:
        numbers_in(np.array([cell]), dtype)
    except (ValueError, OverflowError):
        return False
    return True


def are_names(cells: Iterable[str]) -> bool:
    """Return True if all cells are names: not empty, and not numbers.

    A column that also holds numbers is not a column of names, because its other cells may be mistyped numbers.
    """
    return all(cell and not is_number(cell, np.dtype(np.float64)) for cell in map(str.strip, cells))


Names = tuple[str, ...]

WHOLE = np.dtype(np.int64)

FOR_NUMBERS = "for class names use a classification loss, `losses='cross-entropy'`; for binary labels save 1 and 0"
"""The hint of the error about a column of text if its input takes floats."""


def is_text(array: object) -> bool:
    """Return True if a column holds text."""
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "OUT"


def as_numbers(source: Path, label: str, column: np.ndarray, known: Names | None) -> np.ndarray | None:
    """Convert a column of text to integers, int64 (N,).

    Return None if the column holds class names or values that are not text.

    Args:
        source: the file or folder, for messages.
        label: the name of the label.
        column: text, (N,).
        known: the class names that are already known; None if none are. A column that contains a known name holds
            names, even if the name looks like a number.

    Raises:
        UsageError: some cells are numbers, but not all are integers; or some cells are empty.
    """
    texts: list[object] = column.tolist()
    if not all(isinstance(text, str) for text in texts):
        return None
    different = sorted(set(map(str, texts)))
    if are_names(different) or not set(different).isdisjoint(known or ()):
        return None
    whole = {text for text in different if is_number(text, WHOLE)}
    if len(whole) == len(different):
        numbers = dict(zip(different, numbers_in(np.array(different, str), WHOLE), strict=True))
        return np.array([numbers[str(text)] for text in texts], WHOLE)
    at = next(at for at, text in enumerate(texts) if text not in whole)
    problem = f"is '{texts[at]}', which is not a whole number{', but other samples have whole numbers' * bool(whole)}"
    hint = "save class names in every sample, or class numbers in every sample"
    raise wrong_type(f"'{source}', sample {at} (the first is 0): the label '{label}' {problem}", hint)


def numbered(source: Path, label: str, column: np.ndarray, known: Names | None) -> tuple[np.ndarray, Names]:
    """Return the class number of each sample, int64 (N,), and the class names in the order of their numbers.

    Args:
        source: the file or folder, for messages.
        label: the name of the label.
        column: text, (N,).
        known: the class names; None takes the names in the column, sorted.

    Raises:
        UsageError: a value is not text, or is not a known class name.
    """
    texts: list[object] = column.tolist()
    at = next((at for at, text in enumerate(texts) if not isinstance(text, str)), None)
    if at is not None:
        mixed = any(isinstance(text, str) for text in texts)
        problem = "but other samples have text" if mixed else "which is not a class name"
        message = f"'{source}', sample {at} (the first is 0): the label '{label}' is {texts[at]!r}, {problem}"
        raise wrong_type(message, "save class names as text, or class numbers as integers")
    names = tuple(sorted(set(map(str, texts)))) if known is None else known
    numbers = {name: number for number, name in enumerate(names)}
    at = next((at for at, text in enumerate(texts) if text not in numbers), None)
    if at is not None:
        problem = f"is '{texts[at]}', which is not one of the {len(names)} classes that the model was trained on"
        hint = suggest(str(texts[at]), names, "classes")
        raise unknown_name(f"'{source}', sample {at} (the first is 0): the label '{label}' {problem}", hint)
    return np.array([numbers[str(text)] for text in texts], np.int64), names


def shortened(names: Sequence[str]) -> str:
    """Return names joined by commas. If there are more than six, return the first ones and the total number."""
    return ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")


CLASSES, NAMES = "onnxgrad.classes", "names"
"""The metadata keys under which onnxgrad and Ultralytics store class names in a model."""

WORDS = ("argmax", "label")
"""Words that a user can give instead of a class, which is then known only when the model runs. They name no class."""


def class_names(model: ModelProto) -> dict[str, list[str]]:
    """Return the class names in a model's metadata: output or label -> names. The key '' means any output or label.

    Returns:
        {} if the model has no class names, or if they can't be parsed.
    """
    said = {entry.key: entry.value for entry in model.metadata_props}
    try:
        if CLASSES in said:
            found = strict_json.loads(said[CLASSES])
        elif NAMES in said:
            found = {"": ast.literal_eval(said[NAMES])}
        else:
            return {}
        lists = found.items() if isinstance(found, Mapping) else [("", found)]
        return {str(name): listed for name, classes in lists if (listed := _listed(classes))}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # such as {[1]}, or endless digits
        return {}


def _listed(classes: object) -> list[str]:
    """Return the class names in a list, or in a map with the keys 0, 1, ..., in order; [] for other objects."""
    if isinstance(classes, Mapping):
        classes = [classes[number] for number in range(len(classes))] if set(classes) == set(range(len(classes))) else 0
    return [str(name) for name in classes] if isinstance(classes, list) else []


def names_for(found: Mapping[str, Sequence[str]], count: int, *names: str) -> list[str]:
    """Return the names of `count` classes, or [] if no entry of `found` fits.

    `found` is the result of `class_names`: output or label -> its class names. The entry of the first tensor in `names`
    that has one is used. If this entry has fewer than `count` names, the other classes are named by their numbers. If
    it has more, the result is [].

    If none of these tensors has an entry, but `found` has a single entry with exactly `count` names, these names are
    returned.
    """
    own = next((found[name] for name in names if found.get(name)), None)
    if own is not None and len(own) < count:
        return [*own, *map(str, range(len(own), count))]
    of_one = next(iter(found.values())) if len(found) == 1 else []
    listed = of_one if own is None else own
    return list(listed) if len(listed) == count else []


def number_of(class_: int | str, names: Sequence[str]) -> int | str:
    """Convert a class name to its number. Numbers and words such as 'argmax' are returned unchanged.

    If `names` is empty, any class is returned unchanged.

    Raises:
        UsageError: the class is not among `names`.
    """
    if not isinstance(class_, str) or class_.isdigit() or class_ in WORDS or not names:
        return class_
    if class_ not in names:
        raise unknown_name(f"there is no class '{class_}'", suggest(class_, names, "classes"))
    return list(names).index(class_)


def called(number: int, names: Sequence[str]) -> str:
    """Describe a class by its number and, if it has one, its name: class 3 (cat)."""
    return f"class {number}" + (f" ({names[number]})" if number < len(names) else "")
