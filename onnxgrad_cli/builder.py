"""The main job as one call: from an inference model to a training model, in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes import pipeline, pipeline_for
from onnxgrad_cli.passes.pipeline import PassRecord
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders, repeated, taken_to_be_equal
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes
from onnxgrad_cli.record import Training


@dataclass
class TrainingModel:
    """A training model and how it came about."""

    graph: Graph
    options: Options
    training: Training = field(default_factory=Training)
    records: list[PassRecord] = field(default_factory=list)

    @property
    def model(self) -> onnx.ModelProto:
        """The training model."""
        return self.graph.commit()

    def run(
        self,
        after: Callable[[pipeline.Pass, Graph, PassRecord], None] | None = None,
        stop_after: str | None = None,
    ) -> None:
        """Run the passes, as `build` does; what was done before an error stays here to be seen."""

        def note(step: pipeline.Pass, graph: Graph, record: PassRecord) -> None:
            self.records.append(record)
            if after:
                after(step, graph, record)

        passes = pipeline_for(self.options)
        pipeline.run(passes, self.graph, self.options, self.training, after=note, stop_after=stop_after)


@judged
def build(
    model: ModelSource,
    options: Options | None = None,
    *,
    path: Path | None = None,
    after: Callable[[pipeline.Pass, Graph, PassRecord], None] | None = None,
    stop_after: str | None = None,
) -> TrainingModel:
    """Turn an inference model into a training model.

    The model is not run to see whether sizes that it calls by one name are equal; a caution tells what was believed.

    Args:
        model: a file, the bytes of one, or a model, which is not changed; its external data, if any, need not be
            loaded. `TrainingModel(Graph(model), options).run()` saves the copy of a model that nobody else has.
        options: what to build.
        path: where a model or bytes were read from; external data are relative to it.
        after, stop_after: see `pipeline.run`.

    Raises:
        UsageError: an option does not fit the model.
        UnsupportedError: something on the way to the loss can't be differentiated.
        OnnxgradError: a file can't be read, or is no valid model.
    """
    proto, source = own_model(model, path)
    built = TrainingModel(Graph(proto, source), options or Options())
    forget_placeholders(built.graph)
    believed = list(repeated(proto, fixed_sizes(built.options)))
    if believed:
        built.training.cautions.append(taken_to_be_equal(believed))
    built.run(after, stop_after)
    return built
