"""The one place that loads onnxruntime and opens its sessions, and the tensors that are bound to their runs.

Weights and state are no part of the model of such a session: they are bound, and so can be shared between sessions.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.files import load_external_data, without_links
from onnxgrad_cli.ir.skeleton import without_initializers
from onnxgrad_cli.ir.types import is_external

if TYPE_CHECKING:
    import onnxruntime

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

SILENT = 4
"""The severity of what ends a process: less is not logged."""

FEW_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
"""Integers that onnxruntime computes with as others only."""

TWO_BITS = frozenset({TensorProto.INT2, TensorProto.UINT2})
"""Integers of which onnxruntime makes a wrong product where their columns are no multiple of four: its optimizer packs
them for MatMulNBits as if four of one column always filled a byte."""

OPTIMIZED_FOR_MANY_RUNS, OPTIMIZED_FOR_FEW_RUNS = 20_000, 5_000
"""Nodes beyond which onnxruntime runs a model as it stands, in a session that trains and in one that runs a few times.
The time of its optimizations grows with the square of the nodes: 17 s for 10,000 nodes (1.5 s without), and over a
minute for 20,000."""

EXACT_INTEGERS = "session.x64quantprecision"
"""The setting without which sums of products of bytes overflow on x86 processors that have no VNNI."""

DEVICES = {"CUDAExecutionProvider": "cuda", "ROCMExecutionProvider": "cuda", "DmlExecutionProvider": "dml"}
"""Execution providers that compute elsewhere than in the memory of the processor, and what their device is called."""


def load_onnxruntime() -> ModuleType:
    """The package onnxruntime, loaded when it is first used: its import takes a tenth of the time of a small build.

    It logs nothing: what fails it raises too, and its log would bring what a model says, raw, to the terminal. Where a
    program has loaded it before, its log stays as that wants it.

    Raises:
        KeyboardInterrupt: the user interrupted the import; onnxruntime's native part makes an ImportError of that.
    """
    ours = "onnxruntime" not in sys.modules
    try:
        import onnxruntime
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if ours:
        onnxruntime.set_default_logger_severity(SILENT)
    return onnxruntime


@contextmanager
def of_samples(which: str = "the samples") -> Iterator[None]:
    """Tell what onnxruntime raises in a run as the model's failure on data that a user has given.

    Args:
        which: what the samples are called.

    Raises:
        OnnxgradError: the run fails.
    """
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise OnnxgradError(f"the model fails on {which}: {str(error).strip()}") from error


BUILDS = {
    "cuda": "onnxruntime-gpu", "tensorrt": "onnxruntime-gpu", "dml": "onnxruntime-directml",
    "openvino": "onnxruntime-openvino",
}  # fmt: skip
"""Execution provider -> the package of the onnxruntime that has it."""


def find_provider(name: str) -> str:
    """The full name of an execution provider: 'cuda' is CUDAExecutionProvider.

    Raises:
        UsageError: the installed onnxruntime does not have it.
    """
    there = {_short(provider): provider for provider in load_onnxruntime().get_available_providers()}
    if _short(name) in there:
        return there[_short(name)]
    hint = suggest(_short(name), there, "providers")
    if package := BUILDS.get(_short(name)):  # the packages hold the same module, and so replace each other
        hint = f"pip uninstall -y onnxruntime && pip install {package}; this one has {', '.join(there)}"
    raise UsageError(f"`provider`: this onnxruntime has no '{name}'", hint)


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
    alternating: bool = False,
    written: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> onnxruntime.InferenceSession:
    """A session that trains a model or evaluates it on data, with many runs.

    Args:
        model, path, provider, threads, alternating, written, sizes: see `start_session`.

    Raises:
        UsageError: `threads` are more than this machine can use.
        OnnxgradError: onnxruntime refuses the model.
    """
    if threads is not None:
        checks.threads(threads)
    try:
        return start_session(model, path, provider, threads, alternating=alternating, written=written, sizes=sizes)
    except Exception as error:  # of many kinds, none of them public
        raise OnnxgradError(f"onnxruntime can't run the model: {str(error).strip()}", _hint(model, error)) from error


def _hint(model: ModelProto, error: Exception) -> str | None:
    """What to do about a kernel that a provider lacks, where that is because of a type which it has few kernels for."""
    kinds = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    kinds.update(tensor.data_type for tensor in model.graph.initializer)
    if "NOT_IMPLEMENTED" not in str(error) or TensorProto.BFLOAT16 not in kinds:
        return None
    return "on a processor onnxruntime has few kernels for bfloat16: export the model in float16 or float32"


def start_session(
    model: ModelProto,
    path: Path | None = None,
    provider: str = CPU,
    threads: int | None = None,
    *,
    alternating: bool = False,
    beside: bool = False,
    optimized: int = OPTIMIZED_FOR_MANY_RUNS,
    arena: bool = True,
    file: Path | None = None,
    written: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> onnxruntime.InferenceSession:
    """A session on a model; what refuses the model is onnxruntime's own error.

    Args:
        model: the model.
        path: where the model was read from; external data are relative to it.
        provider: the execution provider, by its full name; the processor runs what the provider lacks.
        threads: how many the processor uses; None is onnxruntime's choice.
        alternating: whether another session runs next: then the threads of this one don't spin for more work, in the
            way of the other.
        beside: whether it runs twice at the same time: then its threads never spin.
        optimized: the number of nodes beyond which onnxruntime does not optimize the model.
        arena: whether the memory of a run is kept for the next one; runs of other sizes, or that fail, add to it.
        file: a file that holds the model, which is opened as whoever has the file does.
        written: where onnxruntime writes the model as it runs it.
        sizes: symbol -> size, of which onnxruntime may make use.

    Raises:
        Exception: onnxruntime refuses the model; its exceptions share no public base class.
    """
    runtime = load_onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = SILENT
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = False  # patterns take up to half the memory again, and save microseconds
    if len(model.graph.node) > optimized:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if alternating:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if beside:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # by default what is multiplied with an integer weight is quantized too
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    _keep_quantizers(runtime, options, model)
    if any(tensor.data_type in TWO_BITS for tensor in model.graph.initializer):
        _at_most_basic(runtime, options)
    if any(map(_on_integers, model.graph.node)):  # else it fails at weights that are dequantized alone
        options.add_session_config_entry(EXACT_INTEGERS, "1")
    for symbol, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(symbol, size)
    if written is not None:
        options.optimized_model_filepath = os.fsencode(written)
    providers: list[str | tuple[str, dict[str, str]]] = [CPU]
    if provider != CPU:  # OpenVINO's has threads of its own
        own = {"num_of_threads": str(threads)} if provider == OPENVINO and threads is not None else {}
        providers.insert(0, (provider, own))
    source: bytes | _FileName
    if file is None:
        with without_links(model, path) as folder:
            source = model.SerializeToString()
        folder_name = os.fsencode(folder.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder_name)
    else:
        source = _FileName(file)
    session = _opened(runtime, model, source, options, providers)
    if provider not in session.get_providers():  # onnxruntime goes on without it, and says so in its log alone
        raise RuntimeError(f"it can't load {provider}: a library that it needs is missing, or of another version")
    return session


def as_run(
    model: ModelProto, path: Path | None = None, threads: int | None = None, sizes: Mapping[str, int] | None = None
) -> ModelProto:
    """A model as onnxruntime runs it on the processor: what its optimizer has made of it, its nodes in their order.

    Args:
        model: the model.
        sizes: symbol -> size; onnxruntime then computes in advance what follows from the sizes alone.
        path: where the model was read from; external data are relative to it.
        threads: see `start_session`.

    Raises:
        OnnxgradError: onnxruntime refuses the model.
    """
    with TemporaryDirectory() as folder:
        written = Path(folder) / "model.onnx"
        open_session(model, path, threads=threads, written=written, sizes=sizes)
        return onnx.load(written)


class _FileName(os.PathLike[bytes]):
    """A file by the bytes of its name, which need be no text; bytes alone onnxruntime takes for the model."""

    def __init__(self, file: Path) -> None:
        self._name = os.fsencode(file)

    def __fspath__(self) -> bytes:
        return self._name


def _opened(runtime: Any, model: ModelProto, source: bytes | _FileName, options: Any, providers: list[Any]) -> Any:
    """A session with exact integers, or with onnxruntime's own where it asks for kernels of types that have none."""
    open_session = partial(runtime.InferenceSession, source, options, providers=providers, enable_fallback=0)
    try:
        return open_session()
    except runtime.capi.onnxruntime_pybind11_state.NotImplemented:
        if not any(map(_on_integers, model.graph.node)):
            raise
        options.add_session_config_entry(EXACT_INTEGERS, "0")
        return open_session()


def _on_integers(node: NodeProto) -> bool:
    """Whether a node computes with what is quantized."""
    kind = node.op_type.removeprefix("Dynamic")
    return (kind.startswith("Q") and node.op_type != "QuantizeLinear") or "Integer" in kind


def _keep_quantizers(runtime: ModuleType, options: onnxruntime.SessionOptions, model: ModelProto) -> None:
    """Let floats between quantizers be computed as the model says.

    onnxruntime's kernels of integers saturate where the processor lacks VNNI, and it makes some of 4 bits that it does
    not have; of a Relu before a quantizer to fewer than 8 bits its optimizer believes that it can be left out.
    """
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    if not quantizers:
        return
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not FEW_BITS.isdisjoint(_made_by(quantizers, model)):
        _at_most_basic(runtime, options)


def _at_most_basic(runtime: ModuleType, options: onnxruntime.SessionOptions) -> None:
    """Let onnxruntime's optimizer do what changes no number, and no more."""
    levels = runtime.GraphOptimizationLevel
    if options.graph_optimization_level != levels.ORT_DISABLE_ALL:
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC


def _made_by(quantizers: Sequence[NodeProto], model: ModelProto) -> Iterator[int]:
    """The types of integers that quantizers make, as their attributes or stored zero points say."""
    zeros = {node.input[2] for node in quantizers if len(node.input) > 2}
    yield from (attribute.i for node in quantizers for attribute in node.attribute if attribute.name == "output_dtype")
    yield from (tensor.data_type for tensor in model.graph.initializer if tensor.name in zeros)
    constants = (node for node in model.graph.node if node.op_type == "Constant" and node.output[0] in zeros)
    yield from (attribute.t.data_type for node in constants for attribute in node.attribute)


def trim() -> None:
    """Give back to the system what lies free in the memory of the process, where the C library can.

    What was read of a file and copied from there lies free after that, as much as the file holds, and glibc keeps it.
    Source: malloc_trim(3).
    """
    trim_all = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim_all is not None:
        trim_all(0)


def array_run(session: onnxruntime.InferenceSession) -> Callable[..., Any]:
    """Return the session's `run`, or one that also reads and writes bfloat16 arrays, which numpy has no name for."""
    types = [value.type for value in (*session.get_inputs(), *session.get_outputs())]
    tensors = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
    return partial(_run_with_bfloat16, session) if tensors and "tensor(bfloat16)" in types else session.run


def _run_with_bfloat16(
    session: onnxruntime.InferenceSession, outputs: Sequence[str] | None, feeds: Mapping[str, Any], *options: Any
) -> list[np.ndarray]:
    buffers = {name: Buffer(np.asarray(x)) for name, x in feeds.items()}
    values = {name: buffer.value for name, buffer in buffers.items()}
    return [_array_of(value) for value in session.run_with_ort_values(outputs, values, *options)]


def _array_of(value: onnxruntime.OrtValue) -> np.ndarray:
    """A tensor on the processor as an array, which is a copy where its type is bfloat16."""
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, BFLOAT16).reshape(value.shape()).copy()


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
        ort_value = load_onnxruntime().OrtValue
        if array.dtype == BFLOAT16:
            return ort_value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        return ort_value.ortvalue_from_numpy(array, self._device, 0)

    def read(self) -> np.ndarray:
        """A copy of what it holds."""
        return self.array.copy() if self._device == "cpu" else self.value.numpy()

    def write(self, array: np.ndarray) -> None:
        """Let it hold other values, of its shape and type."""
        if self._device == "cpu":
            self.array[...] = array
        else:
            self.value.update_inplace(np.ascontiguousarray(array, self.array.dtype))


class BoundRuns:
    """The runs of a session that read and write buffers where they lie."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        read: Mapping[str, Buffer],
        written: Mapping[str, Buffer],
        provider: str = CPU,
    ) -> None:
        """Bind the buffers.

        Args:
            session: on the model.
            read, written: the buffers of inputs and of outputs, by their names; the other inputs are fed to each run.
            provider: the execution provider of the session.
        """
        self._session, self._read = session, read
        self._elsewhere = provider in DEVICES
        self._binding = session.io_binding()
        self._bind_read()
        for name, buffer in written.items():
            self._binding.bind_ortvalue_output(name, buffer.value)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Run on what else the model takes."""
        for name, array in feeds.items():
            feed(self._binding, name, array)
        if self._elsewhere:
            self._bind_read()
        self._session.run_with_iobinding(self._binding)

    def _bind_read(self) -> None:
        """Bind what is read: on a device before each run.

        Where the processor runs a node that reads an input, onnxruntime copies the input there as it is bound, and
        never again: it would compute with the weights of the first step for good.
        """
        for name, buffer in self._read.items():
            self._binding.bind_ortvalue_input(name, buffer.value)
