"""ONNX files: exports of PyTorch modules, and two that need no framework.

The two are a chain of many small nodes, and a network with a gigabyte of external weights in a sparse file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH: Mapping[int, str] = {0: "batch"}


def export(
    model: Any,
    example: Any,
    path: Path,
    name: str | tuple[str, ...] = "x",
    axes: Mapping[str, Mapping[int, str]] | None = None,
    opset: int = 18,
) -> Path:
    """Write a PyTorch module as ONNX.

    Args:
        model: the module.
        example: its input, or a tuple of them.
        path: where to.
        name: of the input, or of each.
        axes: input or 'output' -> axis -> symbol; by default axis 0 of each is 'batch'.
        opset: of the file.
    """
    import torch

    names, examples = ([name], (example,)) if isinstance(name, str) else (list(name), tuple(example))
    symbols = axes or dict.fromkeys([*names, "output"], BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            examples,
            str(path),
            opset_version=opset,
            dynamo=False,
            input_names=names,
            output_names=["output"],
            dynamic_axes={value: dict(symbol) for value, symbol in symbols.items()},
            do_constant_folding=False,
        )
    return path


def chain(nodes: int, path: Path, width: int = 8) -> Path:
    """A chain of `nodes` small nodes with a weight in every fourth."""
    rng = np.random.default_rng(0)
    made, weights, value = [], [], "x"
    for i in range(nodes):
        kind = ("Mul", "Tanh", "Add", "Sigmoid")[i % 4]
        inputs = [value]
        if kind in ("Mul", "Add"):
            weights.append(numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), f"w{i}"))
            inputs.append(f"w{i}")
        made.append(helper.make_node(kind, inputs, [f"v{i}"], name=f"n{i}"))
        value = f"v{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(made, "chain", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def external(folder: Path, size: int = 1 << 30, width: int = 4096) -> Path:
    """A network of square matrix products with `size` bytes of weights in one sparse file beside it."""
    layers = size // (4 * width * width)
    nodes, weights, value = [], [], "x"
    for i in range(layers):
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (
            ("location", "weights.bin"),
            ("offset", i * 4 * width * width),
            ("length", 4 * width * width),
        ):
            tensor.external_data.add(key=key, value=str(text))
        weights.append(tensor)
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"h{i}"], name=f"matmul{i}"),
            helper.make_node("Relu", [f"h{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        value = f"r{i}"
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(layers * 4 * width * width)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(nodes, "external", [x], [y], weights)
    path = folder / "external.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path
