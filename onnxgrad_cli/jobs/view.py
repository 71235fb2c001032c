"""From a model in a file to a picture of it in another."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import STREAM, ModelSource, check_target, followed, read_model, save_bytes
from onnxgrad_cli.view import Drawing, draw, fold, render
from onnxgrad_cli.view.html import html
from onnxgrad_cli.view.render import SUFFIXES


@judged
def run_view(
    model: ModelSource,
    out: str | Path | None = None,
    kind: str | None = None,
    *,
    limit: int = 150,
    depth: int | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> tuple[Drawing, str]:
    """Draw the model in a file.

    Args:
        model: any model; '-' is stdin.
        out: where the picture goes; '-' or None writes none, and the caller has the text.
        kind: its format; by default what the suffix of `out` says, or else DOT.
        limit: fold the model until at most so many boxes stand for nodes; 0 folds nothing. A page of HTML holds the
            whole model, and opens so.
        depth: fold at this depth of its modules instead.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated.

    Returns:
        The drawing as it was folded, and the picture as text.

    Raises:
        UsageError: the format is unknown, or a file would be replaced that must not be.
        OnnxgradError: the model can't be read, or the picture can't be written.
    """
    target = None if out is None or str(out) == STREAM else followed(checks.path("out", out), streams=True)
    kind = kind or _by_suffix(target)
    proto, path = read_model(model)
    if target is not None:
        check_target(target, proto, path, force)
    whole = draw(proto, path)
    tell("laying out the picture", 1)
    drawing = fold(whole, limit, depth)
    text = html(whole, limit, depth) if kind == "html" else render(drawing, kind)  # a page folds and unfolds itself
    if target is not None:
        save_bytes(text.encode(), target)
    return drawing, text


def _by_suffix(target: Path | None) -> str:
    if target is None:
        return "dot"
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"the name of '{target}' says no format of a picture",
            f"{suggest(target.suffix, SUFFIXES, 'suffixes')}; or name one with `format`",
        )
    return SUFFIXES[target.suffix.lower()]
