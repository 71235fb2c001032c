"""The report of a run of training: how the loss went, on which data, and what the run was asked to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxgrad_cli.report import document
from onnxgrad_cli.report.blocks import Block, Inline, Name, Page, Paragraph, Picture, Section, Table
from onnxgrad_cli.report.curve import Curve, svg
from onnxgrad_cli.report.model import Report
from onnxgrad_cli.report.words import figure, names, number, seconds, several

CURVE, RATE, METRIC = "curve.svg", "rate.svg", "metric-{}.svg"
"""The files beside the report with the pictures of the curves: of the loss, of the rate, and of each metric."""

ENDS = {
    "done": "All epochs were run",
    "max steps": "It ended after as many steps as were asked for",
    "no better": "It ended early, for the validation got no better",
}
"""Why a run ends."""

OF_THE_BUILD = {"What was asked", "Trained weights", "Adapters", "Not trained, and why", "Cautions", "Cost", "Versions"}
"""What the report of the training model says that matters here too."""


@dataclass(frozen=True)
class Run:
    """What there is to say about a run.

    Attributes:
        model: the name of the model's file.
        reason: why it ended, one of `ENDS`.
        epochs: what each has come to: 'loss', 'val_loss', 'val_<metric>'; one at least.
        best: the epoch whose weights were taken, counted from 1.
        by: what says which epoch is best, a name in `epochs`; "" where the last one is taken.
        steps, seconds: how many were taken in all, and how long it took at last.
        course: how it was trained, by the option.
        data: what each set of data is for -> its source and how many samples it has.
        files: what was written.
        curve: the loss of each step.
        others: what else has a curve, metrics and the rate, by name.
        confusion: output -> the names of its classes, and how often each (rows) was taken for each in the epoch whose
            weights were taken.
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
        """The curves: of the loss, of each metric and of the rate."""
        found = [_picture(self.curve, CURVE, f"Loss of {self.model}")] if self.curve.steps else []
        for i, (name, curve) in enumerate(self.others.items(), 1):
            file = RATE if name == "rate" else METRIC.format(i)
            found.append(_picture(curve, file, f"{_words(name).capitalize()} of {self.model}"))
        return found


def page(run: Run) -> Page:
    """The run as a document."""
    which = f", the best by its {_words(run.by)}" if run.by else ", the last"
    verdict = f"{ENDS[run.reason]}; the model has the weights of epoch {run.best} of {len(run.epochs)}{which}."
    return Page(("Training of ", Name(run.model)), verdict, "good", list(_glance(run)), list(_sections(run)))


def _glance(run: Run) -> Iterator[tuple[str, Inline]]:
    first, best = run.epochs[0], run.epochs[run.best - 1]
    for name, value in best.items():
        yield _words(name), f"{figure(first[name])} in the first epoch, {figure(value)} in epoch {run.best}"
    yield "steps", f"{number(run.steps)} in {several(len(run.epochs), 'epoch')}"
    yield "time", seconds(run.seconds)


def _sections(run: Run) -> Iterator[Section]:
    """The sections on the run, then those on the training model that matter to it."""
    if run.pictures:
        yield Section("Curves", list(run.pictures))
    names = list(run.epochs[0])
    rows: list[tuple[Inline, ...]] = [
        (str(i), *(figure(epoch[name]) for name in names), "its weights were taken" if i == run.best else "")
        for i, epoch in enumerate(run.epochs, 1)
    ]
    yield Section("Epochs", [Table(("epoch", *map(_words, names), ""), rows, frozenset(range(1 + len(names))))])
    if run.confusion:
        yield Section("Confusion of classes", list(_confusion(run.confusion)))
    rows = [(Name(option), _setting(value)) for option, value in run.course.items()]
    yield Section("How it was trained", [Table(("option", "value"), rows)])
    rows = [(use, Name(source), number(samples)) for use, (source, samples) in run.data.items()]
    yield Section("Data", [Table(("used for", "from", "samples"), rows, frozenset({2}))])
    yield from (section for section in document.sections(run.built) if section.title in OF_THE_BUILD)
    yield Section("Files", [Table(("written",), [(Name(file),) for file in run.files])])


def _picture(curve: Curve, file: str, words: str) -> Picture:
    return Picture(svg(curve, words), file, words)


def _confusion(found: Mapping[str, tuple[Sequence[str], Sequence[Sequence[int]]]]) -> Iterator[Block]:
    """How often each class was taken for each: a row for each label, a column for each class that was chosen."""
    for output, (classes, counts) in found.items():
        yield Paragraph((Name(output), ": labels by row, what was chosen by column, with the weights that were taken."))
        rows: list[tuple[Inline, ...]] = [
            (Name(label), *map(number, row)) for label, row in zip(classes, counts, strict=True)
        ]
        yield Table(("", *classes), rows, frozenset(range(1, 1 + len(classes))))


def _setting(value: object) -> Inline:
    """What an option was given; of several values each."""
    return names([str(each) for each in value], len(value)) if isinstance(value, list | tuple) else Name(str(value))


def _words(name: str) -> str:
    return name.replace("val_", "validation ")
