"""What `onnxgrad doctor` finds: a model file, what would be trained of it, and which export would have served better.

`dataclasses.asdict` of it is the JSON result, so a field's name here is a public key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.errors import Refusal
from onnxgrad_cli.report.words import number, several

MOST = 4
"""Names of one group that are shown to people; the JSON result has all."""


@dataclass(frozen=True)
class Origin:
    """Where a file comes from, and what it says of itself.

    Attributes:
        exporter: the program that wrote it, in words.
        producer: that program and its version, as the file has them.
        domains: the domains of operators -> their versions; "" is the standard's own.
        operators: how many nodes there are of each operator, those of other domains as 'domain::Op'.
        functions: its own functions, as 'domain::name'.
        inputs, outputs: name -> type.
        sizes: the sizes that may vary, by their names.
    """

    exporter: str
    producer: str
    ir_version: int
    domains: dict[str, int]
    operators: dict[str, int]
    functions: list[str]
    inputs: dict[str, str]
    outputs: dict[str, str]
    sizes: list[str]


@dataclass(frozen=True)
class Group:
    """Float tensors that are not trained for one reason; `numbers` elements in all."""

    reason: str
    names: list[str]
    numbers: int


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        status: 'differentiable', 'refused' or 'failed'.
        verdict: the same in a sentence.
        origin: the file.
        repaired: what was read otherwise than it is written.
        trained: the weights.
        trained_numbers: how many elements they have.
        not_trained: all other float tensors.
        warnings: weights that stay untrained, and the option that changes it.
        doubts: what could as well be otherwise, and how to say so.
        unnamed: the weights whose names the exporter made up.
        equal: weights that hold equal values: they may have been one, and are trained apart.
        normalization: how BatchNormalization and Dropout stand in the file.
        refusals: what can't be differentiated.
        error, hint: what else stands in the way, and what to do about it.
        proof: what stands in the way of a proof on random data.
        advice: how an export would have served better.
    """

    status: str
    verdict: str
    origin: Origin
    repaired: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    trained_numbers: int = 0
    not_trained: list[Group] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    equal: list[list[str]] = field(default_factory=list)
    normalization: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    error: str = ""
    hint: str = ""
    proof: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def in_words(found: Diagnosis) -> str:
    """The diagnosis for a reader: under a heading each, the lines that say something."""
    lines = [found.verdict]
    for heading, texts in _parts(found):
        lines += [f"{heading if i == 0 else '':14}{visible(text)}" for i, text in enumerate(texts)]
    return "\n".join(lines)


def _parts(found: Diagnosis) -> Iterator[tuple[str, list[str]]]:
    origin = found.origin
    nodes = sum(origin.operators.values())
    versions = ", ".join(f"{domain or 'opset'} {version}" for domain, version in origin.domains.items())
    by = origin.producer if origin.producer.startswith(origin.exporter) else f"{origin.exporter} ({origin.producer})"
    yield "written by", [f"{by}, {versions}, {several(nodes, 'node')}"]
    yield "inputs", [f"{name}: {kind}" for name, kind in origin.inputs.items()]
    yield "outputs", [f"{name}: {kind}" for name, kind in origin.outputs.items()]
    yield "may vary", [", ".join(origin.sizes) or "no size"]
    yield "read as", found.repaired
    yield "trained", [f"{several(len(found.trained), 'tensor')}, {several(found.trained_numbers, 'number')}"]
    yield (
        "not trained",
        [f"{_listed(group.names)} ({number(group.numbers)}): {group.reason}" for group in found.not_trained],
    )
    yield "warning", found.warnings
    yield "in doubt", found.doubts
    yield "names", [_named(found)] if found.trained else []
    yield "equal", [f"{_listed(names)}: of equal values, trained apart" for names in found.equal]
    yield "modes", found.normalization
    refused = [f"{refusal}{'; ' + refusal.hint if refusal.hint else ''}" for refusal in found.refusals]
    yield "in the way", [*refused, *filter(None, [*found.error.split("\n"), found.hint])]
    yield "proof", found.proof
    yield "better export", found.advice


def _named(found: Diagnosis) -> str:
    if not found.unnamed:
        return "every weight bears the name that it had"
    return (
        f"made up for {number(len(found.unnamed))} of {several(len(found.trained), 'weight')}: {_listed(found.unnamed)}"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST:,} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
