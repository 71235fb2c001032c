"""Check the names of the data sets of a training, and assign the losses to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError, conflict, missing_value, no_data, suggest, unknown_name, wrong_value
from onnxgrad_cli.losses.spec import check_set, split_set
from onnxgrad_cli.options import Options

Source = str | Path | Mapping[str, str | Path]
"""The training data: a file or folder; or a map: name of a data set -> its file or folder."""


def typed_sets(texts: Iterable[str]) -> str | dict[str, str]:
    """Parse the `--data` options of the command line: one DATA, or one or more SET=DATA with different names.

    Raises:
        UsageError: two sets have the same name, or there are several sets and one has no name.
    """
    found: dict[str, str] = {}
    for name, path in map(split_set, texts):
        if name in found:
            other = f"two data sets are called '{name}'" if name else f"'{path}' has no name, nor has another data set"
            raise conflict(f"`data`: {other}", "give each its own name, such as `data=train=DATA`")
        found[name] = path
    if "" in found and len(found) > 1:
        raise missing_value(
            f"`data`: '{found['']}' has no name, but another data set does", f"name it: `data=NAME={found['']}`"
        )
    return found.get("", found)


def sets_of(data: Source) -> dict[str, Path]:
    """Return a map: name of a data set -> its file or folder. The name is "" for data without a name.

    Raises:
        UsageError: there is no data set, or a name or a path is not valid.
    """
    if not isinstance(data, Mapping):
        return {"": checks.path("data", data)}
    checks.mapping("data", data, "such as data={'train': 'data.npz'}")
    if not data:
        raise no_data("`data` is empty, so there is nothing to train on", "such as data={'train': 'data.npz'}")
    for name in data:
        check_set("data", name)
    return {name: checks.path("data", path) for name, path in data.items()}


def val_of(val: Any, sets: Iterable[str]) -> tuple[str, Any]:
    """Return the name of the data set whose losses are evaluated, and the validation data.

    Args:
        val: the validation data, the fraction to hold out, or a map with one entry: data set -> validation data.
        sets: the names of the data sets; the first one is the default.

    Raises:
        UsageError: the map names an unknown data set, or does not have exactly one entry.
    """
    first, *others = sets
    if not isinstance(val, Mapping):
        return first, val
    if len(val) != 1:
        raise wrong_value("`val` must name one data set", "such as val={'train': 'val.npz'}")
    ((name, data),) = val.items()
    if name not in (first, *others):
        raise _unknown("val", name, (first, *others))
    return name, data


def losses_by_set(options: Options, sets: Iterable[str]) -> Options:
    """Return the options with the losses in the order of the data sets.

    The order matters: the losses on the first set use the model itself, and each other set gets a copy of the model.

    Raises:
        UsageError: a loss has no data set or an unknown one, or a data set has no loss.
    """
    names = list(sets)
    for spec in options.losses:
        if spec.data and names == [""]:
            raise conflict(
                f"`losses`: '{spec.name}' is to be computed on the data set '{spec.data}', but the set in `data` has "
                "no name",
                f"name the data: `data={spec.data}=DATA`",
            )
        if not spec.data and names != [""]:
            raise missing_value(
                f"`losses`: '{spec.name}' has no data set; the sets in `data` are {' and '.join(names)}",
                f"choose one: `losses={names[0]}={spec.name}`",
            )
        if spec.data not in names:
            raise _unknown("losses", spec.data, names)
    lacking = next((name for name in names if name not in {spec.data for spec in options.losses}), None)
    if lacking is not None:
        raise missing_value(
            f"no loss is computed on the data set '{lacking}'", f"add one, such as `losses={lacking}=mse`"
        )
    return replace(options, losses=tuple(sorted(options.losses, key=lambda spec: names.index(spec.data))))


def _unknown(argument: str, name: str, names: Iterable[str]) -> UsageError:
    known = [each for each in names if each]
    hint = suggest(name, known, "data sets") if known else "name the data: `data=NAME=DATA`"
    return unknown_name(f"`{argument}`: there is no data set '{name}'", hint)
