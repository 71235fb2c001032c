"""Write a drawing in DOT, the language of Graphviz, for layout by `dot` or an editor plug-in, or for editing.

Source: graphviz.org, The DOT Language; escString; Character Entities.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxgrad_cli.common.escape import escaped_lines
from onnxgrad_cli.view.drawing import LOOKS, Box, BoxKind, Cluster, Drawing

SHAPES = {"box": "box", "round": "box", "stadium": "ellipse", "cylinder": "cylinder", "hexagon": "hexagon"}


def dot(drawing: Drawing) -> str:
    """Return the drawing as a DOT graph."""
    return "\n".join(_lines(drawing)) + "\n"


def _lines(drawing: Drawing) -> Iterator[str]:
    """Yield the lines of the DOT file."""
    yield "// drawn by onnxgrad"
    yield f"digraph {_quoted(drawing.title)} {{"
    yield f"  graph [label={_quoted(drawing.caption)}, labelloc=t, fontname=Helvetica, compound=true];"
    yield "  node [fontname=Helvetica, fontsize=10, margin=0.08, height=0.3];"
    yield "  edge [fontname=Helvetica, fontsize=8, color=gray40];"
    yield from _legend(drawing.kinds)
    for part in drawing.root.parts:
        yield from _part(part, "  ")
    places = {part.key: i for group in drawing.root.groups() for i, part in enumerate(group.parts)}
    for edge, group, source, target in drawing.meetings():
        against = group.beside or places[source.key] > places[target.key]
        attributes = {"label": drawing.label(edge), "tooltip": "\n".join(edge.tensors)}
        shown = [f"{name}={_quoted(text)}" for name, text in attributes.items() if text]
        shown += ["constraint=false"] if against else []
        yield f"  {edge.source} -> {edge.target} [{', '.join(shown)}];"
    yield "}"


def _legend(kinds: list[BoxKind]) -> Iterator[str]:
    yield "  subgraph cluster_legend {"
    yield '    label="legend"; color=gray70;'
    for kind in kinds:
        yield f"    legend_{kind} [label={_quoted(LOOKS[kind].meaning)}, {_look(kind)}];"
    yield "  }"


def _part(part: Box | Cluster, indent: str) -> Iterator[str]:
    if isinstance(part, Box):
        label = "\n".join([part.title, *part.lines])
        yield f"{indent}{part.key} [label={_quoted(label)}, tooltip={_quoted(part.details)}, {_look(part.kind)}];"
        return
    yield f"{indent}subgraph cluster_{part.key} {{"
    color = _quoted(LOOKS[part.kind].color) if part.kind and part.title else "gray85"
    yield f'{indent}  label={_quoted(part.title)}; style="rounded"; color={color}; fontsize=9;'
    for inner in part.parts:
        yield from _part(inner, indent + "  ")
    yield f"{indent}}}"


def _look(kind: BoxKind) -> str:
    look = LOOKS[kind]
    style = ["filled"] + ["rounded"] * (look.shape == "round") + ["dashed"] * (look.border == "dashed")
    double = {"cylinder": ", penwidth=2.5"}.get(look.shape, ", peripheries=2") if look.border == "double" else ""
    colors = f'fillcolor="{look.fill}", color="{look.color}"'
    return f'shape={SHAPES[look.shape]}, style="{",".join(style)}", {colors}{double}'


def _quoted(text: str) -> str:
    """Return a DOT string in which the quotes, backslashes, entities and line breaks of a text are shown literally."""
    escaped = escaped_lines(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
