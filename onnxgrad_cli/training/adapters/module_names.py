"""What transformers calls the modules of a model that onnxruntime-genai's builder has written.

The builder names the parts of all decoders as those of Llama: `self_attn.q_proj`, `mlp.gate_proj`. The model in
transformers that an adapter of PEFT is for may call them otherwise, or have made one module of several. An adapter of
such a module has one factor A for all of its parts, and parts that were adapted one by one have their own: side by side
these are one adapter, of a rank as large as all of theirs.

Source: the modules in transformers, `modeling_phi.py`, `modeling_phi3.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.modules import GENAI, GENAI_KIND
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.training.adapters.places import Factors, places

Arrays = Mapping[str, np.ndarray]
"""The factors A and B of a module, and its magnitudes if it has some."""

Own = tuple[Adapter, Factors]
"""The adapter of a module, and its factors in the shapes of the module's layer."""

LIKE_LLAMA = frozenset({
    "ernie4_5", "gemma", "gemma2", "gptoss", "granite", "llama", "mistral", "nemotron", "olmo", "qwen2", "qwen3",
    "smollm3",
})  # fmt: skip
"""Kinds whose modules have the builder's names; kinds are as a genai_config.json has them."""

RENAMED: Mapping[str, Mapping[str, str]] = {"phi": {"o_proj": "dense"}}
"""For a kind the modules with other names: the builder's, and that in transformers."""

PACKED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
}
"""For a kind the modules that are several of the builder's, one after the other along the outputs."""


def kind_of(model: ModelProto) -> str:
    """The kind of a model, as its genai_config.json says; "" where none lay beside it, or another program wrote it."""
    if model.producer_name != GENAI:
        return ""
    return next((entry.value for entry in model.metadata_props if entry.key == GENAI_KIND), "")


def is_known(kind: str) -> bool:
    """Whether it is known what the modules of a kind are called; those without a kind keep the names they have."""
    return not kind or kind in LIKE_LLAMA or kind in RENAMED or kind in PACKED


def renamed(kind: str, module: str) -> str:
    """What transformers calls a module that is one there, too."""
    around, dot, last = module.rpartition(".")
    return around + dot + RENAMED.get(kind, {}).get(last, last)


def packings(kind: str, modules: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The modules of transformers that hold several of some modules of the builder's: each with its parts, in order.

    Yields:
        A module of which any part is among `modules`, and all of its parts.
    """
    for packed, parts in PACKED.get(kind, {}).items():
        for around in dict.fromkeys(m.removesuffix(part) for m in modules for part in parts if m.endswith(f".{part}")):
            yield around + packed, [around + part for part in parts]


def in_transformers(model: ModelProto, found: Mapping[str, Own]) -> dict[str, Own]:
    """Adapters by the modules that the model has in transformers.

    Raises:
        UsageError: these are not known, or DoRA adapts but a part of one.
    """
    kind = kind_of(model)
    if not is_known(kind):
        raise UsageError(
            f"`adapter`: what modules of a '{kind}' are called in transformers is not known here, as PEFT asks",
            "write an .onnx_adapter or a .safetensors file, which need no modules",
        )
    packed = dict(packings(kind, list(found)))
    inside = {part for parts in packed.values() for part in parts}
    own = {renamed(kind, name): each for name, each in found.items() if name not in inside}
    sizes = {name: size for place in places(model) for name, size in place.sizes.items()} if packed else {}
    for module, parts in packed.items():
        if lacking := [part for part in parts if part not in sizes]:
            raise UsageError(
                f"`adapter`: '{module}' is one matrix in transformers, and the model has no '{lacking[0]}'",
                "write an .onnx_adapter or a .safetensors file, which need no modules",
            )
        own[module] = _packed(module, found, {part: sizes[part] for part in parts})
    return own


def _packed(module: str, found: Mapping[str, Own], sizes: Mapping[str, int]) -> Own:
    """The adapter of a module in transformers, of those of its parts; parts without one stay as they are.

    Args:
        module: its name.
        found: the adapters by the builder's modules.
        sizes: of the parts, in order, the numbers of outputs.
    """
    there = [found[part] for part in sizes if part in found]
    adapter, first = there[0]
    magnitudes = [factors.magnitude for _, factors in there if factors.magnitude is not None]
    if magnitudes and len(there) < len(sizes):
        lacking = next(part for part in sizes if part not in found)
        raise UsageError(
            f"`adapter`: '{module}' is one matrix in transformers, and '{lacking}' of it has no adapter of DoRA",
            "adapt all parts, or none",
        )
    pairs = {part: scaled_to(factors, first.scale) for part, (_, factors) in found.items() if part in sizes}
    a, b = side_by_side([pairs.get(part, nothing(size, first.a)) for part, size in sizes.items()])
    alpha = first.scale * (math.sqrt(len(a)) if adapter.scaling == "rslora" else len(a))
    joined = Factors(a, b, first.scale, np.concatenate(magnitudes) if magnitudes else None)
    return replace(adapter, rank=len(a), alpha=alpha), joined


def scaled_to(own: Factors, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors of an adapter which, multiplied with `scale`, add what it does."""
    return own.a, own.b if own.scale == scale else (own.b * (own.scale / scale)).astype(own.b.dtype)


def as_built(
    kind: str, stored: Mapping[str, Arrays], sizes: Mapping[str, int]
) -> tuple[Mapping[str, Arrays], dict[str, str]]:
    """Factors by the modules that the model's builder has named, and what transformers calls each of these.

    Args:
        kind: of the model; see `kind_of`.
        stored: the factors by the modules in transformers.
        sizes: the builder's modules, each with its number of outputs.
    """
    called = {name: renamed(kind, name) for name in sizes}
    found: dict[str, dict[str, np.ndarray]] = {name: dict(stored[own]) for name, own in called.items() if own in stored}
    for module, parts in packings(kind, list(sizes)):
        called |= dict.fromkeys(parts, module)
        ends = np.cumsum([sizes.get(part, 0) for part in parts])[:-1]
        for name, array in stored.get(module, {}).items():
            shared = name == "A"  # what is of outputs is parted: the last part has the rest, whose size is checked
            pieces = [array] * len(parts) if shared else np.split(np.atleast_1d(array), ends)
            for part, piece in zip(parts, pieces, strict=True):
                found.setdefault(part, {})[name] = piece
    return found, called


def nothing(size: int, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors of an adapter of rank 0, of as many outputs, which takes the same input as that of A `like`."""
    return like[:0], np.zeros((size, 0), like.dtype)


def side_by_side(factors: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The factors of adapters that take one input, as those of one adapter whose outputs are theirs in turn.

    Args:
        factors: of each adapter A of [rank, in] and B of [out, rank].

    Returns:
        A of [ranks, in] and B of [outs, ranks]; where all but those of rank 0 have the same A, that and no more.
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
