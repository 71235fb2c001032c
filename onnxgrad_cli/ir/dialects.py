"""What onnxruntime reads beyond the standard: operators of its own in the standard's domain, files not quite in form.

`mend` brings a model into the form that the standard asks for, with the meaning that it has for onnxruntime, and
`complaint` is what onnx's checker then still has against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, OperatorSetIdProto, TensorProto

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.domains import STANDARD, plain_domain
from onnxgrad_cli.ir.einsum import is_equation
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import CONTROL_FLOW, reads, subgraphs, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes

NEVER = 1 << 30
OF_ONNXRUNTIME = {"LayerNormalization": 17, "SimplifiedLayerNormalization": NEVER, "ThresholdedRelu": 10}
"""Operators that onnxruntime has in the standard's domain at every opset, in the form of today, and the opset from
which the standard has them. Its optimizer writes the first two, as do onnxruntime.transformers and onnxruntime-genai.
"""

STASHING = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Those of them that have an attribute stash_type, the type in which they compute."""

FIRST_WITHOUT = 10
GIVEN_UP = frozenset({"Affine", "Crop", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"})
"""Operators that the standard tried out and gave up at opset 10; onnxruntime runs them in older models."""

UNIMPORTED = {"ai.onnx.ml": 5, "com.microsoft": 1, "com.microsoft.nchwc": 1}
"""The versions at which onnxruntime takes domains that a model uses and does not import."""


def is_of_onnxruntime(op_type: str, opset: int) -> bool:
    """Whether an operator in the standard's domain is onnxruntime's own at an opset, and unknown to the standard."""
    return opset < OF_ONNXRUNTIME.get(op_type, FIRST_WITHOUT if op_type in GIVEN_UP else 0)


# -- a model in the standard's form ---------------------------------------------------------------------------------


def mend(model: ModelProto) -> list[Caution]:
    """Bring a model, in place, into the form that the standard asks for, with the meaning that onnxruntime gives it.

    Of what stands twice the last counts, opset imports and initializers alike; nodes that are not in the order in which
    they run are put into it; a domain that is used and not imported is imported; the standard's domain has one name.

    Returns:
        What was mended that a reader should know of.
    """
    cautions = [*_use_one_domain(model), *_import_domains(model), *_order(model.graph)]
    model.graph.name = model.graph.name or "graph"
    for position in reversed(range(len(model.graph.initializer))):
        if not model.graph.initializer[position].name:  # nothing can read it
            del model.graph.initializer[position]
    twice = _keep_last(model.graph.initializer)
    if twice:
        text = f"the model stores {_listed(twice)} twice: what stands last counts, as for onnxruntime"
        cautions.append(_note("initializers", text))
    return cautions


def drop_absent_ends(model: ModelProto) -> None:
    """Leave out, in place, what nodes of the standard name as absent at the end of their inputs, which means the same.

    On an absent axis of DFT, and an absent bias of LayerNormalization, onnxruntime ends the process. Of operators that
    take as many inputs as there are, none may be absent: see `fatal_node`.
    """
    for node in _all_nodes(model):
        names = node.input
        if names and not names[-1] and plain_domain(node.domain) == "" and not _takes_many(node, _opset(model)):
            while names and not names[-1]:
                names.pop()


def _note(subject: str, text: str) -> Caution:
    return Caution("note", subject, text)


def _listed(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _all_nodes(model: ModelProto) -> Iterator[Node]:
    """The nodes of a model, of its bodies and of its functions."""
    yield from with_bodies(model.graph.node)
    for function in model.functions:
        yield from with_bodies(function.node)


def _use_one_domain(model: ModelProto) -> Iterator[Caution]:
    """Call the standard's domain by its short name, and import each domain once."""
    for entry in model.opset_import:
        if entry.domain == STANDARD:
            entry.domain = ""
    for node in _all_nodes(model):
        if node.domain == STANDARD:
            node.domain = ""
    versions: dict[str, set[int]] = {}
    for entry in model.opset_import:
        versions.setdefault(entry.domain, set()).add(entry.version)
    _keep_last(model.opset_import)
    for entry in model.opset_import:
        if len(versions[entry.domain]) > 1:
            all_of_them = " and ".join(str(version) for version in sorted(versions[entry.domain]))
            text = (
                f"the model imports '{entry.domain or STANDARD}' at {all_of_them}: {entry.version}, "
                "which stands last, counts, as for onnxruntime"
            )
            yield _note("opset_import", text)


def _keep_last(entries: Any) -> list[str]:
    """Leave of protobuf entries with the same name, or domain, the last; returns the names that stood twice."""

    def key(entry: TensorProto | OperatorSetIdProto) -> str:
        return entry.domain if isinstance(entry, OperatorSetIdProto) else entry.name

    last = {key(entry): position for position, entry in enumerate(entries)}
    twice = {key(entry): position for position, entry in enumerate(entries) if last[key(entry)] != position}
    if twice:
        for position in reversed(range(len(entries))):
            if last[key(entries[position])] != position:
                del entries[position]
    return list(twice)


def _import_domains(model: ModelProto) -> Iterator[Caution]:
    imported = {entry.domain for entry in model.opset_import}
    functions = {function.domain for function in model.functions}
    for domain in sorted({node.domain for node in with_bodies(model.graph.node)} - imported - functions):
        if domain in UNIMPORTED:
            version = UNIMPORTED[domain]
            model.opset_import.add(domain=domain, version=version)
            text = f"the model imports no version of '{domain}', which it uses: {version} is taken, as by onnxruntime"
            yield _note("opset_import", text)


def _order(graph: GraphProto) -> Iterator[Caution]:
    """Put the nodes into an order in which each comes after those that it reads from, where there is one."""
    if _is_in_order(graph):
        return
    makers = {name: position for position, node in enumerate(graph.node) for name in node.output if name}
    before = [{makers[name] for name in reads(node) if name in makers} for node in graph.node]
    early = [position for position, needed in enumerate(before) if needed and max(needed) >= position]
    if not early:
        return
    try:
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError:
        return
    nodes = GraphProto(node=[graph.node[position] for position in order]).node
    first = graph.node[early[0]]
    name = first.name or first.output[0]
    text = f"node '{name}' stood before one that it reads from: the nodes are put in the order in which they run"
    del graph.node[:]
    graph.node.extend(nodes)
    yield _note("nodes", text)


def _is_in_order(graph: GraphProto) -> bool:
    """Whether each node comes after those that it reads from."""
    made, waited_for = set[str](), set[str]()
    for node in graph.node:
        waited_for.update(itertools.filterfalse(made.__contains__, reads(node)))
        outputs = node.output[:]
        if not waited_for.isdisjoint(outputs):
            return False
        made.update(outputs)
    return True


# -- what is still wrong with it ------------------------------------------------------------------------------------


def complaint(bare: ModelProto, full: bool = False) -> str:
    """What onnx's checker has against a model, "" for nothing: onnxruntime's own operators count as known.

    Nor does an input or output lack anything that has no declared type or shape: onnxruntime infers those of outputs,
    and takes inputs of any rank.

    Args:
        bare: the model without its weights (see `skeleton`), mended; it is changed.
        full: whether types and shapes are inferred and compared with what is declared.
    """
    if found := _unlike_any_dialect(bare):
        return found
    _in_domains(bare)
    try:
        if full:
            infer_shapes(bare, check_type=True, strict_mode=True)
        _give_shapes(bare)
        onnx.checker.check_model(bare)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:600]
    return ""


def _unlike_any_dialect(model: ModelProto) -> str:
    """What no runtime takes, though the checker may; "" for nothing."""
    used = {plain_domain(node.domain) for node in with_bodies(model.graph.node)} | {""}
    for entry in model.opset_import:
        if not 0 <= entry.version <= NEVER or (not entry.version and plain_domain(entry.domain) in used):
            return f"it imports version {entry.version} of '{entry.domain or STANDARD}'"
    if found := unknown_operators(model) or _unbound_attribute(model) or _fatal(model):
        return found
    if not _opset(model) and any(not node.domain for node in model.graph.node):
        return "it imports no opset of the standard, and each runtime takes another one then"
    return ""


def _in_domains(model: ModelProto) -> None:
    """Put onnxruntime's operators that stand in the standard's domain in its own, and import that."""
    opset = _opset(model)
    for node in _all_nodes(model):
        if not node.domain and is_of_onnxruntime(node.op_type, opset):
            node.domain = "com.microsoft"
    for owner in (model, *model.functions):
        if all(entry.domain != "com.microsoft" for entry in owner.opset_import):
            owner.opset_import.add(domain="com.microsoft", version=UNIMPORTED["com.microsoft"])


def _give_shapes(model: ModelProto) -> None:
    """Give inputs and outputs that have none a type and a shape, which the checker asks for."""
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") in (None, "tensor_type") and not tensor.HasField("shape"):
            tensor.elem_type = tensor.elem_type or TensorProto.FLOAT
            tensor.shape.SetInParent()


def fatal_node(nodes: Iterable[Node], opset: int) -> str:
    """What is wrong with a node, or one in a body, that onnx's checker lets pass and that libraries fall over.

    Args:
        nodes: the nodes, those of the standard's domain under its short name.
        opset: the version of the standard's operators.

    Returns:
        A sentence, "" where there is no such node.
    """
    for node in with_bodies(nodes):
        fault = _absent_of_many(node, opset) or _odd_equation(node) or _short_body(node)
        if fault:
            return f"node '{node.name or next(iter(node.output), node.op_type)}' ({node.op_type}) {fault}"
    return ""


def _fatal(model: ModelProto) -> str:
    """The same of a model and its functions."""
    parts = ((part.node, _opset(owner)) for part, owner in ((model.graph, model), *((f, f) for f in model.functions)))
    precisions = (_unset_precision(model, function) for function in model.functions)
    return next(filter(None, itertools.chain(itertools.starmap(fatal_node, parts), precisions)), "")


def _unset_precision(model: ModelProto, function: FunctionProto) -> str:
    """A normalization of onnxruntime's own in a function, without a stash_type: onnxruntime ends the process on it.

    In a graph it takes the default.
    """
    for node in with_bodies(function.node):
        if node.domain or node.op_type not in STASHING or not is_of_onnxruntime(node.op_type, _opset(function)):
            continue
        given = next((a for a in node.attribute if a.name == "stash_type"), None)
        if given is None or (given.ref_attr_name and not _always_given(model, function, given.ref_attr_name)):
            label = f"node '{node.name or next(iter(node.output), '')}' ({node.op_type}) in function '{function.name}'"
            return f"{label} has no stash_type, without which onnxruntime can't read it there"
    return ""


def _always_given(model: ModelProto, function: FunctionProto, attribute: str) -> bool:
    """Whether an attribute of a function has a value at each call."""
    key = (function.domain, function.name)
    calls = (node for node in _all_nodes(model) if (node.domain, node.op_type) == key)
    has_default = any(a.name == attribute for a in function.attribute_proto)
    return has_default or all(any(a.name == attribute for a in call.attribute) for call in calls)


def _absent_of_many(node: Node, opset: int) -> str:
    """An absent input among as many as there are, as of Min: onnxruntime ends the process as it runs the node."""
    if "" not in node.input or node.domain or is_of_onnxruntime(node.op_type, opset):
        return ""
    if not _takes_many(node, opset):
        return ""
    first = len(onnx.defs.get_schema(node.op_type, opset).inputs) - 1
    absent = [at for at, name in enumerate(node.input) if not name and at >= first]
    return f"lacks its input {absent[0]}" if absent else ""


def _takes_many(node: Node, opset: int) -> bool:
    """Whether an operator of the standard's domain takes any number of inputs."""
    if not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return False
    inputs = onnx.defs.get_schema(node.op_type, opset).inputs
    return bool(inputs) and inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def _odd_equation(node: Node) -> str:
    """An equation of Einsum that is none: onnx's inference of shapes, in onnxruntime too, never ends for some."""
    if node.op_type != "Einsum" or node.domain:
        return ""
    given = (a.s.decode(errors="backslashreplace") for a in node.attribute if a.name == "equation" and a.s)
    return next((f"has the equation '{text}', which is none" for text in given if not is_equation(text)), "")


def _short_body(node: Node) -> str:
    """A body of If, Loop or Scan that hands out too little: of none at all onnx's inference does not tell."""
    if node.domain or node.op_type not in CONTROL_FLOW:
        return ""
    wanted = len(node.output) + (node.op_type == "Loop")  # whether it goes on
    found = (len(body.output) for body in subgraphs(node))
    return next((f"has a body with {count} outputs, and needs {wanted} of it" for count in found if count < wanted), "")


def _unbound_attribute(model: ModelProto) -> str:
    """An attribute that refers to one of a function, and stands in none, which the checker lets pass; "" for none."""
    for node in with_bodies(model.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                label = node.name or next(iter(node.output), node.op_type)
                what = f"attribute '{attribute.name}' of node '{label}' ({node.op_type})"
                return f"{what} refers to '{attribute.ref_attr_name}' of a function, and stands in none"
    return ""


def unknown_operators(model: ModelProto) -> str:
    """The operators that neither the standard nor onnxruntime has at the model's opset, or of domains not imported.

    Returns:
        What is wrong, "" for nothing; of operators in the domains of others it is not known what these have.
    """
    imported = {plain_domain(entry.domain) for entry in model.opset_import}
    nodes = _calls(model)
    foreign = next((key for key in nodes if key[0] and key[0] not in imported), None)
    if foreign:
        return f"it imports no version of '{foreign[0]}', and uses its {foreign[1]} ('{nodes[foreign]}')"
    opset = _opset(model)
    found = [op_type for domain, op_type in nodes if opset and not domain and not _is_known(op_type, opset)]
    if not found:
        return ""
    shown = ", ".join(f"{op_type} ('{nodes['', op_type]}'{_when(op_type, opset)})" for op_type in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"opset {opset} has no operator {shown}{more}"


def _calls(model: ModelProto) -> dict[tuple[str, str], str]:
    """The operators that are none of the model's own functions, (domain, name) -> the first node of each."""
    made = {(plain_domain(function.domain), function.name) for function in model.functions}
    nodes: dict[tuple[str, str], str] = {}
    for node in with_bodies(model.graph.node):
        nodes.setdefault((plain_domain(node.domain), node.op_type), node.name or next(iter(node.output), ""))
    return {key: label for key, label in nodes.items() if key not in made}


def _is_known(op_type: str, opset: int) -> bool:
    if is_of_onnxruntime(op_type, opset):
        return True
    if not onnx.defs.has(op_type, max_inclusive_version=opset):
        return False
    # GroupNormalization is deprecated from 18 on and has been mended at 21; Upsample is for ever gone at 10
    return not (onnx.defs.get_schema(op_type, opset).deprecated and onnx.defs.get_schema(op_type).deprecated)


def _when(op_type: str, opset: int) -> str:
    """At which opsets the standard has an operator that it has not at this one."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op_type and not s.domain]
    first = min((schema.since_version for schema in schemas), default=0)
    if first > opset:
        return f", of opset {first} and newer"
    gone = [schema.since_version for schema in schemas if schema.deprecated]
    return f", given up at opset {min(gone)}" if gone else ""


def _opset(model: ModelProto | FunctionProto) -> int:
    """The opset of the standard's domain, 0 where a model or a function imports none."""
    return next((entry.version for entry in model.opset_import if not plain_domain(entry.domain)), 0)
