"""If, Loop and Scan: the cotangents of a body are a body, which computes an iteration again and then walks it back.

What an iteration needs of the past is its state before it: the forward node hands that out, one an iteration, and only
where the cotangents read it. Values captured from outside follow the inputs of a rule as if they were inputs; their
cotangents are summed up in states of the backward loop, so that memory grows with the states, not with iterations times
weights.
Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapter 12 (a checkpoint an iteration).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx import GraphProto, NodeProto, TypeProto
from onnx.helper import make_node, make_sequence_type_proto

from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import input_types, inside
from onnxgrad_cli.ir.iterations import fixed_trips
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import body_of, reads, subgraphs
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.renaming import renamed
from onnxgrad_cli.ir.types import dtype_of, element_type, is_differentiable, shape_of, tensor_type

Cotangents = Mapping[str, "Val | None"]


@rule("If")
def if_(op, gs, ys, condition, *captured, then_branch, else_branch):
    wanted = {x.name: x for x in captured if op.wants(x)}
    sides = [_Side(op, branch, gs, ys, wanted) for branch in (then_branch, else_branch)]
    tied = [x for name, x in wanted.items() if any(side.cotangents[name] is not None for side in sides)]
    if not tied:
        return [None] * (1 + len(captured))
    then_branch, else_branch = (side.close(tied) for side in sides)
    branches = {"then_branch": then_branch, "else_branch": else_branch}
    found = _emit(op, "If", [condition], [x.type for x in tied], **branches)
    given = {x.name: g for x, g in zip(tied, found, strict=True)}
    return [None, *(given.get(x.name) for x in captured)]


@rule("Loop")
def loop(op, gs, ys, trips, condition, *rest, body):
    types = input_types(op.graph, op.node)
    count = len(types) - 2
    step = _Step(op, body, types, gs, rest[:count], rest[count:], first=(2, 1))
    length = _iterations(op, step, ys[count:])
    last = step.outside(op.squeeze(length, [0]) - op.const(1))
    i, on = (step.input(f"{op.node.name}/{name}", t) for name, t in zip(("i", "on"), types, strict=False))
    fetch = Op(step.inner)
    at = fetch.rename(fetch.Sub(last, i), step.names[0])
    fetch.rename(fetch.const(True), step.names[1])
    for name, stack, *_ in step.stacks():
        stack, shape = step.outside(stack), shape_of(step.inner.types[name])
        found = fetch.SequenceAt(stack, at) if stack.is_sequence else fetch.Gather(stack, at, axis=0)
        fetch.rename(fetch.state(found, shape), name)
    new = step.close(fetch.nodes, [i, on], [on])
    found = _emit(op, "Loop", [length, None, *step.start(ys)], step.types(), body=new)
    return [None, None, *step.of_initial(found), *step.of_captured(found)]


@rule("Scan", versions=(9, None))
def scan(
    op, gs, ys, *rest, body, num_scan_inputs,
    scan_input_axes, scan_input_directions, scan_output_axes, scan_output_directions,
):  # fmt: skip
    inputs = len(body.input)
    count = inputs - num_scan_inputs
    initial, xs, captured = rest[:count], rest[count:inputs], rest[inputs:]
    axes = scan_input_axes or [0] * len(xs)
    flips = scan_input_directions or [0] * len(xs)
    step = _Step(op, body, input_types(op.graph, op.node), gs, initial, captured, xs)
    rows = list(zip(step.rows, xs, axes, flips, strict=True))
    rows += step.stacks(scan_output_axes, scan_output_directions)
    back = {k: g for k, name in enumerate(step.rows) if (g := step.cotangents.get(name)) is not None}
    new = step.close([], [], [], list(back.values()))
    read = set(_read_in(new))
    rows = [row for row in rows if row[0] in read] or rows[:1]
    new.input.extend(bodies.declared(name, step.inner.types[name]) for name, *_ in rows)
    found = _emit(
        op,
        "Scan",
        [*step.start(ys), *(x for _, x, _, _ in rows)],
        [*step.types(), *(xs[k].type for k in back)],
        body=new,
        num_scan_inputs=len(rows),
        scan_input_axes=[axis for _, _, axis, _ in rows],
        scan_input_directions=[1 - flip for _, _, _, flip in rows],
        scan_output_axes=[axes[k] for k in back] or None,
        scan_output_directions=[1 - flips[k] for k in back] or None,
    )
    of_rows = dict(zip(back, found[len(found) - len(back) :], strict=True))
    return [*step.of_initial(found), *(of_rows.get(k) for k in range(len(xs))), *step.of_captured(found)]


@rule("SequenceMap", needs_opset=17)
def sequence_map(op, g, y, *xs, body):
    elements, captured = xs[: len(body.input)], xs[len(body.input) :]
    if any(op.wants(x) for x in captured) or any(op.wants(x) and not x.is_sequence for x in elements):
        raise Unknown("its body reads a value that is the same for all elements", "export the model with a Loop")
    return [_mapped(op, body, elements, g, at) if op.wants(x) else None for at, x in enumerate(elements)]


def _mapped(op: Op, body: GraphProto, elements: Sequence[Val], g: Val, at: int) -> Val | None:
    """Return the cotangent of one of the sequences that a SequenceMap reads, as a SequenceMap."""
    types = [found for x in (*elements, g) if (found := element_type(x.type)) is not None]
    if len(types) <= len(elements):
        raise Unknown("the type of the elements of a sequence is unknown")
    step = _Body(op, body, types[:-1])
    upstream = step.input(f"{g.name}_element", types[-1])
    step.differentiate([(step.inner.output_names[0], upstream)], [step.names[at]])
    cotangent = step.cotangents[step.names[at]]
    if cotangent is None or cotangent.type is None:
        return None
    new = bodies.close(step.inner, step.op, [*map(step.op.val, step.names), upstream], [cotangent])
    return op.emit("SequenceMap", *elements, g, body=new, types=[make_sequence_type_proto(cotangent.type)])


def _emit(
    op: Op, op_type: str, inputs: Sequence[Val | None], types: Sequence[TypeProto], **attributes: Any
) -> list[Val]:
    if not types:  # nothing that is wanted has come this way
        return []
    found = op.emit(op_type, *inputs, outputs=len(types), types=types, **attributes)
    return list(found) if len(types) > 1 else [found]


def _iterations(op: Op, step: _Step, stacked: Sequence[Val | None]) -> Val:
    """How often a Loop has run, as a vector of one element."""
    fixed = fixed_trips(op.graph, step.node, step.inner)
    if fixed is not None:
        return op.ints([fixed])
    for y in stacked:
        if y is not None:
            return op.dim(y, 0)
    return op.dim(step.hand_out(step.names[0]), 0)


def _read_in(body: GraphProto) -> Iterator[str]:
    """Every value that the nodes of a body read."""
    return (name for node in body.node for name in reads(node))


def _add(
    graph: Graph, nodes: list[NodeProto], op_type: str, inputs: Sequence[str], output: str, **attributes: Any
) -> NodeProto:
    name = graph.fresh(f"{output}/{op_type}")
    nodes.append(make_node(op_type, inputs, [output], name=name, **attributes))
    return nodes[-1]


class _Body:
    """A body whose values are computed again, and the cotangents that follow from them."""

    def __init__(self, op: Op, body: GraphProto, types: Sequence[TypeProto]) -> None:
        copy = renamed(op.graph, body)
        self.outer = op
        self.inner = inside(op.graph, copy, types)
        self.op = Op(self.inner)
        self.op.role, self.op.forward = op.role, op.forward
        self.names = [value.name for value in copy.input]
        self.original = dict(zip(self.names, (value.name for value in body.input), strict=True))
        for mine, other in zip(copy.node, body.node, strict=True):
            self.original.update(zip(mine.output, other.output, strict=True))
        self.cotangents: Cotangents = {}

    def outside(self, x: Val, value_type: TypeProto | None = None) -> Val:
        """A value from outside as a value in the body."""
        known = value_type or x.type
        if x.name not in self.inner.types and known is not None:
            self.inner.add_input(x.name, known)
        return self.op.val(x.name)

    def input(self, stem: str, value_type: TypeProto) -> Val:
        """A new input of the body."""
        name = self.inner.fresh(stem)
        self.inner.add_input(name, value_type)
        return self.op.val(name)

    def differentiate(self, seeds: Iterable[tuple[str, Val]], wanted: Iterable[str]) -> None:
        """Walk the body back from the cotangents of its outputs, of which two may be the same value."""
        total: dict[str, Val] = {}
        for name, g in seeds:
            total[name] = bodies.add(self.op, total[name], g) if name in total else g
        self.cotangents = differentiate(self.inner, total, wanted, self.op, self.outer.training)

    def random(self, results: Iterable[Val]) -> list[Node]:
        """The nodes that draw random numbers of which `results` depend."""
        needed, found = {x.name for x in results}, []
        for node in reversed([*self.inner.nodes, *self.op.nodes]):
            if needed.intersection(node.output):
                needed.update(reads(node))
                if node.op_type in RANDOM:
                    found.append(node)
                elif any(_draws(graph) for graph in subgraphs(node)):
                    raise Unknown(f"'{node.name}' draws random numbers in a body inside a body")
        return found


def _draws(graph: GraphProto) -> bool:
    return any(node.op_type in RANDOM or any(map(_draws, subgraphs(node))) for node in graph.node)


def _ranks(*values: Val) -> list[int | None]:
    return [None if value.known_shape is None else len(value.known_shape) for value in values]


class _Side(_Body):
    """One branch of an If, and the cotangents of what it captures: none of a branch that is never taken.

    That is one which returns another rank than the If has: where a rank was read off a run, it is kept to.
    """

    def __init__(
        self, op: Op, branch: GraphProto, gs: Sequence[Val | None], ys: Sequence[Val | None], wanted: Iterable[str]
    ) -> None:
        super().__init__(op, branch, [])
        ranks = [_ranks(self.op.val(name), y) for name, y in zip(self.inner.output_names, ys, strict=False) if y]
        taken = not any(None not in (mine, its) and mine != its for mine, its in ranks)
        outputs = zip(self.inner.output_names, gs if taken else (), strict=False)
        # the branch knows the shape of its own output best: the If has one for both
        seeds = [(name, self.outside(g, self.inner.types[name])) for name, g in outputs if g is not None]
        self.differentiate(seeds, wanted)

    def close(self, wanted: Sequence[Val]) -> GraphProto:
        """The branch of the backward If: the cotangent of each wanted value, zero where this branch has none."""
        found = [self.cotangents[x.name] or bodies.zeros_like(self.op, self.outside(x)) for x in wanted]
        drawn = self.random(found)
        if drawn:
            raise Unknown(f"'{drawn[0].name}' draws random numbers, which a branch can't draw again")
        return bodies.close(self.inner, self.op, [], found)


class _Step(_Body):
    """One iteration of a Loop or Scan, and its cotangents.

    Attributes:
        before, after: the names of the states in the body, before and after an iteration.
        rows: the names in the body of what a Scan slices.
        states: position of a state -> its cotangent after the iteration, an input of the backward body.
        sums: captured value -> what its cotangent has come to so far, an input of the backward body.
        slices: name in the body -> the cotangent of a stacked output of which it is a slice, and the output's position.
        saved: value of the body that can't be computed again -> all of them stacked, an output of the forward node.
    """

    def __init__(
        self,
        op: Op,
        body: GraphProto,
        types: Sequence[TypeProto],
        gs: Sequence[Val | None],
        initial: Sequence[Val],
        captured: Sequence[Val],
        xs: Sequence[Val] = (),
        first: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(op, body, types)
        assert op.node is not None
        self.node, self.gs, self.initial, self.captured = op.node, gs, initial, captured
        inner, count = self.inner, len(initial)
        names, outputs = self.names[first[0] :], inner.output_names[first[1] :]
        self.before, self.rows = names[:count], names[count:]
        self.after, stacked = outputs[:count], outputs[count:]
        asked = {k: g for k, g in enumerate(gs[count:]) if g is not None}
        ties = zip([*self.before, *self.rows, *(x.name for x in captured)], [*initial, *xs, *captured], strict=True)
        active = self._active([name for name, x in ties if op.wants(x)])
        alive = self._alive(active, [stacked[k] for k in asked])
        self.states = {j: self.input(f"{self.before[j]}_g", inner.types[self.after[j]]) for j in alive}
        self.slices: dict[str, tuple[Val, int]] = {}
        seeds = [(self.after[j], g) for j, g in self.states.items()]
        for k, g in asked.items():
            part = self.input(f"{stacked[k]}_g", inner.types[stacked[k]])
            seeds.append((stacked[k], part))
            self.slices[part.name] = (g, k)
        self.differentiate(seeds, active)
        tied = [x.name for x in captured if self.cotangents.get(x.name) is not None]
        self.sums = {name: self.input(f"{name}_sum", inner.types[name]) for name in tied}
        drawn = self._take_random()
        self.sequences = [name for name in self.before if self.op.val(name).is_sequence]
        self.saved = {name: self._each(name) for name in [*self.before, *drawn] if name not in self.sequences}

    def _active(self, wanted: list[str]) -> list[str]:
        """What is wanted and, through any number of iterations, the states that depend on it."""
        while True:
            active, _ = on_the_way(self.inner, wanted, [])
            pairs = zip(self.before, self.after, strict=True)
            more = [b for b, a in pairs if a in active and b not in wanted and is_differentiable(self.inner.types[b])]
            if not more:
                return wanted
            wanted = [*wanted, *more]

    def _alive(self, active: list[str], stacked: list[str]) -> list[int]:
        """The active states on which something depends that has a cotangent, through any number of iterations."""
        alive = [j for j, b in enumerate(self.before) if self.gs[j] is not None and b in active]
        while True:
            _, needed = on_the_way(self.inner, active, [*(self.after[j] for j in alive), *stacked])
            more = [j for j, b in enumerate(self.before) if j not in alive and b in needed and b in active]
            if not more:
                return sorted(alive)
            alive += more

    def _take_random(self) -> list[str]:
        """Take the nodes that draw random numbers out of the body; what they drew must come from the forward node."""
        drawn = self.random([g for g in self.cotangents.values() if g is not None])
        self.inner.nodes = [node for node in self.inner.nodes if not any(node is other for other in drawn)]
        return [name for node in drawn for name in node.output if name]

    def _each(self, name: str) -> Val:
        """What will be a value of each iteration: stacked, or a sequence where a Loop may change its sizes."""
        value_type, graph = self.inner.types[name], self.outer.graph
        shape = shape_of(value_type)
        each = graph.fresh(f"{self.node.name}/{self.original[name]}_each")
        changes = name in self.before and value_type != self.inner.types[self.after[self.before.index(name)]]
        if changes and self.node.op_type == "Loop":
            sizes = None if shape is None else [None] * len(shape)
            graph.types[each] = make_sequence_type_proto(tensor_type(dtype_of(value_type), sizes))
        else:
            stacked = tensor_type(dtype_of(value_type), None if shape is None else [None, *shape])
            graph.types[each] = graph.named(stacked)
        return self.outer.val(each)

    def stacks(
        self, axes: Sequence[int] | None = None, flips: Sequence[int] | None = None
    ) -> list[tuple[str, Val, int, int]]:
        """What is sliced besides the inputs: (name in the body, stacked values, their axis, their direction)."""
        given = [(name, g, axes[k] if axes else 0, flips[k] if flips else 0) for name, (g, k) in self.slices.items()]
        return given + [(name, stack, 0, 0) for name, stack in self.saved.items()]

    def close(
        self, before: Sequence[Node], inputs: Sequence[Val], outputs: Sequence[Val], rows: Sequence[Val] = ()
    ) -> GraphProto:
        """The backward body: `inputs`, then states and sums; `outputs`, then those of the iteration before, `rows`."""
        after = []
        for j, g in self.states.items():
            keeps = self.inner.types[self.before[j]] == self.inner.types[self.after[j]]
            like = g if keeps else self.op.val(self.before[j])
            after.append(self.cotangents[self.before[j]] or bodies.zeros_like(self.op, like))
        for name, total in self.sums.items():
            if (more := self.cotangents[name]) is not None:
                after.append(bodies.add(self.op, total, more))
        self.inner.nodes = [*before, *self.inner.nodes]
        states = [*self.states.values(), *self.sums.values()]
        body = bodies.close(self.inner, self.op, [*inputs, *states], [*outputs, *after, *rows])
        read = set(_read_in(body))
        for name in self.sequences:
            if name in read:
                raise Unknown(f"the gradient needs the sequence '{self.original[name]}' as it was in each iteration")
        for name in self.saved:
            if name in read:
                self.hand_out(name)
        return body

    def hand_out(self, name: str) -> Val:
        """Let the forward node hand out a value of each iteration: stacked, or in a sequence if its sizes differ."""
        graph, body = self.outer.graph, body_of(self.node, "body")
        each = self.saved[name] if name in self.saved else self._each(name)
        mine, skipped = self.original[name], int(self.node.op_type == "Loop")
        self.node.output.extend([""] * (len(body.output) - skipped - len(self.node.output)))
        copy = graph.fresh(f"{mine}_copy")
        if not each.is_sequence:
            _add(graph, body.node, "Identity", [mine], copy)
            body.output.append(bodies.declared(copy, self.inner.types[name]))
            self.node.output.append(each.name)
            for given in self.node.attribute:
                if given.name in ("scan_output_axes", "scan_output_directions"):
                    given.ints.append(0)
            return each
        none, past, states = graph.fresh(f"{each.name}/none"), graph.fresh(f"{mine}_past"), len(self.node.input) - 2
        at = next(i for i, node in enumerate(graph.nodes) if node is self.node)
        dtype = dtype_of(self.inner.types[name])
        graph.nodes.insert(at, Node.read(_add(graph, [], "SequenceEmpty", [], none, dtype=dtype)))
        graph.types[none] = each.type  # type: ignore[assignment]
        _add(graph, body.node, "SequenceInsert", [past, mine], copy)
        body.input.append(bodies.declared(past, each.type))
        body.output.insert(skipped + states, bodies.declared(copy, each.type))
        self.node.input.append(none)
        self.node.output.insert(states, each.name)
        return each

    def start(self, ys: Sequence[Val | None]) -> list[Val]:
        """The states and sums before the backward loop."""
        finals = [self.gs[j] or bodies.zeros_like(self.outer, ys[j] or self.initial[j]) for j in self.states]
        return finals + [bodies.zeros_like(self.outer, x) for x in self.captured if x.name in self.sums]

    def types(self) -> list[TypeProto]:
        """The types of the states and sums after the backward loop."""
        values = [self.initial[j] for j in self.states] + [x for x in self.captured if x.name in self.sums]
        return [x.type for x in values if x.type is not None]

    def of_initial(self, found: Sequence[Val]) -> list[Val | None]:
        """The cotangents of the initial states among the results of the backward loop."""
        given = dict(zip(self.states, found, strict=False))
        return [given.get(j) for j in range(len(self.initial))]

    def of_captured(self, found: Sequence[Val]) -> list[Val | None]:
        """The cotangents of the captured values among the results of the backward loop."""
        given = dict(zip(self.sums, found[len(self.states) :], strict=False))
        return [given.get(x.name) for x in self.captured]
