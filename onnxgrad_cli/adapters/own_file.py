"""Read and write adapters in onnxgrad's format: a safetensors file, far smaller than the model that it adapts.

The file has the LoRA matrices `<weight>_lora_A` and `<weight>_lora_B`, and with DoRA the magnitudes
`<weight>_lora_magnitude`. It also has weights that were trained in full, and running statistics. The metadata list the
adapters, each with its weight, rank and alpha. For a weight [out, in] (Gemm with transB, Linear after a Transpose,
Conv) the LoRA matrices are equal to PEFT's `lora_A.weight` and `lora_B.weight`. For a weight [in, out] they are
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from onnxgrad_cli.checkpoints.tensors import load_tensors, load_words, tensor_bytes
from onnxgrad_cli.checkpoints.validate_checkpoint import are_adapters
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import unreadable
from onnxgrad_cli.metadata import Adapter

ADAPTERS = "onnxgrad.adapters"
"""The key of the metadata entry with the list of adapters."""

BASE = "onnxgrad.base"
"""The key of the metadata entry with the digest of the base model, which `untrained_digest` computes."""


def adapter_bytes(adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], base: str = "") -> bytes:
    """Return the bytes of an adapter file.

    Args:
        adapters: the adapters, such as `describe(training_model).adapters`.
        values: name -> array: the LoRA matrices of the adapters, weights that were trained in full, and running
            statistics.
        base: the digest of the base model; "" if it is unknown.

    Raises:
        OnnxgradError: a LoRA matrix is missing.
    """
    check_factors(adapters, values)
    return tensor_bytes(values, {ADAPTERS: [asdict(adapter) for adapter in adapters], **({BASE: base} if base else {})})


def load_adapter(path: Path, tell: Tell = silent) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """Read adapters from a file. Return them, and a map: name -> array of their LoRA matrices and other trained values.

    Raises:
        OnnxgradError: the file can't be read, or has no adapters of onnxgrad, or a LoRA matrix is missing or doesn't
            fit.
    """
    values, words = load_tensors(path, tell)
    if not are_adapters(words.get(ADAPTERS)):
        hint = "name a file of adapters; for adapters of PEFT, name their folder"
        raise unreadable(f"'{path}' holds no adapters of onnxgrad", hint)
    adapters = [Adapter(**each) for each in words[ADAPTERS]]
    check_factors(adapters, values)
    return adapters, values


def is_adapter(path: Path) -> bool:
    """Return True if a safetensors file has adapters of onnxgrad.

    Raises:
        OnnxgradError: the file can't be read.
    """
    return ADAPTERS in load_words(path)


def base_of(path: Path) -> str:
    """Return the digest of the base model from a file of adapters, or "" if the file has none.

    Raises:
        OnnxgradError: the file can't be read.
    """
    return str(load_words(path).get(BASE, ""))


def check_factors(adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Check that the LoRA matrices of adapters exist and fit together.

    Raises:
        OnnxgradError: a LoRA matrix is missing, a LoRA matrix doesn't have the adapter's rank, or magnitudes are not a
            vector.
    """
    for adapter in adapters:
        for name in adapter.names:
            if name not in values:
                raise unreadable(f"the adapter of '{adapter.weight}' is incomplete: '{name}' is missing")
        shapes = [list(values[name].shape) for name in (adapter.a, adapter.b)]
        if any(len(shape) < 2 or adapter.rank not in shape[:2] for shape in shapes):
            message = f"the adapter of '{adapter.weight}' has rank {adapter.rank}, but its LoRA matrices are"
            raise unreadable(f"{message} {shapes[0]} and {shapes[1]}")
        if adapter.magnitude and values[adapter.magnitude].ndim != 1:
            raise unreadable(f"the adapter of '{adapter.weight}' has magnitudes that are not a vector")
