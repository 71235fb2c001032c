"""Adapters as PEFT keeps them, the library of Hugging Face: a folder of a configuration and the factors.

`adapter_model.safetensors` holds `base_model.model.<module>.lora_A.weight` of [rank, in] and `lora_B.weight` of
[out, rank], not scaled; `adapter_config.json` says by what their product is multiplied. What of a configuration makes
PEFT compute something else than that is refused. With DoRA there is `lora_magnitude_vector`, too, of [out].
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

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.files.safetensors_header import read_header
from onnxgrad_cli.metadata import VERSION, Adapter, tool_version
from onnxgrad_cli.training.adapters.module_names import (
    Arrays,
    as_built,
    in_transformers,
    kind_of,
    nothing,
    scaled_to,
    side_by_side,
)
from onnxgrad_cli.training.adapters.own_file import check_factors
from onnxgrad_cli.training.adapters.places import Factors, Place, flat, keys, places
from onnxgrad_cli.training.adapters.together import Read, together
from onnxgrad_cli.training.run.tensors import read_bytes

CONFIG, MODEL, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""The files of a folder."""

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(?:(A|B)\.weight|(magnitude_vector)(?:\.weight)?)")
MAGNITUDE = "magnitude_vector"
"""What PEFT calls the magnitudes of DoRA, beside factors A and B."""

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Beginnings of an adapter that leave the weights alone that it adds to."""

MOST = 2**20
"""Bytes that a configuration may have."""

MOST_PATTERNS = 10_000
"""Patterns that an entry of a configuration may have: each is tried on each module."""

STRANGE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "velora_config",
)  # fmt: skip
"""Entries of a configuration that make an adapter another one than the product of two factors, where they say so."""


# -- to write ---------------------------------------------------------------------------------------------------------


def peft_bytes(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The files of the folder for adapters of a model, by name.

    Args:
        model: the inference model.
        adapters: its adapters.
        values: their factors.

    Raises:
        UsageError: a matrix is that of no module that is known, or weights were trained in full.
        OnnxgradError: a factor is missing or does not fit.
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
    """The modules of which adapters are, each with its own and the factors in the shapes of the module's layer."""
    own = {adapter.weight: adapter for adapter in adapters}
    if len({bool(adapter.magnitude) for adapter in adapters}) > 1:
        raise UsageError(
            "`adapter`: in a folder of PEFT all adapters are of DoRA, or none", "write a .safetensors file"
        )
    others = sorted(values.keys() - {name for adapter in adapters for name in adapter.names})
    hint = "write an .onnx_adapter or a .safetensors file, which need no modules"
    if others:
        raise UsageError(f"`adapter`: a folder of PEFT has no place for '{others[0]}', which was trained in full", hint)
    named = keys(places(model, own.keys()))
    met = Counter(name for key in named.values() for name in key[0].sizes)
    barred = [
        f"{place.weight}: {why}" for key, (place, *_) in named.items()
        if (why := place.obstacle or ("" if key == place.module else f"'{place.module}' has another matrix, too"))
    ]  # fmt: skip
    barred += [f"{name}: there are several of this name" for name, count in met.items() if count > 1 and name]
    missing = own.keys() - {place.weight for key in named.values() for place in key}
    barred += [f"{weight}: no product of the model's own graph reads it" for weight in sorted(missing)]
    if barred:
        raise UsageError("`adapter`: PEFT knows adapters by their modules, and these have none:", hint, barred[:20])
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
    """A pattern of a configuration that means one module."""
    return "^" + module.replace(".", r"\.")


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A file that says which library's shapes it has, as PEFT's own do, and that it is ours."""
    halves = {name for name, array in tensors.items() if array.dtype == ml_dtypes.bfloat16}
    found = {name: array.astype(np.float32) if name in halves else array for name, array in tensors.items()}
    data: bytes = safetensors.numpy.save(found, {"format": "pt", VERSION: tool_version()})
    return data


# -- to read ----------------------------------------------------------------------------------------------------------


def load_peft(folder: Path, model: ModelProto) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in a folder of PEFT, as they belong to a model, and their factors by name.

    Raises:
        OnnxgradError: a file is missing or damaged, holds more than factors, or is of modules that the model has not.
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
        raise OnnxgradError(
            f"'{folder}' has factors of '{ignored[0]}', to which its configuration gives no adapter",
            "let its target_modules name what it is for: PEFT would leave the factors out",
        )
    unknown = sorted(stored.keys() - called.values())
    if unknown:
        raise OnnxgradError(
            f"'{folder}' has an adapter of '{unknown[0]}', and the model has no such module",
            suggest(unknown[0], set(called.values()), "modules"),
        )
    found: list[Read] = []
    for place in layers:
        own = {name: factors[name] for name in place.sizes if name in factors}
        if own:
            found.append((place, *_at(folder, config, place, own, called)))
    return together(found, known)


def _at(
    folder: Path, config: Mapping[str, Any], place: Place, own: Mapping[str, Arrays], called: Mapping[str, str]
) -> tuple[Adapter, dict[str, np.ndarray]]:
    """The adapter of a place, of those of the modules that it stands for."""
    parts = {name: _module(folder, config, place, name, found, called[name]) for name, found in own.items()}
    if not place.parts:
        ((found, alpha),) = parts.values()
        return place.adapter(found, alpha, _scaling(config))
    if config.get("use_dora") and len(parts) < len(place.parts):
        lacking = next(name for name, _ in place.parts if name not in parts)
        raise OnnxgradError(
            f"'{folder}' has DoRA of '{next(iter(parts))}' and none of '{lacking}', which are one matrix here",
            "merge the adapter into its model with PEFT, and export that",
        )
    first = next(found for found, _ in parts.values())
    wide = {
        name: replace(found, b=found.b.astype(np.float64)) for name, (found, _) in parts.items()
    }  # rounded but once
    pairs = {name: scaled_to(found, 1.0) for name, found in wide.items()}
    a, b = side_by_side([pairs.get(name, nothing(size, first.a)) for name, size in place.parts])
    lengths = [each for name, _ in place.parts if name in parts and (each := parts[name][0].magnitude) is not None]
    return place.adapter(Factors(a, b, 1.0, np.concatenate(lengths) if lengths else None), len(a))


def _module(
    folder: Path, config: Mapping[str, Any], place: Place, name: str, own: Arrays, called: str
) -> tuple[Factors, float]:
    """The factors of a module, and its alpha."""
    rank = _of(config, "rank_pattern", called, config["r"])
    alpha = _of(config, "alpha_pattern", called, config["lora_alpha"])
    out = place.sizes[name]
    shapes = [(rank, place.shape[0], *place.kernel), (out, rank, *place.kernel)]
    a, b, m = own["A"], own["B"], own.get(MAGNITUDE)
    if (m is not None) != bool(config.get("use_dora")) or (m is not None and m.size != out):
        raise OnnxgradError(f"'{folder}' has not the magnitudes of '{name}' that its configuration says")
    if [a.shape, b.shape] != shapes:
        raise OnnxgradError(
            f"'{folder}' does not fit the model: '{name}' goes from {place.shape[0]} to {out}, "
            f"its factors of rank {rank} are {list(a.shape)} and {list(b.shape)}",
            "it is an adapter of another model",
        )
    adapter = Adapter(place.weight, "", "", rank, alpha, _scaling(config))
    return Factors(flat(a), flat(b), adapter.scale, None if m is None else m.reshape(-1)), alpha


def _scaling(config: Mapping[str, Any]) -> str:
    return "rslora" if config.get("use_rslora") else "lora"


def _of(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    """What a configuration says of a module: the first pattern counts that is its path, or the end of that.

    PEFT reads patterns as regular expressions. Those of a stranger can take for ever, so that only names are read, in
    which a dot is any character, and one behind a backslash a dot.
    """
    for key, value in (config.get(pattern) or {}).items():
        compiled = _pattern(key)
        if compiled is None:
            raise OnnxgradError(
                f"'{pattern}' has a pattern that is no module's name: {key!r}", "name each module there"
            )
        if compiled.fullmatch(module):
            return value
    return default


@cache
def _pattern(key: str) -> re.Pattern[str] | None:
    """Return a compiled pattern of a configuration, or None if it is more than a module's name."""
    name = key.removeprefix("^").removesuffix("$")
    if not re.fullmatch(r"([\w-]|\\?\.)+", name):
        return None
    return re.compile(name if key.startswith("^") else rf"(.*\.)?{name}")


def _names(config: Mapping[str, Any], entry: str) -> frozenset[str] | None:
    """Return the modules that an entry lists, or None where it is a regular expression, which is not read."""
    names = config.get(entry)
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else None


def _is_meant(module: str, target: frozenset[str] | None, excluded: frozenset[str] | None) -> bool:
    """Return True if a configuration gives a module an adapter: names match the end of its path."""
    ends = {module, *(module[at + 1 :] for at, mark in enumerate(module) if mark == ".")}
    return (target is None or not ends.isdisjoint(target)) and ends.isdisjoint(excluded or ())


def _config(path: Path) -> dict[str, Any]:
    data = read_bytes(path, MOST)
    try:
        config = strict_json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OnnxgradError(f"'{path}' is no JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise OnnxgradError(f"'{path}' describes no LoRA, but {kind!r}", "adapters of other kinds are not read")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if any(isinstance(each, dict) and len(each) > MOST_PATTERNS for each in patterns):
        raise OnnxgradError(f"'{path}' has more than {MOST_PATTERNS:,} patterns", "it has one for each module at most")
    ranks = [config.get("r"), *(patterns[0].values() if isinstance(patterns[0], dict) else [None])]
    alphas = [config.get("lora_alpha"), *(patterns[1].values() if isinstance(patterns[1], dict) else [None])]
    if not all(map(_is_rank, ranks)) or not all(map(_is_alpha, alphas)):
        raise OnnxgradError(f"'{path}' does not say which rank and which alpha its adapters have")
    known = ("use_rslora", "use_dora")
    uses = [name for name, value in config.items() if value and name.startswith("use_") and name not in known]
    strange = [*uses, *(name for name in STRANGE if config.get(name))]
    strange += ["init_lora_weights"] * (config.get("init_lora_weights") not in STARTS)
    if strange or config.get("bias", "none") != "none":
        raise OnnxgradError(
            f"'{path}' describes more than two factors: {(strange or ['bias'])[0]}",
            "merge it into its model with PEFT, and export that",
        )
    return config


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**31


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _factors(path: Path, pickled: Path) -> dict[str, dict[str, np.ndarray]]:
    """The factors A and B of each module, and its magnitudes if it has some."""
    if pickled.exists() and not path.exists():
        raise OnnxgradError(
            f"'{pickled}' is a pickle, which can run code and is not read", "save the adapter as safetensors with PEFT"
        )
    try:
        data = read_bytes(path)
        read_header(BytesIO(data))
        tensors: dict[str, Any] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except OnnxgradError:
        raise
    except Exception as error:  # the library has kinds of its own, and raises others too
        raise OnnxgradError(f"'{path}' is no safetensors file, or is broken: {error}") from None
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor["dtype"] not in _TYPES:
            copied = key.endswith(".base_layer.weight")
            raise OnnxgradError(
                f"'{path}' holds '{key}' of {tensor['dtype']}, which is no factor of a layer",
                "save it with `save_embedding_layers=False`, if the model's own weights are as they were"
                if copied
                else "merge the adapter into its model with PEFT, and export that",
            )
        array = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        found.setdefault(match[1], {})[match[2] or match[3]] = array
    alone = next((module for module, own in found.items() if not {"A", "B"} <= own.keys()), None)
    if alone is not None or not found:
        raise OnnxgradError(f"'{path}' is incomplete: '{alone}' lacks a factor" if found else f"'{path}' is empty")
    return found
