"""From a model and samples to what its scores of them come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.explanations.baseline import baseline_of
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.pictures import draw
from onnxgrad_cli.explanations.run import Run
from onnxgrad_cli.explanations.samples import check_batch_first, chosen, class_names, open_samples, scored
from onnxgrad_cli.explanations.subject import Subject, in_mode, the_input, the_layer, typed
from onnxgrad_cli.explanations.tokens import Token, page
from onnxgrad_cli.files import ModelSource, own_model, save_bytes
from onnxgrad_cli.files.arrays import write_npz
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.jobs.scores import UNPROVED, Verdict, file_for, proved_scorer
from onnxgrad_cli.metadata import check_is_original
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.class_names import called, number_of
from onnxgrad_cli.training.data import Data, SampleOptions, SequenceOptions, names_in
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.pasts import with_empty_pasts
from onnxgrad_cli.training.data.picture_layout import Layout, layout_of
from onnxgrad_cli.training.data.text import Tokenizer

UNSIGNED = frozenset({"saliency", "smoothgrad"})
"""Methods of which the largest magnitude over channels counts; of the others attributions add up."""

ENDINGS = (".npz", ".npy", ".png", ".html")


@dataclass(frozen=True)
class Explained:
    """What a score comes from.

    Attributes:
        method: its name.
        words: what was done, in a sentence.
        values: attributions, float32 (n, ...), of the shape of what they are of; of grad-cam (n, *places).
        samples: the numbers of the samples, int64 (n,).
        classes: the classes whose scores are explained, int64 (n, ...).
        scores: the scores, float64 (n,).
        names: what the classes are called, if anything.
        gaps: of integrated gradients, how far each sum is from the difference of the scores, as a share; float64 (n,).
        tokens: the numbers of tokens, where attributions are of these; int64 (n, length).
        texts: what the tokens of each sample stand for, up to its end, where a tokenizer says so.
        lengths: how many tokens each sample has, int64 (n,).
        proof: the verdict on the gradients, and why.
        alone: whether the output is one number, so that it is itself what is explained, and no class of it.
        files: what was written.
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
        """The attributions of places: over an axis of channels, their sum or their largest magnitude."""
        if channels is None:
            return self.values
        return np.abs(self.values).max(channels) if self.method in UNSIGNED else self.values.sum(channels)

    def of_tokens(self) -> list[list[Token]] | None:
        """The tokens of each sample with their attributions; None where it is no tokens that are explained."""
        if self.tokens is None or self.lengths is None:
            return None
        texts = self.texts or [list(map(str, row)) for row in self.tokens.tolist()]
        values = self.of_places(2)
        return [
            [Token(int(number), text, float(value)) for number, text, value in zip(*row, strict=False)][:length]
            for *row, length in zip(self.tokens, texts, values, self.lengths.tolist(), strict=True)
        ]

    def name_of(self, row: int) -> str:
        """What the class of a sample is called; "score" where there is one number alone."""
        if self.alone:
            return "score"
        found = self.classes[row]
        if found.ndim:
            return "of each place"
        return self.names[found] if found < len(self.names) else str(found)


@judged
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
    """Attribute the score of a class to what a model is fed.

    Args:
        model: the model; '-' is stdin.
        data: samples in any format of training data, or a single picture.
        out: a .png of pictures, an .html of tokens, an .npz with `attributions`, `samples`, `classes` and `scores`, of
            tokens also `tokens` and `texts`, or an .npy of the attributions; by default nothing is written.
        method: how; by default saliency.
        class_: whose score: a number, a name that the model stores, 'argmax' (its own answer), or 'label'. Of an output
            with places besides classes it is the sum of all places' scores.
        class_axis: the axis of the classes.
        output: the output that is scored; by default the first of floats.
        wrt: the input that is explained, or a value in between, such as the embeddings of tokens, which is the default
            where there is no input of floats.
        label, prefix: what the data call the labels, and have before the names of inputs.
        sample: the numbers of the samples that are explained; by default all, of a .png the first.
        samples: how columns become inputs, such as a normalization.
        sequences: how text becomes tokens; the tokenizer also says what tokens that the data hold stand for.
        options: shapes and modes, as for a build.
        verify: prove the gradients; by default where that takes a few seconds.
        force: replace a file that onnxgrad did not write.
        tell: takes what is narrated.

    Raises:
        CheckFailed: a gradient is wrong, or there is no proof though one is asked for.
        UnsupportedError: the model can't be differentiated.
        UsageError: the request does not fit the model or the data.
        OnnxgradError: a file can't be read or written.
    """
    method, options, sequences = method or Method(), options or Options(), sequences or SequenceOptions()
    keep(data, sequences.tokenizer, method.baseline)
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
            raise UsageError("`wrt` is not for grad-cam", "leave `wrt` out; `layer` names the layer")
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
        visible(f"{run.words()}, of {whose}'{what.output}', by '{subject.name}'"),
        values.values, rows, values.classes, values.scores, names, values.gaps,
        tokens, texts, lengths, proof, alone,
    )  # fmt: skip
    if target is not None:
        save_bytes(_drawn(explained, target, run, *shown) if shown else _arrays(explained, target), target)
        explained.files.append(target)
    return explained


def _class_words(class_: int | str, names: Sequence[str]) -> str:
    words = {"argmax": "the class that the model finds", "label": "the labelled class"}
    return f"the score of {words.get(str(class_)) or called(int(class_), names)} of "


def _tokens(
    subject: Subject, model: ModelProto, data: Data, rows: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The tokens whose embeddings are explained, and how many each sample has."""
    lookup = next((n for n in model.graph.node if subject.name in n.output and n.op_type == "Gather"), None)
    if lookup is None or lookup.input[1] not in data.arrays:
        return None, None
    found, column = data.batch(rows)[lookup.input[1]], data.arrays[lookup.input[1]]
    if found.ndim != 2:
        return None, None
    return found, column.lengths[data.rows(rows)] if isinstance(column, Lists) else np.full(len(rows), found.shape[1])


def _texts(tokens: np.ndarray | None, lengths: np.ndarray | None, tokenizer: Path | None) -> list[list[str]] | None:
    """What tokens stand for.

    Raises:
        UsageError: there are none, or the tokenizer can't be used.
    """
    if tokenizer is None:
        return None
    if tokens is None or lengths is None:
        raise UsageError("`tokenizer`: what is explained are no tokens", "leave it out, or explain their embeddings")
    names = Tokenizer(tokenizer)
    return [names.texts(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]


def _picture(graph: Graph, data: Data, target: Path) -> tuple[str, Layout]:
    """The input that pictures are drawn of."""
    for name in data.arrays:
        layout = layout_of(graph.types[name]) if name in graph.types and is_float(graph.types[name]) else None
        if layout is not None:
            return name, layout
    raise UsageError(f"'{target}' is a picture, and the model is fed none", "write .npz")


def _arrays(found: Explained, target: Path) -> bytes:
    """Attributions alone, or with what they are of, by the ending of the file."""
    if target.suffix.lower() == ".html":
        return _token_page(found, target)
    stream = BytesIO()
    if target.suffix.lower() == ".npy":
        np.save(stream, found.values)
        return stream.getvalue()
    arrays = {"attributions": found.values, "samples": found.samples, "classes": found.classes, "scores": found.scores}
    if found.tokens is not None:
        arrays["tokens"] = found.tokens
    if found.texts is not None:
        length = 0 if found.tokens is None else found.tokens.shape[1]
        arrays["texts"] = np.array([[*row, *[""] * (length - len(row))] for row in found.texts])
    write_npz(arrays, stream)
    return stream.getvalue()


def _token_page(found: Explained, target: Path) -> bytes:
    """The tokens in the colours of what they add.

    Raises:
        UsageError: it is no tokens that are explained.
    """
    tokens = found.of_tokens()
    if tokens is None:
        raise UsageError(f"'{target}' is a page of tokens, and what is explained are none", "write .png or .npz")
    headings = [
        f"sample {number}: {found.name_of(row)}, {found.scores[row]:.5g}" for row, number in enumerate(found.samples)
    ]
    return page(found.words, list(zip(headings, tokens, strict=True))).encode()


def _drawn(found: Explained, target: Path, run: Run, name: str, layout: Layout) -> bytes:
    """The samples beside their attributions.

    Raises:
        UsageError: attributions are of no places.
    """
    pictures = run.data.batch(found.samples)[name].astype(np.float64)
    if layout.axis is not None:
        pictures = np.moveaxis(pictures, layout.axis, -1)[..., :3]
        pictures = pictures[..., 0] if pictures.shape[-1] < 3 else pictures
    heat = found.values if found.method == "grad-cam" else found.of_places(run.channels(found.values.ndim))
    if heat.ndim != 3:
        raise UsageError(f"'{target}' is a picture, and attributions have the shape {list(heat.shape)}", "write .npz")
    return draw(pictures, heat, found.method == "grad-cam", found.words)
