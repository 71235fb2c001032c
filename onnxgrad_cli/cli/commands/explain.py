"""`onnxgrad explain`: attribute a score of a model to its input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.parsing.click_option import TEXT, option
from onnxgrad_cli.cli.parsing.sample_options import Sizes, on_samples, shown
from onnxgrad_cli.cli.parsing.shared_options import (
    MODEL,
    declared_options,
    how_to_read,
    options,
    output_option,
    values_of,
)
from onnxgrad_cli.cli.terminal.console import Console, show, speaks, table
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.choices import Explanation
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions

if TYPE_CHECKING:
    from rich.text import Text

    from onnxgrad_cli.explanations.tokens import Token
    from onnxgrad_cli.jobs.explain import Explained

SETTINGS = ("repeats", "noise", "seed", "steps", "baseline", "layer", "window", "stride")

ROWS = 12
"""Maximum number of samples that the text output lists."""


@click.command()
@MODEL
@option(
    "--method",
    type=click.Choice(get_args(Explanation)),
    default="saliency",
    help="Attribution method. saliency: gradient of the score. smoothgrad: mean of that gradient over noisy copies of "
    "the sample. integrated-gradients: contribution of each input value, relative to a baseline. grad-cam: positions "
    "in a layer that support the class. occlusion: drop of the score when a part of the input is hidden.",
    common=True,
)
@output_option(
    "Output file: pictures of the samples with their attributions, a page of coloured tokens, or arrays.  "
    "[default: nothing is written]",
    metavar="FILE.png|FILE.html|FILE.npz|FILE.npy",
)
@option(
    "--class",
    "class_",
    default="argmax",
    metavar="N|NAME|argmax|label",
    help="Class whose score is explained: a given class, the predicted class, or the label in --data.",
    common=True,
)
@option("--class-axis", type=int, default=1, help="Axis of the classes in the output.")
@option(
    "--wrt",
    metavar="NAME",
    help="Input to explain, or a value inside the model.  [default: the float input, or the embeddings of tokens]",
)
@option("--label", default="label", metavar="NAME", help="Name of the labels in --data.", common=True)
@option("--repeats", type=click.IntRange(min=1), default=50, help="smoothgrad: number of noisy copies of a sample.")
@option(
    "--noise",
    type=click.FloatRange(min=0),
    default=0.15,
    metavar="SHARE",
    help="smoothgrad: standard deviation of the noise, as a fraction of the range of a sample's values.",
)
@option("--seed", type=click.IntRange(min=0), default=0, help="smoothgrad: seed of the noise.")
@option(
    "--steps",
    type=click.IntRange(min=1),
    default=50,
    help="integrated-gradients: number of gradients on the line from the baseline to the sample.",
)
@option(
    "--baseline",
    type=TEXT,
    default="zero",
    metavar="zero|mean|FILE",
    help="integrated-gradients, occlusion: the input to use as the baseline (zeros, the mean of the data, or an .npy "
    "or .npz file).",
)
@option(
    "--layer",
    metavar="NAME",
    help="grad-cam: the layer to use, as the name of a value or of its node.  "
    "[default: the last value before global pooling or flattening]",
)
@option(
    "--window",
    type=Sizes(),
    help="occlusion: size of the hidden window, in elements: one number, or one per axis.  [default: an eighth of the "
    "input's size]",
)
@option(
    "--stride",
    type=Sizes(),
    help="occlusion: distance by which the window moves, in elements: one number, or one per axis.  [default: half the "
    "window; in volumes the whole window]",
)
@declared_options(
    SequenceOptions, only=("tokenizer", "max_length"),
    tokenizer={"help": "A tokenizer.json, or its folder, which converts text in --data to tokens, and tokens of the "
               "explanation to text."},
)  # fmt: skip
@on_samples
@how_to_read
@speaks
@click.pass_obj
def explain(console: Console, /, model: str, data: str, out: str | None, **values: Any) -> int:
    """Attribute the score of a class to the input of MODEL (- is stdin), for each sample."""
    console.done = "explained"
    from onnxgrad_cli.explanations.method import Method
    from onnxgrad_cli.jobs.explain import run_explain

    window, stride = (values.pop(name) or () for name in ("window", "stride"))
    given = {name: values.pop(name) for name in SETTINGS if name in values}
    method = Method(values.pop("method"), window=window, stride=stride, **given)
    own = {name: values.pop(name) for name in ("label", "output")}  # these names are also options of a build
    sequences = SequenceOptions(**values_of(SequenceOptions, values))
    samples = SampleOptions(**values_of(SampleOptions, values))
    built = options(values)
    with working(console) as tell:
        found = run_explain(
            model, data, out, method, samples=samples, sequences=sequences, options=built, tell=tell, **own, **values
        )
    each = [
        {
            "sample": int(sample),
            "class": cls,
            "name": found.names[cls] if isinstance(cls, int) and cls < len(found.names) else None,
            "score": float(score),
        }
        | ({} if found.gaps is None else {"gap": float(found.gaps[row])})
        for row, (sample, cls, score) in enumerate(
            zip(found.samples, found.classes.tolist(), found.scores, strict=True)
        )
    ]
    result = {
        "method": found.method, "what": found.words, "shape": list(found.values.shape), "samples": each,
        "tokens": _tokens(found), "proof": found.proof._asdict(),
        "files": [str(file) for file in found.files],
    }  # fmt: skip
    console.result(result, "\n".join(_lines(found, each)))
    if not console.json and sys.stdout.isatty():
        for row, tokens in list(zip(each, found.of_tokens() or [], strict=False))[:ROWS]:
            show(_colored(f"sample {row['sample']}: ", tokens), sys.stdout)
    return 0


def _tokens(found: Explained) -> list[list[dict[str, Any]]] | None:
    """Return each sample's tokens with their attributions, for JSON; None if values other than tokens are explained."""
    tokens = found.of_tokens()
    if tokens is None:
        return None
    known = found.texts is not None
    return [
        [
            {"token": each.number, **({"text": each.text} if known else {}), "attribution": each.attribution}
            for each in row
        ]
        for row in tokens
    ]


def _colored(head: str, tokens: Sequence[Token]) -> Text:
    """Return a line: `head`, then the tokens of a sample, coloured by their attributions."""
    from rich.style import Style
    from rich.text import Text

    from onnxgrad_cli.explanations.tokens import between, color_of, shares

    line = Text(head)
    for token, share in zip(tokens, shares(tokens), strict=True):
        front = "#000000" if abs(share) < 0.7 else "#ffffff"
        line.append(escaped(token.text), Style(color=front, bgcolor="#{:02x}{:02x}{:02x}".format(*color_of(share))))
        line.append(between(tokens))
    return line


def _lines(found: Explained, each: list[dict[str, Any]]) -> Iterator[str]:
    yield found.words
    classes = [] if found.alone else ["class"]
    head = ["sample", *classes, "score", *(["off by"] if found.gaps is not None else [])]
    rows = [
        [str(row["sample"]), *(found.name_of(number) for _ in classes), f"{row['score']:.5g}",
         *([f"{row['gap']:.1%}"] if "gap" in row else [])]
        for number, row in enumerate(each[:ROWS])
    ]  # fmt: skip
    yield table(head, rows)
    if len(each) > ROWS:
        yield f"and {len(each) - ROWS} more"
    for row, tokens in list(zip(each, _tokens(found) or [], strict=False))[:ROWS]:
        yield f"sample {row['sample']}:"
        named = found.texts is not None
        yield table(("place", "token", *(["text"] if named else []), "attribution"), [
            (str(place), str(at["token"]), *([at["text"]] if named else []), f"{at['attribution']:.4g}")
            for place, at in enumerate(tokens)
        ])  # fmt: skip
    yield shown(found.proof)
    yield from (f"wrote {file}" for file in found.files)
