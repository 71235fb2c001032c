"""Plant faults in the backward parts of real networks and count those that the proof finds; and right models that fail.

    python -m tests.verification.planted_faults FOLDER [NAME ...] [--faults 20] [--seeds 7] [--single] [--right]

Each subfolder holds model.onnx and about.json, see tests/zoo.py. A fault is planted behind a random node that makes
floats: times 1.01, the other sign, a square matrix transposed, a mean instead of a sum. One that changes no gradient by
more than its float32 noise, or than what tests/zoo.py allows, is no fault, and is counted apart. `--single` proves in
float32 alone; `--right` proves the networks as they are, at several seeds. Exits 1 when a fault is missed or a right
model fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays, is_float, shape_of
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import Roles, describe, started
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.feeds import DescribedModel, first_run, loss_part
from onnxgrad_cli.verification.gradients.loss_function import nearby
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import Proof
from tests.zoo import BOUND

NETWORKS = (
    "bert", "clip_vision", "gcn", "gpt2", "gru", "lenet", "lstm_lm", "mlp_bn_ts13", "unet2d_monai", "vit_tiny",
)  # fmt: skip
"""The ten networks that faults are planted in: of several kinds, and fast."""

Planting = Callable[[NodeProto, str, str], list[NodeProto]]
"""From a node, its value as it was and the name of the wrong one to the nodes that make the wrong one."""


def _scaled(node: NodeProto, right: str, wrong: str) -> list[NodeProto]:
    factor = helper.make_node("Constant", [], [f"{wrong}_factor"], value=_number(1.01))
    return [factor, *_like(right, f"{wrong}_factor", wrong, "Mul")]


def _negated(node: NodeProto, right: str, wrong: str) -> list[NodeProto]:
    return [helper.make_node("Neg", [right], [wrong])]


def _transposed(node: NodeProto, right: str, wrong: str) -> list[NodeProto]:
    return [helper.make_node("Transpose", [right], [wrong], perm=[1, 0])]


def _mean(node: NodeProto, right: str, wrong: str) -> list[NodeProto]:
    of, to, times = (f"{wrong}_{what}" for what in ("of", "to", "times"))
    return [
        helper.make_node("Size", [node.input[0]], [of]),
        helper.make_node("Size", [right], [to]),
        helper.make_node("Div", [of, to], [times]),
        *_like(right, times, wrong, "Div"),
    ]


def _like(right: str, number: str, wrong: str, operator: str) -> list[NodeProto]:
    """A value with a number, in the value's own type."""
    cast = f"{wrong}_cast"
    return [
        helper.make_node("CastLike", [number, right], [cast]),
        helper.make_node(operator, [right, cast], [wrong]),
    ]


def _number(x: float) -> TensorProto:
    return numpy_helper.from_array(np.array(x, np.float32))


KINDS: dict[str, Planting] = {"times 1.01": _scaled, "negated": _negated, "transposed": _transposed, "mean": _mean}


@dataclass
class Network:
    """A network, its training model and what is known of it.

    Attributes:
        original, model: the inference model and its training model.
        roles: of the training model.
        places: kind of fault -> the values behind which it can be planted.
    """

    original: ModelProto
    model: ModelProto
    roles: Roles
    places: dict[str, list[str]]


def network(original: ModelProto, options: Options) -> Network:
    """The training model of an inference model, and where faults fit into it."""
    built = build(original, options)
    model, types = built.model, built.graph.types
    roles = describe(model)
    forward = {name for node in loss_part(model, roles.loss).graph.node for name in node.output}
    typed = [node for node in model.graph.node if node.output[0] in types.keys() - forward]
    backward = [node for node in typed if is_float(types[node.output[0]])]
    values = [node.output[0] for node in backward]
    sums = [node.output[0] for node in backward if node.op_type == "ReduceSum"]
    shapes = {name: shape_of(types[name]) or () for name in values}
    square = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == shape[1] != 1]
    places = {"times 1.01": values, "negated": values, "transposed": square, "mean": sums}
    return Network(original, model, roles, {kind: names for kind, names in places.items() if names})


def planted(found: Network, kind: str, value: str) -> ModelProto:
    """A copy of the training model with a fault behind one value."""
    model = deepcopy(found.model)
    nodes = list(model.graph.node)
    position = next(i for i, node in enumerate(nodes) if value in node.output)
    node = nodes[position]
    right = f"{value}_right"
    node.output[list(node.output).index(value)] = right
    nodes[position + 1 : position + 1] = KINDS[kind](node, right, value)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.value_info[:]
    return model


def faults(found: Network, count: int, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Random faults, by kind and value, each at most once; kinds take turns."""
    left = {kind: list(rng.permutation(names)) for kind, names in found.places.items()}
    for _ in range(count):
        kinds = [kind for kind in left if left[kind]]
        if not kinds:
            return
        kind = kinds[int(rng.integers(len(kinds)))]
        yield kind, str(left[kind].pop())


class Effect:
    """What a fault changes, on the data that a proof of the same seed draws."""

    def __init__(self, found: Network, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._described = DescribedModel(started(found.model, found.roles), found.roles)
        run = Executor(self._described.model, fallback=False)
        self._feeds, outputs, _ = first_run(run, self._described, rng, {}, {})
        self._right = self._gradients(outputs)
        near = [self._gradients(run(nearby(self._described, self._feeds, rng))) for _ in range(5)]
        self._noise = {
            name: max(float(np.max(np.abs(each[name] - x), initial=0)) for each in near)
            for name, x in self._right.items()
        }

    def __call__(self, model: ModelProto) -> dict[str, float]:
        """The gradients that a fault changes by more than their noise, and by how much, relative to their largest
        entries; all of them where the model does not run.
        """
        try:
            got = self._gradients(Executor(started(model, self._described.roles), fallback=False)(self._feeds))
        except Exception:  # onnxruntime's exceptions share no base class
            return dict.fromkeys(self._right, np.inf)
        if any(got[name].shape != x.shape for name, x in self._right.items()):
            return dict.fromkeys(self._right, np.inf)
        far = {name: float(np.max(np.abs(got[name] - x), initial=0)) for name, x in self._right.items()}
        largest = {name: float(np.max(np.abs(x), initial=0)) for name, x in self._right.items()}
        least = {name: max(3 * self._noise[name], BOUND * largest[name]) for name in far}
        return {name: far[name] / max(largest[name], 1e-30) for name in far if not far[name] <= least[name]}

    def _gradients(self, outputs: Arrays) -> Arrays:
        gradients = self._described.roles.gradients
        return {name: np.asarray(outputs[output], np.float64) for name, output in gradients.items()}


@dataclass(frozen=True)
class Count:
    """What became of the faults in a network: how many changed nothing, were found and missed; and of which kinds."""

    none: int
    found: int
    missed: list[str]
    kinds: Counter[str]


def count(network: Network, number: int, seed: int = 0) -> Count:
    """Plant faults until so many have changed a gradient; count those that the proof finds."""
    effect, rng = Effect(network, seed), np.random.default_rng(seed)
    none, kinds, missed = 0, Counter[str](), list[str]()
    for kind, value in faults(network, 50 * number, rng):
        model = planted(network, kind, value)
        changed = effect(model)
        if not changed:
            none += 1
            continue
        kinds[kind] += 1
        proof = prove(model, network.roles, original=network.original, seed=seed)
        if not proof.failed:
            worst = max(changed, key=lambda name: changed[name])
            missed.append(f"{kind} behind '{value}', {worst} by {changed[worst]:.1e}: {proof.steps[-1].detail}")
        if kinds.total() == number:
            break
    return Count(none, kinds.total() - len(missed), missed, kinds)


def right(network: Network, seeds: int) -> list[Proof]:
    """The proofs of a network as it is."""
    return [prove(network.model, network.roles, original=network.original, seed=seed) for seed in range(seeds)]


def in_single() -> mock._patch[object]:
    """Proofs in float32 alone, while it is active."""
    refused = mock.Mock(side_effect=NotImplementedError)
    return mock.patch("onnxgrad_cli.execution.double.to_double", refused)


def _read(folder: Path) -> Network:
    about = json.loads((folder / "about.json").read_text())
    loss = LossSpec("mse", output=about["output"])
    return network(onnx.load(folder / "model.onnx"), Options(losses=(loss,), label="target"))


def _count_faults(folders: list[Path], number: int) -> int:
    counts = []
    for folder in folders:
        counts.append(found := count(_read(folder), number))
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found.kinds.items()))
        print(
            f"{folder.name:20} {found.found} found, {len(found.missed)} missed, {found.none} changed nothing; {kinds}"
        )
        print(*(f"    missed: {each}" for each in found.missed), sep="\n", end="\n" * bool(found.missed), flush=True)
    missed = sum(len(found.missed) for found in counts)
    print(f"{sum(f.found for f in counts)} found, {missed} missed, {sum(f.none for f in counts)} changed nothing")
    return missed


def _count_right(folders: list[Path], seeds: int) -> int:
    verdicts: Counter[str] = Counter()
    for folder in folders:
        for seed, proof in enumerate(right(_read(folder), seeds)):
            verdicts[proof.verdict] += 1
            if proof.verdict != "proved":
                print(f"{folder.name:20} seed {seed}: {proof.verdict}: {proof.why}", flush=True)
    print(dict(verdicts))
    return verdicts["failed"]


def main() -> int:
    """Print what was found; 0 when all was, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--faults", type=int, default=20, help="faults in each network")
    parser.add_argument("--seeds", type=int, default=7, help="seeds of right models")
    parser.add_argument("--single", action="store_true", help="in float32 alone")
    parser.add_argument("--right", action="store_true", help="prove the networks as they are")
    arguments = parser.parse_args()
    folders = [file.parent for file in sorted(arguments.folder.glob("*/model.onnx"))]
    names = arguments.names or ([] if arguments.right else NETWORKS)
    folders = [folder for folder in folders if not names or folder.name in names]
    if arguments.single:
        in_single().start()
    wrong = _count_right(folders, arguments.seeds) if arguments.right else _count_faults(folders, arguments.faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
