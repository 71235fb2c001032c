"""Names of derivatives after CasADi's convention: `jac_y_x`, `fwd_x` and `adj_y` for seeds, `hess_y_x_z`.

Source: J. Andersson et al., CasADi, Mathematical Programming Computation 11, 2019, and its `Function.factory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.renaming import rename


def casadi_names(kind: Derivative, of: Sequence[str], wrt: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of the inputs that are added, one for each seed, and of the derivatives, in their order.

    A Hessian is that of the sum of all outputs, which are named one after the other; the product with it is CasADi's
    forward derivative of a reverse one.
    """
    total = "_".join(of)
    forward, adjoint = [f"fwd_{x}" for x in wrt], [f"adj_{x}" for x in wrt]
    return {
        "vjp": ([f"adj_{y}" for y in of], adjoint),
        "jvp": (forward, [f"fwd_{y}" for y in of]),
        "hvp": (forward, [f"fwd_{name}" for name in adjoint]),
        "jacobian": ([], [f"jac_{y}_{x}" for y, x in product(of, wrt)]),
        "hessian": ([], [f"hess_{total}_{x}_{z}" for x, z in product(wrt, wrt)]),
    }[kind]


def name_after(graph: Graph, model: ModelProto, inputs: Iterable[str], outputs: Iterable[str], end: int) -> None:
    """Rename the last inputs of a finished model, and its first outputs, where a name is not taken.

    Args:
        graph: what the model was made of, for its names.
        end: how many of the model's inputs come before those.
    """
    proto = model.graph
    names = {value.name: name for value, name in zip(proto.input[end:], inputs, strict=False)}
    names |= {value.name: name for value, name in zip(proto.output, outputs, strict=False)}
    names = {name: graph.fresh(new) for name, new in names.items()}
    rename(proto.node, names)
    for value in (*proto.input, *proto.output, *proto.value_info, *proto.initializer):
        value.name = names.get(value.name, value.name)
