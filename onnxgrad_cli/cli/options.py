"""The options that say what to build, shared by the commands that build; and how they become `pipeline.Options`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from onnxgrad_cli.cli.code import Typed, TypedFunction, function_loader, load_rules
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.common.choices import SEEDS, Init, Mode, Preset, Quantization, Reduction, Scaling, TargetName, Yield
from onnxgrad_cli.common.inputs import keep

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from onnxgrad_cli.options import Options

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[Any]]"]

Command = TypeVar("Command", bound=Callable[..., Any])


class Pair(click.ParamType[tuple[str, Any]]):
    """KEY=VALUE, or NAME:VALUE for names that may hold colons themselves: the last separator counts."""

    name = "pair"

    def __init__(self, metavar: str, separator: str, parse: Callable[[str], Any]) -> None:
        self.metavar = metavar
        self.separator = separator
        self.parse = parse

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help shows."""
        return self.metavar

    def join(self, key: str, value: Any) -> str:
        """A pair as it is typed."""
        values = value if isinstance(value, list) else [value]
        return f"{key}{self.separator}{','.join(map(str, values))}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """The pair."""
        if isinstance(value, tuple):
            return value
        split = str(value).rpartition if self.separator == ":" else str(value).partition
        key, separator, rest = split(self.separator)
        try:
            if not key or not separator:
                raise ValueError
            return key, self.parse(rest)
        except ValueError:
            self.fail(f"'{value}' is not of the form {self.metavar}", param, ctx)


def _size(text: str) -> int:
    size = int(text)
    if size < 0:
        raise ValueError
    return size


def _dims(text: str) -> tuple[int | str, ...]:
    dims = [dim.strip() for dim in text.split(",") if dim.strip()]
    return tuple(_size(dim) if dim.lstrip("-").isdigit() else dim for dim in dims)


def _setting(text: str) -> object:
    """A number, true, false, a tuple of numbers as in 1,2 or [1,2], or the text itself."""
    from onnxgrad_cli.common.settings import value_of

    listed = text.strip().startswith("[") and text.strip().endswith("]")
    text = text.strip()[1:-1] if listed else text
    if "," in text or listed:
        return tuple(value_of(part) for part in text.split(",") if part.strip())
    return value_of(text)


DIM = Pair("SYMBOL=SIZE", "=", _size)
SHAPE = Pair("INPUT:DIM,DIM,...", ":", _dims)
SETTING = Pair("KEY=VALUE", "=", _setting)


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Let the shell complete a file, for a parameter that is stdin or a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_names(module: str, registry: str) -> Completer:
    """Let the shell complete what a registry has, or a file, for an option that names one of the two."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        from importlib import import_module

        from click.shell_completion import CompletionItem

        known = sorted(each.name for each in getattr(import_module(f"onnxgrad_cli.{module}"), registry))
        found = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return found or complete_files(ctx, param, incomplete)

    return complete


MODEL = click.argument("model", metavar="MODEL", type=TEXT, shell_complete=complete_files)


def proof_data(flag: str, help: str, **more: Any) -> Callable[[Command], Command]:
    """Give a command the option of data that a proof or a measurement is made on, and of what makes tokens of text.

    Args:
        flag: what it is called.
        help: what it is for.
        more: of that option.
    """

    def decorate(command: Command) -> Command:
        command = click.option(
            "--tokenizer",
            type=FilePath(path_type=Path),
            metavar="FILE|DIR",
            help=f"A tokenizer.json, by which text in {flag} becomes tokens.",
        )(command)
        return click.option(flag, type=FilePath(path_type=Path), metavar="DATA", help=help, **more)(command)

    return decorate


def rules(words: str) -> Callable[[Command], Command]:
    """The option that names code, --rules, with the words of its help."""
    return click.option(
        "--rules",
        multiple=True,
        type=FilePath(dir_okay=False),
        metavar="FILE.py",
        help=words,
        cls=Typed,
    )


def what_to_build(command: Command) -> Command:
    """Give a command the options that say what to build."""
    command = how_to_read(command)
    for option in reversed((
        click.option("--loss", multiple=True, cls=TypedFunction, shell_complete=complete_names("losses", "LOSSES"),
                     metavar="NAME|FILE.onnx|FILE.py:FUNCTION[:OUTPUT[:LABEL[:WEIGHT]]]",
                     help="The loss, or several that are summed; see `onnxgrad losses`.  [default: mse]"),
        click.option("--label", metavar="NAME", default="label", show_default=True,
                     help="What the label input is called."),
        click.option("--output", metavar="NAME", help="The output that is judged.  [default: the first of floats]"),
        click.option("--reduction", type=click.Choice(get_args(Reduction)), default="mean", show_default=True,
                     help="What the loss does over the batch."),
        click.option("--loss-option", type=SETTING, multiple=True,
                     help="A setting of the loss, such as label-smoothing=0.1, or of that of one output or label: "
                          "cls:ignore-index=0; see `onnxgrad losses`."),
        click.option("--sample-weight", metavar="NAME", help="Add an input with one weight for each sample."),
        click.option("--l1", type=click.FloatRange(min=0), default=0.0, metavar="FACTOR",
                     help="Add FACTOR times the sum of the weights' magnitudes."),
        click.option("--l2", type=click.FloatRange(min=0), default=0.0, metavar="FACTOR",
                     help="Add FACTOR times the sum of the weights' squares."),
        click.option("--train", multiple=True, metavar="GLOB",
                     help="Train only the weights of these names, or of modules so called."),
        click.option("--freeze", multiple=True, metavar="GLOB",
                     help="Don't train the weights of these names, or of modules so called."),
        click.option("--untie", multiple=True, metavar="GLOB",
                     help="Give modules that share a weight of these names ('*': any) a copy of their own each."),
        click.option("--tie", multiple=True, metavar="GLOB",
                     help="Train weights of these names ('*': any) as one with the weight that has their values, "
                     "perhaps transposed."),
        click.option("--preset", type=click.Choice(get_args(Preset)), multiple=True,
                     help="Train only biases, normalizations, or the last layer. Such choices add up."),
        click.option("--train-last", type=click.IntRange(min=1), default=None, metavar="N",
                     help="Train only the last N layers."),
        click.option("--lora", metavar="RANK[:ALPHA]",
                     help="Train low-rank adapters of the weight matrices, and else only what is chosen by name."),
        click.option("--lora-target", multiple=True, metavar="GLOB|attention|mlp|all-linear",
                     help="Adapt the matrices of these names, or modules.  [default: those of MatMul and Gemm]"),
        click.option("--lora-scaling", type=click.Choice(get_args(Scaling)), default="lora", show_default=True,
                     help="What divides alpha: the rank, or with rslora its square root."),
        click.option("--lora-dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, metavar="SHARE",
                     help="Drop this share of what goes into adapters, in training alone."),
        click.option("--lora-dora", is_flag=True,
                     help="Train the lengths of adapted weights, too, one for each output (DoRA)."),
        click.option("--grad-of-input", multiple=True, metavar="GLOB", help="Add the gradients of inputs."),
        click.option("--optimizer", metavar="NAME", default="",
                     shell_complete=complete_names("optimizers", "OPTIMIZERS"),
                     help="Append a whole step of an optimizer; see `onnxgrad optimizers`."),
        click.option("--optimizer-option", type=SETTING, multiple=True,
                     help="A setting of the optimizer, such as weight-decay=0.01."),
        click.option("--group", multiple=True, metavar="GLOB:KEY=VALUE,...",
                     help="Settings for weights of these names; lr=FACTOR is of the learning rate. The last wins."),
        click.option("--clip-norm", type=float, metavar="MAX",
                     help="Scale the gradients down where their norm, of all together, is larger."),
        click.option("--clip-value", type=float, metavar="MAX",
                     help="Clip each element of the gradients to this magnitude."),
        click.option("--accumulate", type=click.IntRange(min=1), default=1, metavar="N",
                     help="Take a step at each N-th run, as on one batch of all their samples."),
        click.option("--loss-scale", metavar="FACTOR|dynamic",
                     help="Scale the loss gradient up and gradients down again: those in float16 don't vanish."),
        click.option("--ema", type=float, metavar="DECAY",
                     help="Keep exponential moving averages of the weights."),
        click.option("--embed-state/--no-embed-state", default=True,
                     help="Store the optimizer's state; without, it is fed.  [default: store it]"),
        click.option("--unbiased-variance", is_flag=True,
                     help="Update the running variance of BatchNormalization with the unbiased variance of the batch, "
                          "as PyTorch does.  [default: the biased one, as ONNX does]"),
        click.option("--training-info", is_flag=True,
                     help="Leave the graph as it is, and describe the training beside it, as the standard has it."),
        click.option("--init", type=click.Choice(get_args(Init)), default="keep",
                     show_default=True,
                     help="How weights begin: as they are stored, or drawn anew; of `build` with --training-info."),
        click.option("--seed", type=click.IntRange(0, SEEDS - 1),
                     help="Of all random numbers: drawn weights, adapters, and in a training the order and Dropout."),
        click.option("--recompute", metavar="elementwise|block:auto|block:GLOB|budget:SIZE|optimal:SIZE",
                     help="Save memory: compute values again in the backward part instead of keeping them."),
        click.option("--loss-chunks", type=click.IntRange(1), metavar="N",
                     help="Save memory: the loss of a language model by N chunks of its tokens, one after the other "
                     "(by default 4 where the vocabulary is large).",),
        click.option("--tuned", type=FilePath(dir_okay=False, path_type=Path), metavar="FILE.toml",
                     help="Write the forms of gradients that `onnxgrad tune` has found faster here."),
        click.option("--target", type=click.Choice(get_args(TargetName)), default="standard",
                     show_default=True,
                     help="Write for one runtime, with operators of its own where they are faster."),
        click.option("--keep-outputs", is_flag=True, help="Keep the model's own outputs."),
        click.option("--yield", type=click.Choice(get_args(Yield)), default="ones",
                     show_default=True, help="The gradient of the loss: ones, an input, or the YieldOp marker."),
        click.option("--as-gradient-op", is_flag=True,
                     help="Write one Gradient node, the standard's, for the backward part; see `onnxgrad expand`."),
    )):  # fmt: skip
        command = option(command)
    return command


SIZES = (
    click.option("--dim", type=DIM, multiple=True, help="Fix a symbolic dimension; 0 for a past that is empty."),
    click.option("--shape", type=SHAPE, multiple=True,
                 help="Set the shape of an input; a name in place of a number frees a fixed batch."),
)  # fmt: skip
"""The options that fix sizes."""


def how_to_read(command: Command) -> Command:
    """Give a command the options that say how the model is to be taken."""
    for option in reversed((
        click.option("--mode", type=click.Choice(get_args(Mode)), default="keep", show_default=True,
                     help="How BatchNormalization and Dropout behave; keep: as the model has it."),
        click.option("--quantization", type=click.Choice(get_args(Quantization)), default="refuse", show_default=True,
                     help="What becomes of gradients at QuantizeLinear; ste: the straight-through estimator; "
                          "lsq: trains scales too."),
        click.option("--identifiers", is_flag=True,
                     help="Make valid C identifiers of all names that are not the model's own."),
        *SIZES,
        click.option(
            "--infer-by-run/--no-infer-by-run",
            default=None,
            help="Run the model to see ranks that can't be inferred.  [default: where that is quick]",
        ),
        rules("Load more gradient rules from a Python file."),
    )):  # fmt: skip
        command = option(command)
    return command


def options(values: dict[str, Any]) -> Options:
    """Take what `what_to_build`, or `how_to_read` alone, parsed out of `values`, and load the rules it names.

    Raises:
        UsageError: a value does not fit.
    """
    from dataclasses import fields

    from onnxgrad_cli.autodiff.kernel_variants import load_tuned
    from onnxgrad_cli.losses import parse_loss
    from onnxgrad_cli.options import Options
    from onnxgrad_cli.passes.adapters import parse_lora
    from onnxgrad_cli.passes.loss_scale import parse_loss_scale
    from onnxgrad_cli.passes.optimizer.groups import parse_group
    from onnxgrad_cli.passes.rematerialization.request import parse_recompute

    for file in values.pop("rules"):
        load_rules(Path(file))
    keep(values.get("tuned"))
    code = function_loader("--loss")
    losses = tuple(parse_loss(text, code) for text in values.pop("loss", ()))
    lora, scale = values.pop("lora", None), values.pop("loss_scale", None)
    recompute, tuned = values.pop("recompute", None), values.pop("tuned", None)
    return Options(
        losses=losses or Options.losses,
        loss_options=_settings(values.pop("loss_option", ())),
        optimizer_options=_settings(values.pop("optimizer_option", ())),
        dims=dict(values.pop("dim")),
        shapes=dict(values.pop("shape")),
        yield_=values.pop("yield", "ones"),
        lora=None if lora is None else parse_lora(lora),
        group=tuple(parse_group(text) for text in values.pop("group", ())),
        loss_scale=None if scale is None else parse_loss_scale(scale),
        recompute=None if recompute is None else parse_recompute(recompute),
        train_last=values.pop("train_last", None) or 0,
        tuned=load_tuned(tuned) if tuned else {},
        **{field.name: values.pop(field.name) for field in fields(Options) if field.name in values},
    )


def _settings(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings with underscores for hyphens; the output or label that has one, before a colon, is called as it is."""
    from onnxgrad_cli.common.settings import keyword

    split = ((key.rpartition(":"), value) for key, value in pairs)
    return {f"{owner}{colon}{keyword(name)}": value for (owner, colon, name), value in split}
