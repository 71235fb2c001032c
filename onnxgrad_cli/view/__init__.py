"""Pictures of a model: a `Drawing` is read from it, folded until it can be looked at, and written in a format.

drawing = fold(draw(model), limit=150)
text = render(drawing, "svg")         # or "dot", "mermaid", "html"
"""

from onnxgrad_cli.view.drawing import Box, Drawing, Edge, Group, Kind
from onnxgrad_cli.view.fold import fold
from onnxgrad_cli.view.read import draw
from onnxgrad_cli.view.render import FORMATS, render

__all__ = ["FORMATS", "Box", "Drawing", "Edge", "Group", "Kind", "draw", "fold", "render"]
