"""The preprocessing of the training data. It is stored in the trained model and in the run folder.

Data for evaluation and prediction get the same preprocessing. Otherwise classes or columns could have a different
order, or pixels a different scale, and the results would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from onnx import ModelProto

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.data.class_names import CLASSES, Names, class_names
from onnxgrad_cli.data.columns import Chosen
from onnxgrad_cli.data.normalization import Normalization
from onnxgrad_cli.errors import unreadable
from onnxgrad_cli.files import save_bytes
from onnxgrad_cli.metadata import Term

INPUTS = "onnxgrad.preprocessing"
"""The key of the preprocessing in a trained model's metadata_props.

The value is a JSON object. The name of an input is the key of its normalization. The key "" has `Preprocessing.resize`
and `Preprocessing.order`.
"""

FILE = "preprocessing.json"
"""The name of the file with the preprocessing in the run folder."""


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of data.

    Attributes:
        classes: output -> the names of its classes, in the order of their numbers. In models of other programs the key
            may be a label instead, or '' for any output.
        normal: input -> its normalization.
        resize: how pictures whose aspect ratio differs from the input's are resized; None for data without pictures.
        order: input -> its columns in a table, in order, for inputs that took several columns whose names are not
            derived from the name of the input.
        settled: True if a run has started with this preprocessing, so that it must not be computed again.
    """

    classes: Mapping[str, Names] = field(default_factory=dict)
    normal: Mapping[str, Normalization] = field(default_factory=dict)
    resize: Resize | None = None
    order: Chosen = field(default_factory=dict)
    settled: bool = False

    def names_of(self, term: Term) -> Names | None:
        """Return the class names for the output and label of a loss, or None.

        The names are stored under the output, the label, or '' (any output). Names under the label or '' are used only
        if their number is the number of classes of the loss.
        """
        others = (self.classes[key] for key in (term.label, "") if key in self.classes)
        fitting = (names for names in others if 0 < len(names) == term.classes)
        return self.classes.get(term.output, next(fitting, None))

    def with_more(self, found: Preprocessing) -> Preprocessing:
        """Return a copy with the class names and the column order of `found` added."""
        return replace(self, classes={**self.classes, **found.classes}, order={**self.order, **found.order})

    def to_json(self) -> dict[str, str]:
        """Return the metadata entries: key -> JSON text. The dict is empty if there is no preprocessing."""
        order = {name: list(columns) for name, columns in sorted(self.order.items())}
        whole = {key: value for key, value in {"resize": self.resize, "columns": order}.items() if value}
        normal: dict[str, Any] = {name: each.to_json() for name, each in sorted(self.normal.items())}
        said = {**normal, "": whole} if whole else normal
        names = {output: list(names) for output, names in sorted(self.classes.items())}
        return {key: strict_json.dumps(value) for key, value in {CLASSES: names, INPUTS: said}.items() if value}

    @classmethod
    def of_json(cls, entries: Mapping[str, str], where: str) -> Preprocessing:
        """Parse the entries that `to_json` returned. Other entries are ignored.

        Args:
            entries: metadata entries: key -> JSON text.
            where: the place of the entries, for messages.

        Raises:
            OnnxgradError: an entry can't be read.
        """
        try:
            said, names = (strict_json.loads(entries.get(key, "{}")) for key in (INPUTS, CLASSES))
            if not isinstance(said, dict) or not isinstance(names, dict):
                raise ValueError("they are not JSON objects")
            whole = said.pop("", {})
            resize = whole.get("resize")
            order = {name: _texts(columns) for name, columns in whole.get("columns", {}).items()}
            if resize not in (None, *get_args(Resize)):
                raise ValueError(f"'{resize}' is not a way to resize pictures")
            classes = {output: _texts(each) for output, each in names.items()}
            if any(len(set(each)) < len(each) for each in classes.values()):
                raise ValueError("two classes have the same name")
            normal = {name: Normalization.of_json(each) for name, each in said.items()}
            return cls(classes, normal, resize, order)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            message = f"the preprocessing stored in {where} can't be read: {error}"
            raise unreadable(message, f"remove its entries {CLASSES} and {INPUTS}") from None

    @classmethod
    def of_model(cls, model: ModelProto) -> Preprocessing:
        """Read the preprocessing from the metadata of a trained model.

        Raises:
            OnnxgradError: an entry can't be read.
        """
        found = cls.of_json({entry.key: entry.value for entry in model.metadata_props}, "the model")
        said = {key: tuple(names) for key, names in class_names(model).items() if len(set(names)) == len(names)}
        return replace(found, classes={**said, **found.classes})

    def write_to(self, model: ModelProto) -> None:
        """Write the preprocessing to the metadata of a trained model. Existing entries are replaced."""
        for old in [entry for entry in model.metadata_props if entry.key in (CLASSES, INPUTS)]:
            model.metadata_props.remove(old)
        for key, value in self.to_json().items():
            model.metadata_props.add(key=key, value=value)

    @classmethod
    def of_run(cls, folder: Path) -> Preprocessing | None:
        """Read the preprocessing from a run folder. Return None if the folder does not contain it.

        Raises:
            OnnxgradError: the file can't be read.
        """
        file = folder / FILE
        try:
            if not file.is_file():
                return None
            entries = strict_json.loads(file.read_text("utf-8"))
            if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
                raise ValueError("it does not have the format that onnxgrad writes")
        except (OSError, ValueError, RecursionError) as error:
            raise unreadable(f"'{file}' can't be read: {error}", "restore the file, or start a new run") from None
        return replace(cls.of_json(entries, f"'{file}'"), settled=True)

    def write_to_run(self, folder: Path) -> None:
        """Write the preprocessing to the run folder. Without any preprocessing no file is written.

        Raises:
            OnnxgradError: the file can't be written.
        """
        if self.to_json():
            save_bytes((strict_json.dumps(self.to_json()) + "\n").encode(), folder / FILE)


def _texts(names: object) -> Names:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} is not a list of names")
    return tuple(names)
