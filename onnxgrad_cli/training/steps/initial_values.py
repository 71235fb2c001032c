"""Set the weights before the first step: draw them at random, or copy adapters from an earlier training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.choices import Scaling
from onnxgrad_cli.errors import ambiguous, conflict, no_data, wrong_value
from onnxgrad_cli.execution.session import open_session
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.standard.initialization import KEEP, initialization, initializer
from onnxgrad_cli.training.steps.base import TrainerBase


def init_weights(
    trainer: TrainerBase, built: TrainingModel, original: ModelProto, how: str, seed: int, reset: Sequence[str] = ()
) -> None:
    """Draw each weight at random, as suits its role in the model. Reset running statistics to mean 0 and variance 1.

    Args:
        trainer: the trainer that receives the weights.
        built: the training model of the trainer.
        original: the inference model that `built` was made from.
        how: the method: 'xavier', 'he' or 'normal'; 'keep' draws nothing, except for `reset`.
        seed: the seed of the random numbers.
        reset: with 'keep', glob patterns of weights that are drawn nevertheless, with the method 'xavier'.

    Raises:
        UsageError: adapters are trained, which only make sense with the stored weights; or a pattern matches no trained
            weight.
    """
    keeps = how == KEEP
    if keeps and not reset:
        return
    if built.training.adapters and not keeps:
        message = f"`init={how!r}` can't be combined with `lora`, whose adapters are added to the given weights"
        raise conflict(message, "leave one of them out")
    values = initialization(built.graph, original.graph, built.training, "xavier" if keeps else how, seed)
    if keeps:
        trained = list(built.training.trained)
        names = matching(reset, trained, "`reset`", "trained weights", known_as(built.graph.nodes, trained))
        missing = next((name for name in names if name not in values), None)
        if missing is not None:
            raise wrong_value(f"`reset`: '{missing}' has no known initial values", "leave it out")
        values = {name: values[name] for name in names}
    session = open_session(initializer(values, {name: name for name in values}))
    binding = session.io_binding()
    for name in values:
        binding.bind_ortvalue_output(name, trainer.buffers[name].value)
    session.run_with_iobinding(binding)


def as_asked(options: Options, adapters: Sequence[Adapter]) -> Options:
    """Return the options, changed so that they request adapters like the given ones.

    If the options request adapters already, return them unchanged.

    Raises:
        UsageError: there are no adapters; they don't match the requested ones; or options can't express their settings,
            such as several ranks.
    """
    if not adapters:
        hint = "leave `adapter_from` out, and train new adapters with `lora=RANK`"
        raise no_data("`adapter_from`: there are no adapters in it", hint)
    kinds = {(adapter.rank, adapter.alpha, adapter.scaling, bool(adapter.magnitude)) for adapter in adapters}
    ranks = {rank for rank, *_ in kinds}
    wanted = options.lora.rank if options.lora else None
    if len(ranks) > 1 or (wanted is not None and ranks != {wanted}):
        told = ", ".join(map(str, sorted(ranks)))
        needed, hint = "a single rank", "merge them with `onnxgrad export`, and train new ones"
        if wanted is not None:
            needed, hint = f"the rank {wanted}", "leave `lora` out"
        raise conflict(f"`adapter_from`: the adapters have the rank {told}, but the training uses {needed}", hint)
    if options.lora is not None:
        if {dora for *_, dora in kinds} != {options.lora_dora}:
            has, wants = ("have no", "uses") if options.lora_dora else ("have", "does not use")
            message = f"`adapter_from`: the adapters {has} magnitudes, but the training {wants} `lora_dora`"
            raise conflict(message, "leave `lora` and `lora_dora` out: the training then takes both from the adapters")
        return options
    if len(kinds) > 1:
        hint = "choose one with `lora=RANK:ALPHA`"
        raise ambiguous("`adapter_from`: the adapters have different values of alpha", hint)
    ((rank, alpha, scaling, dora),) = kinds
    names = tuple(adapter.weight for adapter in adapters)
    kind: Scaling = "rslora" if scaling == "rslora" else "lora"
    target = options.lora_target or names
    return replace(options, lora=LoraSpec(rank, alpha), lora_scaling=kind, lora_dora=dora, lora_target=target)


def begin_from(trainer: TrainerBase, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Load trained adapters, and the weights that were trained with them, into a trainer.

    If the trainer's adapters have a different alpha, B is scaled so that the model's outputs stay the same.

    Raises:
        UsageError: the trainer has no adapter for a weight; it does not train a weight that was trained in full; or the
            shapes of an adapter's LoRA matrices don't fit.
    """
    own = {adapter.weight: adapter for adapter in trainer.roles.adapters}
    factors = {name for adapter in adapters for name in adapter.names}
    begun: dict[str, np.ndarray] = {}
    for adapter in adapters:
        if adapter.weight not in own:
            message = f"`adapter_from`: there is an adapter of '{adapter.weight}', but this training does not adapt it"
            raise conflict(message, "name it with `lora_target`, too, or leave `lora_target` out")
        to = own[adapter.weight]
        begun |= dict(zip(to.names, (values[name] for name in adapter.names), strict=True))
        begun[to.b] = begun[to.b].astype(np.float64) * (adapter.scale / to.scale)
    begun = {name: array.astype(trainer.buffers[name].array.dtype) for name, array in begun.items()}
    for name in values.keys() - factors:
        if name not in trainer.buffers:
            message = f"`adapter_from`: '{name}' was trained in full with the adapters, but is not trained here"
            raise conflict(message, "name it with `train`")
        begun[name] = values[name]
    trainer.load(begun)
