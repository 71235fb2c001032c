"""Rules of If, Loop, Scan and SequenceMap. The backward body recomputes an iteration, then computes its cotangents.

To recompute an iteration, the backward body needs the states before the iteration. If the cotangents depend on these
states, the forward node gets an additional output with the states before all iterations. Values that a body captures
are passed to the rule after the inputs of the node. The cotangent of a captured value is summed over the iterations in
a state of the backward loop. So the memory for it does not grow with the number of iterations.
Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapter 12 (one checkpoint per iteration).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import GraphProto, NodeProto, TypeProto
from onnx.helper import make_node, make_sequence_type_proto

from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import fixed_trips
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import body_of, read_by, reads, with_bodies
from onnxgrad_cli.ir.renaming import renamed
from onnxgrad_cli.ir.type_inference import input_types, inside
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
    step = _Iteration(op, body, types, gs, rest[:count], rest[count:], first=(2, 1))
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
    step = _Iteration(op, body, input_types(op.graph, op.node), gs, initial, captured, xs)
    rows = list(zip(step.rows, xs, axes, flips, strict=True))
    rows += step.stacks(scan_output_axes, scan_output_directions)
    back = {k: g for k, name in enumerate(step.rows) if (g := step.cotangents.get(name)) is not None}
    new = step.close([], [], [], list(back.values()))
    read = set(read_by(new.node))
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
        raise Unknown("it gives no gradient to a value that all elements share", "export the model with a Loop instead")
    return [_mapped(op, body, elements, g, at) if op.wants(x) else None for at, x in enumerate(elements)]


def _mapped(op: Op, body: GraphProto, elements: Sequence[Val], g: Val, at: int) -> Val | None:
    """Emit a SequenceMap that computes the cotangent of one operand, a sequence, of a SequenceMap.

    Args:
        op: the emitter.
        body: the body of the forward node.
        elements: its operands.
        g: the cotangent of its result.
        at: the position of the operand.
    """
    types = [found for x in (*elements, g) if (found := element_type(x.type)) is not None]
    require(len(types) > len(elements), "the type of the elements of a sequence is unknown")
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
    if not types:  # no wanted cotangent passes through the node
        return []
    found = op.emit(op_type, *inputs, outputs=len(types), types=types, **attributes)
    return list(found) if len(types) > 1 else [found]


def _iterations(op: Op, step: _Iteration, stacked: Sequence[Val | None]) -> Val:
    """Return the number of iterations of a Loop, as an int64 vector of one element."""
    fixed = fixed_trips(op.graph, step.node, step.inner)
    if fixed is not None:
        return op.ints([fixed])
    for y in stacked:
        if y is not None:
            return op.dim(y, 0)
    return op.dim(step.hand_out(step.names[0]), 0)


def _add(
    graph: Graph, nodes: list[NodeProto], op_type: str, inputs: Sequence[str], output: str, **attributes: Any
) -> NodeProto:
    name = graph.fresh(f"{output}/{op_type}")
    nodes.append(make_node(op_type, inputs, [output], name=name, **attributes))
    return nodes[-1]


class _Body:
    """A backward body: it recomputes the values of a forward body, then computes cotangents from them.

    Attributes:
        inner: the body as a graph, with new names.
        op: the emitter of nodes in the body.
        names: the names of the body's inputs.
        original: map from the new name of a value to its name in the forward body.
        cotangents: map from a value to its cotangent; filled by `differentiate`.
    """

    def __init__(self, op: Op, body: GraphProto, types: Sequence[TypeProto]) -> None:
        copy = renamed(op.graph, body)
        self.outer = op
        self.inner = inside(op.graph, copy, types)
        self.op = op.within(graph=self.inner)
        self.names = [value.name for value in copy.input]
        self.original = dict(zip(self.names, (value.name for value in body.input), strict=True))
        for mine, other in zip(copy.node, body.node, strict=True):
            self.original.update(zip(mine.output, other.output, strict=True))
        self.cotangents: Cotangents = {}

    def outside(self, x: Val, value_type: TypeProto | None = None) -> Val:
        """Make a value from outside the body available in it, and return it as a value of the body."""
        known = value_type or x.type
        if x.name not in self.inner.types and known is not None:
            self.inner.add_input(x.name, known)
        return self.op.val(x.name)

    def input(self, stem: str, value_type: TypeProto) -> Val:
        """Add an input to the body, with a new name that contains `stem`, and return it."""
        name = self.inner.fresh(stem)
        self.inner.add_input(name, value_type)
        return self.op.val(name)

    def differentiate(self, seeds: Iterable[tuple[str, Val]], wanted: Iterable[str]) -> None:
        """Differentiate the body. Store the results in `cotangents`.

        Args:
            seeds: outputs with their cotangents. If two outputs are the same value, their cotangents are added.
            wanted: the values to differentiate with respect to.
        """
        total: dict[str, Val] = {}
        for name, g in seeds:
            total[name] = bodies.add(self.op, total[name], g) if name in total else g
        self.cotangents = differentiate(self.inner, total, wanted, self.op, self.outer.training)

    def random(self, results: Iterable[Val]) -> list[Node]:
        """Return the nodes that draw random numbers on which `results` depend."""
        needed, found = {x.name for x in results}, []
        for node in reversed([*self.inner.nodes, *self.op.nodes]):
            if needed.intersection(node.output):
                needed.update(reads(node))
                if node.op_type in RANDOM:
                    found.append(node)
                elif any(inner.op_type in RANDOM for inner in with_bodies([node])):
                    raise Unknown(f"'{node.name}' draws random numbers in a nested subgraph")
        return found


class _Side(_Body):
    """A branch of the backward If: it computes the cotangents of the values that a branch of the forward If captures.

    If an output of the branch has a different rank than the output of the If, the branch is never taken, so its
    cotangents are zero. This is safe even if the rank of the If was only observed in a run of the model, because a
    guard makes runs with a different rank fail.
    """

    def __init__(
        self, op: Op, branch: GraphProto, gs: Sequence[Val | None], ys: Sequence[Val | None], wanted: Iterable[str]
    ) -> None:
        super().__init__(op, branch, [])
        pairs = [(self.op.val(name), y) for name, y in zip(self.inner.output_names, ys, strict=False) if y]
        known = [(mine, its) for mine, its in pairs if None not in (mine.known_shape, its.known_shape)]
        taken = all(mine.rank == its.rank for mine, its in known)
        outputs = zip(self.inner.output_names, gs if taken else (), strict=False)
        # use the shapes of the branch's own outputs, because the If has one shape for both branches
        seeds = [(name, self.outside(g, self.inner.types[name])) for name, g in outputs if g is not None]
        self.differentiate(seeds, wanted)

    def close(self, wanted: Sequence[Val]) -> GraphProto:
        """Return the branch of the backward If. Its outputs are the cotangents of `wanted`; missing ones are zeros."""
        found = [self.cotangents[x.name] or bodies.zeros_like(self.op, self.outside(x)) for x in wanted]
        drawn = self.random(found)
        if drawn:
            raise Unknown(f"'{drawn[0].name}' draws random numbers, which the gradient of a branch can't draw again")
        return bodies.close(self.inner, self.op, [], found)


class _Iteration(_Body):
    """One backward iteration of a Loop or Scan.

    Attributes:
        before, after: the names of the states in the body, before and after an iteration.
        rows: the names, in the body, of the slices that a Scan reads.
        states: map from the position of a state to its cotangent after the iteration, which is an input of the backward
            body.
        sums: map from a captured value to the sum of its cotangents so far, which is an input of the backward body.
        slices: map from an input of the backward body, which is a slice of the cotangent of a stacked output, to a
            pair: the whole cotangent, and the position of the output among the stacked outputs.
        saved: map from a value of the body that can't be recomputed (a state or a random draw) to its values in all
            iterations, which may become an output of the forward node.
    """

    def __init__(
        self, op: Op, body: GraphProto, types: Sequence[TypeProto], gs: Sequence[Val | None], initial: Sequence[Val],
        captured: Sequence[Val], xs: Sequence[Val] = (), first: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
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
        """Return `wanted`, and the states that depend on `wanted` after one or more iterations."""
        while True:
            active, _ = on_the_way(self.inner, wanted, [])
            pairs = zip(self.before, self.after, strict=True)
            more = [b for b, a in pairs if a in active and b not in wanted and is_differentiable(self.inner.types[b])]
            if not more:
                return wanted
            wanted = [*wanted, *more]

    def _alive(self, active: list[str], stacked: list[str]) -> list[int]:
        """Return the positions of the active states that get a cotangent from any later iteration."""
        alive = [j for j, b in enumerate(self.before) if self.gs[j] is not None and b in active]
        while True:
            _, needed = on_the_way(self.inner, active, [*(self.after[j] for j in alive), *stacked])
            more = [j for j, b in enumerate(self.before) if j not in alive and b in needed and b in active]
            if not more:
                return sorted(alive)
            alive += more

    def _take_random(self) -> list[str]:
        """Remove the nodes that draw random numbers, and return their outputs, which the forward node must provide."""
        drawn = self.random([g for g in self.cotangents.values() if g is not None])
        self.inner.nodes = [node for node in self.inner.nodes if not any(node is other for other in drawn)]
        return [name for node in drawn for name in node.output if name]

    def _each(self, name: str) -> Val:
        """Return a value for the output of the forward node that holds a body's value in all iterations.

        The output gets a name and a type, but is not added to the node yet. The values of the iterations are stacked.
        If a Loop may change the sizes of the value, they form a sequence instead.
        """
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
        """Return the stacked values that the body reads in slices: cotangents of outputs, then saved values.

        Args:
            axes: the axis along which each stacked output is stacked; None means 0.
            flips: the direction of each stacked output: 1 if its last slice is from the first iteration; None means 0.

        Returns:
            For each stacked value: (name of the slice in the body, stacked value, axis, direction).
        """
        given = [(name, g, axes[k] if axes else 0, flips[k] if flips else 0) for name, (g, k) in self.slices.items()]
        return given + [(name, stack, 0, 0) for name, stack in self.saved.items()]

    def close(
        self, before: Sequence[Node], inputs: Sequence[Val], outputs: Sequence[Val], rows: Sequence[Val] = ()
    ) -> GraphProto:
        """Return the backward body as a graph. Add the saved values that the body reads to the forward node's outputs.

        Args:
            before: nodes that run first in the body.
            inputs: the first inputs of the body. The states and the sums follow them.
            outputs: the first outputs of the body. The new states and sums follow them.
            rows: the last outputs of the body.
        """
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
        read = set(read_by(body.node))
        for name in self.sequences:
            if name in read:
                raise Unknown(f"the gradient would need the sequence '{self.original[name]}' of every iteration")
        for name in self.saved:
            if name in read:
                self.hand_out(name)
        return body

    def hand_out(self, name: str) -> Val:
        """Add an output to the forward node that holds a value of its body in all iterations, and return the output.

        The values are stacked, or they form a sequence if their sizes may differ.
        """
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
        """Return the initial values of the states and the sums of the backward loop."""
        finals = [self.gs[j] or bodies.zeros_like(self.outer, ys[j] or self.initial[j]) for j in self.states]
        return finals + [bodies.zeros_like(self.outer, x) for x in self.captured if x.name in self.sums]

    def types(self) -> list[TypeProto]:
        """Return the types that the states and the sums have at the end of the backward loop."""
        values = [self.initial[j] for j in self.states] + [x for x in self.captured if x.name in self.sums]
        return [x.type for x in values if x.type is not None]

    def of_initial(self, found: Sequence[Val]) -> list[Val | None]:
        """Return the cotangents of the initial states. They are among the outputs `found` of the backward loop."""
        given = dict(zip(self.states, found, strict=False))
        return [given.get(j) for j in range(len(self.initial))]

    def of_captured(self, found: Sequence[Val]) -> list[Val | None]:
        """Return the cotangents of the captured values. They are among the outputs `found` of the backward loop."""
        given = dict(zip(self.sums, found[len(self.states) :], strict=False))
        return [given.get(x.name) for x in self.captured]
