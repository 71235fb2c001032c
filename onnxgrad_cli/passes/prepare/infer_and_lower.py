"""Alternately infer the types of all values and replace operators without a gradient rule, until nothing changes.

The types of the values in a replacement must be inferred, and each new type may allow further replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import Caution, UnsupportedError
from onnxgrad_cli.ir.dialects import FIRST_WITHOUT
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import reads, subgraphs
from onnxgrad_cli.ir.type_inference import Contradiction, infer_types
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.passes.prepare.constant_folding import fold
from onnxgrad_cli.passes.prepare.declarations import set_hints_aside, settle_hints
from onnxgrad_cli.passes.prepare.expand_definitions import expand, inline_function_bodies
from onnxgrad_cli.passes.prepare.experimental import write_out_experimental
from onnxgrad_cli.passes.prepare.implied_ranks import imply_ranks, is_tensor_of_any_rank
from onnxgrad_cli.passes.prepare.impossible_branches import rule_out_branches
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET, downgrade, opset_limit, raise_opset
from onnxgrad_cli.passes.prepare.runtime_shape_probe import check_hints, keep_ranks, observe_ranks
from onnxgrad_cli.passes.prepare.safe_forms import give_axes, widen_vectors
from onnxgrad_cli.passes.prepare.subgraphs import choose_branches, settle_bodies
from onnxgrad_cli.passes.prepare.unpack_sequences import STEPS, unpack

BODY = "body"
"""Stands for all nodes that have bodies (subgraphs), in `Replacement.operators`."""


class Replacement(NamedTuple):
    """A function that replaces nodes and returns True if it did.

    It is called only for graphs with one of `operators`; None stands for all operators.
    """

    run: Callable[[Graph], bool]
    operators: Set[str] | None = None


def infer_and_lower(graph: Graph, training: Cautions, opset: int = OLDEST_OPSET, by_run: bool | None = None) -> None:
    """Infer the types of a normalised graph, upgrade its opset, and replace operators without a gradient rule.

    The graph gets the opset that its gradient needs, and at least `opset`, as far as onnxruntime loads that. At the
    end, if the graph's opset is newer than onnxruntime loads and runs, newer operators are rewritten and the opset is
    lowered. If `by_run` is True, ranks that can't be inferred are found by running the model. By default, this is done
    only if it is quick.
    """
    if graph.opset() is None:  # all operators belong to other domains
        graph.proto.opset_import.add(domain="", version=OLDEST_OPSET)
    if (graph.opset() or FIRST_WITHOUT) < FIRST_WITHOUT:
        write_out_experimental(graph)
    set_hints_aside(graph)
    infer_and_fold(graph)
    while (
        raise_opset(graph, training, opset)
        or give_axes(graph, training)
        or _replace(graph)
        or observe_ranks(graph, training, by_run)
        or check_hints(graph, training, by_run)
    ):
        normalise(graph)
        infer_and_fold(graph)
    limit = opset_limit(graph)
    if limit.opset < (graph.opset() or 0) and _write_out(graph, limit.opset):
        normalise(graph)
        infer_and_fold(graph)
    downgrade(graph, limit, training)
    _refuse_inputs_of_any_rank(graph)
    keep_ranks(graph)
    settle_hints(graph, training)
    if graph.branches:
        text = "only one branch fits the shapes of the model; a run that chooses the other branch ends with an error"
        names = listed([f"{name} ({branch})" for name, branch in graph.branches.items()])
        training.cautions.append(Caution("note", "If", f"{text}: {names}"))


def _refuse_inputs_of_any_rank(graph: Graph) -> None:
    """Refuse an input without a declared rank if the shape of a value that depends on it is known only from a hint.

    Raises:
        UnsupportedError: there is such an input.
    """
    fed = (name for name in graph.input_names if name not in graph.initializers)
    unknown = {name for name in fed if is_tensor_of_any_rank(graph, name)}
    for node in graph.nodes if unknown else ():
        reached = unknown.intersection(reads(node))
        unknown.update(node.output if reached else ())
        stored = next((name for name in node.output if reached and shape_of(graph.assumed.get(name)) is not None), None)
        if stored is not None:
            source = next(name for name in graph.input_names if name in graph.ancestors([stored]) & unknown)
            raise UnsupportedError(
                f"the model does not declare the number of axes of its input '{source}', but stores that "
                f"'{stored}' is {in_words(graph.assumed[stored])}",
                hint=graph.rank_hint(),
            )


def settle_part(graph: Graph, training: Cautions, by_run: bool | None) -> None:
    """Infer the types of a normalised graph that becomes part of another graph, and replace operators without a rule.

    The part already has the opset of the other graph. Ranks that can't be inferred are found by running the part, as in
    `infer_and_lower`.
    """
    infer_and_fold(graph)
    while _replace(graph) or observe_ranks(graph, training, by_run):
        normalise(graph)
        infer_and_fold(graph)
    keep_ranks(graph)


def _replace(graph: Graph) -> bool:
    """Apply the first of `REPLACEMENTS` that changes the graph or its bodies. Return True if there was one."""
    operators = {node.op_type for node in graph.nodes}
    if any(map(subgraphs, graph.nodes)):
        operators.add(BODY)
    return any(run(graph) for run, kinds in REPLACEMENTS if kinds is None or not operators.isdisjoint(kinds))


def _settle_bodies(graph: Graph) -> bool:
    try:
        return settle_bodies(graph, _settle_body)
    except Contradiction:  # it may be in a branch that can't run
        if rule_out_branches(graph, contradicts=True):
            return True
        raise


REPLACEMENTS = (
    Replacement(expand),
    Replacement(widen_vectors, frozenset({"MatMul"})),
    Replacement(unpack, STEPS.keys()),
    Replacement(choose_branches, frozenset({"If"})),
    Replacement(_settle_bodies, frozenset({BODY})),
    Replacement(inline_function_bodies),
    Replacement(rule_out_branches, frozenset({"If"})),
    Replacement(imply_ranks),  # last: the guards of ranks hide contradictions
)
"""The replacements, in order. When one of them has changed the graph, types are inferred and all start again."""


def _write_out(graph: Graph, opset: int) -> bool:
    """Replace nodes newer than an opset by their definitions, also in bodies. Return True if there were any."""

    def write_out(body: Graph) -> None:
        if expand(body, newer_than=opset):
            infer_and_fold(body)

    changed = expand(graph, newer_than=opset)
    return settle_bodies(graph, write_out) or changed


def _settle_body(body: Graph) -> None:
    infer_and_fold(body)
    while _replace(body):
        infer_and_fold(body)


def infer_and_fold(graph: Graph) -> None:
    """Infer the types of all values. Fold shapes that turn out to be constant, because further types may follow."""
    _infer(graph)
    while fold(graph):
        _infer(graph)


def _infer(graph: Graph) -> None:
    """Infer the types of all values. If they contradict each other, drop branches that can't run."""
    while True:
        try:
            return infer_types(graph)
        except Contradiction:
            if not rule_out_branches(graph, contradicts=True):
                raise
