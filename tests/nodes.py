"""Compare gradients of one-node models, prepared as in a build, with PyTorch's autograd in float64."""

import numpy as np
import onnx
import torch
from onnx import helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.dialects import drop_absent_ends
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.harness import with_gradient

DOMAINS = {"com.microsoft": 1, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def one_node(op, feeds, outputs, attributes, *, opset=26, domain="", symbolic=False, absent=()):
    """Return a model of one node, and its feeds. `feeds` has the inputs in order, with None for absent ones."""
    given = {name: x for name, x in feeds.items() if x is not None}
    names = [name if x is not None else "" for name, x in feeds.items()]
    node = helper.make_node(op, names, outputs, name="node", domain=domain, **attributes)
    infos = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(x.dtype),
            [f"{name}_{axis}" for axis in range(x.ndim)] if symbolic else x.shape,
        )
        for name, x in given.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, DOMAINS[domain]))
    model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=imports, ir_version=10)
    drop_absent_ends(model)
    return model, given


def written_out(model):
    """Return a model after `prepare`, which replaces the operators that have a definition."""
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    graph.remove_unused()
    model = graph.commit()
    for value in model.graph.output:
        value.type.CopyFrom(graph.types[value.name])
    return model


def gradients(model, feeds, rng=None):
    """Return the outputs of a model, their random cotangents, and the gradients of all float inputs."""
    rng = rng or np.random.default_rng(5)
    values = Executor(model)(feeds)
    finite = {name: np.isfinite(y) for name, y in values.items()}
    seeds = {name: np.asarray(rng.standard_normal(y.shape) * finite[name], y.dtype) for name, y in values.items()}
    wanted = [name for name, x in feeds.items() if x.dtype.kind == "f"]
    backward = with_gradient(model, wanted, list(values), "g_")
    found = Executor(backward)({**feeds, **{f"g_{name}": seed for name, seed in seeds.items()}})
    return values, seeds, {name: found[f"g_grad_{name}"] for name in wanted}


def compare(reference, op, feeds, outputs, attributes, tolerance=1e-9, symbolic=(False, True), **keywords):
    """Assert that values and gradients of a node equal those of `reference(**tensors) -> outputs` in PyTorch."""
    for each in symbolic:
        model, given = one_node(op, feeds, outputs, attributes, symbolic=each, **keywords)
        model = written_out(model)
        values, seeds, found = gradients(model, given)
        leaves = {
            name: torch.tensor(x.astype(np.float64) if x.dtype.kind == "f" else x, requires_grad=x.dtype.kind == "f")
            for name, x in given.items()
        }
        ys = reference(**{name: leaves.get(name) for name in feeds})
        named = {name: y for name, y in zip(outputs, ys, strict=False) if name}
        total = torch.zeros((), dtype=torch.float64)
        for name, y in named.items():
            np.testing.assert_allclose(values[name], y.detach().numpy(), atol=tolerance, rtol=tolerance)
            keep = torch.tensor(np.isfinite(values[name]))
            total = total + (torch.where(keep, y, 0) * torch.tensor(seeds[name].astype(np.float64))).sum()
        total.backward()
        for name, gradient in found.items():
            assert gradient.shape == given[name].shape and gradient.dtype == given[name].dtype
            leaf = leaves[name]
            expected = np.zeros(leaf.shape) if leaf.grad is None else np.nan_to_num(leaf.grad.numpy())
            error = np.max(np.abs(gradient.astype(np.float64) - expected), initial=0)
            assert error <= tolerance * np.max(np.abs(expected), initial=1), (name, error)
