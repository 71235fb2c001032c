"""The names of classes, as a model's metadata have them.

`onnxgrad.classes` is a JSON object: the name of an output or of a label -> the names of its classes, in the order of
their numbers. Ultralytics writes `names`, a mapping of the numbers as Python spells it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from onnx import ModelProto

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.errors import UsageError, suggest

CLASSES, NAMES = "onnxgrad.classes", "names"
"""Keys in a model's metadata."""

WORDS = ("argmax", "label")
"""What stands for a class that is not known beforehand, and so is no name of one."""


def class_names(model: ModelProto) -> dict[str, list[str]]:
    """Output or label -> the names of its classes; '' stands for any. {} where a model says none that can be read."""
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
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # sets of lists, numbers without end
        return {}


def _listed(classes: object) -> list[str]:
    """Names in the order of their numbers; [] where it is no list of them, and no mapping of 0, 1, ... to them."""
    if isinstance(classes, Mapping):
        classes = [classes[number] for number in range(len(classes))] if set(classes) == set(range(len(classes))) else 0
    return [str(name) for name in classes] if isinstance(classes, list) else []


def names_for(found: Mapping[str, Sequence[str]], count: int, *names: str) -> list[str]:
    """The names of so many classes: of the first of some tensors that has any, else the only ones there are; or [].

    Classes of such a tensor beyond those that have names are called by their numbers.
    """
    own = next((found[name] for name in names if found.get(name)), None)
    if own is not None and len(own) < count:
        return [*own, *map(str, range(len(own), count))]
    of_one = next(iter(found.values())) if len(found) == 1 else []
    listed = of_one if own is None else own
    return list(listed) if len(listed) == count else []


def number_of(class_: int | str, names: Sequence[str]) -> int | str:
    """The number of a class that is called by its name; a number, and a word such as 'argmax', stay what they are.

    Raises:
        UsageError: there are names, and this is none of them.
    """
    if not isinstance(class_, str) or class_.isdigit() or class_ in WORDS or not names:
        return class_
    if class_ not in names:
        raise UsageError(f"there is no class '{class_}'", suggest(class_, names, "classes"))
    return list(names).index(class_)


def called(number: int, names: Sequence[str]) -> str:
    """A class in words, with its name if it has one."""
    return f"class {number}" + (f" ({names[number]})" if number < len(names) else "")
