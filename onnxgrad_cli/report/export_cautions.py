"""Cautions about model files in which the exporter folded parameters away or made up their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnx import ModelProto

from onnxgrad_cli.common.wording import as_cli_flags
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.passes.parameters.constants import GENERATED
from onnxgrad_cli.report.words import several


def folded_normalizations(model: ModelProto) -> list[str]:
    """Return a sentence in a list if the exporter folded BatchNormalization into other layers, otherwise an empty list.

    A folded normalization is recognized by its traces. PyTorch's newer exporter lists the names of all running means in
    the metadata, but doesn't store the running mean of a folded normalization. Its older exporter gives the weight of a
    folded convolution a name of its own, such as 'onnx::Conv_12'.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    statistics = sum(name.endswith("running_mean") for name in provenance(model).fixed - stored)
    made_up = sum(
        node.op_type in ("Conv", "ConvTranspose") and node.input[1].startswith("onnx::") for node in model.graph.node
    )
    count = statistics or made_up
    convolutions = sum(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
    where = several(count, "convolution" if convolutions >= count else "layer")
    return [f"BatchNormalization was folded into {where}: its parameters can't be trained"] if count else []


def invented_names(weights: Sequence[str]) -> list[str]:
    """Return the weights whose names were made up by the exporter."""
    return [name for name in weights if GENERATED.match(name)]


def export_cautions(folded: Iterable[str], weights: Sequence[str]) -> Iterator[Caution]:
    """Yield cautions about folded normalizations and about weights whose names the exporter made up.

    Args:
        folded: the sentences that `folded_normalizations` returned for the model before the passes.
        weights: the names of the trained weights.
    """
    for text in folded:
        yield Caution("note", "", text)
    if unnamed := invented_names(weights):
        count = f"{len(unnamed):,} of {several(len(weights), 'weight')}"
        text = (
            f"the exporter invented the names of {count}, such as '{unnamed[0]}', so `train` can't select them by layer"
        )
        yield Caution("note", unnamed[0], as_cli_flags(text))
