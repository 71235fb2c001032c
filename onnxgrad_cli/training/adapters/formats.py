"""The three forms in which adapters are kept: ours, onnxruntime's, and PEFT's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import Switch, check_folder, check_target, followed, make_folder
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.training.adapters import onnx_adapter, own_file
from onnxgrad_cli.training.adapters.onnx_adapter import is_onnx_adapter, load_onnx_adapter, onnx_adapter_bytes
from onnxgrad_cli.training.adapters.own_file import adapter_bytes, load_adapter
from onnxgrad_cli.training.adapters.peft_folder import CONFIG, MODEL, PICKLE, load_peft, peft_bytes
from onnxgrad_cli.training.run.base import is_base, untrained_digest

Form = Literal["safetensors", "onnx_adapter", "peft"]


class AdapterTarget:
    """Where adapters are to be written, and in which form.

    Attributes:
        path: the file, or the folder of PEFT.
        form: which one it is.
    """

    def __init__(self, out: str | Path) -> None:
        """Take a place by its ending, or by a word before it.

        Args:
            out: `NAME.safetensors`, `NAME.onnx_adapter`, or a folder for PEFT: one that is there, a name that has no
                ending or ends in a slash; or one of the words 'safetensors', 'onnx_adapter' and 'peft', a colon, and
                any name.

        Raises:
            UsageError: neither says which form it is, or it is no file; see `followed`.
        """
        text = str(out)
        word, _, rest = text.partition(":")
        named = word in get_args(Form) and bool(rest)
        path = checks.path("adapter", rest if named else text)
        self.form: Form = word if named else _by_ending(text)  # type: ignore[assignment]
        self.path = path if self.form == "peft" else followed(path)

    @property
    def files(self) -> list[Path]:
        """The files that are written."""
        return [self.path / MODEL, self.path / CONFIG] if self.form == "peft" else [self.path]

    def check(self, model: ModelProto, source: Path | None, force: bool) -> None:
        """Make sure that the files may be written, before any work is done for them; see `check_target`.

        Raises:
            UsageError: one is an input, or a file that onnxgrad did not write.
            OnnxgradError: one can't be written.
        """
        if self.form != "peft":
            check_target(self.path, model, source, force)
            return
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`adapter`: '{self.path}' is a file, and PEFT has a folder", "name a folder")
        check_folder(self.path, "`adapter`")
        weights, config = self.files
        if self.path.is_dir() and weights.exists():
            check_target(weights, model, source, force)
        elif config.exists() and not force:
            raise UsageError(f"'{config}' exists, and onnxgrad did not write it", "replace it with `force=True`")

    def make(
        self, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
    ) -> dict[Path, bytes]:
        """What goes into the files, which tells whether it can.

        Args:
            model: the inference model that was adapted.
            adapters: its adapters.
            values: their factors, weights that were trained in full, and running statistics.

        Raises:
            OnnxgradError: the form has no place for something.
        """
        if self.form == "peft":
            found = peft_bytes(model, adapters, values)
            return {self.path / name: data for name, data in found.items()}
        write = onnx_adapter_bytes if self.form == "onnx_adapter" else _own
        return {self.path: write(model, adapters, values)}

    def stage(
        self, switch: Switch, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
    ) -> list[Path]:
        """Write adapters that take their names with other files; see `make`.

        Returns:
            The files.
        """
        made = self.make(model, adapters, values)
        if self.form == "peft":
            make_folder(self.path, "`adapter`")
        for file, data in made.items():
            switch.stage(file, methodcaller("write", data), durable=True)
        return list(made)

    def save(self, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> list[Path]:
        """Write adapters, all of the files or none; see `make`.

        Returns:
            The files.
        """
        self.make(model, adapters, values)  # before a folder is made for nothing
        if self.form == "peft":
            make_folder(self.path, "`adapter`")
        with Switch(self.files[-1], bound=True) as switch:
            files = self.stage(switch, model, adapters, values)
            switch.commit()
        return files


def _by_ending(text: str) -> Form:
    path = Path(text)
    if path.suffix in (".safetensors", ".onnx_adapter"):
        return "onnx_adapter" if path.suffix == ".onnx_adapter" else "safetensors"
    if text.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        return "peft"
    raise UsageError(
        f"`adapter`: the ending of '{text}' says nothing of the form",
        "end in .safetensors or .onnx_adapter; a folder of PEFT has no ending, or 'peft:' before it",
    )


def _own(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> bytes:
    return adapter_bytes(adapters, values, untrained_digest(model, values))


def read_adapters(source: Path, model: ModelProto, tell: Tell = silent) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters that a file or a folder holds, as they belong to a model.

    Args:
        source: in any of the three forms.
        model: the inference model; it is only read.
        tell: takes a line where damage would not be noticed, and where they were trained on another model.

    Returns:
        The adapters, and by name their factors and what else was trained.

    Raises:
        OnnxgradError: it can't be read, is damaged, or belongs to another model.
    """
    if source.is_dir():
        if not (source / CONFIG).exists():
            raise OnnxgradError(f"'{source}' is a folder, and holds no {CONFIG} of PEFT", "name the file")
        return load_peft(source, model)
    foreign = is_onnx_adapter(source)
    adapters, values = load_onnx_adapter(source, model) if foreign else load_adapter(source, tell)
    base = onnx_adapter.base_of(source) if foreign else own_file.base_of(source)
    if base and not is_base(base, model, values):
        tell(
            f"caution: the adapters in '{source}' were trained on another model, of other nodes, opsets, inputs or "
            "outputs, or other weights where they are not trained",
            0,
        )
    return adapters, values


def files_of(source: Path) -> list[Path]:
    """The files that adapters are in."""
    return [source / name for name in (MODEL, PICKLE, CONFIG)] if source.is_dir() else [source]


def is_foreign(source: Path) -> bool:
    """Whether adapters are in another form than ours."""
    return source.is_dir() or (source.is_file() and is_onnx_adapter(source))
