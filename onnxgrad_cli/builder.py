"""Build a training model from an inference model, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes import pipeline
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.passes.pipeline import PassRecord, pipeline_for
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders, repeated, taken_to_be_equal
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes
from onnxgrad_cli.record import Training


@dataclass
class TrainingModel:
    """A training model, with the options and the results of its build.

    Attributes:
        graph: the graph of the model, which the passes change.
        options: the options of the build.
        training: the results of the passes.
        records: for each pass that has run, its time and the number of nodes before and after it.
        frozen_are_inputs: True if weights that the user froze by name become inputs after the build. No pass may then
            rely on their values.
    """

    graph: Graph
    options: Options
    training: Training = field(default_factory=Training)
    records: list[PassRecord] = field(default_factory=list)
    frozen_are_inputs: bool = False

    @property
    def model(self) -> onnx.ModelProto:
        """The training model."""
        return self.graph.commit()

    @property
    def frozen(self) -> list[str]:
        """The weights that the user froze by name."""
        return matching(self.options.freeze, list(self.training.not_trained), "`freeze`", "float weights")

    def steps(self, stop_after: str | None = None) -> Iterator[tuple[pipeline.Pass, PassRecord]]:
        """Run the passes one after the other, and yield each after it has run.

        If a pass raises an error, `graph` and `training` contain the results of the passes before it.

        Args:
            stop_after: the name of the last pass to run; None for all passes.

        Yields:
            Each pass after it has run, with its record.
        """
        passes = pipeline_for(self.options)
        for step, record in pipeline.run(passes, self.graph, self.options, self.training, stop_after):
            self.records.append(record)
            if step.name == "prepare" and self.frozen_are_inputs:
                self.graph.vary(self.frozen)
            yield step, record

    def run(self, stop_after: str | None = None) -> None:
        """Run all passes, or the passes up to and including `stop_after`."""
        for _ in self.steps(stop_after):
            pass


@attribute_failures
def build(
    model: ModelSource, options: Options | None = None, *, path: Path | None = None, stop_after: str | None = None
) -> TrainingModel:
    """Turn an inference model into a training model.

    This function assumes that axes with the same symbol have the same size. It does not run the model to check this,
    but adds a caution that names the symbols.

    Args:
        model: a file, the bytes of a file, or a model in memory. A model in memory is copied, and its external data
            need not be loaded. `TrainingModel(Graph(model), options).run()` changes the model in place instead.
        options: the options of the build.
        path: the file that a model or bytes were read from; external data are relative to it.
        stop_after: the name of the last pass to run; None for all passes.

    Raises:
        UsageError: an option does not fit the model.
        UnsupportedError: a node between the inputs or weights and the loss can't be differentiated.
        OnnxgradError: a file can't be read, or is not a valid model.
    """
    proto, source = own_model(model, path)
    built = TrainingModel(Graph(proto, source), options or Options())
    forget_placeholders(built.graph)
    believed = list(repeated(proto, fixed_sizes(built.options)))
    if believed:
        built.training.cautions.append(taken_to_be_equal(believed))
    built.run(stop_after)
    return built
