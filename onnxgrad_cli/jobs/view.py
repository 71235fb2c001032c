"""Draw the graph of a model, and write the picture."""

from __future__ import annotations

import shlex
from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import unknown_name, wrong_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import STREAM, ModelSource, check_target, read_model, resolve_output, save_bytes
from onnxgrad_cli.view import Drawing, dot, draw, fold, html

SUFFIXES = {".dot": "dot", ".gv": "dot", ".html": "html", ".htm": "html"}
"""Suffix of a file -> the format to write."""

OF_GRAPHVIZ = frozenset({".svg", ".png", ".pdf"})
"""Suffixes of pictures that Graphviz can make from DOT. onnxgrad does not write them."""


@attribute_failures
@job
def run_view(
    model: ModelSource,
    out: str | Path | None = None,
    form: str | None = None,
    *,
    limit: int = 150,
    depth: int | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> tuple[Drawing, str]:
    """Draw the model in a file.

    Args:
        model: any model; '-' is stdin.
        out: the file of the picture. '-' or None writes no file: the caller prints the text.
        form: the format, 'dot' or 'html'. By default it follows from the suffix of `out`; without a file it is 'dot'.
        limit: the maximum number of boxes. Modules are folded until there are at most this many; 0 folds nothing. An
            HTML page contains the whole model, and is folded like this when it opens.
        depth: fold all modules at this depth, instead of using `limit`.
        force: replace a file that onnxgrad did not write.
        tell: receives progress messages.

    Returns:
        The folded drawing, and the picture as text.

    Raises:
        UsageError: the format is unknown, or an existing file would be replaced.
        OnnxgradError: the model can't be read, or the picture can't be written.
    """
    file = None if out is None or str(out) == STREAM else checks.path("out", out)
    target = file and resolve_output(file, streams=True)
    form = _format(file) if form is None else form
    if form not in SUFFIXES.values():
        raise unknown_name(f"no format '{form}' for pictures", "use 'dot' or 'html'")
    proto, path = read_model(model)
    if target is not None:
        check_target(target, proto, path, force)
    whole = draw(proto, path)
    tell("writing the picture", 1)
    drawing = fold(whole, limit, depth)
    # a page contains the code that folds and unfolds it
    text = html(whole, limit, depth) if form == "html" else dot(drawing)
    if target is not None:
        save_bytes(text.encode(), target)
    return drawing, text


def _format(file: Path | None) -> str:
    """Return the format for the suffix of a file; 'dot' for stdout."""
    suffix = file.suffix.lower() if file else ".dot"
    if file and suffix in OF_GRAPHVIZ:
        made = file.with_suffix(".dot")
        command = shlex.join(["dot", f"-T{suffix[1:]}", str(made), "-o", str(file)])
        raise wrong_value(
            f"can't draw '{file}': onnxgrad draws .html and .dot",
            f"use `out={str(made)!r}`, then run Graphviz: {command}",
        )
    if suffix not in SUFFIXES:
        raise wrong_value(
            f"`out`: can't tell the format of a picture from the name '{file}'",
            "use .html or .dot, or name the format with `form`",
        )
    return SUFFIXES[suffix]
