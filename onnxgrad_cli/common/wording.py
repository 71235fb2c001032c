"""Messages in the words of whoever asked: of Python where the library is called, of flags on the command line.

Errors name arguments as Python does, in backquotes: `lora_target`, `yield_='keep'`, `train=GLOB`. The console reads
these as --lora-target, --yield keep and --train GLOB. Settings, such as `weight_decay`, are read as they are typed:
weight-decay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice

FLAGS = {
    "attributes": "--attribute",
    "columns": "--map",
    "dims": "--dim",
    "flags": "--option",
    "inputs": "--input",
    "labels": "--label-input",
    "loss_options": "--loss-option",
    "losses": "--loss",
    "metrics": "--metric",
    "optimizer_options": "--optimizer-option",
    "outputs": "--output",
    "reports": "--report",
    "shapes": "--shape",
}
"""The arguments that are called otherwise on the command line, mostly because a flag is repeated there."""

ARGUMENTS = frozenset(
    (
        "accumulate adaptable adapter adapter_from against artifacts as_gradient_op attributes augment balance "
        "baseline batch_size case class_ class_axis classes clip clip_norm clip_value columns data dims dump_passes "
        "ema embed_state epochs epsilon eval_every flags force format freeze grad_of_input group identifiers "
        "infer_by_run init inputs keep_mode keep_outputs kind l1 l2 label labels layer learning_rate log lora "
        "lora_dora lora_dropout lora_scaling lora_target loss_chunks loss_options loss_output loss_scale losses "
        "max_length max_steps memory merge method metrics mode names new_data noise nominal_checkpoint norm normalize "
        "of optimizer optimizer_options ort out output outputs pack pad_id patience per_sample picture prefix preset "
        "provider quantization recompute reduction repeats reports reset resize resume roles run runtime sample "
        "sample_weight save_every schedule seed shapes shuffle start step_size steps stop_after stride target targeted "
        "test_data threads tie tokenizer train train_last training_info transform tuned unbiased_variance untie "
        "use_ema val val_prefix verify webgpu weights window wrt yield_"
    ).split()
)
"""The arguments that messages name. Other names in backquotes are settings if they have underscores, or stay as is."""

_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def flag_of(argument: str) -> str:
    """The flag of an argument: yield_ is --yield, lora_target --lora-target."""
    return FLAGS.get(argument, f"--{argument.rstrip('_').replace('_', '-')}")


def in_flags(text: str) -> str:
    """A message with its arguments in the words of the command line."""
    return _ARGUMENT.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    if found[1] not in ARGUMENTS:
        return found[1].replace("_", "-") if "_" in found[1] and found[2] is None else found[0]
    flag, value = flag_of(found[1]), found[2]
    if value in (None, "True"):
        return flag
    if value == "False":
        return f"--no-{flag.removeprefix('--')}"
    quoted = re.fullmatch(r"'([\w.-]+)'", value)  # a string that the shell needs no quotes for
    return f"{flag} {quoted[1] if quoted else value}"


def listed(names: Collection[str], most: int = 5) -> str:
    """Names in quotes, the first few of many."""
    return ", ".join(f"'{name}'" for name in islice(names, most)) + ", ..." * (len(names) > most)
