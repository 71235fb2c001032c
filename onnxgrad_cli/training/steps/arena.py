"""The memory that onnxruntime's runs take on the processor: which values share a buffer, and where buffers lie.

Values alive are less than what a process takes. A dead value's buffer is kept for a later value of its shape, what lies
free between two buffers is too small for a third, and what was written once stays with the process. All of that follows
from the sizes of the values, so it is played through here.

Source: AllocationPlanner (onnxruntime/core/framework/allocation_planner.cc) and BFCArena (bfc_arena.cc), whose settings
are those by default: best fit, regions in powers of two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Sequence

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.liveness import IN_PLACE
from onnxgrad_cli.cost.steps import Step

UNIT = 256
"""Sizes of buffers are multiples of it."""

FIRST_REGION, LARGEST_REGION = 1 << 20, 1 << 30
"""Bytes of the first region, and those up to which each region is twice as large as the last."""

MOST_WASTED = 128 << 20
"""Bytes that a buffer may leave unused at most, where it takes less than twice what was asked for."""

RUNS = 3
"""Runs after which no more is written to: the first one finds the memory empty, and so lays buffers out otherwise."""

PAGE = 4096
"""Bytes that a process gets at once, when it first writes to one of them."""


class Arena:
    """Memory that is taken from the system region by region, and never given back.

    Attributes:
        size: the bytes of its regions.
        touched: the bytes that were ever written to.
    """

    def __init__(self) -> None:
        self.size = self.touched = 0
        self._region = FIRST_REGION
        self._end = 0  # where the next region ends: the system gives lower and lower addresses
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._starts: dict[int, int] = {}  # free chunk's address -> size
        self._ends: dict[int, int] = {}  # where a free chunk ends -> its address
        self._taken: dict[int, int] = {}  # address of a buffer -> size of its chunk
        self._pages: dict[int, bytearray] = {}
        self._regions: list[int] = []

    def take(self, size: int) -> int:
        """The address of a new buffer of `size` bytes, which is written to."""
        rounded = -(-max(size, 1) // UNIT) * UNIT
        at = bisect_left(self._free, (rounded,))
        if at == len(self._free):
            self._extend(rounded)
            at = bisect_left(self._free, (rounded,))
        found, address = self._free[at]
        self._remove(address)
        if found >= 2 * rounded or found - rounded >= MOST_WASTED:
            self._add(address + rounded, found - rounded)
            found = rounded
        self._taken[address] = found
        self._touch(address, size)
        return address

    def give_back(self, address: int) -> None:
        """Let a buffer's memory be taken anew, joined with what lies free beside it."""
        size = self._taken.pop(address)
        if (after := address + size) in self._starts:
            size += self._remove(after)
        if address in self._ends:
            before = self._ends[address]
            size += self._remove(before)
            address = before
        self._add(address, size)

    def _extend(self, needed: int) -> None:
        enough = self._region >= needed
        while self._region < needed:
            self._region *= 2
        begin = self._end - self._region
        insort(self._regions, begin)
        self.size += self._region
        self._pages[begin] = bytearray(self._region // PAGE)
        self._add(begin, self._region)
        self._end = begin - PAGE  # regions don't touch each other
        if enough:
            self._region = min(2 * self._region, LARGEST_REGION)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._starts[address], self._ends[address + size] = size, address

    def _remove(self, address: int) -> int:
        size = self._starts.pop(address)
        del self._ends[address + size], self._free[bisect_left(self._free, (size, address))]
        return size

    def _touch(self, address: int, size: int) -> None:
        begin = self._regions[bisect_left(self._regions, address + 1) - 1]
        pages, first, last = self._pages[begin], (address - begin) // PAGE, -(-(address - begin + size) // PAGE)
        self.touched += PAGE * pages.count(0, first, last)
        pages[first:last] = b"\1" * (last - first)


def after_runs(steps: Sequence[Step], outputs: Collection[str], facts: Facts, elsewhere: Collection[str] = ()) -> Arena:
    """The memory that a session has after some runs of a model.

    Args:
        steps: the nodes, in the order in which they run.
        outputs: the results, which stay to the end of a run.
        facts: the size of every value; what has none counts as nothing.
        elsewhere: those of the results that are written to memory which is there already.
    """
    arena, addresses = Arena(), dict[str, int]()
    owners = _owners(steps, frozenset(outputs), facts)
    last = {owners[name]: at for at, step in enumerate(steps) for name in (*step.reads, *step.made) if name in owners}
    last.update((owners[name], len(steps)) for name in outputs if name in owners)
    gone: dict[int, list[str]] = {}
    for name, at in last.items():
        gone.setdefault(at, []).append(name)
    for _ in range(RUNS):
        for at, step in enumerate(steps):
            for name in step.made:
                if owners.get(name) == name and name not in elsewhere:
                    addresses[name] = arena.take(_bytes(name, facts))
            for name in gone.get(at, ()):
                if name in addresses:
                    arena.give_back(addresses.pop(name))
        for name in list(addresses):
            arena.give_back(addresses.pop(name))
    return arena


def _owners(steps: Sequence[Step], outputs: frozenset[str], facts: Facts) -> dict[str, str]:
    """Of each value the one whose buffer it has; values that nodes make alone, and no views of others.

    A result takes the buffer of the operand that it shows, of one that it may be written over, or else that one of its
    shape which has become free last.
    """
    owners: dict[str, str] = {}
    uses = Counter(name for step in steps for name in step.reads)
    uses.update(outputs)
    left: Counter[str] = Counter()  # buffer -> how often it is still to be read
    free: list[str] = []  # buffers, the one that has become free last at the end
    for step in steps:
        for name in step.made:
            owner = _owner(name, step, owners, left, free, outputs, facts)
            if owner is not None:
                owners[name] = owner
                left[owner] += uses[name]
        for name in (*step.reads, *step.made):
            owner = owners.get(name)
            if owner is None or (name in step.made and uses[name]):
                continue
            left[owner] -= name not in step.made
            if left[owner] == 0 and owner not in free:
                free.append(owner)
    return owners


def _owner(
    name: str,
    step: Step,
    owners: dict[str, str],
    left: Counter[str],
    free: list[str],
    outputs: frozenset[str],
    facts: Facts,
) -> str | None:
    """Whose buffer a result gets; None where that is memory which no node has made."""
    if name in outputs:
        return name
    if step.shows:
        return owners.get(step.shows)
    kind = _kind(name, facts)
    if step.op_type in IN_PLACE and name == step.made[0]:
        for operand in step.reads:
            owner = owners.get(operand)
            if owner is not None and left[owner] == 1 and _kind(operand, facts) == kind:
                return owner
    for owner in reversed(free):
        if _kind(owner, facts) == kind is not None:
            free.remove(owner)
            return owner
    return name


def _kind(name: str, facts: Facts) -> tuple[tuple[int, ...], int] | None:
    """The shape of a value, and the bytes of it."""
    try:
        return facts[name].shape, facts.bytes(name)
    except LookupError:
        return None


def _bytes(name: str, facts: Facts) -> int:
    kind = _kind(name, facts)
    return kind[1] if kind else 0
