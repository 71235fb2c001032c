"""Attributions of tokens: each token of a sample with its text, and a page on which their colours say what they add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from onnxgrad_cli.common.visible import visible

RED, BLUE = (214, 39, 40), (31, 119, 180)
"""What speaks for a score, and against it."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.8 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; } p { margin: .3rem 0; overflow-wrap: anywhere; }
span { white-space: pre-wrap; border-radius: .2rem; padding: .1rem .05rem; }
"""


class Token(NamedTuple):
    """A token of a sample.

    Attributes:
        number: of the token.
        text: what it stands for; its number, where nobody says.
        attribution: what it adds to the score, or how strongly the score answers to it.
    """

    number: int
    text: str
    attribution: float


def shares(tokens: Sequence[Token]) -> list[float]:
    """What each token adds, as a share of the largest magnitude: -1 to 1."""
    largest = max((abs(token.attribution) for token in tokens), default=0.0)
    return [token.attribution / (largest or 1.0) for token in tokens]


def between(tokens: Sequence[Token]) -> str:
    """What stands between tokens in a line: nothing, where they hold the spaces of their text themselves."""
    return "" if any(" " in token.text for token in tokens) else " "


def color_of(share: float) -> tuple[int, int, int]:
    """The colour of a share, red, green and blue from 0 to 255: white where it is 0."""
    strong = RED if share > 0 else BLUE
    red, green, blue = (round(255 + (channel - 255) * min(abs(share), 1.0)) for channel in strong)
    return red, green, blue


def page(said: str, samples: Sequence[tuple[str, Sequence[Token]]]) -> str:
    """Samples of tokens as a page of HTML that needs nothing else.

    Args:
        said: what was done, in a sentence.
        samples: of each its heading and its tokens.
    """
    return "\n".join(_lines(said, samples)) + "\n"


def _lines(said: str, samples: Sequence[tuple[str, Sequence[Token]]]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(visible(said))}</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<h1>What each token adds</h1>\n<p>{escape(visible(said))}. Red speaks for the score, blue against it.</p>"
    for heading, tokens in samples:
        yield f"<h2>{escape(visible(heading))}</h2>\n<p>{between(tokens).join(map(_span, tokens, shares(tokens)))}</p>"
    yield "</body>\n</html>"


def _span(token: Token, share: float) -> str:
    strong = ", ".join(map(str, RED if share > 0 else BLUE))
    color = f"background: rgba({strong}, {abs(share):.3f})"
    return f'<span style="{color}" title="{token.number}: {token.attribution:.4g}">{escape(visible(token.text))}</span>'
