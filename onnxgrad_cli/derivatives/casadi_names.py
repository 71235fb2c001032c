"""Rename the inputs and outputs of a model of derivatives by CasADi's convention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.renaming import rename


def check_kind(kind: Derivative) -> None:
    """Raise a UsageError if CasADi has no names for a kind of derivative."""
    if kind in ("gnvp", "hessian-diagonal", "laplacian"):
        raise conflict(f"`names='casadi'` has no names for `kind='{kind}'`", "leave out CasADi names")


def casadi_names(
    kind: Derivative, of: Sequence[str], wrt: Sequence[str], weighted: bool
) -> tuple[list[str], list[str]]:
    """Return CasADi's names of the added inputs and of the derivatives, each in the order of the model.

    The name of a Hessian lists all outputs, because it is the Hessian of their sum. The weights of a sum are called
    `lam_<y>`, as for the Lagrangian of a nonlinear program. CasADi treats a Hessian-vector product as the forward
    derivative of a reverse derivative.
    """
    total = "_".join(of)
    forward, adjoint = [f"fwd_{x}" for x in wrt], [f"adj_{x}" for x in wrt]
    inputs, outputs = {
        "vjp": ([f"adj_{y}" for y in of], adjoint),
        "jvp": (forward, [f"fwd_{y}" for y in of]),
        "hvp": (forward, [f"fwd_{name}" for name in adjoint]),
        "jacobian": ([], [f"jac_{y}_{x}" for y, x in product(of, wrt)]),
        "hessian": ([], [f"hess_{total}_{x}_{z}" for x, z in product(wrt, wrt)]),
    }[kind]
    return [*(f"lam_{y}" for y in of if weighted), *inputs], outputs


def name_after(graph: Graph, model: ModelProto, inputs: Iterable[str], outputs: Iterable[str], end: int) -> None:
    """Rename the last inputs and the first outputs of a finished model. A name that is in use gets a suffix.

    Args:
        graph: the graph that the model was made from, which knows the names in use.
        model: the finished model.
        inputs: the new names of the inputs after the first `end`.
        outputs: the new names of the first outputs.
        end: the number of inputs that keep their names.
    """
    proto = model.graph
    names = {value.name: name for value, name in zip(proto.input[end:], inputs, strict=False)}
    names |= {value.name: name for value, name in zip(proto.output, outputs, strict=False)}
    names = {name: graph.fresh(new) for name, new in names.items()}
    rename(proto.node, names)
    for value in (*proto.input, *proto.output, *proto.value_info, *proto.initializer):
        value.name = names.get(value.name, value.name)
