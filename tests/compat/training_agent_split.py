"""Run a graph with a YieldOp in two parts, on the agent that onnxruntime-training made for it.

Not a test: the tests run this file with the Python of an environment that has onnxruntime-training 1.19.2, which
cannot share one with the package itself.

    python training_agent_split.py MODEL.onnx IN.npz OUT.npz [IN.npz OUT.npz]... [-- IN.npz OUT.npz...]...

Each IN.npz holds the graph's inputs by name (one that has a value of its own may be missing from all) and the
cotangents by the names of the YieldOp's outputs. Its OUT.npz is given the YieldOp's inputs, which are all that the
forward part returns, and the graph's outputs. All forward parts run before the first backward part. The files after
`--` get an agent of their own, whose graph may be fed other inputs.
"""

import sys

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as ort


def main(model_file, *files):
    groups = [[]]
    for file in files:
        if file == "--":
            groups.append([])
        else:
            groups[-1].append(file)
    for group in groups:
        split(model_file, *group)


def split(model_file, *files):
    model = onnx.load(model_file)
    (marker,) = (node for node in model.graph.node if node.op_type == "YieldOp")
    given = [dict(np.load(file)) for file in files[::2]]
    feeds = [value.name for value in model.graph.input if value.name in given[0]]
    results = [value.name for value in model.graph.output]
    agent = TrainingAgent(model, feeds, list(marker.input), results)
    halfway = [agent.forward([arrays[name] for name in feeds]) for arrays in given]
    for arrays, (outputs, state), file in zip(given, halfway, files[1::2], strict=True):
        gradients = agent.backward(cotangents(marker, arrays, outputs), state)
        np.savez(file, **dict(zip([*marker.input, *results], [*outputs, *gradients], strict=True)))


def cotangents(marker, arrays, outputs):
    """One for each YieldOp's output, in the type of what it handed out: float16 is computed in float32 on a CPU."""
    exact = next((a.ints for a in marker.attribute if a.name == "non_differentiable_outputs"), ())
    differentiable = [output for position, output in enumerate(outputs) if position not in exact]
    return [arrays[name].astype(like.dtype) for name, like in zip(marker.output, differentiable, strict=True)]


class TrainingAgent:
    """The agent on arrays."""

    def __init__(self, model, feeds, outputs, gradients):
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["MatmulTransposeFusion"],  # its operator has no kernel for float64
        )
        self.cpu = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)
        self.agent = ort.TrainingAgent(
            self.session._sess, feeds, [self.cpu] * len(outputs), gradients, [self.cpu] * len(gradients), 0
        )

    def forward(self, arrays):
        """The outputs, and what the backward part goes on from."""
        state, values = ort.PartialGraphExecutionState(), ort.OrtValueVector()
        self.agent.run_forward(self.vector(arrays), values, state, None)
        return [value.numpy() for value in values], state

    def backward(self, arrays, state):
        """The gradients."""
        values = ort.OrtValueVector()
        self.agent.run_backward(self.vector(arrays), values, state)
        return [value.numpy() for value in values]

    def vector(self, arrays):
        values = ort.OrtValueVector()
        for array in arrays:
            values.push_back(ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.cpu))
        return values


if __name__ == "__main__":
    main(*sys.argv[1:])
