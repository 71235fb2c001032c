"""Load onnxruntime, open its sessions, and bind tensors to their runs. No other module does this.

In a session that trains, weights and state are not stored in the model. They are bound as inputs, so that several
sessions can share them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError, suggest, unknown_name
from onnxgrad_cli.files import load_external_data, without_links
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.types import is_external
from onnxgrad_cli.ir.weightless_copy import without_initializers

if TYPE_CHECKING:
    import onnxruntime

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

SILENT = 4
"""The severity of fatal errors in onnxruntime's log. Less severe messages are not logged."""

FEW_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
"""Integer types of fewer than 8 bits. onnxruntime has no arithmetic for them and computes with other types instead."""

TWO_BITS = frozenset({TensorProto.INT2, TensorProto.UINT2})
"""Integer types with which onnxruntime's optimizer gives wrong products if a column's length is not a multiple of four.

It packs them for MatMulNBits as if each byte held four numbers of the same column.
"""

OPTIMIZED_FOR_MANY_RUNS, OPTIMIZED_FOR_FEW_RUNS = 20_000, 5_000
"""If a model has more nodes than this, onnxruntime does not optimize it.

The first number is for sessions with many runs, as in training, the second for those with few. The time of
onnxruntime's optimizer grows with the square of the number of nodes. Opening takes 17 s for 10,000 nodes (1.5 s without
the optimizer), and over a minute for 20,000.
"""

EXACT_INTEGERS = "session.x64quantprecision"
"""The session setting that prevents overflow in sums of 8-bit products on x86 processors without VNNI."""

PLATFORMS = ["NchwcTransformer"]
"""Names of onnxruntime's optimizations that make a model depend on the processor. They are left out of saved models."""

DEVICES = {"CUDAExecutionProvider": "cuda", "ROCMExecutionProvider": "cuda", "DmlExecutionProvider": "dml"}
"""Execution provider with memory of its own -> the name of its device."""


def load_onnxruntime() -> ModuleType:
    """Import onnxruntime at the first call, and return it. The import takes a tenth of the time of a small build.

    onnxruntime's log is turned off: all errors that it logs are raised too, and the log would write raw text of the
    model to the terminal. If the program imported onnxruntime before, its log settings stay.

    Raises:
        KeyboardInterrupt: the user interrupted the import. onnxruntime's native part turns the interrupt into an
            ImportError.
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
    """Turn an exception of onnxruntime inside the block into an error about the user's data.

    Args:
        which: the name of the samples in the error.

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
"""Short name of an execution provider -> the Python package of onnxruntime that contains it."""


def find_provider(name: str) -> str:
    """Return the full name of an execution provider, such as CUDAExecutionProvider for 'cuda'.

    Raises:
        UsageError: the installed onnxruntime does not have it.
    """
    there = {_short(provider): provider for provider in load_onnxruntime().get_available_providers()}
    if _short(name) in there:
        return there[_short(name)]
    hint = suggest(_short(name), there, "providers")
    if package := BUILDS.get(_short(name)):  # the packages hold the same module, and so replace each other
        hint = (
            f"run pip uninstall -y onnxruntime && pip install {package}; the installed onnxruntime has "
            f"{', '.join(there)}"
        )
    raise unknown_name(f"`provider`: the installed onnxruntime has no provider '{name}'", hint)


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()


def take_out(model: ModelProto, names: Collection[str], path: Path | None) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Copy a model without the values of some initializers, which become plain inputs; return the values separately.

    Args:
        model: the model; not changed.
        names: names of initializers that are inputs too.
        path: the file the model was read from; external data are relative to it.

    Returns:
        The copy, and a map from name to value.

    Raises:
        OnnxgradError: values in another file can't be read.
    """
    taken = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in names}
    if external := list(filter(is_external, taken.values())):
        elsewhere = ModelProto()
        elsewhere.graph.initializer.extend(external)
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
    """Open a session for many runs, such as for training or evaluation.

    Args:
        model, path, provider, threads, alternating, written, sizes: as in `start_session`.

    Raises:
        UsageError: `threads` is more than this machine can use.
        OnnxgradError: onnxruntime refuses the model.
    """
    if threads is not None:
        checks.threads(threads)
    try:
        return start_session(model, path, provider, threads, alternating=alternating, written=written, sizes=sizes)
    except Exception as error:  # onnxruntime's exception classes are not public
        raise OnnxgradError(f"onnxruntime can't run the model: {str(error).strip()}", _hint(model, error)) from error


def _hint(model: ModelProto, error: Exception) -> str | None:
    """Return a hint for a missing kernel if the model uses bfloat16, which has few kernels; otherwise None."""
    kinds = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    kinds.update(tensor.data_type for tensor in model.graph.initializer)
    if "NOT_IMPLEMENTED" not in str(error) or TensorProto.BFLOAT16 not in kinds:
        return None
    return "onnxruntime has few CPU kernels for bfloat16: export the model in float16 or float32"


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
    """Open a session on a model. Errors of onnxruntime are raised unchanged.

    Args:
        model: the model.
        path: the file the model was read from; external data are relative to it.
        provider: the full name of the execution provider. The processor runs the operators that the provider lacks.
        threads: the number of threads on the processor; None leaves the choice to onnxruntime.
        alternating: True if another session runs next. Idle threads of this session then stop spinning after a run,
            because that would slow the other session.
        beside: True if two runs of the session may take place at the same time. Its idle threads then never spin.
        optimized: the number of nodes above which onnxruntime does not optimize the model.
        arena: True keeps the memory of a run for the next one. The kept memory grows if runs have different sizes or
            fail.
        file: a file that contains the model. It is opened instead of `model`, as a user of the file would open it.
        written: the file to which onnxruntime writes the optimized model.
        sizes: symbol -> size. onnxruntime may optimize the model for these sizes.

    Raises:
        Exception: onnxruntime refuses the model. Its exceptions share no public base class.
    """
    runtime = load_onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = SILENT
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = False  # patterns increase memory by up to half, and save only microseconds
    if len(model.graph.node) > optimized:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if alternating:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if beside:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # by default, the operand that is multiplied by an integer weight is quantized, too
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    _keep_quantizers(runtime, options, model)
    if any(tensor.data_type in TWO_BITS for tensor in model.graph.initializer):
        _at_most_basic(runtime, options)
    integers = any(map(_on_integers, model.graph.node))
    if integers:  # the setting fails on models that only dequantize
        options.add_session_config_entry(EXACT_INTEGERS, "1")
    for symbol, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(symbol, size)
    if written is not None:
        options.optimized_model_filepath = os.fsencode(written)
    # OpenVINO has its own threads
    own = {"num_of_threads": str(threads)} if provider == OPENVINO and threads is not None else {}
    providers = [(provider, own), CPU] if provider != CPU else [CPU]
    source: bytes | _FileName
    if file is None:
        with without_links(model, path) as folder:
            source = model.SerializeToString()
        folder_name = os.fsencode(folder.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder_name)
    else:
        source = _FileName(file)
    opened = partial(runtime.InferenceSession, source, options, providers=providers, enable_fallback=0)
    try:
        session = opened()
    except runtime.capi.onnxruntime_pybind11_state.NotImplemented:  # perhaps a kernel that sums exactly
        if not integers:
            raise
        options.add_session_config_entry(EXACT_INTEGERS, "0")
        session = opened()
    if provider not in session.get_providers():  # onnxruntime only logs that it continues without the provider
        raise RuntimeError(
            f"it can't load {provider}, because a library that it needs is missing or has another version"
        )
    return session


def ort_format(model: ModelProto) -> bytes:
    """Return the bytes of a .ort file with the optimized model. onnxruntime of about the same version can open it.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/ort-format-models.html.

    Raises:
        OnnxgradError: onnxruntime can't open the model.
    """
    runtime = load_onnxruntime()
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.ort")
        options = runtime.SessionOptions()
        options.log_severity_level = SILENT
        options.optimized_model_filepath = os.fsencode(path)
        options.add_session_config_entry("session.save_model_format", "ORT")
        try:
            runtime.InferenceSession(model.SerializeToString(), options, providers=[CPU], disabled_optimizers=PLATFORMS)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise OnnxgradError(f"onnxruntime can't write the model as .ort: {error}") from None
        return path.read_bytes()


def as_run(
    model: ModelProto, path: Path | None = None, threads: int | None = None, sizes: Mapping[str, int] | None = None
) -> ModelProto:
    """Return a model in the form in which onnxruntime runs it: optimized, and with its nodes in the order of execution.

    Args:
        model: the model.
        sizes: symbol -> size. Values that depend only on these sizes are then computed in advance.
        path: the file the model was read from; external data are relative to it.
        threads: the number of CPU threads; None for onnxruntime's default.

    Raises:
        OnnxgradError: onnxruntime refuses the model.
    """
    with TemporaryDirectory() as folder:
        written = Path(folder) / "model.onnx"
        open_session(model, path, threads=threads, written=written, sizes=sizes)
        return onnx.load(written)


class _FileName(os.PathLike[bytes]):
    """A file name as bytes, which may not be valid text. onnxruntime would take plain bytes for a model."""

    def __init__(self, file: Path) -> None:
        self._name = os.fsencode(file)

    def __fspath__(self) -> bytes:
        return self._name


def _on_integers(node: NodeProto) -> bool:
    """Return True if a node computes with quantized values."""
    kind = node.op_type.removeprefix("Dynamic")
    return (kind.startswith("Q") and node.op_type != "QuantizeLinear") or "Integer" in kind


def _keep_quantizers(runtime: ModuleType, options: onnxruntime.SessionOptions, model: ModelProto) -> None:
    """Set options so that onnxruntime computes the float operators between quantizers as the model defines them.

    By default onnxruntime replaces them by integer kernels, which saturate on processors without VNNI, and by nodes on
    4-bit integers, for which it has no kernels. Its optimizer also removes a Relu before a quantizer to fewer than 8
    bits, which is wrong.
    """
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    if not quantizers:
        return
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not FEW_BITS.isdisjoint(_made_by(quantizers, model)):
        _at_most_basic(runtime, options)


def _at_most_basic(runtime: ModuleType, options: onnxruntime.SessionOptions) -> None:
    """Restrict onnxruntime's optimizer to optimizations that don't change any result."""
    levels = runtime.GraphOptimizationLevel
    if options.graph_optimization_level != levels.ORT_DISABLE_ALL:
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC


def _made_by(quantizers: Sequence[NodeProto], model: ModelProto) -> Iterator[int]:
    """Yield the integer types of the outputs of quantizers, from their attributes or stored zero points."""
    zeros = {node.input[2] for node in quantizers if len(node.input) > 2}
    yield from (attribute.i for node in quantizers for attribute in node.attribute if attribute.name == "output_dtype")
    yield from (tensor.data_type for tensor in model.graph.initializer if tensor.name in zeros)
    constants = (node for node in model.graph.node if node.op_type == "Constant" and node.output[0] in zeros)
    yield from (attribute.t.data_type for node in constants for attribute in node.attribute)


def trim() -> None:
    """Return free memory of the process to the operating system, if the C library can do so.

    After a file is read and its values are copied, memory of the size of the file is free, but glibc keeps it. Source:
    malloc_trim(3).
    """
    trim_all = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim_all is not None:
        trim_all(0)


def array_run(session: onnxruntime.InferenceSession) -> Callable[..., Any]:
    """Return the session's `run`, or a version of it for bfloat16 arrays if the model has such inputs or outputs."""
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
    """Return a tensor in the processor's memory as an array. An array of bfloat16 is a copy."""
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, BFLOAT16).reshape(value.shape()).copy()


def feed(binding: onnxruntime.IOBinding, name: str, array: np.ndarray) -> None:
    """Bind an array to an input of a session's runs. Memory of the processor is not copied.

    Raises:
        RuntimeError: the type of the array is not that of the input.
    """
    if array.dtype == BFLOAT16:  # onnxruntime does not take this numpy type
        binding.bind_ortvalue_input(name, Buffer(array).value)
    else:
        binding.bind_cpu_input(name, array)


class Buffer:
    """A tensor that runs read or write in place. If it is in the processor's memory, `array` shares this memory."""

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
        """Return a copy of the tensor's values."""
        return self.array.copy() if self._device == "cpu" else self.value.numpy()

    def write(self, array: np.ndarray) -> None:
        """Replace the tensor's values by those of an array of the same shape and type."""
        if self._device == "cpu":
            self.array[...] = array
        else:
            self.value.update_inplace(np.ascontiguousarray(array, self.array.dtype))


class BoundRuns:
    """Runs of a session whose weights and state are bound to buffers."""

    def __init__(
        self, session: onnxruntime.InferenceSession, read: Mapping[str, Buffer], written: Mapping[str, Buffer],
        provider: str = CPU,
    ) -> None:  # fmt: skip
        """Bind the buffers to inputs and outputs.

        Args:
            session: a session on the model.
            read: input -> the buffer that each run reads. The other inputs are fed to each run.
            written: output -> the buffer that each run writes.
            provider: the execution provider of the session.
        """
        self._session, self._read = session, read
        self._elsewhere = provider in DEVICES
        self._binding = session.io_binding()
        self._bind_read()
        for name, buffer in written.items():
            self._binding.bind_ortvalue_output(name, buffer.value)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Run the session. `feeds` are the inputs that have no buffer."""
        for name, array in feeds.items():
            feed(self._binding, name, array)
        if self._elsewhere:
            self._bind_read()
        self._session.run_with_iobinding(self._binding)

    def _bind_read(self) -> None:
        """Bind the buffers of inputs. For a provider with memory of its own, this is done before each run.

        If a node on the processor reads an input, onnxruntime copies the input to the processor only when the input is
        bound. Without a new binding, all runs would compute with the weights of the first step.
        """
        for name, buffer in self._read.items():
            self._binding.bind_ortvalue_input(name, buffer.value)


def attribute_defaults(op_type: str, domain: str) -> Mapping[str, Any]:
    """Return a map: attribute -> default value, from an operator's newest schema in the installed onnxruntime."""
    return _all_defaults().get((plain_domain(domain), op_type), {})


@cache
def _all_defaults() -> dict[tuple[str, str], dict[str, Any]]:
    """Return a map for all operators: (domain, operator) -> attribute -> default value.

    Reading the schemas takes 50 ms. They are sorted by version, because their order is undocumented.
    """
    load_onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    defaults: dict[tuple[str, str], dict[str, Any]] = {}
    for schema in sorted(get_all_operator_schema(), key=lambda schema: schema.since_version):
        found = {name: _default(attribute._default_value) for name, attribute in schema.attributes.items()}
        defaults[plain_domain(schema.domain), schema.name] = {k: v for k, v in found.items() if v is not None}
    return defaults


def _default(serialized: bytes) -> Any:
    """Return the value of a serialized attribute; None if it is empty, as for an attribute without a default."""
    attribute = onnx.AttributeProto()
    try:
        attribute.ParseFromString(serialized)
    except DecodeError:  # an attribute without a default has a single newline here
        return None
    value = onnx.helper.get_attribute_value(attribute) if attribute.type else None
    return value.decode(errors="replace") if isinstance(value, bytes) else value
