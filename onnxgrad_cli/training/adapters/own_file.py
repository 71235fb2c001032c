"""What adapter training has found, in a file of its own: far smaller than the model, and of use only beside it.

A safetensors file with the factors, `<weight>_lora_A` and `<weight>_lora_B`, and what else was trained: weights in
full, running statistics. Its metadata say which weight each pair belongs to, with rank and alpha. For a weight of
[out, in] (Gemm with transB, Linear behind a Transpose, Conv) the factors are those that peft calls `lora_A.weight` and
`lora_B.weight`; for one of [in, out] they are the transposes of these. With DoRA there is `<weight>_lora_magnitude`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import followed, save_bytes
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.training.run.progress import are_adapters
from onnxgrad_cli.training.run.tensors import load_tensors, load_words, tensor_bytes

ADAPTERS = "onnxgrad.adapters"
"""The entry of the metadata that describes the adapters."""

BASE = "onnxgrad.base"
"""The entry that tells the model that they were trained on from others, see `untrained_digest`."""


def save_adapter(path: Path, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Write adapters, whole or not at all.

    Args:
        path: the file.
        adapters: as `describe(training_model).adapters` has them.
        values: their factors by name, weights that were trained in full, and running statistics.

    Raises:
        OnnxgradError: a factor is missing, or the file can't be written.
    """
    save_bytes(adapter_bytes(adapters, values), followed(path), durable=True)


def adapter_bytes(adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], base: str = "") -> bytes:
    """What `save_adapter` writes, and of which base the adapters are, where that is known.

    Raises:
        OnnxgradError: a factor is missing.
    """
    check_factors(adapters, values)
    return tensor_bytes(values, {ADAPTERS: [asdict(adapter) for adapter in adapters], **({BASE: base} if base else {})})


def load_adapter(path: Path, tell: Tell = silent) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in a file, and the values of their factors and of what else was trained.

    Raises:
        OnnxgradError: the file can't be read, or holds no adapters.
    """
    values, words = load_tensors(path, tell)
    if not are_adapters(words.get(ADAPTERS)):
        raise OnnxgradError(
            f"'{path}' holds no adapters of onnxgrad",
            "it is a safetensors file of another kind; adapters of PEFT are read by the name of their folder",
        )
    adapters = [Adapter(**each) for each in words[ADAPTERS]]
    check_factors(adapters, values)
    return adapters, values


def is_adapter(path: Path) -> bool:
    """Whether a file holds adapters.

    Raises:
        OnnxgradError: it can't be read.
    """
    return ADAPTERS in load_words(path)


def base_of(path: Path) -> str:
    """What a file of adapters says of the model that they were trained on; "" where it says nothing.

    Raises:
        OnnxgradError: it can't be read.
    """
    return str(load_words(path).get(BASE, ""))


def check_factors(adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Make sure that adapters have their factors.

    Raises:
        OnnxgradError: one is missing, or is no pair of matrices of the adapter's rank.
    """
    for adapter in adapters:
        for name in adapter.names:
            if name not in values:
                raise OnnxgradError(f"the adapter of '{adapter.weight}' is incomplete: '{name}' is missing")
        shapes = [values[name].shape for name in (adapter.a, adapter.b)]
        if any(len(shape) < 2 or adapter.rank not in shape[:2] for shape in shapes):
            sizes = " and ".join(str(list(shape)) for shape in shapes)
            raise OnnxgradError(f"the adapter of '{adapter.weight}' is of rank {adapter.rank}, its factors of {sizes}")
        if adapter.magnitude and values[adapter.magnitude].ndim != 1:
            raise OnnxgradError(f"the adapter of '{adapter.weight}' has magnitudes that are no vector")
