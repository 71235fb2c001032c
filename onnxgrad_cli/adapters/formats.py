"""Read and write adapters in three formats: onnxgrad's .safetensors, onnxruntime's .onnx_adapter, PEFT's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.adapters import onnx_adapter, own_file
from onnxgrad_cli.adapters.onnx_adapter import is_onnx_adapter, load_onnx_adapter, onnx_adapter_bytes
from onnxgrad_cli.adapters.own_file import adapter_bytes, load_adapter
from onnxgrad_cli.adapters.peft_folder import CONFIG, MODEL, PICKLE, load_peft, peft_bytes
from onnxgrad_cli.checkpoints.base_model_digest import is_base, untrained_digest
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError, missing_file, wrong_value
from onnxgrad_cli.files import AtomicWriteGroup, check_folder, check_target, make_folder, resolve_output
from onnxgrad_cli.metadata import Adapter

Form = Literal["safetensors", "onnx_adapter", "peft"]


class AdapterTarget:
    """The path and the format of adapters to write.

    Attributes:
        path: the file; for PEFT, the folder.
        form: the format.
    """

    def __init__(self, out: str | Path) -> None:
        """Parse the user's target. The format follows from the suffix or from a prefix.

        Args:
            out: `NAME.safetensors`, `NAME.onnx_adapter`, or a folder for PEFT. A path is taken for a folder if the
                folder exists, or if the path has no suffix or ends in a slash. After the prefix 'safetensors:',
                'onnx_adapter:' or 'peft:', any name is accepted.

        Raises:
            UsageError: the format is unknown, or the path can't be a file.
        """
        text = str(out)
        word, _, rest = text.partition(":")
        named = word in get_args(Form) and bool(rest)
        path = checks.path("adapter", rest if named else text)
        self.form: Form = word if named else _by_ending(text)  # type: ignore[assignment]
        self.path = path if self.form == "peft" else resolve_output(path)

    @property
    def files(self) -> list[Path]:
        """The paths of the files to write."""
        return [self.path / MODEL, self.path / CONFIG] if self.form == "peft" else [self.path]

    def check(self, model: ModelProto, source: Path | None, force: bool) -> None:
        """Check that the files may be written.

        Raises:
            UsageError: a file is an input, or exists, was not written by onnxgrad, and `force` is False.
            OnnxgradError: a file can't be written.
        """
        if self.form != "peft":
            check_target(self.path, model, source, force)
            return
        if self.path.exists() and not self.path.is_dir():
            raise wrong_value(f"`adapter`: '{self.path}' is a file, but PEFT needs a folder", "name a folder")
        check_folder(self.path, "`adapter`")
        weights, config = self.files
        if self.path.is_dir() and weights.exists():
            check_target(weights, model, source, force)
        elif config.exists() and not force:
            hint = "replace it with `force=True`"
            raise UsageError(f"'{config}' exists, and onnxgrad did not write it", hint, code="file_exists")

    def make(
        self, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
    ) -> dict[Path, bytes]:
        """Return the contents of the files to write: path -> bytes. Nothing is written.

        Args:
            model: the inference model that was adapted.
            adapters: the adapters of the model.
            values: name -> array: LoRA matrices of adapters, weights that were trained in full, and running statistics.

        Raises:
            OnnxgradError: the format can't store an adapter or a value.
        """
        if self.form == "peft":
            return {self.path / name: data for name, data in peft_bytes(model, adapters, values).items()}
        if self.form == "onnx_adapter":
            return {self.path: onnx_adapter_bytes(model, adapters, values)}
        return {self.path: adapter_bytes(adapters, values, untrained_digest(model, values))}

    def stage(
        self, switch: AtomicWriteGroup, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
    ) -> list[Path]:
        """Add the files to a group of files that is replaced atomically.

        Args:
            switch: the group of files.
            model, adapters, values: as in `make`.

        Returns:
            The paths of the files.
        """
        made = self.make(model, adapters, values)
        if self.form == "peft":
            make_folder(self.path, "`adapter`")
        for file, data in made.items():
            switch.stage(file, methodcaller("write", data), durable=True)
        return list(made)

    def save(self, model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> list[Path]:
        """Write the files atomically, all or none. The arguments are those of `make`.

        Returns:
            The paths of the files.
        """
        self.make(model, adapters, values)  # raises errors before a folder is made
        if self.form == "peft":
            make_folder(self.path, "`adapter`")
        with AtomicWriteGroup(self.files[-1], bound=True) as switch:
            files = self.stage(switch, model, adapters, values)
            switch.commit()
        return files


def _by_ending(text: str) -> Form:
    path = Path(text)
    forms: dict[str, Form] = {".safetensors": "safetensors", ".onnx_adapter": "onnx_adapter"}
    if path.suffix in forms:
        return forms[path.suffix]
    if text.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        return "peft"
    hint = "use the ending .safetensors or .onnx_adapter; for a folder of PEFT use no ending, or 'peft:' in front"
    raise wrong_value(f"`adapter`: the ending of '{text}' is not a known format", hint)


def read_adapters(source: Path, model: ModelProto, tell: Tell = silent) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """Read the adapters of a model from a file or a folder.

    Args:
        source: the file or folder, in any of the three formats.
        model: the inference model; not changed.
        tell: receives a warning if the file has no checksums, or if the adapters were trained on another model.

    Returns:
        The adapters; and a map name -> array of their LoRA matrices, of weights that were trained in full, and of
        running statistics.

    Raises:
        OnnxgradError: the source can't be read, is damaged, or doesn't fit the model.
    """
    if source.is_dir():
        if not (source / CONFIG).exists():
            message = f"'{source}' is a folder without the {CONFIG} of PEFT"
            raise missing_file(message, "pass a file, or a PEFT folder")
        return load_peft(source, model)
    foreign = is_onnx_adapter(source)
    adapters, values = load_onnx_adapter(source, model) if foreign else load_adapter(source, tell)
    base = onnx_adapter.base_of(source) if foreign else own_file.base_of(source)
    if base and not is_base(base, model, values):
        tell(
            f"caution: the adapters in '{source}' were trained on another model: its nodes, opsets, inputs, outputs "
            "or untrained weights differ",
            0,
        )
    return adapters, values


def files_of(source: Path) -> list[Path]:
    """Return the paths of the files to read, for adapters in a file or a folder."""
    return [source / name for name in (MODEL, PICKLE, CONFIG)] if source.is_dir() else [source]


def is_foreign(source: Path) -> bool:
    """Return True if adapters are in another program's format: in a folder of PEFT, or an .onnx_adapter file."""
    return source.is_dir() or (source.is_file() and is_onnx_adapter(source))
