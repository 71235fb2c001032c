"""Draw pictures of a model. `draw` makes a `Drawing`, which is written as an HTML page or, after folding, as DOT.

drawing = draw(model)
page = html(drawing)                    # the reader folds and unfolds it
text = dot(fold(drawing, limit=150))    # for Graphviz
"""

from onnxgrad_cli.view.dot import dot
from onnxgrad_cli.view.drawing import Box, BoxKind, Cluster, Drawing, Edge
from onnxgrad_cli.view.fold import fold
from onnxgrad_cli.view.html_drawing import html
from onnxgrad_cli.view.read import draw

__all__ = ["Box", "BoxKind", "Cluster", "Drawing", "Edge", "dot", "draw", "fold", "html"]
