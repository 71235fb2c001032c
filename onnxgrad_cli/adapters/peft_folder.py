"""Read and write adapters in the format of Hugging Face's PEFT: a folder with a configuration and the LoRA matrices.

`adapter_model.safetensors` has `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank],
which are not multiplied by the scale, and with DoRA `lora_magnitude_vector` [out]. `adapter_config.json` has the rank
and alpha, from which the scale follows. If a configuration makes PEFT compute anything other than LoRA or DoRA with
these LoRA matrices, it is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from onnx import ModelProto

from onnxgrad_cli.adapters.module_names import (
    NAMELESS,
    Arrays,
    as_built,
    in_transformers,
    joined,
    kind_of,
)
from onnxgrad_cli.adapters.own_file import check_factors
from onnxgrad_cli.adapters.places import AdapterSite, Factors, Read, flat, keys, misfit, places, together
from onnxgrad_cli.checkpoints.tensors import parsing, read_bytes
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.checks import is_number
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.errors import OnnxgradError, UsageError, conflict, suggest, unreadable
from onnxgrad_cli.files.safetensors_header import read_header
from onnxgrad_cli.metadata import VERSION, Adapter

CONFIG, MODEL, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""The names of the files in a folder: the configuration, and the LoRA matrices as safetensors or as a pickle.

A pickle is refused.
"""

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(?:(A|B)\.weight|(magnitude_vector)(?:\.weight)?)")
MAGNITUDE = "magnitude_vector"
"""The key of DoRA's magnitudes in the map of a module's arrays, whose other keys are 'A' and 'B'."""

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""The values of `init_lora_weights` with which PEFT leaves the weights of the base model unchanged."""

MAX_CONFIG_BYTES = 2**20
"""The largest allowed size of a configuration, in bytes."""

MOST_PATTERNS = 10_000
"""The largest allowed number of patterns in an entry of a configuration. Each pattern is matched with each module."""

STRANGE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "velora_config",
)  # fmt: skip
"""Entries of a configuration that must not be set.

With them, an adapter would be more than a product of two LoRA matrices.
"""

MERGED = "merge the adapter into its model with PEFT, and export this model"
COPIED = "save the adapter with `save_embedding_layers=False`, if the model's own weights did not change"
"""The hints of errors about adapters that are more than a product of two LoRA matrices."""


# -- writing ----------------------------------------------------------------------------------------------------------


def peft_bytes(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return the contents of the folder's files: file name -> bytes.

    Args:
        model: the inference model.
        adapters: its adapters.
        values: name -> array, with the LoRA matrices of the adapters.

    Raises:
        UsageError: the module of an adapted matrix is unknown, weights were trained in full, or only some adapters use
            DoRA.
        OnnxgradError: a LoRA matrix is missing or does not fit.
    """
    check_factors(adapters, values)
    found = in_transformers(model, dict(_modules(model, adapters, values)))
    dora = bool(adapters[0].magnitude)
    rank = Counter(adapter.rank for adapter, _ in found.values()).most_common(1)[0][0]
    alpha = Counter(adapter.alpha for adapter, _ in found.values()).most_common(1)[0][0]
    config = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True,
        "r": rank, "lora_alpha": _whole(alpha), "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "use_rslora": adapters[0].scaling == "rslora", "use_dora": dora,
        "target_modules": sorted(found), "modules_to_save": None,
        "rank_pattern": {_exactly(name): a.rank for name, (a, _) in found.items() if a.rank != rank},
        "alpha_pattern": {_exactly(name): _whole(a.alpha) for name, (a, _) in found.items() if a.alpha != alpha},
    }  # fmt: skip
    tensors = {}
    for name, (_, factors) in found.items():
        for kind, array in (("A", factors.a), ("B", factors.b)):
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = array
        if factors.magnitude is not None:
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = factors.magnitude
    return {MODEL: _safetensors(tensors), CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def _modules(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, tuple[Adapter, Factors]]]:
    """Yield each adapted module, with its adapter, and the LoRA matrices in the shapes that PyTorch's layer requires.

    Raises:
        UsageError: the module of an adapted matrix is unknown, weights were trained in full, or only some adapters use
            DoRA.
    """
    own = {adapter.weight: adapter for adapter in adapters}
    if len({bool(adapter.magnitude) for adapter in adapters}) > 1:
        message = "`adapter`: a folder of PEFT can't mix adapters with and without DoRA"
        raise conflict(message, "write a .safetensors file")
    others = sorted(values.keys() - {name for adapter in adapters for name in adapter.names})
    if others:
        raise conflict(f"`adapter`: a folder of PEFT can't hold '{others[0]}', which was trained in full", NAMELESS)
    named = keys(places(model, own.keys()))
    met = Counter(name for key in named.values() for name in key[0].sizes)
    barred = [
        f"{place.weight}: {why}" for key, (place, *_) in named.items()
        if (why := place.obstacle or ("" if key == place.module else f"'{place.module}' also has another matrix"))
    ]  # fmt: skip
    barred += [f"{name}: several modules have this name" for name, count in met.items() if count > 1 and name]
    missing = own.keys() - {place.weight for key in named.values() for place in key}
    barred += [f"{weight}: no product of the main graph reads it" for weight in sorted(missing)]
    if barred:
        message = "`adapter`: PEFT names adapters by their modules, but these have none:"
        raise UsageError(message, NAMELESS, barred[:20], code="conflict")
    for place, *_ in named.values():
        adapter, found = own[place.weight], place.of(own[place.weight], values)
        start = 0
        for name, size in place.sizes.items():
            b = found.b[start : start + size]
            m = None if found.magnitude is None else found.magnitude[start : start + size]
            m = m.reshape(1, -1, *place.kernel) if m is not None and place.kernel else m
            start += size
            a, b = (np.ascontiguousarray(factor).reshape(*factor.shape, *place.kernel) for factor in (found.a, b))
            yield name, (adapter, Factors(a, b, found.scale, m))


def _exactly(module: str) -> str:
    """Return a pattern for a configuration that matches one module only."""
    return "^" + module.replace(".", r"\.")


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a safetensors file, with the metadata that PEFT writes and the version of onnxgrad.

    bfloat16 is stored as float32.
    """
    halves = {name for name, array in tensors.items() if array.dtype == ml_dtypes.bfloat16}
    found = {name: array.astype(np.float32) if name in halves else array for name, array in tensors.items()}
    data: bytes = safetensors.numpy.save(found, {"format": "pt", VERSION: tool_version()})
    return data


# -- reading ----------------------------------------------------------------------------------------------------------


def load_peft(folder: Path, model: ModelProto) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """Read the adapters of a model from a folder of PEFT. Return them, and a map: name of a LoRA matrix -> array.

    Raises:
        OnnxgradError: a file is missing or damaged, contains more than LoRA matrices, or contains a module that the
            model lacks.
    """
    config = _config(folder / CONFIG)
    stored = _factors(folder / MODEL, folder / PICKLE)
    known = places(model)
    layers = [key[0] for name, key in keys(known).items() if name == key[0].module and not key[0].obstacle]
    there = {name: size for place in layers for name, size in place.sizes.items()}
    factors, called = as_built(kind_of(model), stored, there)
    target, excluded = _names(config, "target_modules"), _names(config, "exclude_modules")
    ignored = sorted(module for module in stored if not _is_meant(module, target, excluded))
    if ignored:
        message = f"'{folder}' has LoRA matrices of '{ignored[0]}', but its configuration gives this module no adapter"
        hint = "add its module to target_modules: PEFT would ignore the LoRA matrices"
        raise OnnxgradError(message, hint, code="mismatch")
    unknown = sorted(stored.keys() - called.values())
    if unknown:
        message = f"'{folder}' has an adapter of '{unknown[0]}', but the model has no such module"
        raise OnnxgradError(message, suggest(unknown[0], set(called.values()), "modules"), code="unknown_name")
    found: list[Read] = []
    for place in layers:
        own = {name: factors[name] for name in place.sizes if name in factors}
        if own:
            found.append((place, *_at(folder, config, place, own, called)))
    return together(found, known)


def _at(
    folder: Path, config: Mapping[str, Any], place: AdapterSite, own: Mapping[str, Arrays], called: Mapping[str, str]
) -> tuple[Adapter, dict[str, np.ndarray]]:
    """Return the adapter of one matrix product, and its LoRA matrices.

    If several modules are packed into the product, the LoRA matrices of the modules are joined.

    Args:
        folder: the folder, for messages.
        config: the contents of the folder's adapter_config.json.
        place: the matrix product.
        own: module -> its LoRA matrices in the folder, for each module of the product that has some.
        called: module -> its name in transformers.

    Raises:
        OnnxgradError: the LoRA matrices don't fit, or DoRA adapts only some of the product's modules.
    """
    parts = {name: _module(folder, config, place, name, found, called[name]) for name, found in own.items()}
    if not place.parts:
        ((found, alpha),) = parts.values()
        return place.adapter(found, alpha, _scaling(config))
    if config.get("use_dora") and len(parts) < len(place.parts):
        lacking = next(name for name, _ in place.parts if name not in parts)
        message = f"'{folder}' uses DoRA for '{next(iter(parts))}' but not for '{lacking}', which are one matrix here"
        raise OnnxgradError(message, MERGED, code="mismatch")
    # in float64, so that the scaled LoRA matrices are rounded only once
    wide = {name: replace(found, b=found.b.astype(np.float64)) for name, (found, _) in parts.items()}
    whole = joined(wide, place.sizes, 1.0)
    return place.adapter(whole, len(whole.a))


def _module(
    folder: Path, config: Mapping[str, Any], place: AdapterSite, name: str, own: Arrays, called: str
) -> tuple[Factors, float]:
    """Return the LoRA matrices of a module, and its alpha.

    Args:
        folder: the folder, for messages.
        config: the configuration.
        place: the matrix product.
        name: the module.
        own: the module's arrays in the file: 'A', 'B' and, with DoRA, `MAGNITUDE`.
        called: the module's name in transformers.

    Raises:
        OnnxgradError: the LoRA matrices or magnitudes don't fit.
    """
    rank = _of(config, "rank_pattern", called, config["r"])
    alpha = _of(config, "alpha_pattern", called, config["lora_alpha"])
    out = place.sizes[name]
    shapes = [(rank, place.shape[0], *place.kernel), (out, rank, *place.kernel)]
    a, b, m = own["A"], own["B"], own.get(MAGNITUDE)
    if (m is not None) != bool(config.get("use_dora")) or (m is not None and m.size != out):
        text = f"the magnitudes of '{name}' in '{folder}' don't match its 'use_dora', or the module's {out} outputs"
        raise OnnxgradError(text, code="mismatch")
    if [a.shape, b.shape] != shapes:
        raise misfit(folder, name, (place.shape[0], out), a, b)
    adapter = Adapter(place.weight, "", "", rank, alpha, _scaling(config))
    return Factors(flat(a), flat(b), adapter.scale, None if m is None else m.reshape(-1)), alpha


def _scaling(config: Mapping[str, Any]) -> str:
    return "rslora" if config.get("use_rslora") else "lora"


def _of(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the path of a module, or the end of the path.

    PEFT reads patterns as regular expressions. Because an expression from an untrusted file can take extremely long to
    match, only names are accepted. A dot in a name matches any character; a dot after a backslash matches only a dot.

    Args:
        config: the configuration.
        pattern: the entry of the configuration that maps patterns to values.
        module: the path of the module.
        default: the value if no pattern matches.

    Raises:
        OnnxgradError: a pattern is not a name.
    """
    for key, value in (config.get(pattern) or {}).items():
        compiled = _pattern(key)
        if compiled is None:
            raise unreadable(f"'{pattern}' has {key!r}, which is not the name of a module", "name each module instead")
        if compiled.fullmatch(module):
            return value
    return default


@cache
def _pattern(key: str) -> re.Pattern[str] | None:
    """Compile a pattern of a configuration. Return None if it is not just the name of a module."""
    name = key.removeprefix("^").removesuffix("$")
    if not re.fullmatch(r"([\w-]|\\?\.)+", name):
        return None
    return re.compile(name if key.startswith("^") else rf"(.*\.)?{name}")


def _names(config: Mapping[str, Any], entry: str) -> frozenset[str] | None:
    """Return the names of modules that an entry lists; None if the entry is not a list but a regular expression."""
    names = config.get(entry)
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else None


def _is_meant(module: str, target: frozenset[str] | None, excluded: frozenset[str] | None) -> bool:
    """Return True if the configuration gives a module an adapter.

    A name in the configuration matches a module whose path is the name or ends with '.' and the name.

    Args:
        module: the path of the module.
        target: the names of modules with an adapter; None for all.
        excluded: the names of modules without an adapter; None for none.
    """
    ends = {module, *(module[at + 1 :] for at, mark in enumerate(module) if mark == ".")}
    return (target is None or not ends.isdisjoint(target)) and ends.isdisjoint(excluded or ())


def _config(path: Path) -> dict[str, Any]:
    data = read_bytes(path, MAX_CONFIG_BYTES)
    try:
        config = strict_json.loads(data)
    except (ValueError, RecursionError) as error:
        raise unreadable(f"'{path}' is not JSON: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        hint = "use a LoRA adapter: other kinds are not supported"
        raise unreadable(f"'{path}' describes {kind!r}, not LoRA", hint)
    _check_ranks(path, config)
    known = ("use_rslora", "use_dora")
    uses = [name for name, value in config.items() if value and name.startswith("use_") and name not in known]
    strange = [*uses, *(name for name in STRANGE if config.get(name))]
    strange += ["init_lora_weights"] * (config.get("init_lora_weights") not in STARTS)
    strange += ["bias"] * (config.get("bias", "none") != "none")
    if strange:
        raise unreadable(f"'{path}' sets '{strange[0]}', which onnxgrad does not support", MERGED)
    return config


def _check_ranks(path: Path, config: Mapping[str, Any]) -> None:
    """Check the ranks and scales of a configuration, also those in its patterns."""
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    ranks, alphas = ([*each.values()] if isinstance(each, dict) else [None] for each in patterns)
    if len(ranks) > MOST_PATTERNS or len(alphas) > MOST_PATTERNS:
        raise unreadable(f"'{path}' has more than {MOST_PATTERNS:,} patterns", "keep at most one for each module")
    fits = all(is_number(rank, 1, whole=True) and rank <= 2**31 for rank in (config.get("r"), *ranks))
    if not fits or not all(is_number(alpha) and abs(alpha) < 1e30 for alpha in (config.get("lora_alpha"), *alphas)):
        raise unreadable(f"'{path}' has no valid rank 'r' or 'lora_alpha'")


def _factors(path: Path, pickled: Path) -> dict[str, dict[str, np.ndarray]]:
    """Read the LoRA matrices in a file: module -> its arrays 'A', 'B', and with DoRA `MAGNITUDE`.

    Args:
        path: the safetensors file.
        pickled: the path of PEFT's pickle format, for the error message: pickles are not read.

    Raises:
        OnnxgradError: the file is missing, damaged or incomplete, or has tensors that are not LoRA matrices.
    """
    if pickled.exists() and not path.exists():
        hint = "save the adapter as safetensors with PEFT"
        raise unreadable(f"'{pickled}' is a pickle, which can run code, so it is not read", hint)
    data = read_bytes(path)
    with parsing(path):
        read_header(BytesIO(data))
        tensors: dict[str, Any] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor["dtype"] not in _TYPES:
            message = f"'{path}' holds '{key}' of {tensor['dtype']}, which is not a LoRA matrix of floats"
            raise unreadable(message, COPIED if key.endswith(".base_layer.weight") else MERGED)
        array = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        found.setdefault(match[1], {})[match[2] or match[3]] = array
    alone = next((module for module, own in found.items() if not {"A", "B"} <= own.keys()), None)
    if alone is not None or not found:
        raise unreadable(f"'{path}' is incomplete: '{alone}' lacks a LoRA matrix" if found else f"'{path}' is empty")
    return found
