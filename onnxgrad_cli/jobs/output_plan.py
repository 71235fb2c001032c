"""Resolve and check the files that a job writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import conflict, missing_value, wrong_value
from onnxgrad_cli.files import STREAM, ModelSource, check_apart, check_target, resolve_output
from onnxgrad_cli.files.start_values import check_places, places
from onnxgrad_cli.report import FORMATS


@dataclass(frozen=True)
class OutputPlan:
    """The files that a build writes. Symbolic links in names that the user typed are resolved.

    Attributes:
        model: the training model; None is stdout.
        others: further models and checkpoints to write beside it.
        values_beside: write the values of weights and state to files beside the model.
        reports: the files of the report.
        picture: the HTML page with the picture of the model; None for no picture.
        dump: the folder for the model after each pass; None to write no such models.
        force: replace files that onnxgrad did not write.
    """

    model: Path | None
    others: tuple[Path, ...] = ()
    values_beside: bool = False
    reports: tuple[Path, ...] = ()
    picture: Path | None = None
    dump: Path | None = None
    force: bool = False

    @classmethod
    def of(
        cls, model: Path | None, others: Sequence[Path] = (), values_beside: bool = False,
        reports: Sequence[str | Path] = (), no_report: bool = False, picture: str | Path | None = None,
        dump: str | Path | None = None, force: bool = False,
    ) -> OutputPlan:  # fmt: skip
        """Return the plan for the file names that a user gave.

        Args:
            reports: the files of the report; () for `<model>.report.md`, or for no file if the model goes to stdout.
            no_report: write no report.

        Raises:
            UsageError: a name is empty, is not a file, or has the suffix of another format.
        """
        named = checks.paths("reports", reports)
        if no_report:
            named = []
        elif not named and model is not None:
            named = [model.with_name(f"{model.name}.report.md")]
        else:
            named = [resolve_output(file) for file in named]
        page = None if picture is None else page_for(checks.path("picture", picture), model)
        folder = checks.path_or_none("dump_passes", dump)
        return cls(model, tuple(others), values_beside, tuple(named), page, folder, force)

    def check(self, model: ModelProto, source: Path | None) -> None:
        """Check that every file may be written.

        Args:
            model: the model that was read. Files of its external data must not be overwritten.
            source: the file of the model that was read, which must not be overwritten.

        Raises:
            UsageError: a file is an input, was not written by onnxgrad, or would be written twice.
            OnnxgradError: a file can't be written.
        """
        files = [file for file in (self.model, *self.others, *self.reports, self.picture) if file is not None]
        for file in files:
            check_target(file, model, source, self.force)
        if self.values_beside and self.model is not None:
            check_places(self.model, self.force)
            files += places(self.model)
        check_apart(files)
        for file in self.reports:
            if file.suffix[1:] not in FORMATS:
                raise wrong_value(
                    f"`reports`: can't tell the report's format from the name '{file}'",
                    f"use '{file.with_suffix('.md')}' for Markdown, which reads well as plain text, or .html or .json",
                )


def _is_stream(model: ModelSource, out: str | Path | None) -> bool:
    return STREAM in (str(out), str(model) if out is None and isinstance(model, (str, Path)) else "")


def target_of(model: ModelSource, out: str | Path | None, word: str) -> Path | None:
    """Return the file for an output model: `out`, or by default `<model>.<word>.onnx`; None for stdout.

    Args:
        model: the source model; '-' is stdin, for which the default is stdout.
        out: the name that the user gave; '-' is stdout. A symbolic link is resolved.
        word: a part of the default name.

    Raises:
        UsageError: `out` is None for a model in memory, or is not a file.
    """
    if _is_stream(model, out):
        return None
    return file_of(model, out, word, streams=True)


def file_of(
    model: ModelSource, out: str | Path | None, word: str, suffix: str = ".onnx", streams: bool = False
) -> Path:
    """Return the file for an output: `out`, or by default `<model>.<word><suffix>` beside the source.

    Args:
        model: the source model.
        out: the name that the user gave. A symbolic link is resolved.
        word, suffix: parts of the default name.
        streams: True if hints may offer '-', which the caller then handles.

    Raises:
        UsageError: the file would be stdout, `out` is None for a model in memory, or `out` is not a file.
    """
    if _is_stream(model, out):
        raise conflict("`out`: the output can't be written to stdout", "pass an output file")
    if out is None:
        if not isinstance(model, (str, Path)):
            raise missing_value("`out` is required, because a model in memory has no file name", "name a file")
        source = checks.path("model", model)
        return source.with_name(f"{source.stem}.{word}{suffix}")
    return resolve_output(checks.path("out", out), streams)


def page_for(picture: Path, target: Path | None) -> Path:
    """Return the file for the HTML page with a picture of the training model.

    Args:
        picture: the name that the user gave.
        target: the file of the model; None if it is written to stdout.

    Raises:
        UsageError: the suffix of `picture` is not .html, or the model goes to stdout.
    """
    if picture.suffix.lower() != ".html":
        raise wrong_value(f"`picture`: '{picture}' does not end in .html", f"use '{picture.with_suffix('.html')}'")
    if target is None:
        raise missing_value(
            "`picture` is written beside the model, but the model is written to stdout", "name a file with `out`"
        )
    return resolve_output(picture)
