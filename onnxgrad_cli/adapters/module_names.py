"""Convert adapters between the module names of onnxruntime-genai's model builder and those of transformers.

The builder names the modules of all decoders as in Llama: `self_attn.q_proj`, `mlp.gate_proj`. In transformers, for
which PEFT adapters are made, a module may have another name, or several of the builder's modules may be packed into
one. An adapter of a packed module has one LoRA matrix A for all parts. If the parts were adapted separately, each has
its own LoRA matrix A. In that case their adapters are joined to one adapter of the packed module, whose rank is the sum
of their ranks.

Source: the modules in transformers, `modeling_phi.py`, `modeling_phi3.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.adapters.places import Factors, places
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.modules import GENAI, GENAI_KIND
from onnxgrad_cli.metadata import Adapter

Arrays = Mapping[str, np.ndarray]
"""The LoRA matrices of a module: 'A', 'B', and with DoRA the magnitudes -> array."""

Own = tuple[Adapter, Factors]
"""The adapter of a module, and its LoRA matrices in the shapes that the module's layer in PyTorch requires."""

LIKE_LLAMA = frozenset({
    "ernie4_5", "gemma", "gemma2", "gptoss", "granite", "llama", "mistral", "nemotron", "olmo", "qwen2", "qwen3",
    "smollm3",
})  # fmt: skip
"""The model types (in genai_config.json) whose module names are equal in onnxruntime-genai and in transformers."""

RENAMED: Mapping[str, Mapping[str, str]] = {"phi": {"o_proj": "dense"}}
"""Model type -> module name in onnxruntime-genai -> module name in transformers, where the two differ."""

PACKED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
}
"""Model type -> packed module in transformers -> its parts, modules in onnxruntime-genai, in the order of outputs."""


NAMELESS = "write an .onnx_adapter or a .safetensors file, which need no module names"
"""The hint of errors about modules that have no name in transformers."""


def kind_of(model: ModelProto) -> str:
    """Return the model type, such as 'phi3', from the genai_config.json that onnxruntime-genai's builder has written.

    Return "" if there was no such file beside the model, or if the builder did not write the model.
    """
    if model.producer_name != GENAI:
        return ""
    return next((entry.value for entry in model.metadata_props if entry.key == GENAI_KIND), "")


def is_known(kind: str) -> bool:
    """Return True if the module names in transformers are known for a model type.

    They are known for the type "", for which they equal the names in the model.
    """
    return not kind or kind in LIKE_LLAMA or kind in RENAMED or kind in PACKED


def renamed(kind: str, module: str) -> str:
    """Convert a module's name in onnxruntime-genai's model builder to its name in transformers.

    The module must not be a part of a packed module, as listed in `PACKED`.
    """
    around, dot, last = module.rpartition(".")
    return around + dot + RENAMED.get(kind, {}).get(last, last)


def packings(kind: str, modules: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Find the packed modules in transformers that have some of onnxruntime-genai's modules as parts.

    Yields:
        The name of a packed module with at least one part in `modules`, and the names of all its parts, in order.
    """
    for packed, parts in PACKED.get(kind, {}).items():
        for around in dict.fromkeys(m.removesuffix(part) for m in modules for part in parts if m.endswith(f".{part}")):
            yield around + packed, [around + part for part in parts]


def in_transformers(model: ModelProto, found: Mapping[str, Own]) -> dict[str, Own]:
    """Convert adapters of onnxruntime-genai's modules to adapters of the modules in transformers.

    Args:
        model: the inference model.
        found: module of the builder -> its adapter.

    Returns:
        Module in transformers -> its adapter. The adapters of the parts of a packed module are joined.

    Raises:
        UsageError: the names in transformers are unknown for the model type, the model lacks a part of a packed module,
            or DoRA adapts only some parts of a packed module.
    """
    kind = kind_of(model)
    if not is_known(kind):
        message = f"`adapter`: PEFT needs the module names in transformers, which onnxgrad does not know for a '{kind}'"
        raise conflict(message, NAMELESS)
    packed = dict(packings(kind, list(found)))
    inside = {part for parts in packed.values() for part in parts}
    own = {renamed(kind, name): each for name, each in found.items() if name not in inside}
    sizes = {name: size for place in places(model) for name, size in place.sizes.items()} if packed else {}
    for module, parts in packed.items():
        if lacking := [part for part in parts if part not in sizes]:
            message = f"`adapter`: '{module}' is one matrix in transformers, but the model lacks its part"
            raise conflict(f"{message} '{lacking[0]}'", NAMELESS)
        own[module] = _packed(module, found, {part: sizes[part] for part in parts})
    return own


def _packed(module: str, found: Mapping[str, Own], sizes: Mapping[str, int]) -> Own:
    """Join the adapters of the parts of a packed module. The result adds nothing to parts that have no adapter.

    Args:
        module: the name of the packed module.
        found: module of the builder -> its adapter.
        sizes: part -> its number of outputs, in order.

    Raises:
        UsageError: DoRA adapts only some of the parts.
    """
    there = {part: found[part][1] for part in sizes if part in found}
    first = next(iter(there))
    adapter = found[first][0]
    if adapter.magnitude and len(there) < len(sizes):
        lacking = next(part for part in sizes if part not in found)
        message = f"`adapter`: '{module}' is one matrix in transformers, but its part '{lacking}' has no DoRA adapter"
        raise conflict(message, "adapt all parts, or none")
    whole = joined(there, sizes, there[first].scale)
    rank = len(whole.a)
    alpha = whole.scale * (math.sqrt(rank) if adapter.scaling == "rslora" else rank)
    return replace(adapter, rank=rank, alpha=alpha), whole


def joined(parts: Mapping[str, Factors], sizes: Mapping[str, int], scale: float) -> Factors:
    """Join adapters with the same input into one adapter, whose output is the concatenation of their outputs.

    Args:
        parts: part -> its adapter. Parts without an adapter get an adapter that adds nothing.
        sizes: part -> its number of outputs, in order.
        scale: the scale of the result; B of each part is rescaled to it.
    """
    like = next(iter(parts.values())).a
    pairs = []
    for name, size in sizes.items():
        own = parts.get(name) or Factors(like[:0], np.zeros((size, 0), like.dtype), scale)
        pairs.append((own.a, own.b if own.scale == scale else (own.b * (own.scale / scale)).astype(own.b.dtype)))
    a, b = side_by_side(pairs)
    magnitudes = [m for name in sizes if name in parts and (m := parts[name].magnitude) is not None]
    return Factors(a, b, scale, np.concatenate(magnitudes) if magnitudes else None)


def as_built(
    kind: str, stored: Mapping[str, Arrays], sizes: Mapping[str, int]
) -> tuple[Mapping[str, Arrays], dict[str, str]]:
    """Convert LoRA matrices of transformers' modules to those of onnxruntime-genai's modules. Split packed modules.

    Args:
        kind: the model type in genai_config.json; "" if it is unknown.
        stored: module in transformers -> its LoRA matrices.
        sizes: module of the builder -> its number of outputs.

    Returns:
        Two maps: module of the builder -> its LoRA matrices; and module of the builder -> its module in transformers.
    """
    called = {name: renamed(kind, name) for name in sizes}
    found: dict[str, dict[str, np.ndarray]] = {name: dict(stored[own]) for name, own in called.items() if own in stored}
    for module, parts in packings(kind, list(sizes)):
        called |= dict.fromkeys(parts, module)
        ends = np.cumsum([sizes.get(part, 0) for part in parts])[:-1]
        for name, array in stored.get(module, {}).items():
            shared = name == "A"  # B and magnitudes are split along the outputs; the last part's size is checked later
            pieces = [array] * len(parts) if shared else np.split(np.atleast_1d(array), ends)
            for part, piece in zip(parts, pieces, strict=True):
                found.setdefault(part, {})[name] = piece
    return found, called


def side_by_side(factors: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Join adapters with the same input into one adapter, whose output is the concatenation of their outputs.

    Args:
        factors: A [rank, in] and B [out, rank] of each adapter.

    Returns:
        A [sum of ranks, in] and B [sum of outputs, sum of ranks], which is block-diagonal. But if all adapters with a
        rank above 0 have the same A, the result is this A, and B [sum of outputs, rank].
    """
    first = next((a for a, _ in factors if len(a)), factors[0][0])
    if all(not len(a) or np.array_equal(a, first) for a, _ in factors):
        return first, np.concatenate([b if b.size else np.zeros((len(b), len(first)), b.dtype) for _, b in factors])
    columns = np.cumsum([0, *(len(a) for a, _ in factors)])
    rows = np.cumsum([0, *(len(b) for _, b in factors)])
    whole = np.zeros((rows[-1], columns[-1]), np.result_type(*(b for _, b in factors)))
    for k, (_, b) in enumerate(factors):
        whole[rows[k] : rows[k + 1], columns[k] : columns[k + 1]] = b
    return np.concatenate([a for a, _ in factors]), whole
