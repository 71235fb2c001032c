"""Accept models that onnxruntime loads although they break the ONNX standard.

Such models use operators that onnxruntime adds to the standard's domain, or deviate from the required form. `repair`
brings a model into the required form and keeps the meaning that onnxruntime gives it. `checker_error` returns the error
that onnx's checker still raises afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import chain, filterfalse
from typing import Any

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.domains import MICROSOFT, ML, STANDARD, plain_domain
from onnxgrad_cli.ir.einsum import is_equation
from onnxgrad_cli.ir.functions import called_by, key_of
from onnxgrad_cli.ir.node import Node, refill
from onnxgrad_cli.ir.node_values import CONTROL_FLOW, all_nodes, reads, schema_of, subgraphs, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import MAX_AXES, dtype_of

NEVER = 1 << 30
OF_ONNXRUNTIME = {"LayerNormalization": 17, "SimplifiedLayerNormalization": NEVER, "ThresholdedRelu": 10}
"""Operator -> the opset in which the standard added it, for operators that onnxruntime accepts at every opset.

At older opsets, onnxruntime gives the operator its newest definition. The first two are written by onnxruntime's
optimizer, onnxruntime.transformers and onnxruntime-genai.
"""

STASHING = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators of `OF_ONNXRUNTIME` that have the attribute stash_type: the element type in which they compute."""

FIRST_WITHOUT = 10
GIVEN_UP = frozenset({"Affine", "Crop", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"})
"""Experimental operators that the standard removed in opset 10, but that onnxruntime still runs in older models."""

UNIMPORTED = {ML: 5, MICROSOFT: 1, "com.microsoft.nchwc": 1}
"""Domain -> the version that onnxruntime assumes if a model uses the domain and does not import it."""


def is_of_onnxruntime(op_type: str, opset: int) -> bool:
    """Return True if an operator of the standard's domain is defined, at this opset, only by onnxruntime."""
    return opset < OF_ONNXRUNTIME.get(op_type, FIRST_WITHOUT if op_type in GIVEN_UP else 0)


# -- a model in the standard's form ---------------------------------------------------------------------------------


def repair(model: ModelProto) -> list[Caution]:
    """Bring a model, in place, into the form that the standard requires. Keep the meaning that onnxruntime gives it.

    - If an opset import or an initializer appears twice, the last one stays.
    - Nodes are sorted so that each follows the nodes that it reads from.
    - A domain in `UNIMPORTED` that is used but not imported is imported.
    - The standard's domain gets its short name, "".

    Returns:
        Notes for the user about changes that may matter to them.
    """
    notes = [*_use_one_domain(model), *_import_domains(model), *_order(model.graph)]
    model.graph.name = model.graph.name or "graph"
    for position in reversed(range(len(model.graph.initializer))):
        if not model.graph.initializer[position].name:  # no node can read it
            del model.graph.initializer[position]
    if twice := _keep_last(model.graph.initializer, "name"):
        text = f"the model stores {listed(twice, 3)} twice; onnxgrad uses the last one, as onnxruntime does"
        notes.append(("initializers", text))
    return [Caution("note", subject, text) for subject, text in notes]


def drop_absent_ends(model: ModelProto) -> None:
    """Remove, in place, omitted inputs (empty names) at the end of the inputs of standard nodes.

    This does not change their meaning, but onnxruntime crashes if the axis of DFT or the bias of LayerNormalization is
    an empty name. Operators with a variable number of inputs are skipped: see `_absent_of_many`.
    """
    for node in all_nodes(model):
        names = node.input
        if names and not names[-1] and plain_domain(node.domain) == "" and not _takes_many(node, _opset(model)):
            while names and not names[-1]:
                names.pop()


def _use_one_domain(model: ModelProto) -> Iterator[tuple[str, str]]:
    """Give the standard's domain its short name, and import each domain only once."""
    for named in (*model.opset_import, *all_nodes(model)):
        if named.domain == STANDARD:
            named.domain = ""
    versions = sorted({(entry.domain, entry.version) for entry in model.opset_import})
    _keep_last(model.opset_import, "domain")
    for entry in model.opset_import:
        every = [str(version) for domain, version in versions if domain == entry.domain]
        if len(every) > 1:
            what = f"the model imports '{entry.domain or STANDARD}' at versions {' and '.join(every)}"
            yield "opset_import", f"{what}; onnxgrad uses the last one, {entry.version}, as onnxruntime does"


def _keep_last(entries: Any, field: str) -> list[str]:
    """Keep only the last of the protobuf entries with the same name or domain. Return the names that were repeated."""
    names = [getattr(entry, field) for entry in entries]
    last = {name: position for position, name in enumerate(names)}
    earlier = [position for position, name in enumerate(names) if last[name] != position]
    for position in reversed(earlier):
        del entries[position]
    return list(dict.fromkeys(names[position] for position in earlier))


def _import_domains(model: ModelProto) -> Iterator[tuple[str, str]]:
    known = {entry.domain for entry in model.opset_import} | {function.domain for function in model.functions}
    for domain in sorted({node.domain for node in with_bodies(model.graph.node)} & UNIMPORTED.keys() - known):
        version = UNIMPORTED[domain]
        model.opset_import.add(domain=domain, version=version)
        what = f"the model uses '{domain}' without importing a version of it"
        yield "opset_import", f"{what}; onnxgrad uses version {version}, as onnxruntime does"


def _order(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Sort the nodes so that each follows the nodes that it reads from, and yield a note if their order changes.

    If there is a cycle, the nodes stay as they are.
    """
    if _is_in_order(graph):
        return
    makers = {name: position for position, node in enumerate(graph.node) for name in node.output if name}
    before = [{makers[name] for name in reads(node) if name in makers} for node in graph.node]
    early = next((node for at, node in enumerate(graph.node) if max(before[at], default=-1) >= at), None)
    if early is None:
        return
    name = early.name or early.output[0]
    with suppress(CycleError):
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
        refill(graph.node, [graph.node[position] for position in order])
        yield "nodes", f"node '{name}' was stored before a node that it reads from, so the nodes were sorted"


def _is_in_order(graph: GraphProto) -> bool:
    """Return True if each node follows the nodes that it reads from."""
    made, waited_for = set[str](), set[str]()
    for node in graph.node:
        waited_for.update(filterfalse(made.__contains__, reads(node)))
        outputs = node.output[:]
        if not waited_for.isdisjoint(outputs):
            return False
        made.update(outputs)
    return True


# -- faults that remain ---------------------------------------------------------------------------------------------


def checker_error(bare: ModelProto, full: bool = False) -> str:
    """Return the error that onnx's checker raises for a model, or "" if it raises none.

    The operators that onnxruntime adds to the standard's domain count as known. Inputs and outputs need no declared
    type or shape, because onnxruntime infers the types of outputs and accepts inputs of any rank.

    Args:
        bare: the model without its weights (`weightless_copy.skeleton`), after `repair`; it is changed.
        full: True to also infer types and shapes and compare them with the declared ones.
    """
    if found := _unlike_any_dialect(bare):
        return found
    _in_domains(bare)
    _replace_deprecated(bare)
    for node in all_nodes(bare):  # the checker names a node by its name alone
        node.name = node.name or next(iter(node.output), "")
    try:
        if full:
            infer_shapes(bare, check_type=True, strict_mode=True)
        _give_shapes(bare)
        onnx.checker.check_model(bare)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:600]
    return ""


def _unlike_any_dialect(model: ModelProto) -> str:
    """Describe an error that onnx's checker may accept although no runtime does; "" if there is none."""
    used = {plain_domain(node.domain) for node in with_bodies(model.graph.node)} | {""}
    for entry in model.opset_import:
        if not 0 <= entry.version <= NEVER or (not entry.version and plain_domain(entry.domain) in used):
            return f"it imports version {entry.version} of '{entry.domain or STANDARD}'"
    if found := unknown_operators(model) or _unbound_attribute(model) or _fatal(model):
        return found
    if not _opset(model) and any(not node.domain for node in model.graph.node):
        return "it does not import an opset of the standard, and runtimes then assume different ones"
    return ""


def _in_domains(model: ModelProto) -> None:
    """Move onnxruntime's operators from the standard's domain to com.microsoft, and import that domain if needed."""
    opset = _opset(model)
    for node in all_nodes(model):
        if not node.domain and is_of_onnxruntime(node.op_type, opset):
            node.domain = MICROSOFT
    for owner in (model, *model.functions):
        if all(entry.domain != MICROSOFT for entry in owner.opset_import):
            owner.opset_import.add(domain=MICROSOFT, version=UNIMPORTED[MICROSOFT])


def _replace_deprecated(model: ModelProto) -> None:
    """Turn GroupNormalization of opset 18 into InstanceNormalization, which has the same operands and result type.

    The checker refuses this version because it is deprecated, but onnxruntime runs it.
    """
    for owner, nodes in ((model, model.graph.node), *((each, each.node) for each in model.functions)):
        for node in with_bodies(nodes) if 18 <= _opset(owner) < 21 else ():
            if node.op_type == "GroupNormalization" and not node.domain:
                node.op_type = "InstanceNormalization"
                refill(node.attribute, [each for each in node.attribute if each.name != "num_groups"])


def _give_shapes(model: ModelProto) -> None:
    """Declare a type and a shape for inputs and outputs that lack them, because the checker requires both."""
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") in (None, "tensor_type") and not tensor.HasField("shape"):
            tensor.elem_type = tensor.elem_type or TensorProto.FLOAT
            tensor.shape.SetInParent()


def _fatal(model: ModelProto) -> str:
    """Describe the first node of a model or its functions that is invalid although onnx's checker accepts it.

    Such nodes make libraries crash or hang, or mean something else in each library. The standard's domain has its short
    name. See also `_unset_precision`, for nodes in functions. Return "" if there is no such node.
    """
    functions = {key_of(function): function for function in model.functions}
    for owner, nodes in ((model, model.graph.node), *((each, each.node) for each in model.functions)):
        opset = _opset(owner)
        for node in with_bodies(nodes):
            checks = (_odd_attribute, _odd_equation, _absent_of_many, _unfit_body) if not node.domain else ()
            faults = chain(*(check(node, opset) for check in checks), _unfit_call(node, functions.get(called_by(node))))
            for fault in faults:
                return f"{_label(node)} {fault}"
    return next(chain.from_iterable(_unset_precision(model, function) for function in model.functions), "")


def _label(node: Node) -> str:
    return f"node '{node.name or next(iter(node.output), node.op_type)}' ({node.op_type})"


def _unfit_call(node: Node, function: FunctionProto | None) -> Iterator[str]:
    """Describe a call of a function with more inputs or outputs than the function has."""
    if function is not None and (len(node.input) > len(function.input) or len(node.output) > len(function.output)):
        called, has = (f"{len(each.input)} inputs and {len(each.output)} outputs" for each in (node, function))
        yield f"has {called}, but its function has {has}"


def _odd_attribute(node: Node, opset: int) -> Iterator[str]:
    """Describe an axis that no tensor has, a Cast to no type, or a Constant without a value or with several.

    onnx and onnxruntime cut an axis to 32 bits, so that 2^32 would be axis 0.
    """
    if node.op_type == "Constant" and len(node.attribute) != 1:
        yield f"has {len(node.attribute)} values instead of one"
    for attribute in node.attribute:
        far = [axis for axis in (attribute.i, *attribute.ints) if abs(axis) > MAX_AXES]
        if far and attribute.name in ("axis", "axes"):
            yield f"has the axis {far[0]}, but tensors have at most {MAX_AXES} axes"
        if node.op_type == "Cast" and attribute.name == "to" and not (attribute.i or attribute.ref_attr_name):
            yield "converts to the element type 0, which does not exist"


def _unset_precision(model: ModelProto, function: FunctionProto) -> Iterator[str]:
    """Describe a normalization in a function that lacks stash_type, so that onnxruntime would crash; "" if none does.

    This concerns normalizations that only onnxruntime defines. Outside of functions, it uses the attribute's default.
    """
    for node in with_bodies(function.node):
        if node.domain or node.op_type not in STASHING or not is_of_onnxruntime(node.op_type, _opset(function)):
            continue
        given = next((a for a in node.attribute if a.name == "stash_type"), None)
        if given is None or (given.ref_attr_name and not _always_given(model, function, given.ref_attr_name)):
            yield f"{_label(node)} in function '{function.name}' has no stash_type, which onnxruntime requires there"


def _always_given(model: ModelProto, function: FunctionProto, attribute: str) -> bool:
    """Return True if an attribute of a function has a default, or every call gives it a value."""
    key = (function.domain, function.name)
    calls = (node for node in all_nodes(model) if (node.domain, node.op_type) == key)
    has_default = any(a.name == attribute for a in function.attribute_proto)
    return has_default or all(any(a.name == attribute for a in call.attribute) for call in calls)


def _absent_of_many(node: Node, opset: int) -> Iterator[str]:
    """Describe an omitted input among variadic inputs, such as those of Min; "" if there is none.

    onnxruntime crashes when it runs such a node.
    """
    if "" in node.input and not is_of_onnxruntime(node.op_type, opset) and _takes_many(node, opset):
        first = len(onnx.defs.get_schema(node.op_type, opset).inputs) - 1
        yield from (f"has no input {at}" for at, name in enumerate(node.input) if not name and at >= first)


def _takes_many(node: Node, opset: int) -> bool:
    """Return True if an operator of the standard's domain has variadic inputs."""
    schema = schema_of(node.op_type, opset)
    inputs = schema.inputs if schema is not None else ()
    return bool(inputs) and inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def _odd_equation(node: Node, opset: int) -> Iterator[str]:
    """Describe an invalid equation of Einsum; "" if there is none.

    For some invalid equations, onnx's shape inference, which onnxruntime uses too, never returns.
    """
    given = (a.s.decode(errors="backslashreplace") for a in node.attribute if a.name == "equation" and a.s)
    if node.op_type == "Einsum":
        yield from (f"has the equation '{text}', which is not valid" for text in given if not is_equation(text))


def _unfit_body(node: Node, opset: int) -> Iterator[str]:
    """Describe a body of If, Loop or Scan with another number of inputs or outputs than the node requires.

    Also describe branches of an If that declare different element types. The checker accepts both.
    """
    if node.op_type not in CONTROL_FLOW:
        return
    passed = {"If": 0, "Loop": max(len(node.input), 2), "Scan": len(node.input) - (opset < 9)}[node.op_type]
    needed = len(node.output) + (node.op_type == "Loop")  # the condition of a Loop
    for body in subgraphs(node):
        stored = {tensor.name for tensor in body.initializer}
        required = sum(value.name not in stored for value in body.input)
        if len(body.output) != needed:
            yield f"has a body with {len(body.output)} outputs, but needs {needed}"
        if not required <= passed <= len(body.input):
            yield f"has a body with {required} inputs, but passes it {passed}"
    branches = [[dtype_of(value.type) for value in body.output] for body in subgraphs(node)]
    pairs = enumerate(zip(*branches, strict=True)) if node.op_type == "If" else ()
    yield from (f"has branches with different types of output {i}" for i, pair in pairs if len({*pair} - {0}) > 1)


def _unbound_attribute(model: ModelProto) -> str:
    """Describe an attribute outside of functions that refers to an attribute of a function; "" if there is none.

    onnx's checker accepts such an attribute.
    """
    for node in with_bodies(model.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                what = f"attribute '{attribute.name}' of {_label(node)}"
                return f"{what} refers to '{attribute.ref_attr_name}' of a function, but is not in a function"
    return ""


def unknown_operators(model: ModelProto) -> str:
    """Describe operators that are not defined at the model's opset, or whose domain is not imported.

    An operator of the standard's domain counts as defined if the standard or onnxruntime defines it.

    Returns:
        The description, or "" if there are no such operators. Operators in other imported domains are not checked,
        because their definitions are unknown.
    """
    imported = {plain_domain(entry.domain) for entry in model.opset_import}
    nodes = _calls(model)
    foreign = next((key for key in nodes if key[0] and key[0] not in imported), None)
    if foreign:
        return f"it uses {foreign[1]} ('{nodes[foreign]}') of '{foreign[0]}', but imports no version of '{foreign[0]}'"
    opset = _opset(model)
    found = [op_type for domain, op_type in nodes if opset and not domain and not _is_known(op_type, opset)]
    if not found:
        return ""
    shown = ", ".join(f"{op_type} ('{nodes['', op_type]}'{_when(op_type, opset)})" for op_type in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"opset {opset} has no operator {shown}{more}"


def _calls(model: ModelProto) -> dict[tuple[str, str], str]:
    """Return (domain, operator) -> the name of the first node, for operators that no function of the model defines."""
    made = {(plain_domain(function.domain), function.name) for function in model.functions}
    nodes: dict[tuple[str, str], str] = {}
    for node in with_bodies(model.graph.node):
        nodes.setdefault((plain_domain(node.domain), node.op_type), node.name or next(iter(node.output), ""))
    return {key: label for key, label in nodes.items() if key not in made}


def _is_known(op_type: str, opset: int) -> bool:
    if is_of_onnxruntime(op_type, opset):
        return True
    schema = schema_of(op_type, opset)
    # GroupNormalization is deprecated at 18 and has a new definition at 21. Upsample is deprecated for good at 10.
    return schema is not None and not (schema.deprecated and onnx.defs.get_schema(op_type).deprecated)


def _when(op_type: str, opset: int) -> str:
    """Describe the opsets at which the standard defines an operator that is missing at this opset."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op_type and not s.domain]
    first = min((schema.since_version for schema in schemas), default=0)
    if first > opset:
        return f", of opset {first} and newer"
    gone = [schema.since_version for schema in schemas if schema.deprecated]
    return f", removed at opset {min(gone)}" if gone else ""


def _opset(model: ModelProto | FunctionProto) -> int:
    """Return the opset of the standard's domain, or 0 if a model or function does not import it."""
    return next((entry.version for entry in model.opset_import if not plain_domain(entry.domain)), 0)
