"""What the gradients of the expensive operators cost, beside PyTorch's eager mode in the same run.

    python -m benchmarks.ops [--repeat N] [--threads N] [--only NAME ...]

A step is one forward and one backward pass from a given cotangent to every float input, in float32. The two take turns
in blocks, after a run each that is not measured; the figure is a ratio of medians, and `reference` is the ratio of the
best lowering known for stock onnxruntime, where that was measured before. Results that differ by more than a thousandth
of the largest entry end the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper
from torch.nn import functional as F

from onnxgrad_cli.execution.interleaved_timing import interleaved
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.mode import apply_mode
from onnxgrad_cli.record import Training
from tests.harness import with_gradient

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One operator at one size.

    Attributes:
        name: what it is called in the table.
        op, attrs: the node.
        inputs: the node's inputs: shapes of random floats, arrays, or None; those of `constant` are initializers.
        function: the same in PyTorch, of the tensors that are not constant.
        reference: ratio of the best lowering known.
        constant: positions of inputs that are initializers.
        outputs: how many outputs the node has; the first is what PyTorch's function returns.
        positive: positions of inputs that are positive.
        equal: whether PyTorch has its inputs in the same layout, so that gradients can be compared.
    """

    name: str
    op: str
    inputs: Sequence[Any]
    function: Callable[..., torch.Tensor]
    reference: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    constant: Sequence[int] = ()
    outputs: int = 1
    positive: Sequence[int] = ()
    opset: int = 20
    equal: bool = True
    mode: str = "keep"

    def arrays(self) -> dict[str, np.ndarray]:
        """The inputs' values by name."""
        rng = np.random.default_rng(0)
        return {
            f"x{i}": rng.standard_normal(x, np.float32) * np.float32(0.1) + np.float32(i in self.positive)
            if isinstance(x, tuple)
            else np.asarray(x)
            for i, x in enumerate(self.inputs)
            if x is not None
        }

    def model(self, arrays: Arrays) -> onnx.ModelProto:
        """The model of the node and its gradients; `g_y0` is the cotangent."""
        constant = {f"x{i}" for i in self.constant}
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in arrays.items()
            if name not in constant
        ]
        names = ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, name="node", **self.attrs)
        weights = [onnx.numpy_helper.from_array(arrays[name], name) for name in sorted(constant)]
        graph = helper.make_graph([node], "row", infos, [onnx.ValueInfoProto(name="y0")], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        view = Graph(model)
        infer_types(view)
        if apply_mode(view, Options(mode=self.mode), Training()):
            model = view.commit()
        wanted = [info.name for info in infos if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
        return with_gradient(onnx.shape_inference.infer_shapes(model), wanted, ["y0"], "g_")


def recurrent(kind: type[torch.nn.RNNBase], steps: int, batch: int, size: int) -> tuple[list[Any], Callable[..., Any]]:
    """The inputs of a layer, and the same in PyTorch, whose gates stand in another order."""
    gates = 4 if kind is torch.nn.LSTM else 3
    layer = kind(size, size)  # type: ignore[call-arg, arg-type]

    def function(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        values = dict(zip(names, (w[0], r[0], *b[0].chunk(2)), strict=True))
        return torch.func.functional_call(layer, values, (x,))[0].unsqueeze(1)

    rows = gates * size
    return [(steps, batch, size), (1, rows, size), (1, rows, size), (1, 2 * rows)], function


def rows() -> Iterator[Row]:
    """The table."""
    rng = np.random.default_rng(1)

    def conv(
        name: str, x: tuple[int, ...], w: tuple[int, ...], reference: str = "", op: str = "Conv", **attrs: int
    ) -> Row:
        n = len(x) - 2
        pad, stride, group = attrs.get("pad", 0), attrs.get("stride", 1), attrs.get("group", 1)
        function = getattr(F, f"conv{'_transpose' if op == 'ConvTranspose' else ''}{n}d")
        written = {"kernel_shape": w[2:], "pads": [pad] * 2 * n, "strides": [stride] * n, "group": group}
        call: dict[str, Any] = {"padding": pad, "stride": stride, "groups": group}
        return Row(name, op, [x, w], lambda x, w: function(x, w, **call), reference, written)

    yield conv("Conv 3x3, 64 x 56x56", (4, 64, 56, 56), (64, 64, 3, 3), "1.0-1.9", pad=1)
    yield conv("Conv 3x3, 256 x 14x14", (4, 256, 14, 14), (256, 256, 3, 3), "1.0-1.9", pad=1)
    yield conv("Conv 1x1, 256 x 28x28", (4, 256, 28, 28), (128, 256, 1, 1), "0.2-0.9")
    yield conv("Conv 3x3/2, 128 x 28x28", (4, 128, 28, 28), (128, 128, 3, 3), "0.3-1.9", pad=1, stride=2)
    yield conv("Conv 7x7/2, stem", (2, 3, 112, 112), (64, 3, 7, 7), "2.2", pad=3, stride=2)
    yield conv("Conv depthwise 3x3", (4, 128, 28, 28), (128, 1, 3, 3), "0.3-5", pad=1, group=128)
    yield conv("Conv 3x3, 4 groups", (4, 128, 28, 28), (128, 32, 3, 3), pad=1, group=4)
    yield conv("Conv 1-D, 5 taps", (8, 64, 512), (64, 64, 5), pad=2)
    yield conv("ConvTranspose 4x4/2", (4, 64, 14, 14), (64, 32, 4, 4), op="ConvTranspose", pad=1, stride=2)

    image = (4, 64, 56, 56)
    square = {"kernel_shape": [2, 2], "strides": [2, 2]}
    lapping = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    yield Row("MaxPool 2x2/2", "MaxPool", [image], lambda x: F.max_pool2d(x, 2), "0.9-1.7", square)
    yield Row("MaxPool 3x3/2", "MaxPool", [image], lambda x: F.max_pool2d(x, 3, 2, 1), "3.2", lapping)
    yield Row("AveragePool 2x2/2", "AveragePool", [image], lambda x: F.avg_pool2d(x, 2), "0.3", square)
    average = {**lapping, "count_include_pad": 1}
    yield Row("AveragePool 3x3/2", "AveragePool", [image], lambda x: F.avg_pool2d(x, 3, 2, 1), "0.2-0.4", average)

    vector = (64,)
    statistics_ = [np.zeros(vector, np.float32), np.ones(vector, np.float32)]
    yield Row("BatchNormalization, training", "BatchNormalization", [image, vector, vector, *statistics_],
              lambda x, s, b: F.batch_norm(x, None, None, s, b, True), "2.7-3.7",
              constant=(3, 4), positive=(1,), mode="train")  # fmt: skip
    yield Row("LayerNormalization", "LayerNormalization", [(8, 128, 768), (768,), (768,)],
              lambda x, s, b: F.layer_norm(x, (768,), s, b), "3.5-5", positive=(1,))  # fmt: skip
    yield Row("RMSNormalization", "RMSNormalization", [(8, 128, 768), (768,)],
              lambda x, s: F.rms_norm(x, (768,), s, 1e-5), "0.3-0.5", positive=(1,), opset=23)  # fmt: skip
    yield Row("Softmax", "Softmax", [(48, 128, 128)], lambda x: F.softmax(x, 2), attrs={"axis": 2})
    labels = rng.integers(0, 30522, 256)
    yield Row("cross-entropy, 30,522 classes", "SoftmaxCrossEntropyLoss", [(256, 30522), labels],
              lambda x, t: F.cross_entropy(x, t), "0.65-0.86")  # fmt: skip
    yield Row("Gelu", "Gelu", [(1024, 3072)], F.gelu)

    for count, table, known in ((1024, (30522, 768), "0.7"), (2048, (1000, 64), "3.4"), (16384, (1000, 64), "8.5"),
                                (2048, (2, 768), "")):  # fmt: skip
        name = f"Gather, {count:,} from {table[0]:,} x {table[1]}"
        yield Row(name, "Gather", [table, rng.integers(0, table[0], count)], lambda x, i: F.embedding(i, x), known)
    places = rng.integers(0, 4096, (8192, 64))
    yield Row("ScatterElements, add", "ScatterElements", [(4096, 64), places, (8192, 64)],
              lambda x, i, u: x.scatter_add(0, i, u), attrs={"reduction": "add"})  # fmt: skip
    yield Row("CumSum", "CumSum", [(256, 4096), np.array(1)], lambda x: x.cumsum(1), constant=(1,))

    yield Row("MatMul, 8 x 128 rows", "MatMul", [(8, 128, 768), (768, 768)], torch.matmul, "1.0-1.4")
    yield Row("MatMul, 48 products", "MatMul", [(48, 128, 64), (48, 64, 128)], torch.matmul)
    equation = "bhid,bhjd->bhij"
    yield Row("Einsum", "Einsum", [(4, 12, 128, 64)] * 2, lambda a, b: torch.einsum(equation, a, b),
              attrs={"equation": equation})  # fmt: skip
    yield Row("Attention", "Attention", [(4, 12, 128, 64)] * 3, F.scaled_dot_product_attention, opset=23)
    yield Row("Attention, causal", "Attention", [(4, 12, 128, 64)] * 3,
              lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
              attrs={"is_causal": 1}, opset=23)  # fmt: skip
    for kind, known in ((torch.nn.LSTM, "1.58"), (torch.nn.GRU, "")):
        inputs, function = recurrent(kind, 50, 16, 128)
        attrs = {"hidden_size": 128, **({"linear_before_reset": 1} if kind is torch.nn.GRU else {})}
        yield Row(f"{kind.__name__}, 50 steps", kind.__name__, inputs, function, known, attrs, equal=False)

    scales = np.array([1, 1, 2, 2], np.float32)
    yield Row("Resize, linear, x 2", "Resize", [(4, 32, 28, 28), None, scales],
              lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), attrs={"mode": "linear"},
              constant=(2,))  # fmt: skip
    yield Row("GridSample", "GridSample", [(4, 32, 28, 28), (4, 28, 28, 2)],
              lambda x, grid: F.grid_sample(x, grid, align_corners=False))  # fmt: skip
    yield Row("DFT of 400", "DFT", [(64, 400, 2)],
              lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x))))  # fmt: skip
    yield Row("DFT of 1,024", "DFT", [(64, 1024, 2)],
              lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x))))  # fmt: skip
    yield Row("Det of 8x8", "Det", [(64, 8, 8)], torch.linalg.det)


def ours(model: onnx.ModelProto, feeds: Arrays, threads: int) -> tuple[Callable[[], None], Callable[[], Arrays]]:
    """A step on onnxruntime, and what it gave last, outputs being bound so that nothing is copied."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for value in session.get_inputs():
        binding.bind_cpu_input(value.name, np.asarray(feeds[value.name], order="C"))
    names = [value.name for value in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    return (
        lambda: session.run_with_iobinding(binding),
        lambda: dict(zip(names, binding.copy_outputs_to_cpu(), strict=True)),
    )


def theirs(row: Row, feeds: Arrays) -> tuple[Callable[[], None], Callable[[], Arrays]]:
    """The same step in PyTorch."""
    leaves = {
        name: torch.tensor(feeds[name], requires_grad=feeds[name].dtype == np.float32)
        for i in range(len(row.inputs))
        if (name := f"x{i}") in feeds and i not in row.constant
    }
    cotangent = torch.tensor(feeds["g_y0"])

    def step() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        torch.autograd.backward(row.function(*leaves.values()), cotangent)

    def values() -> Arrays:
        return {f"g_grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}

    return step, values


def measure(row: Row, repeat: int, threads: int) -> dict[str, Any]:
    """Milliseconds of both, in turn, and the ratio of the medians.

    Raises:
        AssertionError: the two don't compute the same.
    """
    arrays = row.arrays()
    model = row.model(arrays)
    feeds: dict[str, np.ndarray] = dict(arrays)
    (seed,) = (value for value in model.graph.input if value.name == "g_y0")
    shape = [dim.dim_value for dim in seed.type.tensor_type.shape.dim]
    feeds["g_y0"] = np.asarray(np.random.default_rng(2).standard_normal(shape, np.float32))
    run, found = ours(model, feeds, threads)
    step, expected = theirs(row, feeds)
    run(), step()
    mine = found()
    for name, gradient in expected().items():
        error = np.abs(mine[name] - gradient).max() / max(np.abs(gradient).max(), 1e-6)
        assert not row.equal or error < 1e-3, f"{row.name}: {name} differs by {error:.1e} of its largest entry"
    medians = interleaved({"onnxgrad": run, "torch": step}, repeat)
    ratio = medians["onnxgrad"] / medians["torch"]
    return {"name": row.name, **medians, "ratio": ratio, "reference": row.reference, "nodes": len(model.graph.node)}


def main() -> None:
    """Measure and print; the rows as JSON too, with --json FILE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each; with one, other work disturbs least")
    parser.add_argument("--only", nargs="*", help="part of a row's name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'forward and backward':32} {'onnxgrad':>11} {'PyTorch':>11} {'ratio':>6}  reference")
    measured = []
    for row in rows():
        if not arguments.only or any(part in row.name for part in arguments.only):
            found = measure(row, arguments.repeat, arguments.threads)
            measured.append(found)
            print(
                f"{found['name']:32} {found['onnxgrad']:8.2f} ms {found['torch']:8.2f} ms {found['ratio']:6.2f}"
                f"  {found['reference']}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
