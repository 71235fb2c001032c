"""Find the modules of the exported program that a node belongs to, from metadata and names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate

from onnxgrad_cli.ir.node import FORWARD, Node, metadata_of

SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata key under which PyTorch's newer exporter lists the modules around a node, and then the node's name."""

GENAI, GENAI_KIND = "onnxruntime-genai", "onnxruntime-genai.type"
"""A producer whose module names differ from those of transformers, and its metadata key for the model type."""

VIEWS = frozenset({"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only change the shape or type of a weight, so that their result still counts as the weight."""

HANDED_ON = VIEWS | {"DequantizeLinear", "Expand", "QuantizeLinear"}
"""Operators through which `readers` follows a weight: if their first input is a weight, so is their result."""


def modules_around(node: Node) -> tuple[str, ...]:
    """Return the full paths of the modules around a node, outermost first, from its metadata or, if empty, its name."""
    return _noted(node) or folders(node.name)


def module_finder(nodes: Collection[Node], weights: Collection[str]) -> Callable[[Node], tuple[str, ...]]:
    """Return a function that finds the modules around a node. It must be called for the nodes in graph order.

    If most nodes have modules in their metadata or name, the function is `modules_around`. Otherwise a node without
    modules gets those in the name of the first weight that it reads, such as `layers.0.fc.weight`, or those of the node
    before it.

    Args:
        nodes: the nodes of the forward part.
        weights: the graph's initializers.
    """
    if 2 * sum(map(bool, map(modules_around, nodes))) > len(nodes):
        return modules_around
    last: tuple[str, ...] = ()

    def module(node: Node) -> tuple[str, ...]:
        nonlocal last
        if own := modules_around(node):
            return own
        weight = next((name for name in node.input if "." in name and name in weights), "")
        last = tuple(accumulate(weight.split(".")[:-1], "{}.{}".format)) or last
        return last

    return module


def _noted(node: Node) -> tuple[str, ...]:
    """Return the modules that an exporter listed in a node's metadata."""
    text = metadata_of(node, SCOPES)
    if not text:
        return ()
    try:
        scopes = list(map(str, ast.literal_eval(text)))
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):  # not the format that PyTorch writes
        scopes = []
    named = [scope for scope in scopes[:-1] if scope and not scope.startswith("_empty_nn_module")]
    return tuple(dict.fromkeys(named))


def folders(name: str) -> tuple[str, ...]:
    """Return the full path of each folder in a name with slashes, outermost first."""
    return tuple(accumulate(filter(None, name.split("/")[:-1]), "{}/{}".format))


def module_path(node: Node) -> str:
    """Return the path of the innermost module around a node, such as 'encoder.layers.0.linear1'; "" if it is unknown.

    A node that replaces a node of the file has the path of the replaced node.
    """
    name = metadata_of(node, FORWARD) or node.name
    return next(reversed(_noted(node)), "") or _dotted(name.split("/")[:-1])


def origin(node: Node) -> dict[str, str]:
    """Return the metadata for nodes that replace a node: the name of the node in the file, and its listed modules."""
    scopes = metadata_of(node, SCOPES)
    return {FORWARD: metadata_of(node, FORWARD) or node.name, **({SCOPES: scopes} if scopes else {})}


def _dotted(parts: Iterable[str]) -> str:
    """Return the module path, with dots, for the folders in a node's name.

    PyTorch's older exporter repeats the name of a container, such as a Sequential, in the folders of its children. So
    the node '/layers.0/mlp/mlp.0/MatMul' is in the module layers.0.mlp.0.
    """
    found: list[str] = []
    for part in filter(None, parts):
        if found and part.startswith(f"{found[-1]}."):
            found.pop()
        found.append(part)
    return ".".join(found)


def readers(nodes: Iterable[Node], names: Iterable[str]) -> dict[str, list[Node]]:
    """Return initializer -> the nodes that read it, directly or through nodes in `HANDED_ON`, which are included."""
    found: dict[str, list[Node]] = {name: [] for name in names}
    weight_of = {name: name for name in found}
    for node in nodes:
        for name in dict.fromkeys(node.input):
            if name in weight_of:
                found[weight_of[name]].append(node)
        if node.op_type in HANDED_ON and node.input[0] in weight_of:
            weight_of.update(dict.fromkeys(node.output, weight_of[node.input[0]]))
    return found


def known_as(nodes: Iterable[Node], names: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """Return a map: initializer -> other names that select it, taken from the modules of the nodes that read it.

    An exporter that folds or merges weights gives them names such as 'val_20'. But the module that reads the weight
    identifies it, so 'encoder.layers.0.linear1' and 'encoder.layers.0.linear1.val_20' select it too. If a pass has
    replaced a node of the file, the name of that node does so too.
    """
    found: dict[str, frozenset[str]] = {}
    for name, nodes_of in readers(nodes, names).items():
        paths = {path for node in nodes_of if (path := module_path(node))}
        inside = {f"{path}.{name}" for path in paths if not name.startswith(f"{path}.")}
        labels = {label for node in nodes_of for label in (node.name, metadata_of(node, FORWARD)) if label}
        found[name] = frozenset({*paths, *inside, *labels})
    return found
