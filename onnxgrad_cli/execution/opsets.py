"""The newest opset that onnxruntime loads: asked of the installed one, and only where a model makes it matter."""

from __future__ import annotations

from functools import cache

from onnx import TensorProto, helper

from onnxgrad_cli.execution.executor import Executor

ASSURED = 26
"""The newest opset that every onnxruntime loads which pyproject.toml admits: 1.31 and newer."""


def newest_loaded(limit: int) -> int:
    """The newest opset of the default domain, up to `limit`, that the installed onnxruntime loads.

    Up to `ASSURED` nothing is asked, so that a build of a model there does not import onnxruntime for this.
    """
    return next((opset for opset in range(limit, ASSURED, -1) if _loads(opset)), min(limit, ASSURED))


@cache
def _loads(opset: int) -> bool:
    """Whether a session opens on a model of one Identity.

    The answer takes 0.5 ms, and the import of onnxruntime 30 ms (1.32, two threads); the proof of a training model
    imports onnxruntime anyway. A table of versions would be wrong for those that are newer than the table.
    """
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "opset", [x], [y])
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports))
    try:
        Executor(model, fallback=False)
    except Exception:  # of many kinds, none of them public
        return False
    return True
