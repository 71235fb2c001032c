"""Prepare a training run from a model, data and options. Errors in them are reported before the first step."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.adapters.branches import check_branches
from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.checkpoints.integers import stored_as
from onnxgrad_cli.checkpoints.stored_weights import check_stored
from onnxgrad_cli.checkpoints.validate_checkpoint import check_ema
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data import (
    Batches,
    Data,
    DataSets,
    NamedSet,
    Preprocessing,
    balance,
    fraction_of,
    held_out,
    names_in,
    open_data,
    prepared,
    prepared_alike,
    ranges_of,
    seed_of,
)
from onnxgrad_cli.data.empty_kv_cache import with_empty_pasts, with_sizes_of_pasts
from onnxgrad_cli.data.ragged import Ragged
from onnxgrad_cli.data.states import Recurrent, has_batch_behind, recurrent_values
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.execution.session import CPU, find_provider
from onnxgrad_cli.files import ModelSource, check_target, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_batch_normalization, uses_batch
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.ir.weightless_copy import skeleton
from onnxgrad_cli.jobs.memory_plan import StepPlan, planned
from onnxgrad_cli.jobs.train.data_set_names import Source, losses_by_set, val_of
from onnxgrad_cli.jobs.train.lbfgs_options import check_lbfgs
from onnxgrad_cli.jobs.train.prepared_run import PreparedRun
from onnxgrad_cli.metadata import Adapter, Roles, Term, check_is_original, describe
from onnxgrad_cli.optimizers import LBFGS
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.train import DEFAULT_OPTIMIZER, Course
from onnxgrad_cli.passes.prepare.free_batch import HINT, SamplesMixError, asked_batch, fixed_batch
from onnxgrad_cli.report.glance import first_warnings
from onnxgrad_cli.report.model import WARNINGS
from onnxgrad_cli.training.distributed.communicator import Communicator
from onnxgrad_cli.training.evaluation import EvalSession, Evaluator, make_eval_model
from onnxgrad_cli.training.metrics import metrics_of
from onnxgrad_cli.training.new_head import with_classes
from onnxgrad_cli.training.padding_check import check_padding
from onnxgrad_cli.training.schedules import cycles_momentum
from onnxgrad_cli.training.steps.base import TrainerBase
from onnxgrad_cli.training.steps.full_batch import WHO, FullBatchTrainer
from onnxgrad_cli.training.steps.initial_values import as_asked, begin_from, init_weights
from onnxgrad_cli.training.steps.parallel import ParallelTrainer, agree, divisors_of
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.checks.freed_batch import FreedModel, freed

SEVERAL_SETS = "each data set has batches of its own"
"""Reason in error messages: a training step on several data sets can't be split into several runs."""


def prepare(
    model: ModelSource, data: Mapping[str, Path], val: Source | float | None, target: Path, options: Options,
    course: Course, adapter: AdapterTarget | None, adapter_from: Path | None, force: bool, link: Communicator,
    tell: Tell, resumed: Path | None,
) -> PreparedRun:  # fmt: skip
    """Build the training model and open the data.

    Args:
        data: name of a data set -> its file or folder. The name is "" for data without a name.
        target: the file of the trained model.
        resumed: the folder of the run to continue; None for a new run.
    """
    options, (val_set, held) = losses_by_set(options, data), val_of(val, data)
    if len(data) > 1:
        _check_sets(course, link)
    solves = options.optimizer == LBFGS.name
    if solves:
        check_lbfgs(options, course, link)
    options = replace(
        options,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
        embed_state=False,  # the trainer creates the initial state
        cycle_momentum=cycles_momentum(course.schedule),
    )
    if link.world > 1:
        alike = replace(course, threads=None, provider="")  # these may differ between machines
        agree(link, {"options": np.array(re.sub(" at 0x[0-9a-f]+", "", f"{options} {alike}"))}, "options")
    if adapter is not None and not options.lora and adapter_from is None:
        raise UsageError("`adapter`: no adapters are trained", "train adapters with `lora=RANK`")
    original, path = own_model(model)
    check_is_original(original)
    begun = None if adapter_from is None else read_adapters(adapter_from, original, tell)
    check_target(target, original, path, force)
    if adapter is not None:
        adapter.check(original, path, force)
    asked = course
    built, options, course, free = _built(original, path, options, course, data, begun, link, tell)
    if link.world > 1 and _takes_statistics(original, options):
        tell("caution: each process computes the statistics of BatchNormalization on its own part of the batch", 0)
    trainer = _trainer(built, course, link)
    check_stored(original, _own(original, trainer))
    check_branches(original, trainer.roles.adapters)
    init_weights(trainer, built, original, course.init, course.seed, course.reset)
    if begun is not None:
        begin_from(trainer, *begun)
    values = {name: buffer.array for name, buffer in trainer.buffers.items()}
    ema = check_ema(trainer.roles.averages, values) if course.use_ema else {}
    known = _known(original, course, resumed)
    recurrent = recurrent_values(original.graph.node)
    opened, validation = _data(data, val_set, held, built, trainer, course, known, recurrent, tell)
    samples = next(iter(opened.values()))
    if solves and samples.transform is not None and samples.transform.draws:
        raise UsageError(
            f"`transform` draws random numbers, but {WHO} requires the same loss in each run",
            "use a function without the second parameter, or a different optimizer",
        )
    if free is not None:
        feeds = samples.batch(np.arange(free.samples) % (samples.batch_size or len(samples)))
        caution = free.compare(feeds)
        tell(f"{caution}; the trained model keeps its batch size of {free.batch.size}", 0)
        built.training.cautions.append(caution)
    run = original if free is None else free.model
    padded = [each for each in (samples, validation) if each is not None and each.padding is not None and each.ragged]
    if padded and course.batch_size > link.world:
        if padded[0] is samples and _takes_statistics(original, options):
            raise UsageError(
                f"'{samples.source}' has samples of different sizes: BatchNormalization in training mode would take "
                "the padding into its statistics",
                "use `mode='eval'`",
            )
        session, described = _session(run, path, options, course, trainer)
        for each in padded:
            check_padding(session, each, next(iter(described.sets.values()), {}), trainer.buffers)
    evaluator = None
    if validation is not None:
        losses = tuple(spec for spec in options.losses if spec.data == val_set)
        asked_of_set = replace(options, losses=losses)
        evaluator = _evaluator(run, path, asked_of_set, course, trainer, validation, link, ema, tell)
    agree(link, {"samples": np.array(len(samples))}, "data")
    roles, first = trainer.roles, next(iter(data))
    drop_last = _drops_single(original, options, len(samples), course.batch_size, link, tell)
    batches = _batches(samples, built, roles.on_set(first).losses, course, link, drop_last, tell)
    if course.batch_size != asked.batch_size and (rest := len(samples) % asked.batch_size):
        tell(f"the last {rest} samples of an epoch share a step with the first samples of the next epoch", 0)
    sets = None if not roles.sets else DataSets(
        NamedSet(first, samples, batches, roles.sets[first]),
        [_other_set(opened, name, roles, course, tell) for name in list(data)[1:]],
    )  # fmt: skip
    ready = PreparedRun(original, path, course, built, trainer, samples, evaluator, batches, ema, sets)
    if adapter is not None:  # compute its content once now, so that an unsupported adapter format is reported early
        adapter.make(original, trainer.roles.adapters, ready.adapter_values(trainer.weights(), trainer.state()))
    return ready


def _check_sets(course: Course, link: Communicator) -> None:
    """Refuse options that are not available with several data sets.

    Raises:
        UsageError: several processes train, or classes are to be balanced.
    """
    if link.world > 1:
        raise UsageError(
            "several processes can't train on several data sets, because each process would get a different number of "
            "samples from each set",
            "train in one process, or on one data set",
        )
    if course.samples.balance:
        raise UsageError("`balance` can't be combined with several data sets", "leave it out", code="conflict")


def _batches(
    samples: Data, built: TrainingModel, terms: Sequence[Term], course: Course, link: Communicator, drop_last: bool,
    tell: Tell,
) -> Batches:  # fmt: skip
    """Return the batches of an epoch, after checking that steps can be computed from them.

    Args:
        samples: the samples.
        built: the training model.
        terms: the losses on these samples.
        course: the course of the training.
        link: connects the processes that train together.
        drop_last: leave out the last batch of an epoch.
        tell: receives progress messages.

    Raises:
        UsageError: the loss can't be computed from parts of the samples, or an epoch has too few batches for a step.
    """
    accumulate, solves = built.options.accumulate, built.options.optimizer == LBFGS.name
    weights = balance(samples, terms[0].label, terms[0].ignore_index, tell) if course.samples.balance else None
    batches = Batches(
        samples, course.batch_size, course.seed, shuffle=course.shuffle and not solves, rank=link.rank,
        world=link.world, weights=weights, tell=tell, drop_last=drop_last,
    )  # fmt: skip
    if solves and len(batches) > 1:
        divisors_of(built, "batch", f"use `batch_size={len(samples)}`")
    if link.world > 1 or (solves and len(batches) > 1):
        _check_uneven_labels(samples, terms, built, "use another optimizer" if solves else "train in one process")
    if accumulate > len(batches):
        raise UsageError(
            f"`accumulate={accumulate}`: an epoch has only {len(batches)} batches, so no step would be taken",
            "choose a smaller number, or a smaller `batch_size`",
        )
    runs = course.epochs * len(batches)
    runs = runs if course.max_steps is None else min(runs, course.max_steps)
    if left := runs % accumulate:
        tell(f"the last {left} of {runs} batches have no effect, because a step takes {accumulate} batches", 0)
    return batches


def _check_uneven_labels(samples: Data, terms: Sequence[Term], built: TrainingModel, alternative: str) -> None:
    """Refuse labels of different sizes if the mean loss can't be computed from the losses of parts of the samples.

    Raises:
        UsageError: there is such a label, and its loss takes no mask and has no divisor.
    """
    for position, term in enumerate(terms):
        uneven = isinstance(samples.arrays.get(term.label), Ragged) and not term.mask
        if uneven and position not in built.training.divisors and built.options.reduction == "mean":
            raise UsageError(
                f"the label '{term.label}' has different sizes, so the loss '{term.name}' can't be computed from parts "
                "of the samples",
                alternative,
            )


def _other_set(opened: Mapping[str, Data], name: str, roles: Roles, course: Course, tell: Tell) -> NamedSet:
    """Return a data set other than the first. If it has fewer samples than a batch, each batch holds all of them."""
    data, seed = opened[name], seed_of(course.seed, list(opened).index(name))
    size = course.batch_size if data.batch_size is not None else min(course.batch_size, len(data))
    batches = Batches(data, size, seed, shuffle=course.shuffle, tell=tell)
    return NamedSet(name, data, batches, roles.sets[name])


def _known(original: ModelProto, course: Course, resumed: Path | None) -> Preprocessing:
    """Return the preprocessing of the run to resume. For a new run, return the one that the model stores."""
    begun = None if resumed is None else Preprocessing.of_run(resumed)
    if begun is not None:
        return begun
    known = Preprocessing.of_model(original)
    return known if course.classes is None else replace(known, classes={})


def _built(
    original: ModelProto, path: Path | None, options: Options, course: Course, data: Mapping[str, Path],
    begun: tuple[Sequence[Adapter], Arrays] | None, link: Communicator, tell: Tell,
) -> tuple[TrainingModel, Options, Course, FreedModel | None]:  # fmt: skip
    """Build the training model, and complete the options and the course.

    The options and the course are completed from `begun` (the adapters to start from), the data, the memory limit, and
    the model's batch size if it is fixed. If the course has `classes`, the last layer of `original` is replaced.

    Returns:
        The training model; the options; the course; and the model whose batch size was made dynamic, or None.
    """
    if begun is not None:
        options = as_asked(options, begun[0])
    if course.classes is not None:
        fresh = with_classes(original, options.losses[0].output or options.output, course.classes, course.seed)
        options = _also_trained(options, fresh)
    options = with_empty_pasts(original, options, lambda: names_in(next(iter(data.values()))), tell)
    free, runs = _free_batch(original, path, options, course, link, tell)
    if runs > 1:
        options, course = replace(options, accumulate=options.accumulate * runs), _in_runs(course, runs)
    model = original if free is None else free.model
    if options.optimizer == LBFGS.name:
        built = build(model, replace(options, optimizer="", optimizer_options={}, embed_state=True), path=path)
        built.options = options  # which the report describes
    elif course.memory is None:
        built = build(model, options, path=path)
    else:
        plan = _within(course.memory, model, path, options, course, link, tell)
        built, options = plan.built, plan.options
        course = _in_runs(course, plan.runs)
    check_ends(built.graph)
    _warn(built, tell)
    return built, options, course, free


def _warn(built: TrainingModel, tell: Tell) -> None:
    """Print the cautions of the training model that a build prints in full."""
    texts = list(dict.fromkeys(str(caution) for caution in built.training.cautions if caution.kind in WARNINGS))
    for text in first_warnings(texts, "the report in the folder of the run"):
        tell(f"warning: {text}", 0)


def _free_batch(
    original: ModelProto, path: Path | None, options: Options, course: Course, link: Communicator, tell: Tell
) -> tuple[FreedModel | None, int]:  # fmt: skip
    """Make the batch size of a model dynamic, if it is fixed and is not the batch size of a step.

    Returns:
        The model with a dynamic batch size, or None; and the number of runs per step of the original model.

    Raises:
        UsageError: the batch size can't be made dynamic, and several runs per step are not possible either.
        UnsupportedError: `shapes` requests a dynamic batch size, and the model can't have one.
    """
    asked = asked_batch(original, options)
    if asked is not None:
        return freed(original, path, asked, options.shapes), 1
    fixed = None if options.shapes or has_batch_behind(original) else fixed_batch(original)
    if fixed is None or fixed.size * link.world == course.batch_size:
        return None, 1
    runs = course.batch_size // fixed.size
    try:
        return freed(original, path, fixed), 1
    except SamplesMixError as error:
        why, apart = str(error.refusals[0]), "the samples of a batch depend on each other"
    except UnsupportedError as error:
        why = str(error.refusals[0]) if error.refusals else error.message
        apart = _not_in_runs(original, options, course, link, fixed.size)
    text = f"the model has a fixed batch size of {fixed.size}, which can't be made dynamic: {why}"
    if not apart:
        tell(f"caution: {text}", 0)
        as_if = f"`batch_size={fixed.size}` and `accumulate={runs * options.accumulate}`"
        tell(f"each step takes {runs} runs, as with {as_if}", 0)
        return None, runs
    hint = HINT
    if not _takes_statistics(original, options):
        alone = f"`batch_size={fixed.size * link.world}`"
        several = runs > link.world and options.optimizer != LBFGS.name
        alone += f" and `accumulate={runs // link.world}`" if several else ""
        hint += f"; or run batches of {fixed.size} with {alone}"
    raise UsageError(f"{text}. A step can't take several runs either: {apart}", hint)


def _not_in_runs(original: ModelProto, options: Options, course: Course, link: Communicator, size: int) -> str:
    """Return the reason why a step can't consist of several runs of a model with a fixed batch size; "" if it can."""
    if _takes_statistics(original, options):
        return "BatchNormalization in training mode requires the statistics of the whole batch"
    if course.batch_size % size:
        return f"the batch size {course.batch_size} is not a multiple of {size}"
    if schedule := _schedule(course, options):
        return f"the schedule '{schedule}' counts each run as a step"
    if _has_several_sets(options):
        return SEVERAL_SETS
    if options.optimizer == LBFGS.name:
        return "L-BFGS takes all samples in a step"
    return "several processes share a batch" if link.world > 1 else ""


def _schedule(course: Course, options: Options) -> str:
    """Return a schedule of the run, of the learning rate or of the weight of a loss; "" if all are constant."""
    texts = (course.schedule, *(spec.schedule for spec in options.losses))
    return next((text for text in texts if text not in ("", "constant")), "")


def _has_several_sets(options: Options) -> bool:
    return len({spec.data for spec in options.losses}) > 1


def _takes_statistics(original: ModelProto, options: Options) -> bool:
    """Return True if a BatchNormalization of the model uses the statistics of the batch during training."""
    graph = Graph(skeleton(original))
    found = [node for node in with_bodies(graph.nodes) if is_batch_normalization(node)]
    own = [uses_batch(node, graph.opset() or 1) for node in found]
    return bool(found) if options.mode == "train" else options.mode == "keep" and any(own)


def _drops_single(
    original: ModelProto, options: Options, samples: int, size: int, link: Communicator, tell: Tell
) -> bool:
    """Return True if the last batch of an epoch must be left out, because a process would get a single sample of it.

    BatchNormalization can't compute the variance of a single sample.

    Raises:
        UsageError: every batch is that small.
    """
    rest, least = samples % size, 2 * link.world  # the parts of a batch differ by at most one sample
    if not (size < least or 0 < rest < least) or not _takes_statistics(original, options):
        return False
    inferred = infer_shapes(skeleton(original)).graph
    types = {value.name: value.type for value in (*inferred.input, *inferred.value_info)}
    layers = filter(is_batch_normalization, inferred.node)
    inputs = [node.input[0] for node in layers if set((shape_of(types.get(node.input[0])) or (0, 0, 0))[2:]) <= {1}]
    if not inputs:
        return False
    text = f"BatchNormalization of '{inputs[0]}' in training mode can't compute the variance of a batch of one sample"
    if size < least:
        per_process = "" if link.world == 1 else f" of at least {least} for {link.world} processes"
        raise UsageError(text, f"choose a larger `batch_size`{per_process}, or `mode='eval'`")
    left = "the last sample of each epoch is" if rest == 1 else f"the last {rest} samples of each epoch are"
    tell(f"caution: {text}: {left} left out; to use all samples, choose another `batch_size`", 0)
    return True


def _within(
    limit: int, original: ModelProto, path: Path | None, options: Options, course: Course, link: Communicator,
    tell: Tell,
) -> StepPlan:  # fmt: skip
    """Return the fastest plan for a step that stays within a memory limit."""
    if link.world > 1 or find_provider(course.provider) != CPU:
        raise UsageError("`memory` is only available for a single process on the CPU", "leave it out")
    whole = "the schedule counts each run as a step" if _schedule(course, options) else ""
    whole = SEVERAL_SETS if _has_several_sets(options) else whole
    return planned(
        lambda asked: build(original, asked, path=path),
        options, limit, course.batch_size, course.threads, whole, tell,
    )  # fmt: skip


def _in_runs(course: Course, runs: int) -> Course:
    """Return the course for several runs per step: with a smaller batch size, and with runs counted as steps."""
    return replace(
        course,
        batch_size=course.batch_size // runs,
        max_steps=None if course.max_steps is None else course.max_steps * runs,
        eval_every=course.eval_every * runs,
        save_every=course.save_every * runs,
    )


def _also_trained(options: Options, names: Sequence[str]) -> Options:
    """Return the options, changed so that further weights are trained. If all weights are trained, nothing changes."""
    if not (options.train or options.preset or options.train_last or options.lora):
        return options
    return replace(options, train=(*options.train, *map(glob.escape, names)))


def _own(original: ModelProto, trainer: TrainerBase) -> list[str]:
    """Return the tensors of the original model that training changes: weights, adapted weights, running statistics."""
    roles, adapters = trainer.roles, trainer.roles.adapters
    factors = {name for adapter in adapters for name in adapter.names}
    changed = [name for name, role in roles.inputs.items() if role == "weight" or name in roles.successors]
    kept = [name for name in changed if name not in factors and name not in roles.slots]
    return [*stored_as(original, roles.quantized, kept), *(adapter.weight for adapter in adapters)]


def _trainer(built: TrainingModel, course: Course, link: Communicator) -> TrainerBase:
    provider = find_provider(course.provider)
    if built.options.optimizer == LBFGS.name:
        return FullBatchTrainer(built, provider=provider, threads=course.threads)
    if link.world == 1:
        return Trainer(built, provider=provider, threads=course.threads, seed=course.seed)
    return ParallelTrainer(built, link, provider=provider, threads=course.threads, seed=course.seed)


def _data(
    data: Mapping[str, Path],
    val_set: str,
    val: str | Path | float | None,
    built: TrainingModel,
    trainer: TrainerBase,
    course: Course,
    known: Preprocessing,
    recurrent: Recurrent,
    tell: Tell,
) -> tuple[dict[str, Data], Data | None]:
    """Open the training data of each set, and the validation data, for the losses on the data set `val_set`."""
    roles, first = trainer.roles, next(iter(data))
    inputs = {name: kind for name, kind in trainer.inputs.items() if roles.inputs[name] != "loss weight"}
    inputs, ranges = with_sizes_of_pasts(inputs, built.graph), ranges_of(built.model)
    arrays = roles.sets or {first: {name: name for name in inputs}}
    fed = {each: {name: inputs[own] for name, own in names.items()} for each, names in arrays.items()}

    def opened(
        source: str | Path, of: str, prefix: str, known: Preprocessing, elsewhere: Collection[str], trains: bool = False
    ) -> Data:
        terms, options, how = roles.on_set(of).losses, course.sequences, course.samples
        columns = {column: name for column, name in how.columns.items() if name in fed[of] or name not in known_names}
        own = {name: ranges[each] for name, each in arrays[of].items() if each in ranges}
        found = open_data(
            source, fed[of], own, prefix=prefix, terms=terms, options=options, samples=replace(how, columns=columns),
            known=known, elsewhere=elsewhere, recurrent=recurrent, trains=trains, tell=tell,
        )  # fmt: skip
        if len(data) > 1 and found.padding is not None and found.ragged:
            text = f"'{source}' has samples of different sizes, which can't be combined with several data sets"
            raise UsageError(text, "train on one data set", code="conflict")
        return found

    share = None if val is None else fraction_of(val)
    known_names = {name for names in fed.values() for name in names}
    twice = val is not None and share is None and _is_same(data[val_set], Path(str(val)))
    read_for_val = [course.val_prefix] if twice and course.val_prefix else []
    found, validation, more = dict[str, Data](), None, known
    for name, path in data.items():
        found[name] = opened(path, name, course.prefix, more, read_for_val if name == val_set else [], trains=True)
        found[name].tell_padding(tell)
        more = more.with_more(found[name].preprocessing(roles.on_set(name).losses))
    samples = found[first]
    if val is not None and share is None:
        known = more
        validation = opened(str(val), val_set, course.val_prefix, known, [""] if twice else [])
    elif share is not None:
        if course.val_prefix:
            raise UsageError("`val_prefix` requires `val=DATA`, not a fraction of `data`", "leave `val_prefix` out")
        if val_set != first:
            raise UsageError(
                f"`val`: a fraction can be held out of the first data set '{first}', not of '{val_set}'",
                f"use `val={share:g}`, or `val={val_set}=DATA`",
            )
        samples, validation = held_out(samples, share, course.seed)
        tell(f"{len(validation)} of {len(samples) + len(validation)} samples are held out for validation", 0)
    samples, validation = prepared(
        samples, validation, fed[first], roles.on_set(first), course.samples, known, course.seed, tell
    )
    for position, (name, other) in enumerate(found.items()):
        alike = partial(prepared_alike, other, samples.normal, fed[name], roles.on_set(name), course.samples)
        found[name] = alike(seed_of(course.seed, position)) if name != first else samples
    return found, validation


def _is_same(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def _evaluator(
    model: ModelProto, path: Path | None, options: Options, course: Course, trainer: TrainerBase, data: Data,
    link: Communicator, ema: Mapping[str, str], tell: Tell,
) -> Evaluator:  # fmt: skip
    session, roles = _session(model, path, options, course, trainer)
    metrics = metrics_of(course.metrics, roles.losses)
    batches = Batches(data, data.batch_size or course.batch_size, shuffle=False, tell=tell)
    evaluator = Evaluator(session, data, batches, metrics, ema, link, roles.losses, next(iter(roles.sets.values()), {}))
    if link.rank == 0:
        evaluator.check(trainer.buffers)
    return evaluator


def _session(
    model: ModelProto, path: Path | None, options: Options, course: Course, trainer: TrainerBase
) -> tuple[EvalSession, Roles]:
    found = make_eval_model(model, options, trainer.buffers, path, keep_mode=course.keep_mode, counted=True)
    return EvalSession(found, path, find_provider(course.provider), course.threads), describe(found.model)
