"""Data in a folder that Hugging Face's `Dataset.save_to_disk` has written, by pyarrow: mapped, and read as columns.

dataset_info.json tells the features, of which a ClassLabel has the names of classes; state.json the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.columns import KnownColumns
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.parquet import columns_of
from onnxgrad_cli.training.data.reading import Found, check_regular, reading

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
HINT = "write it with datasets.Dataset.save_to_disk(FOLDER)"
LARGEST = 2**26
"""Bytes of a description."""


def is_arrow_folder(path: Path) -> bool:
    """Whether a folder is a Dataset, or several splits of one."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def read(path: Path, inputs: InputTypes, resize: Resize, known: KnownColumns) -> Found:
    """The columns of a Dataset.

    Raises:
        UsageError: it can't be read, it is several splits, or pyarrow is missing.
    """
    if (path / SPLITS).is_file() and not (path / STATE).is_file():
        splits = [str(name) for name in _described(path / SPLITS).get("splits") or []]
        raise UsageError(
            f"'{path}' has the splits {', '.join(splits)}", f"name one: '{path / (splits or ['train'])[0]}'"
        )
    state = _described(path / STATE)
    with reading(path, "a Dataset of Hugging Face", HINT):
        if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
            raise ValueError("its rows are chosen by a table of indices: call flatten_indices() before it is saved")
        files = [_inside(path, each["filename"]) for each in state["_data_files"]]
    arrow, ipc = (load_package(name, f"reading '{path}'") for name in ("pyarrow", "pyarrow.ipc"))
    tables = []
    for file in files:
        check_regular(file)
        with reading(file, "an Arrow file", HINT):
            tables.append(ipc.open_stream(arrow.memory_map(str(file))).read_all())
    with reading(path, "a Dataset of Hugging Face", HINT):
        table = arrow.concat_tables(tables)
        found = columns_of(path, table.schema.names, lambda names: table.select(names), inputs, resize, known)
    return found._replace(names=_class_names(path, inputs))


def _class_names(path: Path, inputs: InputTypes) -> dict[str, tuple[str, ...]]:
    """The names of classes, of the columns that have them."""
    features = _described(path / INFO).get("features") if (path / INFO).is_file() else None
    found = {}
    for name, feature in (features if isinstance(features, dict) else {}).items():
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        if name in inputs and isinstance(names, list) and all(isinstance(each, str) for each in names):
            found[name] = tuple(names)
    return found


def _described(file: Path) -> dict[str, Any]:
    check_regular(file)
    with reading(file, "JSON", HINT):
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        found = strict_json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    return found


def _inside(path: Path, name: str) -> Path:
    """A file in the folder itself: a description may be a stranger's."""
    file = path / name
    if Path(name).name != name or not file.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"'{name}' is no file in it")
    return file
