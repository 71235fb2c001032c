"""Rewrite a training model for a chosen runtime, which has faster operators than the standard, or fewer.

The pass runs late, so that all nodes of the forward and backward parts can be replaced. Where nodes become calls of
functions, the standard operators still define their meaning; see `targets.standard`.
"""

from __future__ import annotations

from collections import Counter

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import declare
from onnxgrad_cli.options import GradientOptions
from onnxgrad_cli.record import Targeted, Training
from onnxgrad_cli.targets import find_target


def rewrite_for_target(graph: Graph, options: GradientOptions, training: Training) -> None:
    """With --target: use operators of one runtime where they are faster, and refuse those that it doesn't support."""
    target = find_target(options.target)
    if target.fit:
        target.fit(graph)
    replaced = target.replace(graph) if target.replace else []
    functions = {(function.domain, function.name): function for function in graph.proto.functions}
    inner = [node for call in replaced for node in functions[call.domain, call.op_type].node if node.domain]
    operators = Counter(f"{node.domain}::{node.op_type}" for node in inner)
    training.targeted = Targeted(options.target, len(replaced), dict(operators))
    declare(graph)
