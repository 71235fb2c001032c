"""Write trained weights or adapters into the inference model that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.adapters.branches import of_integers
from onnxgrad_cli.adapters.formats import AdapterTarget, files_of, is_foreign, read_adapters
from onnxgrad_cli.adapters.merge import adaptable as make_adaptable, merge as merge_model, requantized
from onnxgrad_cli.adapters.own_file import is_adapter
from onnxgrad_cli.adapters.requantize import measured
from onnxgrad_cli.checkpoints.base_model_digest import is_base
from onnxgrad_cli.checkpoints.model_values import check_fits, read_model_values
from onnxgrad_cli.checkpoints.stored_weights import stored_tensors
from onnxgrad_cli.checkpoints.tensors import is_safetensors, load_tensors, load_words
from onnxgrad_cli.checkpoints.validate_checkpoint import check_ema
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.strict_json import decoded
from onnxgrad_cli.data import Preprocessing
from onnxgrad_cli.errors import OnnxgradError, conflict, no_data
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.observation import fed_types
from onnxgrad_cli.files import (
    STREAM,
    AtomicWriteGroup,
    ModelSource,
    check_target,
    own_model,
    read_model,
    save_model,
    stage_model,
)
from onnxgrad_cli.files.outputs import is_model
from onnxgrad_cli.files.start_values import HeldValues, is_values, places, read_values
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.output_plan import target_of
from onnxgrad_cli.jobs.proof_data import ProofData
from onnxgrad_cli.metadata import Adapter, Quantized
from onnxgrad_cli.training.new_head import with_trained_classes
from onnxgrad_cli.training.run.folder import BEST, CHECKPOINT, load_checkpoint
from onnxgrad_cli.verification.written_file import check_opens


@attribute_failures
@job
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
    """Write an inference model with trained weights, and with adapters merged into the weights that they adapt.

    Args:
        source: the trained values, in one of these forms.

            - The folder of a run of `onnxgrad train`. Its best checkpoint is read, or the last one if there is no best
              one.
            - A single checkpoint.
            - Adapters: a file that training has written, an `.onnx_adapter`, or a PEFT folder.
            - A .bin file: the bytes of weights that were trained elsewhere, in the order of a training model's JSON.
            - A safetensors file that holds only weights of the model.
            - An ONNX file with weights: a trained model, a model of derivatives, or a training model.
        model: the inference model that was trained. If a model of derivatives was trained: the model it was built from.
        out: the file for the model; by default `<model>.exported.onnx`, or with `adaptable` `<model>.adaptable.onnx`.
        roles: the JSON file that describes the .bin file, if its name or folder differs from the .bin file's.
        adaptable: write a model whose adapters add nothing until a runtime overrides their LoRA matrices.
        merge: also merge the adapters of matrices that are stored as integers, and quantize these again. The loss of
            precision in the outputs is measured and reported. Without `merge`, such an adapter is computed in nodes of
            its own, without loss.
        test_data: data for measuring this loss of precision: an .npz, or training data, of which the first samples are
            used. By default inputs are drawn at random.
        tokenizer: the tokenizer for text in these data: a tokenizer.json, or the folder that holds it.
        adapter: a file or folder to which only the adapters are written; see `AdapterTarget`. The model is then
            written only if `out`, `adaptable` or `merge` is given.
        use_ema: write the moving averages that `Options.ema` keeps, in place of the weights.
        keep_mode: leave BatchNormalization and Dropout in the mode that they have in the model; by default they are
            written in inference mode.
        force: replace a file that onnxgrad did not write.
        tell: receives progress messages, and a note if a checkpoint has no checksums, so that damage would not be
            noticed.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: an existing file would be replaced, or `use_ema` is set and there are no moving averages.
        OnnxgradError: the checkpoint can't be read, is damaged, or belongs to another model.
        CheckFailed: onnxruntime opens the original model but not the model to be written.
    """
    _check_asked(adaptable, merge, test_data)
    roles = checks.path_or_none("roles", roles)
    given = ProofData.of(checks.path_or_none("test_data", test_data), checks.path_or_none("tokenizer", tokenizer))
    proto, path = own_model(model)
    source = _file_of(checks.path("source", source), tell)
    protect_inputs(test_data, tokenizer, *files_of(source), places(source)[0] if roles is None else roles)
    trained = _read(source, roles, proto, path, use_ema, tell)
    if not trained.adapters and (adaptable or adapter is not None):
        name = "adaptable" if adaptable else "adapter"
        raise no_data(f"`{name}`: '{source}' contains no adapters", "train adapters with `lora=RANK`")
    alone = AdapterTarget(adapter) if adapter is not None else None
    if alone is not None:
        alone.check(proto, path, force)
        if out is None and not adaptable and not merge:
            return alone.save(proto, trained.adapters, trained.stored)
    target = target_of(model, out, "adaptable" if adaptable else "exported")
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
    """Write a model, and to `alone` only the adapters, if it is given. All files are replaced atomically.

    Returns:
        The files, the model first. A model written to stdout (`target` is None) is not among them.
    """
    original, path = trained.model, trained.path
    if target is None:
        files = alone.save(original, trained.adapters, trained.stored) if alone is not None else []
        return [*save_model(model, STREAM), *files]
    tell("writing the model, and opening the written file", 1)
    with AtomicWriteGroup(target) as switch:
        files = stage_model(switch, model, target, path, check=check_opens(model, original, path))
        if alone is not None:
            files += alone.stage(switch, original, trained.adapters, trained.stored)
        switch.commit()
    return files


def _check_asked(adaptable: bool, merge: bool, test_data: str | Path | None) -> None:
    """Raise an error if `adaptable` is combined with `merge`, or `test_data` is given without `merge`."""
    if adaptable and merge:
        raise conflict(
            "`merge` can't be combined with `adaptable`, which leaves the weights unchanged",
            "choose one",
        )
    if test_data is not None and not merge:
        raise conflict("`test_data` requires `merge`, whose loss of precision it measures", "leave it out")


def _write_preprocessing(source: Path, model: ModelProto) -> None:
    """Copy the preprocessing of the training data from the run's folder, or from the trained model, into a model."""
    if _holds_model(source):
        begun: Preprocessing | None = Preprocessing.of_model(read_model(source)[0])
    else:
        begun = Preprocessing.of_run(source.parent) if source.name in (CHECKPOINT, BEST) else None
    if begun is not None and begun != Preprocessing():
        begun.write_to(model)


def _holds_model(source: Path) -> bool:
    """Return True if a file is an ONNX model, and not a file of tensors that begins with the same byte."""
    return source.is_file() and is_model(source) and not is_safetensors(source) and not is_foreign(source)


@dataclass(frozen=True)
class _Trained:
    """An inference model and its trained values.

    Attributes:
        model, path: the model, and the file that it was read from.
        weights: the trained weights, or their moving averages.
        state: the other trained values, such as running statistics.
        adapters: the adapters whose LoRA matrices are among the weights.
        quantized: the weights that the model stores as integers.
    """

    model: ModelProto
    path: Path | None
    weights: Arrays
    state: Arrays
    adapters: Sequence[Adapter]
    quantized: Quantized

    @property
    def stored(self) -> Arrays:
        """The content of an adapter file: LoRA matrices, fully trained weights, and state that the model stores too."""
        own = {name for _, name in stored_tensors(self.model.graph)} if self.adapters else set()
        return {**{name: array for name, array in self.state.items() if name in own}, **self.weights}

    def merged(self, keep_mode: bool) -> ModelProto:
        """Return the model with all trained values. Adapters of weights stored as integers become branches."""
        return merge_model(self.model, self.adapters, self.weights, self.path, self.state, keep_mode, self.quantized)

    def rounded(self, keep_mode: bool, given: ProofData, tell: Tell) -> ModelProto:
        """Return the model with adapters merged into its integer matrices, and report the loss of precision."""
        found, lost = requantized(
            self.model, self.adapters, self.weights, self.path, self.state, keep_mode, self.quantized
        )
        data = given.arrays(self.model, fed_types(self.model), (), tell)
        worst = max(lost, key=lost.__getitem__)
        tell(
            f"{len(lost)} adapters were merged, and the matrices rounded to integers, which loses precision; "
            f"'{worst}' lost the most: its rounding error is {lost[worst]:.0%} of the change by its adapter",
            0,
        )
        tell("measuring the loss of precision", 1)
        for each in measured(self.model, self.merged(keep_mode), found, self.path, data):
            tell(f"{each}, measured on {'the given' if data else 'random'} data", 0)
        return found


def _read(
    source: Path, roles: Path | None, model: ModelProto, path: Path | None, use_ema: bool, tell: Tell
) -> _Trained:
    """Read the trained values of a model from a file in any supported format."""
    held = _held(source, roles, model, path, use_ema, tell)
    ema = _ema(source, held) if use_ema else {}
    weights = {name: held.values[ema.get(name, name)] for name in held.weights}
    state = {name: array for name, array in held.values.items() if name not in weights}
    return _Trained(model, path, weights, state, held.adapters, held.quantized)


def _file_of(source: Path, tell: Tell) -> Path:
    """Return the file to read.

    In a run's folder, this is the best checkpoint, or the last one if there is no best one.
    """
    found = next((source / name for name in (BEST, CHECKPOINT) if (source / name).is_file()), None)
    if found is not None:
        tell(f"reading '{found}'", 0)
        return found
    best = source.with_name(BEST)
    if source.name == CHECKPOINT and best.is_file():
        tell(f"'{source}' contains the last weights, '{best}' contains the best ones", 0)
    return source


def _held(
    source: Path, roles: Path | None, model: ModelProto, path: Path | None, use_ema: bool, tell: Tell
) -> HeldValues:
    """Read all values in a file in any supported format."""
    if is_values(source):
        return read_values(source, roles)
    if roles is not None:
        raise conflict(f"`roles` describes the bytes of a .bin file, but '{source}' has another format", "leave it out")
    if _holds_model(source):
        found = read_model_values(source, model)
        _fit_classes(model, found.held.values, tell)
        check_fits(source, model, path, found.held, found.untrained, tell)
        return found.held
    if is_foreign(source) or is_adapter(source):
        if use_ema:
            raise conflict(
                "`use_ema`: an adapter file stores no moving averages",
                "name a checkpoint, or train with `onnxgrad train --use-ema`, which writes the averages as the adapter",
            )
        adapters, values = read_adapters(source, model, tell)
        _fit_classes(model, values, tell)
        return HeldValues(values, tuple(values), tuple(adapters))
    if not load_words(source):
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
            f"'{source}' belongs to another model: its nodes, opsets, inputs, outputs or untrained weights differ",
            "name the model that was trained",
            code="mismatch",
        )
    return held


def _fit_classes(model: ModelProto, values: Arrays, tell: Tell) -> None:
    """If the training has changed the number of classes of an output, change it in the model, too."""
    for output, classes in with_trained_classes(model, values).items():
        tell(f"output '{output}' gets {classes} classes, as in the training", 0)


def _ema(source: Path, held: HeldValues) -> dict[str, str]:
    ema = check_ema(held.averages, held.values)
    if not any(held.values[average].any() for average in ema.values()):
        raise no_data(
            f"`use_ema`: the averages in '{source}' are still zero, because no step was taken", "leave `use_ema` out"
        )
    return ema
