"""The pass: products with matrices of few bits by their kernels, and such matrices as floats only while they are used.

A definition writes the matrix of a kernel out as floats, which a runtime would compute early and keep, so that a model
of 4 bits would take the memory of float32. So the kernel comes back in the forward part. The backward part needs the
matrix W, of N rows of K, once, in dX = G W: there it is unpacked when G has come, by a control dependency.
"""

from __future__ import annotations

from functools import cached_property

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node, make_node, metadata_of
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.options import BackwardOptions
from onnxgrad_cli.passes.few_bits.late_floats import late_floats, times_transposed
from onnxgrad_cli.passes.few_bits.unpacking import Packed, late_product
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.quantized_matrices import is_transpose
from onnxgrad_cli.record import Training

ROUNDS = "accuracy_level"
"""The attribute that lets a kernel round what it multiplies."""

FED = {"MatMulNBits": 0, "GatherBlockQuantized": 1}
"""The input of a kernel that is not stored."""


def _run(graph: Graph, options: BackwardOptions, training: Training) -> bool:
    """Let kernels take the place of what definitions have written for them, and make floats late for other products."""
    writer = _Writer(graph)
    if training.forward_stays or not writer.matrices:
        return False
    nodes = [each for node in graph.nodes for each in writer.replaced(node)]
    changed = len(nodes) != len(graph.nodes) or any(a is not b for a, b in zip(nodes, graph.nodes, strict=True))
    graph.set_nodes(nodes)
    return changed


class _Writer:
    """Writes what takes the place of nodes that read matrices of few bits.

    Attributes:
        matrices: value -> the kernel that gives it, or products with it, or the DequantizeLinear that makes it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._op = Op(graph)
        self._stored = graph.initializers.keys() - {*graph.input_names, *graph.not_constant}
        found = {node.output[0]: node for node in graph.nodes if node.op_type == "DequantizeLinear"} | graph.kernels
        self.matrices = {value: node for value, node in found.items() if self._is_frozen(node)}

    @cached_property
    def _makers(self) -> dict[str, Node]:
        return self.graph.producers()

    def _is_frozen(self, node: Node) -> bool:
        """Whether all that a node dequantizes is stored, and nobody feeds or trains it."""
        fed = FED.get(node.op_type)
        return all(name in self._stored for at, name in enumerate(node.input[:4]) if name and at != fed)

    def replaced(self, node: Node) -> list[Node]:
        """The nodes that compute what a node does."""
        if not is_standard(node.domain) or not node.output:
            return [node]
        kernel = self.matrices.get(node.output[0])
        if kernel is not None and kernel.op_type == "GatherBlockQuantized":
            return [self._kernel(node, kernel, list(kernel.input))]
        for position, name in enumerate(node.input[:2] if node.op_type in ("Gemm", "MatMul") else ()):
            value, turned = self._before_views(name)
            if value in self.matrices:
                return self._product(node, position, self.matrices[value], turned)
        return [node]

    def _before_views(self, name: str) -> tuple[str, bool]:
        """The one of the matrices that a value is a view of, and whether transposed; "" where it is of none."""
        turned, makers = False, self._makers
        while name not in self.matrices:
            node = makers.get(name)
            if node is None or not (is_transpose(node) or node.op_type == "Identity"):
                return "", False
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, turned

    def _product(self, node: Node, position: int, source: Node, turned: bool) -> list[Node]:
        """The nodes of a product with a matrix, or with its transpose."""
        other = node.input[1 - position]
        if source.op_type == "DequantizeLinear":
            return self._with_floats(node, position, source, turned)
        if (node.op_type, position) != ("MatMul", 1) or len(shape_of(self.graph.types.get(other)) or ()) < 2:
            return [node]
        if not turned:
            return [self._kernel(node, source, [other, *source.input[1:4]])]
        op = self._begun(node)
        op.rename(late_product(op, op.val(other), Packed.of(op, source)), node.output[0])
        return op.nodes

    def _with_floats(self, node: Node, position: int, source: Node, turned: bool) -> list[Node]:
        """The nodes of a product with what a DequantizeLinear makes: not where it makes the other factor too.

        Runtimes have kernels for such products, which compute with the integers.
        """
        other = node.input[1 - position]
        maker = self._makers.get(other)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return [node]
        op = self._begun(node)
        x = op.val(other)
        floats = late_floats(op, source, x)
        if turned and (node.op_type, position) == ("MatMul", 1) and x.rank > 1:
            op.rename(times_transposed(op, x, floats), node.output[0])
            return op.nodes
        node.input[position] = (op.transpose(floats, [1, 0]) if turned else floats).name
        return [*op.nodes, node]

    def _begun(self, node: Node) -> Op:
        """The emitter, for nodes of the part of the model that a node belongs to."""
        self._op.nodes, self._op.scope = [], node.name
        self._op.role, self._op.forward = metadata_of(node, ROLE), metadata_of(node, FORWARD)
        return self._op

    def _kernel(self, node: Node, kernel: Node, operands: list[str]) -> Node:
        """The kernel's node in place of `node`; it does not round."""
        written = make_node(kernel.op_type, operands, node.output, node.name, domain=kernel.domain)
        written.attribute.extend(attribute for attribute in kernel.attribute if attribute.name != ROUNDS)
        written.metadata = node.metadata
        self.graph.use_domain(kernel.domain)
        self.graph.declared_shapes.update(node.output)
        return written


FEW_BITS = Pass(
    "few-bits", "matrices of few bits multiplied by their kernels, and as floats only while used", _run, ("optimizer",)
)
