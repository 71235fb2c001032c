"""What is trained of an export is what PyTorch learns: a tensor is learned where it moves with the parameters."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import Tensor, nn

from onnxgrad_cli.builder import build
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.constants import GENERATED
from tests.passes.parameters.exported_modules import ROWS, UNDECIDABLE, Row

Exporter = Callable[[nn.Module, tuple[Tensor, ...]], ModelProto]


def scripted(net: nn.Module, inputs: tuple[Tensor, ...]) -> ModelProto:
    """As PyTorch's older exporter writes it."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, inputs, file, dynamo=False, opset_version=17)
    return onnx.load_from_string(file.getvalue())


def traced(net: nn.Module, inputs: tuple[Tensor, ...]) -> ModelProto:
    """As PyTorch's newer exporter writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(net, inputs, dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def unsigned(model: ModelProto) -> ModelProto:
    """The model without what the exporter says of it and of itself, as optimizers and converters leave it."""
    copied = ModelProto()
    copied.CopyFrom(model)
    copied.ClearField("producer_name")
    copied.graph.ClearField("metadata_props")
    copied.graph.ClearField("value_info")
    return copied


def moved(net: nn.Module) -> nn.Module:
    """The network after a training: each parameter somewhere near, and everything else where it was."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter)).add_(0.1 * torch.rand_like(parameter) + 0.01)
    return other


def values(model: ModelProto) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The float tensors of a model by name, and why each that is not trained is not."""
    built = build(model, Options(), stop_after="prepare")
    names = [*built.training.trained, *built.training.not_trained]
    return {n: numpy_helper.to_array(built.graph.initializers[n]) for n in names}, built.training.not_trained


def wrong(model: ModelProto, later: ModelProto) -> dict[str, str]:
    """The tensors whose role was taken wrongly, each with the reason that was given.

    Args:
        model: the export in question.
        later: the export of the same network after its parameters moved.
    """
    (now, not_trained), (then, _) = values(model), values(later)
    common = [name for name in now if name in then]  # the older exporter writes what is equal at first once
    assert common
    common = [name for name in common if now[name].ndim or not GENERATED.match(name)]  # folded, as an entry of a vector
    learned = {name for name in common if not np.array_equal(now[name], then[name], equal_nan=True)}
    untied = "no differentiable path leads from it to the loss"
    found = {name: not_trained.get(name, "trained") for name in common if (name in learned) == (name in not_trained)}
    return {name: reason for name, reason in found.items() if not reason.startswith(untied)}


def exports(row: Row, exporter: Exporter) -> list[ModelProto]:
    """A network as it was initialised, and after each of two trainings."""
    net = row.net().eval()
    once = moved(net)
    inputs = row.inputs
    return [exporter(each, inputs) for each in (net, once, moved(once))]


def check(row: Row, models: list[ModelProto]) -> None:
    """Whether the roles are right where no exporter says them."""
    fresh, once, twice = models
    if row.told:
        assert wrong(once, twice) == {}
    if row.told and row.fresh:
        assert wrong(fresh, once) == {}


def check_scripted(row: Row) -> None:
    models = exports(row, scripted)
    check(row, models)
    if not row.named:
        check(row, [unsigned(model) for model in models])


def check_traced(row: Row) -> None:
    models = exports(row, traced)
    fresh, once, twice = models
    assert (wrong(once, twice), wrong(fresh, once)) == ({}, {})
    if not row.named and row.name != "clip":  # its scale has been taken to e's power, and is a number among numbers
        check(row, [unsigned(model) for model in models])


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.thinned(6, 3)
def test_of_scripted_exports_what_pytorch_learns_is_trained(row: Row) -> None:
    check_scripted(row)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="PyTorch's newer exporter needs onnxscript")
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.thinned(4)
def test_of_traced_exports_what_pytorch_learns_is_trained(row: Row) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    check_traced(row)


@pytest.mark.parametrize(("one", "other", "feed"), UNDECIDABLE)
def test_what_the_file_can_not_tell(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], feed: Callable[[], Tensor]
) -> None:
    """The same seed gives the same file, whether the tensor is learned or not: no rule can tell."""
    files = []
    for make in (one, other):
        torch.manual_seed(0)
        net = make().eval()
        files.append(scripted(net, (feed(),)).graph)
    assert files[0].node == files[1].node
    assert {t.name: t for t in files[0].initializer} == {t.name: t for t in files[1].initializer}
    learned = [[name for name, p in make().named_parameters() if p.requires_grad] for make in (one, other)]
    assert len(learned[1]) == len(learned[0]) + 1
