"""Where the model that a job makes is written."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import STREAM, ModelSource, followed


def target_of(
    model: ModelSource, out: str | Path | None, word: str, suffix: str = ".onnx", streams: bool = True
) -> Path | None:
    """Where a model goes: as asked, else beside the one it was made from, as `<model>.<word>.onnx`; None is stdout.

    Args:
        model: where it was read from.
        out: what is asked for; of a link, the file that it leads to.
        word, suffix: of the name where nothing is.
        streams: whether stdout is taken; else it is refused elsewhere, and no hint names it.

    Raises:
        UsageError: it was made from one in memory, and nothing is asked for; or what is, is no file.
    """
    if out is None:
        if not isinstance(model, (str, Path)):
            raise UsageError("`out`: there is no file beside which to write, for the model is in memory", "name a file")
        source = checks.path("model", model)
        return None if str(model) == STREAM else source.with_name(f"{source.stem}.{word}{suffix}")
    return None if str(out) == STREAM else followed(checks.path("out", out), streams)
