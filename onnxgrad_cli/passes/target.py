"""Write a training model for runtimes that have faster operators than the standard's, or fewer: an opt-in.

It comes late, so that whatever forward and backward part consist of can be replaced; what the functions stand for is
known without them, see `targets.standard`.
"""

from __future__ import annotations

from collections import Counter

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import declare
from onnxgrad_cli.options import GradientOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import Targeted, Training
from onnxgrad_cli.targets import find_target


def _run(graph: Graph, options: GradientOptions, training: Training) -> bool:
    target = find_target(options.target)
    if target.fit:
        target.fit(graph)
    replaced = target.replace(graph) if target.replace else []
    functions = {(function.domain, function.name): function for function in graph.proto.functions}
    inner = [node for call in replaced for node in functions[call.domain, call.op_type].node if node.domain]
    operators = Counter(f"{node.domain}::{node.op_type}" for node in inner)
    training.targeted = Targeted(options.target, len(replaced), dict(operators))
    declare(graph)
    return bool(replaced)


TARGET = Pass(
    "target",
    "with --target: operators of one runtime where they are faster; what it lacks is refused",
    _run,
    ("cleanup",),
)
