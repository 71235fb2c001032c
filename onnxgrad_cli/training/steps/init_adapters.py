"""A training that begins with adapters that another one has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxgrad_cli.common.choices import Scaling
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.training.steps.base import TrainerBase


def as_asked(options: Options, adapters: Sequence[Adapter]) -> Options:
    """Options that ask for these adapters, where they ask for none.

    Raises:
        UsageError: the adapters are of several kinds, which options can't ask for, or there are none.
    """
    if not adapters:
        raise UsageError(
            "`adapter_from`: it holds no adapters",
            "leave `adapter_from` out, and ask for new adapters with `lora=RANK`",
        )
    kinds = {(adapter.rank, adapter.alpha, adapter.scaling, bool(adapter.magnitude)) for adapter in adapters}
    ranks = {rank for rank, *_ in kinds}
    wanted = options.lora.rank if options.lora else None
    if len(ranks) > 1 or (wanted is not None and ranks != {wanted}):
        told = ", ".join(map(str, sorted(ranks)))
        raise UsageError(
            f"`adapter_from`: the adapters are of rank {told}, and a training has one rank", _whole(wanted)
        )
    if options.lora is not None:
        if {dora for *_, dora in kinds} != {options.lora_dora}:
            has, wants = ("have no", "asks for") if options.lora_dora else ("have", "has none without")
            raise UsageError(
                f"`adapter_from`: the adapters {has} magnitudes, and the training {wants} `lora_dora`",
                "leave `lora` and `lora_dora` out, and the training is of their kind",
            )
        return options
    if len(kinds) > 1:
        raise UsageError("`adapter_from`: the adapters have several factors alpha", "choose one with `lora=RANK:ALPHA`")
    ((rank, alpha, scaling, dora),) = kinds
    names = tuple(adapter.weight for adapter in adapters)
    kind: Scaling = "rslora" if scaling == "rslora" else "lora"
    return replace(
        options, lora=LoraSpec(rank, alpha), lora_scaling=kind, lora_dora=dora, lora_target=options.lora_target or names
    )


def _whole(wanted: int | None) -> str:
    return "leave `lora` out" if wanted is not None else "merge them by `onnxgrad export`, and train new ones"


def begin_from(trainer: TrainerBase, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Let a trainer take its first step from adapters that were found before, and from weights trained with them.

    Where another alpha is asked for, B is scaled, so that the model computes what it did with them.

    Raises:
        UsageError: the trainer has no adapter of a weight, or does not train a weight that was trained in full, or
            factors don't fit.
    """
    own = {adapter.weight: adapter for adapter in trainer.roles.adapters}
    factors = {name for adapter in adapters for name in adapter.names}
    begun: dict[str, np.ndarray] = {}
    for adapter in adapters:
        if adapter.weight not in own:
            raise UsageError(
                f"`adapter_from`: there is an adapter of '{adapter.weight}', which is given none here",
                "name it with `lora_target`, too, or leave `lora_target` out",
            )
        to = own[adapter.weight]
        begun[to.a] = values[adapter.a].astype(trainer.buffers[to.a].array.dtype)
        scaled = values[adapter.b].astype(np.float64) * (adapter.scale / to.scale)
        if adapter.magnitude:
            begun[to.magnitude] = values[adapter.magnitude].astype(trainer.buffers[to.magnitude].array.dtype)
        begun[to.b] = scaled.astype(trainer.buffers[to.b].array.dtype)
    for name in values.keys() - factors:
        if name not in trainer.buffers:
            raise UsageError(
                f"`adapter_from`: '{name}' was trained in full with the adapters, and is not trained here",
                "name it with `train`",
            )
        begun[name] = values[name]
    trainer.load(begun)
