"""What was done to data before a model saw them, which a trained model and the folder of its run keep.

Without it other data would be read otherwise than those that were trained on, which nobody would notice: classes in
another order, pixels of another scale, columns in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from onnx import ModelProto

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import save_bytes
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_names import class_names
from onnxgrad_cli.training.data.class_names import Names
from onnxgrad_cli.training.data.columns import Chosen
from onnxgrad_cli.training.data.normalization import Normalization

CLASSES, INPUTS = "onnxgrad.classes", "onnxgrad.preprocessing"
"""The keys in the metadata_props of a trained model: output -> the names of its classes, in order; and input -> what is
done to it."""

FILE = "preprocessing.json"
"""What the folder of a run keeps it in."""


@dataclass(frozen=True)
class Preprocessing:
    """What was done to data.

    Attributes:
        classes: output -> the names of its classes, in the order of their numbers. A model of another program may say
            them of a label, or of '', which stands for any.
        normal: input -> its normalization.
        resize: what became of picture files of other proportions; None where there were none.
        order: input -> the columns of a table that it took, in order, where their names don't tell it.
        settled: whether a run has begun with it, so that nothing of it is found anew.
    """

    classes: Mapping[str, Names] = field(default_factory=dict)
    normal: Mapping[str, Normalization] = field(default_factory=dict)
    resize: Resize | None = None
    order: Chosen = field(default_factory=dict)
    settled: bool = False

    def names_of(self, term: Term) -> Names | None:
        """The names of the classes that a loss is of, by whatever they are said of; what is not said of its output must
        be as many as it tells apart."""
        others = (self.classes[key] for key in (term.label, "") if key in self.classes)
        fitting = (names for names in others if 0 < len(names) == term.classes)
        return self.classes.get(term.output, next(fitting, None))

    def with_more(self, found: Preprocessing) -> Preprocessing:
        """What is known, and what data have shown besides: names of classes, and the order of columns."""
        return replace(self, classes={**self.classes, **found.classes}, order={**self.order, **found.order})

    def to_json(self) -> dict[str, str]:
        """The entries that say it, key -> JSON; none where nothing was done."""
        said: dict[str, Any] = {name: each.to_json() for name, each in sorted(self.normal.items())}
        whole: dict[str, Any] = {} if self.resize is None else {"resize": self.resize}
        if self.order:
            whole |= {"columns": {name: list(columns) for name, columns in sorted(self.order.items())}}
        said |= {"": whole} if whole else {}
        names = {output: list(names) for output, names in sorted(self.classes.items())}
        found = {CLASSES: names, INPUTS: said}
        return {key: strict_json.dumps(value) for key, value in found.items() if value}

    @classmethod
    def of_json(cls, entries: Mapping[str, str], where: str) -> Preprocessing:
        """What `to_json` gave.

        Raises:
            OnnxgradError: it can't be read; the message says `where`.
        """
        try:
            said, names = (strict_json.loads(entries.get(key, "{}")) for key in (INPUTS, CLASSES))
            if not isinstance(said, dict) or not isinstance(names, dict):
                raise ValueError("they are no JSON objects")
            whole = said.pop("", {})
            resize = whole.get("resize")
            order = {name: _texts(columns) for name, columns in whole.get("columns", {}).items()}
            if resize not in (None, *get_args(Resize)):
                raise ValueError(f"'{resize}'")
            classes = {output: _texts(each) for output, each in names.items()}
            if any(len(set(each)) < len(each) for each in classes.values()):
                raise ValueError("two classes have one name")
            normal = {name: Normalization.of_json(each) for name, each in said.items()}
            return cls(classes, normal, resize, order)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise OnnxgradError(
                f"what {where} says of its data can't be read: {error}", f"remove its entries {CLASSES} and {INPUTS}"
            ) from None

    @classmethod
    def of_model(cls, model: ModelProto) -> Preprocessing:
        """What a trained model says.

        Raises:
            OnnxgradError: it can't be read.
        """
        found = cls.of_json({entry.key: entry.value for entry in model.metadata_props}, "the model")
        said = {key: tuple(names) for key, names in class_names(model).items() if len(set(names)) == len(names)}
        return replace(found, classes={**said, **found.classes})

    def write_to(self, model: ModelProto) -> None:
        """Write it into a trained model, in place of what the model has said."""
        for old in [entry for entry in model.metadata_props if entry.key in (CLASSES, INPUTS)]:
            model.metadata_props.remove(old)
        for key, value in self.to_json().items():
            model.metadata_props.add(key=key, value=value)

    @classmethod
    def of_run(cls, folder: Path) -> Preprocessing | None:
        """What the folder of a run says; None where it says nothing.

        Raises:
            OnnxgradError: it can't be read.
        """
        file = folder / FILE
        try:
            text = file.read_text("utf-8") if file.is_file() else None
            entries = {} if text is None else strict_json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise OnnxgradError(f"'{file}' can't be read: {error}", "take another copy, or begin anew") from None
        if text is None:
            return None
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise OnnxgradError(f"'{file}' is none that onnxgrad has written", "take another copy, or begin anew")
        return replace(cls.of_json(entries, f"'{file}'"), settled=True)

    def write_to_run(self, folder: Path) -> None:
        """Write it into the folder of a run, if there is something to say.

        Raises:
            OnnxgradError: it can't be written.
        """
        if self.to_json():
            save_bytes((strict_json.dumps(self.to_json()) + "\n").encode(), folder / FILE)


def _texts(names: object) -> Names:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} is no list of names")
    return tuple(names)
