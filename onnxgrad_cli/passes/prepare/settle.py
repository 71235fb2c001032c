"""Type every value and replace every operator without a rule, in turn, until nothing changes any more.

Each replacement gives values whose types must be inferred, and each type may let more operators be replaced.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import Caution, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import Contradiction, infer_types
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import dtype_of, in_words, shape_of
from onnxgrad_cli.passes.prepare.by_run import check_hints, keep_ranks, observe_ranks
from onnxgrad_cli.passes.prepare.declarations import set_hints_aside, settle_hints
from onnxgrad_cli.passes.prepare.downgrade import downgrade, opset_limit
from onnxgrad_cli.passes.prepare.expand import expand
from onnxgrad_cli.passes.prepare.experimental import write_out_experimental
from onnxgrad_cli.passes.prepare.fold import fold
from onnxgrad_cli.passes.prepare.function_bodies import inline_function_bodies
from onnxgrad_cli.passes.prepare.implied_ranks import imply_ranks
from onnxgrad_cli.passes.prepare.impossible_branches import rule_out_branches
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET, raise_opset
from onnxgrad_cli.passes.prepare.sequences import unpack
from onnxgrad_cli.passes.prepare.squeezes import give_axes
from onnxgrad_cli.passes.prepare.subgraphs import choose_branches, settle_bodies
from onnxgrad_cli.passes.prepare.vectors import widen_vectors


def settle(graph: Graph, training: Cautions, opset: int = OLDEST_OPSET, by_run: bool | None = None) -> None:
    """Type a normalised graph, raise it to the opset its gradient needs, replace operators that have no rule.

    It comes to `opset` at least, as far as onnxruntime loads that. What is beyond the newest opset that onnxruntime
    loads and runs is then written at that one. Ranks that can't be inferred are read off a run, if `by_run`; by default
    where that is quick.
    """
    if graph.opset() is None:  # all of its operators are of other domains
        graph.proto.opset_import.add(domain="", version=OLDEST_OPSET)
    write_out_experimental(graph)
    set_hints_aside(graph)
    infer_and_fold(graph)
    while (
        raise_opset(graph, training, opset)
        or give_axes(graph, training)
        or _replace(graph)
        or _ask_run(graph, training, by_run)
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
        text = "only one branch fits the shapes of the model; a run that chooses the other branch ends with an error: "
        text += listed([f"{name} ({branch})" for name, branch in graph.branches.items()])
        training.cautions.append(Caution("note", "If", text))


def _refuse_inputs_of_any_rank(graph: Graph) -> None:
    """Refuse an input without a declared rank from which a value follows whose shape is only stored in the file.

    Raises:
        UnsupportedError: there is one.
    """
    unknown = {name for name in graph.input_names if name not in graph.initializers and _has_any_rank(graph, name)}
    for node in graph.nodes if unknown else ():
        reached = unknown.intersection(reads(node))
        unknown.update(node.output if reached else ())
        stored = next((name for name in node.output if reached and shape_of(graph.assumed.get(name)) is not None), None)
        if stored is not None:
            source = next(name for name in graph.input_names if name in graph.ancestors([stored]) & unknown)
            raise UnsupportedError(
                f"the model does not declare how many axes its input '{source}' has, and stores that "
                f"'{stored}' is {in_words(graph.assumed[stored])}",
                hint=graph.rank_hint(),
            )


def _has_any_rank(graph: Graph, name: str) -> bool:
    """Return True if a value is a tensor of unknown rank."""
    return bool(dtype_of(graph.types.get(name))) and shape_of(graph.types.get(name)) is None


def settle_part(graph: Graph, training: Cautions, by_run: bool | None) -> None:
    """Type a normalised graph that becomes part of another, at its opset, and replace operators that have no rule.

    Ranks that can't be inferred are read off a run of the part, as in `settle`.
    """
    infer_and_fold(graph)
    while _replace(graph) or observe_ranks(graph, training, by_run):
        normalise(graph)
        infer_and_fold(graph)
    keep_ranks(graph)


def _ask_run(graph: Graph, training: Cautions, by_run: bool | None) -> bool:
    """Learn from a run what can't be inferred; whether that changes any type."""
    return observe_ranks(graph, training, by_run) or check_hints(graph, training, by_run)


def _replace(graph: Graph) -> bool:
    """Replace nodes that have no rule or need not stand, those of bodies too; whether there were any."""
    return (
        expand(graph)
        or widen_vectors(graph)
        or unpack(graph)
        or choose_branches(graph)
        or _settle_bodies(graph)
        or inline_function_bodies(graph)
        or rule_out_branches(graph)
        or imply_ranks(graph)  # last: the guards of ranks hide contradictions
    )


def _settle_bodies(graph: Graph) -> bool:
    try:
        return settle_bodies(graph, _settle_body)
    except Contradiction:  # in a branch that can't run, as it may be
        if rule_out_branches(graph, contradicts=True):
            return True
        raise


def _write_out(graph: Graph, opset: int) -> bool:
    """Replace nodes newer than an opset by their definitions, those of bodies too; whether there were any."""

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
    """Type every value; each shape that turns out to be constant may give others theirs."""
    _infer(graph)
    while fold(graph):
        _infer(graph)


def _infer(graph: Graph) -> None:
    """Type every value, without branches that can't run if they are what contradicts the others."""
    while True:
        try:
            return infer_types(graph)
        except Contradiction:
            if not rule_out_branches(graph, contradicts=True):
                raise
