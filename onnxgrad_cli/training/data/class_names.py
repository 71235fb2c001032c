"""Labels that are names: which number each class has.

Names are sorted, as torchvision's ImageFolder and Keras sort them, and numbered from 0. The trained model keeps them,
so that other data are numbered alike. Labels that are whole numbers are the numbers of the classes, as they are, also
where they are written as text; see `cells`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.training.data.cells import are_names, is_number, numbers_in

Names = tuple[str, ...]

WHOLE = np.dtype(np.int64)

FOR_NUMBERS = "names of classes are for a loss of classes, `losses='cross-entropy'`; of yes and no save 1 and 0"
"""What to do about text where an input takes floats."""


def is_text(array: object) -> bool:
    """Whether a column holds text."""
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "OUT"


def as_numbers(source: Path, label: str, column: np.ndarray, known: Names | None) -> np.ndarray | None:
    """The whole numbers that a column of text writes, int64 (N,); None where it holds names.

    Args:
        source: the file or folder, for messages.
        label: what the labels are called.
        column: text, (N,).
        known: the names that there are, one of which may look like a number.

    Raises:
        UsageError: some of it are numbers, but not all are whole numbers; or it is empty in some samples.
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
    raise UsageError(
        f"'{source}': '{label}' is '{texts[at]}' in sample {at} (the first is 0), which is no whole number"
        + (", and others are: names of classes stand in every sample, or in none" if whole else ""),
        "save names of classes, or their numbers, in every sample",
    )


def numbered(source: Path, label: str, column: np.ndarray, known: Names | None) -> tuple[np.ndarray, Names]:
    """The numbers of classes, int64 (N,), and the names in the order of these numbers.

    Args:
        source: the file or folder, for messages.
        label: what the labels are called.
        column: text, (N,).
        known: the names that there are; None: those in the column.

    Raises:
        UsageError: a value is no text, or a class that there is not.
    """
    texts: list[object] = column.tolist()
    at = next((at for at, text in enumerate(texts) if not isinstance(text, str)), None)
    if at is not None:
        elsewhere = "text elsewhere" if any(isinstance(text, str) for text in texts) else "that is no name of a class"
        raise UsageError(
            f"'{source}': '{label}' is {texts[at]!r} in sample {at} (the first is 0), and {elsewhere}",
            "save names of classes as text, or their numbers as integers",
        )
    names = tuple(sorted(set(map(str, texts)))) if known is None else known
    numbers = {name: number for number, name in enumerate(names)}
    at = next((at for at, text in enumerate(texts) if text not in numbers), None)
    if at is not None:
        raise UsageError(
            f"'{source}': '{label}' is '{texts[at]}' in sample {at} (the first is 0), which is none of the "
            f"{len(names)} classes that the model was trained on",
            suggest(str(texts[at]), names, "classes"),
        )
    return np.array([numbers[str(text)] for text in texts], np.int64), names


def in_words(names: Sequence[str], most: int = 6) -> str:
    """The names, the first few of many."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
