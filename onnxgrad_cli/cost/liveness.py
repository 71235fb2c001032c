"""The memory of the values that are still to be read, node by node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.steps import Step
from onnxgrad_cli.ir.execution_order import run_order

IN_PLACE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor Identity LeakyRelu Log Mul Neg Not Pow Reciprocal Relu Sigmoid "
    "Sign Sin Softmax Softplus Sqrt Sub Sum Tanh Where".split()
)
"""Operators whose result runtimes write over an operand of its size that nobody reads any more."""

COURSE = 200
"""Points of the course of the memory."""

NEVER, GONE = -1, -2
"""In place of the last node, in an order, that reads a value: that there is none, and that it has run."""


def live_bytes(
    steps: Sequence[Step], outputs: Iterable[str], facts: Facts, elsewhere: Collection[str] = ()
) -> list[int]:
    """The bytes of all values alive after each node, in the order in which onnxruntime runs them.

    A value is alive from the node that makes it to the last one that reads it; a view is the memory of what it shows,
    and a result of an elementwise operator takes the place of an operand that nobody reads any more, as runtimes have
    it. Weights and inputs don't count.

    Args:
        steps: the nodes of a training model, or some of them.
        outputs: values that stay alive to the end.
        facts: the size of every value; what has none counts as nothing.
        elsewhere: values that are written to memory which is there already.
    """
    numbers: dict[str, int] = {}
    owner, makers, views = list[int](), list[int](), list[int]()
    reads, made, needs = list[list[int]](), list[range](), list[list[int]]()
    number_of = numbers.get
    for at, step in enumerate(steps):
        read = [number for name in step.reads if (number := number_of(name)) is not None]
        reads.append(read)
        needs.append([makers[value] for value in read])
        first = len(owner)
        for number, name in enumerate(step.made, first):
            numbers[name] = number
            owner.append(number)
            makers.append(at)
        made.append(range(first, len(owner)))
        if step.shows:
            shown = number_of(step.shows)
            owner[first] = first if shown is None else owner[shown]
            views.append(first)
    sizes = [0 if name in elsewhere else facts.bytes_or_nothing(name) for name in numbers]
    for view in views:
        sizes[view] = 0
    order, last = run_order(needs), [NEVER] * len(owner)
    for i, at in enumerate(order):
        for value in reads[at]:
            last[owner[value]] = i
    for name in outputs:
        if name in numbers:
            last[owner[numbers[name]]] = len(order)
    alive, course = 0, list[int]()
    for i, at in enumerate(order):
        new = unread = gone = taken = 0
        for value in made[at]:
            new += sizes[value]
            unread += sizes[value] if last[value] == NEVER else 0
        first = sizes[made[at][0]] if made[at] else 0
        for value in reads[at]:
            value = owner[value]
            if last[value] == i:
                last[value] = GONE
                gone += sizes[value]
                taken = first if sizes[value] == first else taken
        course.append(alive + new - (taken if steps[at].op_type in IN_PLACE else 0))
        alive += new - gone - unread
    return course


def course_of_memory(steps: Sequence[Step], outputs: Iterable[str], facts: Facts) -> list[int]:
    """The course of `live_bytes`: of each of `COURSE` runs of nodes the most."""
    course = live_bytes(steps, outputs, facts)
    size = -(-len(course) // COURSE) or 1
    return [max(course[i : i + size]) for i in range(0, len(course), size)]
