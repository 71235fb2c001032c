"""Draw docs/layers.svg: the layers in import-linter's contract, with the first docstring line of each package."""

import ast
import tomllib
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "layers.svg"

WIDTH, HEIGHT, GAP, MARGIN = 860, 44, 6, 16
NAME_WIDTH, LINE_LENGTH = 150, 98
FILLS = ("#e8f0fe", "#eef7ee")


def contract() -> list[list[str]]:
    """Return the layers of `[tool.importlinter]` from top to bottom, each with its packages and modules."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def purpose(room: str) -> str:
    """Return the first line of the docstring of a package or module of `onnxgrad_cli`."""
    folder = ROOT / "onnxgrad_cli" / room
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{source} has no docstring: the picture of the layers shows its first line")
    return docstring.splitlines()[0].replace("`", "")


def svg() -> str:
    """Return the picture as SVG, with a row for each package or module and the top layer first."""
    rooms = [(row, room) for row, layer in enumerate(contract()) for room in layer]
    height = len(rooms) * (HEIGHT + GAP) - GAP + 2 * MARGIN
    boxes = [_box(MARGIN + place * (HEIGHT + GAP), row, room) for place, (row, room) in enumerate(rooms)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif">',
            "<title>The layers of onnxgrad: each imports only from the rows below its own</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *boxes,
            "</svg>\n",
        ]
    )


def _box(top: int, row: int, room: str) -> str:
    lines = wrap(purpose(room), LINE_LENGTH)
    middle = top + HEIGHT / 2
    text = "".join(
        f'<text x="{MARGIN + NAME_WIDTH}" y="{middle + 4 + 16 * (number - (len(lines) - 1) / 2):g}" font-size="13" '
        f'fill="#333333">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT}" rx="5" '
        f'fill="{FILLS[row % 2]}" stroke="#9aa7b8"/>'
        f'<text x="{MARGIN + 12}" y="{middle + 5:g}" font-size="15" font-weight="600" fill="#1a1a1a">{room}</text>'
        f"{text}"
    )


def files() -> dict[Path, str]:
    """Return the path of the picture, and its text."""
    return {PICTURE: svg()}
