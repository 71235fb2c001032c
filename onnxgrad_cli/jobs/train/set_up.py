"""Prepare a training run from a model, data and options. Errors in them are reported before the first step."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from onnxgrad_cli.data.initial_states import has_batch_behind, recurrent_values
from onnxgrad_cli.data.ragged import Ragged
from onnxgrad_cli.errors import UnsupportedError, conflict, missing_value, no_data, wrong_shape, wrong_value
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.execution.session import CPU, find_provider
from onnxgrad_cli.files import ModelSource, check_target, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_batch_normalization, uses_batch
from onnxgrad_cli.ir.node_values import with_bodies
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
from onnxgrad_cli.report.model import WARNINGS
from onnxgrad_cli.report.summary import first_warnings
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


@dataclass(frozen=True)
class _Setup:
    """The model and the options of a run.

    Attributes:
        original, path: the inference model, and the file it was read from.
        options: the options of the training model.
        course: the options of the training.
        link: connects the processes that train together.
        tell: receives progress messages.
    """

    original: ModelProto
    path: Path | None
    options: Options
    course: Course
    link: Communicator
    tell: Tell

    @property
    def solves(self) -> bool:
        """True if the optimizer is L-BFGS, which takes all samples in each step."""
        return self.options.optimizer == LBFGS.name

    @property
    def has_several_sets(self) -> bool:
        """True if the losses are computed on several data sets."""
        return len({spec.data for spec in self.options.losses}) > 1

    @property
    def schedule(self) -> str:
        """A schedule of the learning rate or of the weight of a loss; "" if all are constant."""
        texts = (self.course.schedule, *(spec.schedule for spec in self.options.losses))
        return next((text for text in texts if text not in ("", "constant")), "")

    @cached_property
    def takes_statistics(self) -> bool:
        """True if a BatchNormalization of the model uses the statistics of the batch during training."""
        graph = Graph(skeleton(self.original))
        found = [node for node in with_bodies(graph.nodes) if is_batch_normalization(node)]
        own = [uses_batch(node, graph.opset() or 1) for node in found]
        return bool(found) if self.options.mode == "train" else self.options.mode == "keep" and any(own)

    def in_runs(self, runs: int) -> _Setup:
        """Return the setup for several runs per step, with smaller batches and step counts in runs."""
        course = self.course
        return replace(self, course=replace(
            course,
            batch_size=course.batch_size // runs,
            max_steps=None if course.max_steps is None else course.max_steps * runs,
            eval_every=course.eval_every * runs,
            save_every=course.save_every * runs,
        ))  # fmt: skip


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
    options = _completed(options, course, link)
    if adapter is not None and not options.lora and adapter_from is None:
        raise missing_value("`adapter`: no adapters are trained", "train adapters with `lora=RANK`")
    original, path = own_model(model)
    check_is_original(original)
    begun = None if adapter_from is None else read_adapters(adapter_from, original, tell)
    check_target(target, original, path, force)
    if adapter is not None:
        adapter.check(original, path, force)
    built, setup, free = _built(_Setup(original, path, options, course, link, tell), data, begun)
    trainer = _trainer(built, setup, begun)
    values = {name: buffer.array for name, buffer in trainer.buffers.items()}
    ema = check_ema(trainer.roles.averages, values) if course.use_ema else {}
    opened, validation = _data(setup, data, val_set, held, built, trainer, resumed)
    samples = next(iter(opened.values()))
    if free is not None:
        _compare_with_freed(free, samples, built, tell)
    evaluated = setup if free is None else replace(setup, original=free.model)
    _check_samples(evaluated, samples, validation, trainer)
    evaluator = None if validation is None else _evaluator(evaluated, val_set, trainer, validation, ema)
    agree(link, {"samples": np.array(len(samples))}, "data")
    batches = _batches(setup, samples, built, trainer.roles.on_set(next(iter(data))).losses)
    if setup.course.batch_size != course.batch_size and (rest := len(samples) % course.batch_size):
        tell(f"the last {rest} samples of an epoch share a step with the first samples of the next epoch", 0)
    sets = _named_sets(setup, opened, batches, trainer.roles)
    ready = PreparedRun(original, path, setup.course, built, trainer, samples, evaluator, batches, ema, sets)
    if adapter is not None:  # compute its content once now, so that an unsupported adapter format is reported early
        adapter.make(original, trainer.roles.adapters, ready.adapter_values(trainer.weights(), trainer.state()))
    return ready


def _completed(options: Options, course: Course, link: Communicator) -> Options:
    """Check the options against the course, and return them with those that training sets itself.

    Raises:
        UsageError: options can't be combined, or the processes have different options.
    """
    if len({spec.data for spec in options.losses}) > 1:
        _check_sets(course, link)
    if options.optimizer == LBFGS.name:
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
    return options


def _compare_with_freed(free: FreedModel, samples: Data, built: TrainingModel, tell: Tell) -> None:
    """Compare a model with a dynamic batch size with the original on samples, and print the caution."""
    feeds = samples.batch(np.arange(free.samples) % (samples.batch_size or len(samples)))
    caution = free.compare(feeds)
    tell(f"{caution}; the trained model keeps its batch size of {free.batch.size}", 0)
    built.training.cautions.append(caution)


def _check_samples(setup: _Setup, samples: Data, validation: Data | None, trainer: TrainerBase) -> None:
    """Check that the model can be trained and evaluated on samples that are padded or transformed.

    Raises:
        UsageError: L-BFGS gets random samples, or padding would change the results.
    """
    if setup.solves and samples.transform is not None and samples.transform.draws:
        raise conflict(
            f"`transform` draws random numbers, but {WHO} requires the same loss in each run",
            "use a function without the second parameter, or a different optimizer",
        )
    padded = [each for each in (samples, validation) if each is not None and each.padding is not None and each.ragged]
    if not padded or setup.course.batch_size <= setup.link.world:
        return
    if padded[0] is samples and setup.takes_statistics:
        raise conflict(
            f"'{samples.source}' has samples of different sizes: BatchNormalization in training mode would take "
            "the padding into its statistics",
            "use `mode='eval'`",
        )
    session, described = _session(setup, trainer)
    for each in padded:
        check_padding(session, each, next(iter(described.sets.values()), {}), trainer.buffers)


def _check_sets(course: Course, link: Communicator) -> None:
    """Refuse options that are not available with several data sets.

    Raises:
        UsageError: several processes train, or classes are to be balanced.
    """
    if link.world > 1:
        raise conflict(
            "several processes can't train on several data sets, because each process would get a different number of "
            "samples from each set",
            "train in one process, or on one data set",
        )
    if course.samples.balance:
        raise conflict("`balance` can't be combined with several data sets", "leave it out")


def _batches(setup: _Setup, samples: Data, built: TrainingModel, terms: Sequence[Term]) -> Batches:
    """Return the batches of an epoch, after checking that steps can be computed from them.

    Args:
        setup: the model and the options.
        samples: the samples.
        built: the training model.
        terms: the losses on these samples.

    Raises:
        UsageError: the loss can't be computed from parts of the samples, or an epoch has too few batches for a step.
    """
    course, link, tell, solves = setup.course, setup.link, setup.tell, setup.solves
    weights = balance(samples, terms[0].label, terms[0].ignore_index, tell) if course.samples.balance else None
    batches = Batches(
        samples, course.batch_size, course.seed, shuffle=course.shuffle and not solves, rank=link.rank,
        world=link.world, weights=weights, tell=tell, drop_last=_drops_single(setup, len(samples)),
    )  # fmt: skip
    accumulate, parts = built.options.accumulate, solves and len(batches) > 1
    if parts:
        divisors_of(built, "batch", f"use `batch_size={len(samples)}`")
    if link.world > 1 or parts:
        _check_uneven_labels(samples, terms, built, "use another optimizer" if solves else "train in one process")
    if accumulate > len(batches):
        raise no_data(
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
            raise wrong_shape(
                f"the label '{term.label}' has different sizes, so the loss '{term.name}' can't be computed from parts "
                "of the samples",
                alternative,
            )


def _named_sets(setup: _Setup, opened: Mapping[str, Data], batches: Batches, roles: Roles) -> DataSets | None:
    """Return the named data sets, if any. `batches` belong to the first set.

    A further set with fewer samples than a batch yields batches of all its samples.
    """
    if not roles.sets:
        return None
    course, found = setup.course, []
    for position, (name, data) in enumerate(opened.items()):
        if position:
            size = course.batch_size if data.batch_size is not None else min(course.batch_size, len(data))
            seed = seed_of(course.seed, position)
            batches = Batches(data, size, seed, shuffle=course.shuffle, tell=setup.tell)
        found.append(NamedSet(name, data, batches, roles.sets[name]))
    return DataSets(found[0], found[1:])


def _known(original: ModelProto, course: Course, resumed: Path | None) -> Preprocessing:
    """Return the preprocessing of the run to resume. For a new run, return the one that the model stores."""
    begun = None if resumed is None else Preprocessing.of_run(resumed)
    if begun is not None:
        return begun
    known = Preprocessing.of_model(original)
    return known if course.classes is None else replace(known, classes={})


def _built(
    setup: _Setup, data: Mapping[str, Path], begun: tuple[Sequence[Adapter], Arrays] | None
) -> tuple[TrainingModel, _Setup, FreedModel | None]:
    """Build the training model, and complete the options and the course.

    They are completed from `begun` (the adapters to start from), the data, the memory limit, and the model's batch size
    if it is fixed. If the course has `classes`, the last layer of the original model is replaced.

    Returns:
        The training model; the completed setup; and the model whose batch size was made dynamic, or None.
    """
    original, path, course, options, tell = setup.original, setup.path, setup.course, setup.options, setup.tell
    if begun is not None:
        options = as_asked(options, begun[0])
    if course.classes is not None:
        fresh = with_classes(original, options.losses[0].output or options.output, course.classes, course.seed)
        if options.train or options.preset or options.train_last or options.lora:  # otherwise all weights are trained
            options = replace(options, train=(*options.train, *map(glob.escape, fresh)))
    options = with_empty_pasts(original, options, lambda: names_in(next(iter(data.values()))), tell)
    setup = replace(setup, options=options)
    free, runs = _free_batch(setup)
    if runs > 1:
        setup = replace(setup, options=replace(options, accumulate=options.accumulate * runs)).in_runs(runs)
    model = original if free is None else free.model
    if setup.solves:
        built = build(model, replace(setup.options, optimizer="", optimizer_options={}, embed_state=True), path=path)
        built.options = setup.options  # which the report describes
    elif course.memory is None:
        built = build(model, setup.options, path=path)
    else:
        plan = _within(course.memory, model, setup)
        built, setup = plan.built, replace(setup, options=plan.options).in_runs(plan.runs)
    check_ends(built.graph)
    texts = list(dict.fromkeys(str(caution) for caution in built.training.cautions if caution.kind in WARNINGS))
    for text in first_warnings(texts, "the report in the folder of the run"):
        tell(f"warning: {text}", 0)
    if setup.link.world > 1 and setup.takes_statistics:
        tell("caution: each process computes the statistics of BatchNormalization on its own part of the batch", 0)
    return built, setup, free


def _free_batch(setup: _Setup) -> tuple[FreedModel | None, int]:
    """Make the batch size of a model dynamic, if it is fixed and is not the batch size of a step.

    Returns:
        The model with a dynamic batch size, or None; and the number of runs per step of the original model.

    Raises:
        UsageError: the batch size can't be made dynamic, and several runs per step are not possible either.
        UnsupportedError: `shapes` requests a dynamic batch size, and the model can't have one.
    """
    original, path, options, world = setup.original, setup.path, setup.options, setup.link.world
    asked = asked_batch(original, options)
    if asked is not None:
        return freed(original, path, asked, options.shapes), 1
    fixed = None if options.shapes or has_batch_behind(original) else fixed_batch(original)
    if fixed is None or fixed.size * world == setup.course.batch_size:
        return None, 1
    runs = setup.course.batch_size // fixed.size
    try:
        return freed(original, path, fixed), 1
    except SamplesMixError as error:
        why, apart = str(error.refusals[0]), "the samples of a batch depend on each other"
    except UnsupportedError as error:
        why = str(error.refusals[0]) if error.refusals else error.message
        apart = _not_in_runs(setup, fixed.size)
    text = f"the model has a fixed batch size of {fixed.size}, which can't be made dynamic: {why}"
    if not apart:
        setup.tell(f"caution: {text}", 0)
        as_if = f"`batch_size={fixed.size}` and `accumulate={runs * options.accumulate}`"
        setup.tell(f"each step takes {runs} runs, as with {as_if}", 0)
        return None, runs
    hint = HINT
    if not setup.takes_statistics:
        alone = f"`batch_size={fixed.size * world}`"
        alone += f" and `accumulate={runs // world}`" if runs > world and not setup.solves else ""
        hint += f"; or run batches of {fixed.size} with {alone}"
    raise conflict(f"{text}. A step can't take several runs either: {apart}", hint)


def _not_in_runs(setup: _Setup, size: int) -> str:
    """Return the reason why a step can't consist of several runs of a model with a fixed batch size; "" if it can."""
    if setup.takes_statistics:
        return "BatchNormalization in training mode requires the statistics of the whole batch"
    if setup.course.batch_size % size:
        return f"the batch size {setup.course.batch_size} is not a multiple of {size}"
    if setup.schedule:
        return f"the schedule '{setup.schedule}' counts each run as a step"
    if setup.has_several_sets:
        return SEVERAL_SETS
    if setup.solves:
        return "L-BFGS takes all samples in a step"
    return "several processes share a batch" if setup.link.world > 1 else ""


def _drops_single(setup: _Setup, samples: int) -> bool:
    """Return True if the last batch of an epoch must be left out, because a process would get a single sample of it.

    BatchNormalization can't compute the variance of a single sample.

    Raises:
        UsageError: every batch is that small.
    """
    size, world = setup.course.batch_size, setup.link.world
    rest, least = samples % size, 2 * world  # the parts of a batch differ by at most one sample
    if not (size < least or 0 < rest < least) or not setup.takes_statistics:
        return False
    inferred = infer_shapes(skeleton(setup.original)).graph
    types = {value.name: value.type for value in (*inferred.input, *inferred.value_info)}
    layers = filter(is_batch_normalization, inferred.node)
    inputs = [node.input[0] for node in layers if set((shape_of(types.get(node.input[0])) or (0, 0, 0))[2:]) <= {1}]
    if not inputs:
        return False
    text = f"BatchNormalization of '{inputs[0]}' in training mode can't compute the variance of a batch of one sample"
    if size < least:
        per_process = "" if world == 1 else f" of at least {least} for {world} processes"
        raise conflict(text, f"choose a larger `batch_size`{per_process}, or `mode='eval'`")
    left = "the last sample of each epoch is" if rest == 1 else f"the last {rest} samples of each epoch are"
    setup.tell(f"caution: {text}: {left} left out; to use all samples, choose another `batch_size`", 0)
    return True


def _within(limit: int, model: ModelProto, setup: _Setup) -> StepPlan:
    """Return the fastest plan for a step of a model that stays within a memory limit."""
    course = setup.course
    if setup.link.world > 1 or find_provider(course.provider) != CPU:
        raise conflict("`memory` is only available for a single process on the CPU", "leave it out")
    whole = "the schedule counts each run as a step" if setup.schedule else ""
    return planned(
        lambda asked: build(model, asked, path=setup.path), setup.options, limit, course.batch_size, course.threads,
        SEVERAL_SETS if setup.has_several_sets else whole, setup.tell,
    )  # fmt: skip


def _own(original: ModelProto, trainer: TrainerBase) -> list[str]:
    """Return the tensors of the original model that training changes: weights, adapted weights, running statistics."""
    roles, adapters = trainer.roles, trainer.roles.adapters
    factors = {name for adapter in adapters for name in adapter.names}
    changed = [name for name, role in roles.inputs.items() if role == "weight" or name in roles.successors]
    kept = [name for name in changed if name not in factors and name not in roles.slots]
    return [*stored_as(original, roles.quantized, kept), *(adapter.weight for adapter in adapters)]


def _trainer(built: TrainingModel, setup: _Setup, begun: tuple[Sequence[Adapter], Arrays] | None) -> TrainerBase:
    """Return the trainer with its initial values, after checking that the trained model can store the weights."""
    original, course, provider = setup.original, setup.course, find_provider(setup.course.provider)
    if setup.solves:
        trainer: TrainerBase = FullBatchTrainer(built, provider=provider, threads=course.threads)
    elif setup.link.world == 1:
        trainer = Trainer(built, provider=provider, threads=course.threads, seed=course.seed)
    else:
        trainer = ParallelTrainer(built, setup.link, provider=provider, threads=course.threads, seed=course.seed)
    check_stored(original, _own(original, trainer))
    check_branches(original, trainer.roles.adapters)
    init_weights(trainer, built, original, course.init, course.seed, course.reset)
    if begun is not None:
        begin_from(trainer, *begun)
    return trainer


def _data(
    setup: _Setup, data: Mapping[str, Path], val_set: str, val: str | Path | float | None, built: TrainingModel,
    trainer: TrainerBase, resumed: Path | None,
) -> tuple[dict[str, Data], Data | None]:  # fmt: skip
    """Open the training data of each set, and the validation data, for the losses on the data set `val_set`."""
    course, tell, roles, first = setup.course, setup.tell, trainer.roles, next(iter(data))
    known, recurrent = _known(setup.original, course, resumed), recurrent_values(setup.original.graph.node)
    inputs = {name: kind for name, kind in trainer.inputs.items() if roles.inputs[name] != "loss weight"}
    inputs, ranges = with_sizes_of_pasts(inputs, built.graph), ranges_of(built.model)
    arrays = roles.sets or {first: {name: name for name in inputs}}
    fed = {each: {name: inputs[own] for name, own in names.items()} for each, names in arrays.items()}

    def opened(
        source: str | Path, of: str, prefix: str, known: Preprocessing, elsewhere: Collection[str], trains: bool = False
    ) -> Data:
        how = course.samples
        columns = {column: name for column, name in how.columns.items() if name in fed[of] or name not in known_names}
        own = {name: ranges[each] for name, each in arrays[of].items() if each in ranges}
        found = open_data(
            source, fed[of], own, prefix=prefix, terms=roles.on_set(of).losses, options=course.sequences,
            samples=replace(how, columns=columns), known=known, elsewhere=elsewhere, recurrent=recurrent, trains=trains,
            tell=tell,
        )  # fmt: skip
        if len(data) > 1 and found.padding is not None and found.ragged:
            text = f"'{source}' has samples of different sizes, which can't be combined with several data sets"
            raise conflict(text, "train on one data set")
        return found

    share = None if val is None else fraction_of(val)
    known_names = {name for names in fed.values() for name in names}
    files = [data[val_set], Path(str(val))] if val is not None and share is None else []
    twice = bool(files) and all(map(Path.exists, files)) and files[0].samefile(files[1])
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
            raise conflict("`val_prefix` requires `val=DATA`, not a fraction of `data`", "leave `val_prefix` out")
        if val_set != first:
            raise wrong_value(
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


def _evaluator(setup: _Setup, val_set: str, trainer: TrainerBase, data: Data, ema: Mapping[str, str]) -> Evaluator:
    """Return an evaluator of the losses on the data set `val_set`, after checking that it works."""
    course, link = setup.course, setup.link
    losses = tuple(spec for spec in setup.options.losses if spec.data == val_set)
    session, roles = _session(replace(setup, options=replace(setup.options, losses=losses)), trainer)
    metrics = metrics_of(course.metrics, roles.losses)
    batches = Batches(data, data.batch_size or course.batch_size, shuffle=False, tell=setup.tell)
    evaluator = Evaluator(session, data, batches, metrics, ema, link, roles.losses, next(iter(roles.sets.values()), {}))
    if link.rank == 0:
        evaluator.check(trainer.buffers)
    return evaluator


def _session(setup: _Setup, trainer: TrainerBase) -> tuple[EvalSession, Roles]:
    course = setup.course
    found = make_eval_model(
        setup.original, setup.options, trainer.buffers, setup.path, keep_mode=course.keep_mode, counted=True
    )
    return EvalSession(found, setup.path, find_provider(course.provider), course.threads), describe(found.model)
