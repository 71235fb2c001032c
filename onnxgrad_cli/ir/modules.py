"""Modules: the parts of the program that a model was exported from, as far as its nodes still say."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate

from onnxgrad_cli.ir.node import FORWARD, Node, metadata_of

SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata in which PyTorch's newer exporter keeps the modules around a node, and the node's own name."""

GENAI, GENAI_KIND = "onnxruntime-genai", "onnxruntime-genai.type"
"""The producer that calls modules otherwise than transformers does, and the metadata with what kind of model it is."""

VIEWS = frozenset({"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result is a weight still."""

HANDED_ON = VIEWS | {"DequantizeLinear", "Expand", "QuantizeLinear"}
"""Operators whose result stands for the weight that is their first input, for whoever reads it."""


def modules_around(node: Node) -> tuple[str, ...]:
    """The modules a node lies in, outermost first, each with its whole path: by its exporter, or by its name."""
    return _noted(node) or folders(node.name)


def module_finder(nodes: Collection[Node], weights: Collection[str]) -> Callable[[Node], tuple[str, ...]]:
    """What tells the modules around a graph's nodes, asked of one after the other: their own, if most nodes have one.

    Else a node without a path is of the module of the weight that it reads, or of the node before it.

    Args:
        nodes: those of the forward part.
        weights: the graph's initializers.
    """
    if 2 * sum(map(bool, map(modules_around, nodes))) > len(nodes):
        return modules_around
    last: tuple[str, ...] = ()

    def module(node: Node) -> tuple[str, ...]:
        nonlocal last
        if own := modules_around(node):
            return own
        last = _weight_module(node, weights) or last
        return last

    return module


def _weight_module(node: Node, weights: Collection[str]) -> tuple[str, ...]:
    """The modules of the first weight that a node reads, by the weight's name: `layers.0.fc.weight`."""
    for name in node.input:
        if "." in name and name in weights:
            return tuple(accumulate(name.split(".")[:-1], "{}.{}".format))
    return ()


def _noted(node: Node) -> tuple[str, ...]:
    """The modules that an exporter has noted in a node's metadata."""
    text = metadata_of(node, SCOPES)
    if not text:
        return ()
    try:
        scopes = list(map(str, ast.literal_eval(text)))
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):  # not as PyTorch writes it
        scopes = []
    named = [scope for scope in scopes[:-1] if scope and not scope.startswith("_empty_nn_module")]
    return tuple(dict.fromkeys(named))


def folders(name: str) -> tuple[str, ...]:
    """The folders of a name with slashes, outermost first, each with its whole path."""
    if "/" not in name:
        return ()
    parts = [part for part in name.split("/")[:-1] if part]
    return tuple("/".join(parts[: i + 1]) for i in range(len(parts)))


def module_path(node: Node) -> str:
    """The path of the innermost module around a node, as 'encoder.layers.0.linear1'; "" where nothing tells.

    Of a node that stands for a part of one of the file, it is that of the latter.
    """
    name = metadata_of(node, FORWARD) or node.name
    return next(reversed(_noted(node)), "") or _dotted(name.split("/")[:-1])


def origin(node: Node) -> dict[str, str]:
    """Metadata of nodes that stand for one of the file: its name, and the modules that the exporter has noted."""
    scopes = metadata_of(node, SCOPES)
    return {FORWARD: metadata_of(node, FORWARD) or node.name, **({SCOPES: scopes} if scopes else {})}


def _dotted(parts: Iterable[str]) -> str:
    """The path that the folders of a name come to.

    PyTorch's older exporter writes the children of a container that is called, a Sequential, with its own name before
    theirs, and the container too: '/layers.0/mlp/mlp.0/MatMul' lies in layers.0.mlp.0.
    """
    found: list[str] = []
    for part in filter(None, parts):
        if found and part.startswith(f"{found[-1]}."):
            found.pop()
        found.append(part)
    return ".".join(found)


def readers(nodes: Iterable[Node], names: Iterable[str]) -> dict[str, list[Node]]:
    """The nodes that read each of some initializers, be it through views or quantizers of them; these too."""
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
    """What initializers are called besides their names: by the nodes and the modules that read them.

    An exporter that folds or merges weights leaves them names such as 'val_20'; the module that reads one, and its
    place there, 'encoder.layers.0.linear1.val_20', stay. Of a node that stands for one of the file, the latter counts.
    """
    found: dict[str, frozenset[str]] = {}
    for name, nodes_of in readers(nodes, names).items():
        paths = {path for node in nodes_of if (path := module_path(node))}
        inside = {f"{path}.{name}" for path in paths if not name.startswith(f"{path}.")}
        labels = {label for node in nodes_of for label in (node.name, metadata_of(node, FORWARD)) if label}
        found[name] = frozenset({*paths, *inside, *labels})
    return found
