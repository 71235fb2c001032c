"""Sessions of onnxruntime whose weights and state are no part of the model: they are bound, and so can be shared."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.skeleton import without_initializers
from onnxgrad_cli.ir.types import is_external

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MANY = 20_000
"""Nodes beyond which onnxruntime runs a model as it stands: the time of its optimizations grows with the square of the
nodes, and is over a minute there."""

DEVICES = {"CUDAExecutionProvider": "cuda", "ROCMExecutionProvider": "cuda", "DmlExecutionProvider": "dml"}
"""Execution providers that compute elsewhere than in the memory of the processor, and what their device is called."""


def find_provider(name: str) -> str:
    """The full name of an execution provider: 'cuda' is CUDAExecutionProvider.

    Raises:
        UsageError: the installed onnxruntime does not have it.
    """
    there = {_short(provider): provider for provider in onnxruntime.get_available_providers()}
    if _short(name) not in there:
        raise UsageError(f"`provider`: this onnxruntime has no '{name}'", suggest(_short(name), there, "providers"))
    return there[_short(name)]


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()


def take_out(model: ModelProto, names: Collection[str], path: Path | None) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Part a model from the values of initializers, which so become inputs without a value.

    Args:
        model: the model; not changed.
        names: initializers that are inputs too.
        path: where the model was read from; external data are relative to it.

    Returns:
        A copy without these values, and the values by name.

    Raises:
        OnnxgradError: values that stand in another file can't be read.
    """
    taken = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in names}
    elsewhere = ModelProto()
    elsewhere.graph.initializer.extend(filter(is_external, taken.values()))
    load_external_data(elsewhere, path)
    taken |= {tensor.name: tensor for tensor in elsewhere.graph.initializer}
    return without_initializers(model, names), {name: numpy_helper.to_array(t) for name, t in taken.items()}


def open_session(
    model: ModelProto,
    path: Path | None = None,
    provider: str = CPU,
    threads: int | None = None,
    *,
    in_turn: bool = False,
) -> onnxruntime.InferenceSession:
    """A session on a model.

    Args:
        model: the model.
        path: where it was read from; external data are relative to it.
        provider: the execution provider, by its full name; what it lacks runs on the processor.
        threads: how many the processor uses; None is onnxruntime's choice.
        in_turn: whether another session runs next: then its threads don't spin for more work, in the way of the other.

    Raises:
        OnnxgradError: onnxruntime refuses the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of each initializer that is an input
    options.enable_mem_pattern = False  # patterns take up to half the memory again, and save microseconds
    if len(model.graph.node) > MANY:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if in_turn:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    folder = path.parent if path else Path()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.absolute()))
    providers: list[str | tuple[str, dict[str, str]]] = [CPU]
    if provider != CPU:  # OpenVINO's has threads of its own
        own = {"num_of_threads": str(threads)} if provider == OPENVINO and threads is not None else {}
        providers.insert(0, (provider, own))
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    except Exception as error:  # of many kinds, none of them public
        raise OnnxgradError(f"onnxruntime can't run the model: {str(error).strip()}") from error


def feed(binding: onnxruntime.IOBinding, name: str, array: np.ndarray) -> None:
    """Let the runs of a binding read an input from an array; on the processor it is not copied.

    Raises:
        RuntimeError: the input is of another type.
    """
    if array.dtype == BFLOAT16:  # which onnxruntime does not know by numpy's name
        binding.bind_ortvalue_input(name, Buffer(array).value)
    else:
        binding.bind_cpu_input(name, array)


class Buffer:
    """A tensor that runs read or write where it lies: on the processor in an array, which is `array`."""

    def __init__(self, array: np.ndarray, provider: str = CPU) -> None:
        self._device = DEVICES.get(provider, "cpu")
        self.array = np.ascontiguousarray(array).reshape(np.shape(array))
        self.value = self._bound(self.array)

    def _bound(self, array: np.ndarray) -> onnxruntime.OrtValue:
        if array.dtype == BFLOAT16:
            make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
            return make(array.view(np.uint16), TensorProto.BFLOAT16)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def read(self) -> np.ndarray:
        """A copy of what it holds."""
        return self.array.copy() if self._device == "cpu" else self.value.numpy()

    def write(self, array: np.ndarray) -> None:
        """Let it hold other values, of its shape and type."""
        if self._device == "cpu":
            self.array[...] = array
        else:
            self.value.update_inplace(np.ascontiguousarray(array, self.array.dtype))
