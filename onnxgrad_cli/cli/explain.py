"""`onnxgrad explain`: what a score of a model comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.console import Console, show, speaks, table
from onnxgrad_cli.cli.options import MODEL, complete_files, how_to_read, options
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.samples import Sizes, on_samples, sample_options, shown
from onnxgrad_cli.common.choices import Explanation
from onnxgrad_cli.common.visible import visible

if TYPE_CHECKING:
    from rich.text import Text

    from onnxgrad_cli.explanations.tokens import Token
    from onnxgrad_cli.jobs.explain import Explained

SETTINGS = ("repeats", "noise", "seed", "steps", "baseline", "layer", "window", "stride")

ROWS = 12
"""Samples that are listed for people."""


@click.command(short_help="Say what a prediction comes from.")
@MODEL
@click.option(
    "--method",
    type=click.Choice(get_args(Explanation)),
    default="saliency",
    show_default=True,
    help="How strongly the score answers; the mean of that under noise; what each number adds to the score from a "
    "baseline; where in a layer what speaks for the class lies; or how much the score falls where a part is hidden.",
)
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE.png|FILE.html|FILE.npz|FILE.npy",
    help="Pictures of the samples under their attributions, a page of tokens in their colours, or arrays.  "
    "[default: nothing is written]",
)
@click.option(
    "--class",
    "class_",
    default="argmax",
    show_default=True,
    metavar="N|NAME|argmax|label",
    help="Whose score: of a class, of the one that the model finds, or of the label in --data.",
)
@click.option("--class-axis", type=int, default=1, show_default=True, help="The axis of the classes.")
@click.option(
    "--wrt",
    metavar="NAME",
    help="The input that is explained, or a value in between.  [default: the one of floats, or embeddings]",
)
@click.option("--label", default="label", show_default=True, metavar="NAME", help="What --data call the labels.")
@click.option("--repeats", type=click.IntRange(min=1), default=50, show_default=True, help="smoothgrad: of the noise.")
@click.option(
    "--noise",
    type=click.FloatRange(min=0),
    default=0.15,
    show_default=True,
    metavar="SHARE",
    help="smoothgrad: its deviation, of the range of a sample.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="smoothgrad: of the noise.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=50, show_default=True, help="integrated-gradients: of the way."
)
@click.option(
    "--baseline",
    type=TEXT,
    default="zero",
    show_default=True,
    metavar="zero|mean|FILE",
    help="integrated-gradients, occlusion: what stands for nothing; mean: of the data; or an .npy or .npz file.",
)
@click.option(
    "--layer",
    metavar="NAME",
    help="grad-cam: a value, or its node.  [default: the last before pooling to one place or flattening]",
)
@click.option("--window", type=Sizes(), help="occlusion: what is hidden.  [default: an eighth of the size]")
@click.option(
    "--stride", type=Sizes(), help="occlusion: how far it moves.  [default: half the window, or all of it in volumes]"
)
@click.option(
    "--tokenizer",
    type=FilePath(path_type=Path),
    metavar="FILE|DIR",
    help="A tokenizer.json, by which text in --data becomes tokens, and which tells what tokens stand for.",
)
@click.option(
    "--max-length", type=click.IntRange(min=2), metavar="TOKENS", help="Leave out what lies behind in a sample."
)
@on_samples
@how_to_read
@speaks
@click.pass_obj
def explain(console: Console, /, model: str, data: str, out: str | None, **values: Any) -> int:
    """Attribute the score of a class that MODEL (- is stdin) gives to samples to what it is fed."""
    console.done = "explained"
    from onnxgrad_cli.explanations.method import Method
    from onnxgrad_cli.jobs.explain import run_explain
    from onnxgrad_cli.training.data import SequenceOptions

    window, stride = (values.pop(name) or () for name in ("window", "stride"))
    given = {name: values.pop(name) for name in SETTINGS if name in values}
    method = Method(values.pop("method"), window=window, stride=stride, **given)
    own = {name: values.pop(name) for name in ("label", "output")}  # which options of a build are called, too
    sequences = SequenceOptions(**{name: values.pop(name) for name in ("tokenizer", "max_length")})
    samples, built = sample_options(values), options(values)
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
        "tokens": _tokens(found), "proof": {"verdict": found.proof[0], "why": found.proof[1]},
        "files": [str(file) for file in found.files],
    }  # fmt: skip
    console.result(result, "\n".join(_lines(found, each)))
    if not console.json and sys.stdout.isatty():
        for row, tokens in list(zip(each, found.of_tokens() or [], strict=False))[:ROWS]:
            show(_colored(f"sample {row['sample']}: ", tokens), sys.stdout)
    return 0


def _tokens(found: Explained) -> list[list[dict[str, Any]]] | None:
    """Each sample's tokens with their attributions, where it is tokens that are explained."""
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
    """The tokens of a sample one after the other, in the colours of what they add."""
    from rich.style import Style
    from rich.text import Text

    from onnxgrad_cli.explanations.tokens import between, color_of, shares

    line = Text(head)
    for token, share in zip(tokens, shares(tokens), strict=True):
        front = "#000000" if abs(share) < 0.7 else "#ffffff"
        line.append(visible(token.text), Style(color=front, bgcolor="#{:02x}{:02x}{:02x}".format(*color_of(share))))
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
