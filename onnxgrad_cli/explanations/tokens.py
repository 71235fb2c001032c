"""Show the attributions of tokens on an HTML page, where the color of each token shows its attribution."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from onnxgrad_cli.common.escape import escaped

RED, BLUE = (214, 39, 40), (31, 119, 180)
"""Colors of positive and negative attributions."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.8 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; } p { margin: .3rem 0; overflow-wrap: anywhere; }
span { white-space: pre-wrap; border-radius: .2rem; padding: .1rem .05rem; }
"""


class Token(NamedTuple):
    """A token of a sample.

    Attributes:
        number: the id of the token.
        text: the text of the token, or its id if the text is unknown.
        attribution: the contribution of the token to the score, or the sensitivity of the score to the token.
    """

    number: int
    text: str
    attribution: float


def shares(tokens: Sequence[Token]) -> list[float]:
    """Return the attribution of each token divided by the largest magnitude: -1 to 1."""
    largest = max((abs(token.attribution) for token in tokens), default=0.0)
    return [token.attribution / (largest or 1.0) for token in tokens]


def between(tokens: Sequence[Token]) -> str:
    """Return the separator between tokens in a line: a space, or "" if the texts of the tokens contain spaces."""
    return "" if any(" " in token.text for token in tokens) else " "


def color_of(share: float) -> tuple[int, int, int]:
    """Return the color for a share from -1 to 1, as red, green and blue from 0 to 255. A share of 0 is white."""
    strong = RED if share > 0 else BLUE
    red, green, blue = (round(255 + (channel - 255) * min(abs(share), 1.0)) for channel in strong)
    return red, green, blue


def page(said: str, samples: Sequence[tuple[str, Sequence[Token]]]) -> str:
    """Return a self-contained HTML page that shows samples of tokens.

    Args:
        said: a sentence that describes the method.
        samples: for each sample, its heading and its tokens.
    """
    text = escape(escaped(said))
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>Contribution of each token</h1>",
        f"<p>{text}. Red increases the score, blue decreases it.</p>",
    ]
    for heading, tokens in samples:
        spans = between(tokens).join(map(_span, tokens, shares(tokens)))
        lines.append(f"<h2>{escape(escaped(heading))}</h2>\n<p>{spans}</p>")
    return "\n".join([*lines, "</body>\n</html>\n"])


def _span(token: Token, share: float) -> str:
    strong = ", ".join(map(str, RED if share > 0 else BLUE))
    color = f"background: rgba({strong}, {abs(share):.3f})"
    return f'<span style="{color}" title="{token.number}: {token.attribution:.4g}">{escape(escaped(token.text))}</span>'
