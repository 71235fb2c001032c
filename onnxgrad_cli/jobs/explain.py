"""Attribute the scores that a model gives to samples, to the model's inputs or to values inside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data import Data, SampleOptions, SequenceOptions, names_in
from onnxgrad_cli.data.class_names import called, number_of
from onnxgrad_cli.data.empty_kv_cache import with_empty_pasts
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.pictures import PictureLayout, layout_of
from onnxgrad_cli.data.text import Tokenizer
from onnxgrad_cli.errors import conflict, wrong_shape
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.explanations.attribution_picture import draw
from onnxgrad_cli.explanations.attributions import baseline_of
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.open_samples import check_batch_first, chosen, class_names, open_samples, scored
from onnxgrad_cli.explanations.run import Run
from onnxgrad_cli.explanations.subject import Subject, in_mode, the_input, the_layer, typed
from onnxgrad_cli.explanations.tokens import Token, page
from onnxgrad_cli.files import ModelSource, own_model, save_bytes
from onnxgrad_cli.files.writing import npz_bytes
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.jobs.score_gradients import UNPROVED, Verdict, file_for, proved_scorer
from onnxgrad_cli.metadata import check_is_original
from onnxgrad_cli.options import Options

UNSIGNED = frozenset({"saliency", "smoothgrad"})
"""Methods for which the attribution of a pixel or token is the largest magnitude over its channels.

For other methods, it is the sum over the channels.
"""

ENDINGS = (".npz", ".npy", ".png", ".html")


@dataclass(frozen=True)
class Explained:
    """The attributions of the scores of some samples.

    Attributes:
        method: the name of the method.
        words: a sentence that describes the computation.
        values: the attributions, float32 (n, ...), with the shape of the explained value; for grad-cam without its
            channels.
        samples: the indices of the samples, int64 (n,).
        classes: the classes whose scores are explained, int64 (n, ...).
        scores: the scores, float64 (n,).
        names: the names of the classes, if the model or the data have them; otherwise ().
        gaps: for integrated gradients, the relative error of the sum of each sample's attributions, float64 (n,). It is
            |sum - (S(x) - S(b))| / |S(x) - S(b)|, for the scores S of the sample x and of the baseline b. None for
            other methods.
        tokens: the token ids, int64 (n, length), if tokens are explained.
        texts: for each sample, the texts of its tokens without padding, if a tokenizer was given.
        lengths: the number of tokens of each sample, int64 (n,), if tokens are explained.
        proof: the verdict of the check of the gradients, with the reason.
        alone: True if the output is a single number, which is explained instead of the score of a class.
        files: the files written.
    """

    method: str
    words: str
    values: np.ndarray
    samples: np.ndarray
    classes: np.ndarray
    scores: np.ndarray
    names: Sequence[str] = ()
    gaps: np.ndarray | None = None
    tokens: np.ndarray | None = None
    texts: list[list[str]] | None = None
    lengths: np.ndarray | None = None
    proof: Verdict = UNPROVED
    alone: bool = False
    files: list[Path] = field(default_factory=list)

    def of_places(self, channels: int | None) -> np.ndarray:
        """Return the attributions of pixels or tokens: reduce the axis `channels` by a sum or the largest magnitude."""
        if channels is None:
            return self.values
        return np.abs(self.values).max(channels) if self.method in UNSIGNED else self.values.sum(channels)

    def of_tokens(self) -> list[list[Token]] | None:
        """Return the tokens of each sample with their attributions; None if values other than tokens are explained."""
        if self.tokens is None or self.lengths is None:
            return None
        texts = self.texts or [list(map(str, row)) for row in self.tokens.tolist()]
        values = self.of_places(2)
        return [
            [Token(int(number), text, float(value)) for number, text, value in zip(*row, strict=False)][:length]
            for *row, length in zip(self.tokens, texts, values, self.lengths.tolist(), strict=True)
        ]

    def name_of(self, row: int) -> str:
        """Return the name of a sample's class, or "score" if the output is a single number."""
        if self.alone:
            return "score"
        found = self.classes[row]
        if found.ndim:
            return "of each place"
        return self.names[found] if found < len(self.names) else str(found)


@attribute_failures
@job
def run_explain(
    model: ModelSource,
    data: str | Path,
    out: str | Path | None = None,
    method: Method | None = None,
    *,
    class_: int | str = "argmax",
    class_axis: int = 1,
    output: str | None = None,
    wrt: str | None = None,
    label: str = "label",
    prefix: str = "",
    sample: Sequence[int] = (),
    samples: SampleOptions | None = None,
    sequences: SequenceOptions | None = None,
    options: Options | None = None,
    verify: bool | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> Explained:
    """Attribute the score of a class to a model's input.

    Args:
        model: the model; '-' is stdin.
        data: samples in any format of training data, or a single picture.
        out: the output file: a .png for pictures; an .html for tokens; an .npz for `attributions`, `samples`, `classes`
            and `scores`, and for tokens also `tokens` and `texts`; or an .npy for the attributions. By default nothing
            is written.
        method: the method and its settings; by default saliency.
        class_: the class whose score is explained: a number, a name that the model stores, 'argmax' (the class that the
            model predicts), or 'label' (the class in the data). If an output has a score per class and position, the
            scores of all positions are summed.
        class_axis: the axis of the output that runs over the classes.
        output: the output with the scores; by default the first float output.
        wrt: the explained value: an input or a value inside the model. By default a float input; if there is none, the
            embeddings of the tokens.
        label: the name of the labels in the data.
        prefix: the prefix of the inputs' names in the data.
        sample: the indices of the samples to explain; by default all, and for a .png the first.
        samples: options of the conversion of data to samples, such as a normalization.
        sequences: options of the conversion of text to tokens. The tokenizer is also used to show the text of tokens.
        options: shapes and modes, as for a build.
        verify: check the gradients numerically. By default they are checked if that takes only a few seconds.
        force: replace a file that onnxgrad did not write.
        tell: receives progress messages.

    Raises:
        CheckFailed: a gradient is wrong, or a requested proof was not possible.
        UnsupportedError: the model can't be differentiated.
        UsageError: the arguments don't fit the model or the data.
        OnnxgradError: a file can't be read or written.
    """
    method, options, sequences = method or Method(), options or Options(), sequences or SequenceOptions()
    protect_inputs(data, sequences.tokenizer, method.baseline)
    proto, path = own_model(model)
    if output is None:
        check_is_original(proto)
    options = with_empty_pasts(proto, options, lambda: names_in(data), tell)
    target = file_for(out, ENDINGS, proto, path, force)
    pictured = target is not None and target.suffix.lower() == ".png"
    proto = in_mode(proto, path, options, tell)
    graph = typed(proto, path, options)
    check_ends(graph)
    what = scored(graph, output, class_axis)
    if method.name == "grad-cam":
        if wrt is not None:
            raise conflict("`wrt` can't be combined with grad-cam", "leave `wrt` out; choose the layer with `layer`")
        subject = the_layer(proto, path, graph, method.layer)
    else:
        subject = the_input(proto, path, graph, wrt)
    named = label if class_ == "label" else None
    found = open_samples(
        data, proto, graph, what, label, named is not None, prefix, samples or SampleOptions(), sequences, tell
    )
    check_batch_first(found, proto, subject.name, what.output)
    names = class_names(found, proto, what, named)
    class_ = number_of(class_, names)
    rows = chosen(found, sample or ((0,) if pictured else ()))
    shown = _picture(graph, found, target) if target is not None and pictured else None
    scorer, proof = proved_scorer(subject, what.output, what, found.batch_size, options, verify, tell)
    needs = method.name in ("integrated-gradients", "occlusion")
    baseline = baseline_of(method, scorer, found) if needs else np.zeros(())
    run = Run(method, what, scorer, found, class_, named, graph, baseline)
    values = run.explain(rows, tell)
    tokens, lengths = _tokens(subject, proto, found, rows)
    texts = _texts(tokens, lengths, sequences.tokenizer)
    alone = what.classes == 1 and class_ == "argmax"
    whose = "" if alone else _class_words(class_, names)
    explained = Explained(
        method.name,
        escaped(f"{run.words()}, of {whose}'{what.output}' with respect to '{subject.name}'"),
        values.values, rows, values.classes, values.scores, names, values.gaps,
        tokens, texts, lengths, proof, alone,
    )  # fmt: skip
    if target is not None:
        save_bytes(_drawn(explained, target, run, *shown) if shown else _arrays(explained, target), target)
        explained.files.append(target)
    return explained


def _class_words(class_: int | str, names: Sequence[str]) -> str:
    words = {"argmax": "the predicted class", "label": "the labelled class"}
    return f"the score of {words.get(str(class_)) or called(int(class_), names)} in "


def _tokens(
    subject: Subject, model: ModelProto, data: Data, rows: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the tokens whose embeddings are explained, and the length of each sample; None, None for other values."""
    lookup = next((n for n in model.graph.node if subject.name in n.output and n.op_type == "Gather"), None)
    if lookup is None or lookup.input[1] not in data.arrays:
        return None, None
    found, column = data.batch(rows)[lookup.input[1]], data.arrays[lookup.input[1]]
    if found.ndim != 2:
        return None, None
    return found, column.lengths[data.rows(rows)] if isinstance(column, Lists) else np.full(len(rows), found.shape[1])


def _texts(tokens: np.ndarray | None, lengths: np.ndarray | None, tokenizer: Path | None) -> list[list[str]] | None:
    """Return, for each sample, the texts of its tokens; None without a tokenizer.

    Raises:
        UsageError: the explained value is not embeddings of tokens, or the tokenizer can't be used.
    """
    if tokenizer is None:
        return None
    if tokens is None or lengths is None:
        raise conflict(
            "`tokenizer`: the explained value is not tokens", "leave it out, or explain the embeddings of tokens"
        )
    names = Tokenizer(tokenizer)
    return [names.texts(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]


def _picture(graph: Graph, data: Data, target: Path) -> tuple[str, PictureLayout]:
    """Return the input that takes pictures, and the layout of the pictures."""
    for name in data.arrays:
        layout = layout_of(graph.types[name]) if name in graph.types and is_float(graph.types[name]) else None
        if layout is not None:
            return name, layout
    raise conflict(f"can't draw '{target}': the model has no picture input", "write .npz")


def _arrays(found: Explained, target: Path) -> bytes:
    """Return the content of the output file, in the format that its suffix gives."""
    if target.suffix.lower() == ".html":
        return _token_page(found, target)
    if target.suffix.lower() == ".npy":
        stream = BytesIO()
        np.save(stream, found.values)
        return stream.getvalue()
    arrays = {"attributions": found.values, "samples": found.samples, "classes": found.classes, "scores": found.scores}
    if found.tokens is not None:
        arrays["tokens"] = found.tokens
    if found.texts is not None:
        length = 0 if found.tokens is None else found.tokens.shape[1]
        arrays["texts"] = np.array([[*row, *[""] * (length - len(row))] for row in found.texts])
    return npz_bytes(arrays)


def _token_page(found: Explained, target: Path) -> bytes:
    """Return an HTML page of the tokens, coloured by their attributions.

    Raises:
        UsageError: the explained value is not embeddings of tokens.
    """
    tokens = found.of_tokens()
    if tokens is None:
        raise conflict(
            f"can't write '{target}': .html is for tokens, but the explained value is not tokens", "write .png or .npz"
        )
    headings = [
        f"sample {number}: {found.name_of(row)}, {found.scores[row]:.5g}" for row, number in enumerate(found.samples)
    ]
    return page(found.words, list(zip(headings, tokens, strict=True))).encode()


def _drawn(found: Explained, target: Path, run: Run, name: str, layout: PictureLayout) -> bytes:
    """Return a picture of the samples beside their attributions.

    Raises:
        UsageError: the attributions don't belong to the pixels of a picture.
    """
    pictures = run.data.batch(found.samples)[name].astype(np.float64)
    if layout.axis is not None:
        pictures = np.moveaxis(pictures, layout.axis, -1)[..., :3]
        pictures = pictures[..., 0] if pictures.shape[-1] < 3 else pictures
    heat = found.values if found.method == "grad-cam" else found.of_places(run.channels(found.values.ndim))
    if heat.ndim != 3:
        raise wrong_shape(f"can't draw '{target}': the attributions have the shape {list(heat.shape)}", "write .npz")
    return draw(pictures, heat, found.method == "grad-cam", found.words)
