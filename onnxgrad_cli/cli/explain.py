"""`onnxgrad explain`: what a score of a model comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import MODEL, how_to_read, options
from onnxgrad_cli.cli.samples import Sizes, on_samples, sample_options, shown
from onnxgrad_cli.common.choices import Explanation

if TYPE_CHECKING:
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
    metavar="FILE.png|FILE.npz|FILE.npy",
    help="Pictures of the samples under their attributions, or arrays.  [default: nothing is written]",
)
@click.option(
    "--class",
    "class_",
    default="argmax",
    show_default=True,
    metavar="N|argmax|label",
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
@click.option("--stride", type=Sizes(), help="occlusion: how far it moves.  [default: half the window]")
@on_samples
@how_to_read
@speaks
@click.pass_obj
def explain(console: Console, /, model: str, data: str, out: str | None, **values: Any) -> int:
    """Attribute the score of a class that MODEL (- is stdin) gives to samples to what it is fed."""
    console.done = "explained"
    from onnxgrad_cli.explanations.method import Method
    from onnxgrad_cli.jobs.explain import run_explain

    window, stride = (values.pop(name) or () for name in ("window", "stride"))
    given = {name: values.pop(name) for name in SETTINGS if name in values}
    method = Method(values.pop("method"), window=window, stride=stride, **given)
    own = {name: values.pop(name) for name in ("label", "output")}  # which options of a build are called, too
    samples, built = sample_options(values), options(values)
    found = run_explain(model, data, out, method, samples=samples, options=built, tell=console.say, **own, **values)
    each = [
        {"sample": int(sample), "class": cls, "name": _name(found, cls), "score": float(score)}
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
    return 0


def _name(found: Explained, cls: Any) -> str | None:
    """What a class is called; None where nobody says, or a sample has a class for each of its places."""
    return found.names[cls] if isinstance(cls, int) and cls < len(found.names) else None


def _tokens(found: Explained) -> list[list[dict[str, Any]]] | None:
    """Each sample's tokens with their attributions, where it is tokens that are explained."""
    if found.tokens is None:
        return None
    values = found.of_places(2)
    return [
        [{"token": int(token), "attribution": float(value)} for token, value in zip(*row, strict=True)]
        for row in zip(found.tokens, values, strict=True)
    ]


def _lines(found: Explained, each: list[dict[str, Any]]) -> Iterator[str]:
    yield found.words
    head = ["sample", "class", "score", *(["off by"] if found.gaps is not None else [])]
    rows = [
        [str(row["sample"]), row["name"] or (str(row["class"]) if isinstance(row["class"], int) else "of each place"),
         f"{row['score']:.5g}", *([f"{row['gap']:.1%}"] if "gap" in row else [])]
        for row in each[:ROWS]
    ]  # fmt: skip
    yield table(head, rows)
    if len(each) > ROWS:
        yield f"and {len(each) - ROWS} more"
    for row, tokens in list(zip(each, _tokens(found) or [], strict=False))[:ROWS]:
        yield f"sample {row['sample']}:"
        yield table(("place", "token", "attribution"), [
            (str(place), str(at["token"]), f"{at['attribution']:.4g}") for place, at in enumerate(tokens)
        ])  # fmt: skip
    yield shown(found.proof)
    yield from (f"wrote {file}" for file in found.files)
