"""The report of a training run: the curves of the loss, the results of each epoch, the data and the options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from onnxgrad_cli.report import sections
from onnxgrad_cli.report.blocks import Block, Inline, Name, Page, Paragraph, Picture, Row, Section, Table
from onnxgrad_cli.report.curve import Curve, svg
from onnxgrad_cli.report.formatting import figure, names, number, seconds, several
from onnxgrad_cli.report.model import Report

CURVE, RATE, METRIC = "curve.svg", "rate.svg", "metric-{}.svg"
"""File names of pictures in the report's folder: the curves of the loss, the learning rate and each metric."""

ENDS = {
    "done": "All epochs were run",
    "max steps": "The run ended after the requested number of steps",
    "no better": "The run ended early, because the validation did not improve",
    "converged": "The run ended early, because the optimizer converged",
    "no lower loss": "The run ended early, because the optimizer found no lower loss",
}
"""Reason why a run ended -> the sentence that reports it."""

OF_THE_BUILD = {"Request", "Trained weights", "Adapters", "Not trained", "Cautions", "Cost", "Versions"}
"""Titles of the sections that are copied from the report of the training model."""


@dataclass(frozen=True)
class RunSummary:
    """The data of the report of one training run.

    Attributes:
        model: the name of the model's file.
        reason: the reason why the run ended, a key of `ENDS`.
        epochs: for each epoch, a map from 'loss', 'val_loss' or 'val_<metric>' to the result. There is at least one
            epoch.
        best: the number of the epoch whose weights were kept, from 1.
        by: the name in `epochs` of the result by which the best epoch was chosen; "" if the last epoch was kept.
        steps: the number of steps.
        seconds: the duration of the last call in seconds, without the time before a resume.
        course: option of the run -> its value.
        data: purpose of a data set -> (its source, its number of samples).
        files: the files that were written.
        curve: the curve of the loss: of each step, and on the validation data.
        others: metric, or 'rate' for the learning rate -> its curve.
        confusion: output -> (the names of its classes, its confusion matrix in the epoch whose weights were kept). Rows
            are labels, columns are predicted classes.
        built: the report of the training model.
    """

    model: str
    reason: str
    epochs: Sequence[Mapping[str, float]]
    best: int
    by: str
    steps: int
    seconds: float
    course: Mapping[str, object]
    data: Mapping[str, tuple[str, int]]
    files: Sequence[str]
    curve: Curve
    others: Mapping[str, Curve]
    confusion: Mapping[str, tuple[Sequence[str], Sequence[Sequence[int]]]]
    built: Report

    @property
    def pictures(self) -> list[Picture]:
        """The curves of the loss, of each metric and of the learning rate."""
        found = [_picture(self.curve, CURVE, f"Loss of {self.model}")] if self.curve.steps else []
        for i, (name, curve) in enumerate(self.others.items(), 1):
            file = RATE if name == "rate" else METRIC.format(i)
            found.append(_picture(curve, file, f"{_words(name).capitalize()} of {self.model}"))
        return found


def page(run: RunSummary) -> Page:
    """Return the report of a run as a document."""
    which = f", the best by its {_words(run.by)}" if run.by else ", the last"
    verdict = f"{ENDS[run.reason]}; the model has the weights of epoch {run.best} of {len(run.epochs)}{which}."
    return Page(("Training of ", Name(run.model)), verdict, "good", list(_glance(run)), list(_sections(run)))


def _glance(run: RunSummary) -> Iterator[tuple[str, Inline]]:
    first, best = run.epochs[0], run.epochs[run.best - 1]
    for name, value in best.items():
        yield _words(name), f"{figure(first[name])} in the first epoch, {figure(value)} in epoch {run.best}"
    yield "steps", f"{number(run.steps)} in {several(len(run.epochs), 'epoch')}"
    yield "time", seconds(run.seconds)


def _sections(run: RunSummary) -> Iterator[Section]:
    """Yield the sections about the run, and the sections of the training model's report that are in `OF_THE_BUILD`."""
    if run.pictures:
        yield Section("Curves", list(run.pictures))
    names = list(run.epochs[0])
    rows: list[Row] = [
        (str(i), *(figure(epoch[name]) for name in names), "its weights are in the model" if i == run.best else "")
        for i, epoch in enumerate(run.epochs, 1)
    ]
    yield Section("Epochs", [Table(("epoch", *map(_words, names), ""), rows, frozenset(range(1 + len(names))))])
    if run.confusion:
        yield Section("Confusion of classes", list(_confusion(run.confusion)))
    rows = [(Name(option), _setting(value)) for option, value in run.course.items()]
    yield Section("Options of the training", [Table(("option", "value"), rows)])
    rows = [(use, Name(source), number(samples)) for use, (source, samples) in run.data.items()]
    yield Section("Data", [Table(("used for", "from", "samples"), rows, frozenset({2}))])
    yield from (section for section in sections.sections(run.built) if section.title in OF_THE_BUILD)
    yield Section("Files", [Table(("written",), [(Name(file),) for file in run.files])])


def _picture(curve: Curve, file: str, words: str) -> Picture:
    return Picture(partial(svg, curve, words), words, file=file)


def _confusion(found: Mapping[str, tuple[Sequence[str], Sequence[Sequence[int]]]]) -> Iterator[Block]:
    """Yield the confusion matrix of each output: a row for each label, a column for each predicted class."""
    for output, (classes, counts) in found.items():
        yield Paragraph((Name(output), ": rows are labels, columns are predicted classes, with the selected weights."))
        rows: list[Row] = [(Name(label), *map(number, row)) for label, row in zip(classes, counts, strict=True)]
        yield Table(("", *classes), rows, frozenset(range(1, 1 + len(classes))))


def _setting(value: object) -> Inline:
    """Return the value of an option, or its values if there are several."""
    return names([str(each) for each in value], len(value)) if isinstance(value, list | tuple) else Name(str(value))


def _words(name: str) -> str:
    return name.replace("val_", "validation ")
