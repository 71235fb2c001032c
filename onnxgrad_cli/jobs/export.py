"""From a checkpoint, an adapter or a trained file, and the model it belongs to, back to an inference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.typed_json import decoded
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import (
    STREAM,
    ModelSource,
    Switch,
    check_target,
    own_model,
    read_model,
    save_model,
    stage_model,
)
from onnxgrad_cli.files.start_values import HeldValues, is_values, places, read_values
from onnxgrad_cli.files.switch import is_model
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.proof_data import ProofData
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import Adapter, Quantized
from onnxgrad_cli.training.adapters.branches import of_integers
from onnxgrad_cli.training.adapters.formats import AdapterTarget, files_of, is_foreign, read_adapters
from onnxgrad_cli.training.adapters.lossy import measured
from onnxgrad_cli.training.adapters.merge import adaptable as make_adaptable, merge as merge_model, requantized
from onnxgrad_cli.training.adapters.own_file import is_adapter
from onnxgrad_cli.training.data import Preprocessing
from onnxgrad_cli.training.new_head import with_trained_classes
from onnxgrad_cli.training.run.base import is_base
from onnxgrad_cli.training.run.ema_weights import check_ema
from onnxgrad_cli.training.run.export import stored_tensors
from onnxgrad_cli.training.run.folder import BEST, CHECKPOINT, load_checkpoint
from onnxgrad_cli.training.run.model_values import check_fits, read_model_values
from onnxgrad_cli.training.run.tensors import holds_weights_alone, is_safetensors, load_tensors
from onnxgrad_cli.verification.written import check_opens


@judged
def run_export(
    source: str | Path,
    model: ModelSource,
    out: str | Path | None = None,
    *,
    roles: str | Path | None = None,
    adaptable: bool = False,
    merge: bool = False,
    test_data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    use_ema: bool = False,
    keep_mode: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Path]:
    """Write the inference model with the weights of a checkpoint, adapters merged into those they belong to.

    Args:
        source: the folder of a run of `onnxgrad train`, whose best checkpoint is taken, or else the last one; one of
            its checkpoints; or adapters in any form: a file that training
            has written, an `.onnx_adapter`, or a folder of PEFT; what was trained elsewhere, as bytes (.bin) in the
            order of a training model's JSON; a safetensors file that has nothing but weights of the model; or an ONNX
            file with weights: a trained model, a model of derivatives, or a training model.
        model: the inference model that was trained, or that the trained model of derivatives was made from.
        out: by default `<model>.trained.onnx`, or `<model>.adaptable.onnx`.
        roles: that JSON, where it does not lie beside the bytes under the same name.
        adaptable: write the model as it is, with empty factors in place of the adapters, which a runtime overrides.
        merge: add adapters into matrices that are stored as integers, too, and round these anew, which is lossy; what
            outputs lose is told. Else such an adapter stands beside its product.
        test_data: an .npz with inputs on which that is measured, or data to train on, of which the first samples are
            taken; else they are drawn at random.
        tokenizer: what makes tokens of text in these data: a tokenizer.json, or the folder that it is in.
        adapter: a file or folder for the adapters alone, see `AdapterTarget`; then the model is written only where
            `out`, `adaptable` or `merge` asks for it.
        use_ema: write the moving averages that `Options.ema` has kept, in place of the weights.
        keep_mode: leave BatchNormalization and Dropout in the mode in which the model came; else they are in
            inference mode.
        force: replace a file that onnxgrad did not write.
        tell: takes a line where another program has written the checkpoint, whose damage would not be noticed.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: a file would be replaced that must not be, or there are no averages of the weights' types.
        OnnxgradError: the checkpoint can't be read, is damaged, or is that of another model.
        CheckFailed: onnxruntime does not open what would be written, and opens the model.
    """
    _check_asked(adaptable, merge, test_data)
    roles = checks.path_or_none("roles", roles)
    given = ProofData.of(checks.path_or_none("test_data", test_data), checks.path_or_none("tokenizer", tokenizer))
    proto, path = own_model(model)
    source = _file_of(checks.path("source", source), tell)
    keep(test_data, tokenizer, *files_of(source), places(source)[0] if roles is None else roles)
    trained = _read(source, roles, proto, path, use_ema, tell)
    if not trained.adapters and (adaptable or adapter is not None):
        name = "adaptable" if adaptable else "adapter"
        raise UsageError(f"`{name}`: '{source}' holds no adapters", "they are trained with `lora=RANK`")
    alone = AdapterTarget(adapter) if adapter is not None else None
    if alone is not None:
        alone.check(proto, path, force)
        if out is None and not adaptable and not merge:
            return alone.save(proto, trained.adapters, trained.stored)
    target = target_of(model, out, "adaptable" if adaptable else "trained")
    if target is not None:
        check_target(target, proto, path, force)
    if adaptable:
        found = make_adaptable(proto, trained.adapters, trained.stored, keep_mode)
    elif merge and of_integers(proto, trained.adapters):
        found = trained.rounded(keep_mode, given, tell)
    else:
        found = trained.merged(keep_mode)
    _write_preprocessing(source, found)
    return _save(found, target, alone, trained, tell)


def _save(
    model: ModelProto, target: Path | None, alone: AdapterTarget | None, trained: _Trained, tell: Tell
) -> list[Path]:
    """Write a model, and the adapters alone where that is asked for; the files take their names together.

    Returns:
        The files, the model first; without it where it goes to stdout, which is `target` None.
    """
    original, path = trained.model, trained.path
    if target is None:
        files = alone.save(original, trained.adapters, trained.stored) if alone is not None else []
        return [*save_model(model, STREAM), *files]
    tell("writing the model, and opening what was written", 1)
    with Switch(target) as switch:
        files = stage_model(switch, model, target, path, check=check_opens(model, original, path))
        if alone is not None:
            files += alone.stage(switch, original, trained.adapters, trained.stored)
        switch.commit()
    return files


def _check_asked(adaptable: bool, merge: bool, test_data: str | Path | None) -> None:
    """Refuse what does not go together."""
    if adaptable and merge:
        raise UsageError("`merge` does not go with `adaptable`, which leaves room for adapters", "choose one")
    if test_data is not None and not merge:
        raise UsageError("`test_data` goes with `merge`, whose loss is measured on them", "leave it out")


def _write_preprocessing(source: Path, model: ModelProto) -> None:
    """Let a model say what was done to data before it saw them, as a run's folder or a trained model says."""
    if _holds_model(source):
        begun: Preprocessing | None = Preprocessing.of_model(read_model(source)[0])
    else:
        begun = Preprocessing.of_run(source.parent) if source.name in (CHECKPOINT, BEST) else None
    if begun is not None and begun != Preprocessing():
        begun.write_to(model)


def _holds_model(source: Path) -> bool:
    """Return True if a file is an ONNX model: such a file and one of tensors may begin with the same byte."""
    return source.is_file() and is_model(source) and not is_safetensors(source) and not is_foreign(source)


@dataclass(frozen=True)
class _Trained:
    """An inference model and what was trained of it.

    Attributes:
        model, path: the model, and the file that it was read from.
        weights: the weights, or their moving averages.
        state: the state besides.
        adapters: the adapters whose factors are weights.
        quantized: what the model stores as integers.
    """

    model: ModelProto
    path: Path | None
    weights: Arrays
    state: Arrays
    adapters: Sequence[Adapter]
    quantized: Quantized

    @property
    def stored(self) -> Arrays:
        """What files of adapters hold: factors, weights trained in full, and of the state what the model has."""
        own = {name for _, name in stored_tensors(self.model.graph)} if self.adapters else set()
        return {**{name: array for name, array in self.state.items() if name in own}, **self.weights}

    def merged(self, keep_mode: bool) -> ModelProto:
        """The model with all that was trained; adapters of integers stand beside their products."""
        return merge_model(self.model, self.adapters, self.weights, self.path, self.state, keep_mode, self.quantized)

    def rounded(self, keep_mode: bool, given: ProofData, tell: Tell) -> ModelProto:
        """The model with adapters rounded into its integers; what that costs is told."""
        found, lost = requantized(
            self.model, self.adapters, self.weights, self.path, self.state, keep_mode, self.quantized
        )
        stored = {tensor.name for tensor in self.model.graph.initializer}
        inputs = {value.name: value.type for value in self.model.graph.input if value.name not in stored}
        data = given.arrays(self.model, inputs, (), tell)
        worst = max(lost, key=lambda each: each.lost)
        tell(
            f"rounded into integers, which is lossy: {len(lost)} matrices, of '{worst.weight}' the most, "
            f"{worst.lost:.0%} of what its adapter adds",
            0,
        )
        tell("measuring what is lost", 1)
        for each in measured(self.model, self.merged(keep_mode), found, self.path, data):
            tell(f"{each}, on {'given' if data else 'drawn'} data", 0)
        return found


def _read(
    source: Path, roles: Path | None, model: ModelProto, path: Path | None, use_ema: bool, tell: Tell
) -> _Trained:
    """What was trained of a model, from a file."""
    held = _held(source, roles, model, path, use_ema, tell)
    ema = _ema(source, held) if use_ema else {}
    weights = {name: held.values[ema.get(name, name)] for name in held.weights}
    state = {name: array for name, array in held.values.items() if name not in weights}
    return _Trained(model, path, weights, state, held.adapters, held.quantized)


def _file_of(source: Path, tell: Tell) -> Path:
    """What is read: of the folder of a run, its best checkpoint, or else its last."""
    found = next((source / name for name in (BEST, CHECKPOINT) if (source / name).is_file()), None)
    if found is None:
        return source
    tell(f"taking '{found}'", 0)
    return found


def _held(
    source: Path, roles: Path | None, model: ModelProto, path: Path | None, use_ema: bool, tell: Tell
) -> HeldValues:
    """All that a file holds, of whatever form it is."""
    if is_values(source):
        return read_values(source, roles)
    if roles is not None:
        raise UsageError(f"`roles` says what bytes are, and '{source}' says so itself", "leave it out")
    if _holds_model(source):
        found = read_model_values(source, model)
        _fit_classes(model, found.held.values, tell)
        check_fits(source, model, path, found.held, found.untrained, tell)
        return found.held
    if is_foreign(source) or is_adapter(source):
        if use_ema:
            raise UsageError(
                "`use_ema`: an adapter has no averages besides its factors",
                "`onnxgrad train --use-ema` writes them as its factors; or name a checkpoint",
            )
        adapters, values = read_adapters(source, model, tell)
        _fit_classes(model, values, tell)
        return HeldValues(values, tuple(values), tuple(adapters))
    if holds_weights_alone(source):
        values = load_tensors(source)[0]
        _fit_classes(model, values, tell)
        held = HeldValues(values, tuple(values))
        check_fits(source, model, path, held, {}, tell)
        return held
    values, progress = load_checkpoint(source, tell)
    _fit_classes(model, values, tell)
    held = HeldValues(
        values,
        tuple(progress["weights"]),
        tuple(Adapter(**adapter) for adapter in progress["adapters"]),
        progress.get("averages", {}),
        decoded(Quantized, progress["quantized"]) if "quantized" in progress else Quantized(),
    )
    same = "base" not in progress or is_base(progress["base"], model, values)
    if not same and "untrained" in progress:
        check_fits(source, model, path, held, progress["untrained"], tell)
    elif not same:
        raise OnnxgradError(
            f"'{source}' is of another model: one of other nodes, opsets, inputs or outputs, or of other weights where "
            "they were not trained",
            "name the model that was trained",
        )
    return held


def _fit_classes(model: ModelProto, values: Arrays, tell: Tell) -> None:
    """Let a model have the classes that a training with `classes` has given it."""
    for output, classes in with_trained_classes(model, values).items():
        tell(f"output '{output}' has {classes} classes, as it was trained", 0)


def _ema(source: Path, held: HeldValues) -> dict[str, str]:
    ema = check_ema(held.averages, held.values)
    if not any(held.values[average].any() for average in ema.values()):
        raise UsageError(
            f"`use_ema`: the averages in '{source}' are still zeros: no step has been taken", "leave `use_ema` out"
        )
    return ema
