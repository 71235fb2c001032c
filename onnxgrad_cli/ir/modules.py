"""The modules of the source network that a node lies in, as exporters write them down."""

from __future__ import annotations

import ast

from onnx import NodeProto

SCOPES = "pkg.torch.onnx.name_scopes"
"""The key of a node's metadata in which PyTorch's exporter lists its modules, the node itself last."""


def modules_of(node: NodeProto, name: str | None = None) -> tuple[str, ...]:
    """The modules a node lies in, outermost first, each with its whole path: by its exporter, or by its name.

    Args:
        node: the node.
        name: what it was called in the file; by default its name.
    """
    said = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    try:
        scopes = ast.literal_eval(said)
    except (ValueError, SyntaxError):
        scopes = []
    named = [scope for scope in map(str, scopes[:-1]) if scope and not scope.startswith("_empty_nn_module")]
    return tuple(dict.fromkeys(named)) if scopes else folders_of(node.name if name is None else name)


def folders_of(name: str) -> tuple[str, ...]:
    """The folders of a name with slashes, outermost first, each with its whole path."""
    folders = [folder for folder in name.split("/")[:-1] if folder]
    return tuple("/".join(folders[: i + 1]) for i in range(len(folders)))
