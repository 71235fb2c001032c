"""What a build does after each pass: narrate, check, and write the model as it is."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.files import check_structure, make_folder, save_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.pipeline import Pass, PassRecord


class PassDump:
    """Called after each pass: tells of it, checks the graph, writes it."""

    def __init__(
        self, folder: Path | None, source: Path | None, force: bool = False, check: bool = False, tell: Tell = silent
    ) -> None:
        self.folder, self.source, self.force, self.check, self.tell = folder, source, force, check, tell
        self._count = 0
        if folder:
            make_folder(folder, "`dump_passes`")

    def __call__(self, step: Pass, graph: Graph, record: PassRecord) -> None:
        """Take note of a pass that has run."""
        self._count += 1
        change = record.nodes_after - record.nodes_before
        self.tell(f"{step.name:9}{record.seconds:7.3f} s {record.nodes_after:7,} nodes ({change:+,})", 1)
        if self.check:
            check_structure(graph.commit(), f"the graph after the pass '{step.name}'")
        if self.folder:
            file = self.folder / f"{self._count}-{step.name}.onnx"
            save_model(graph.commit(), file, self.source, self.force, copy_data=False)
            self.tell(f"wrote {file}", 1)
