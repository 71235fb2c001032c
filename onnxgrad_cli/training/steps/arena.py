"""Simulate how onnxruntime allocates memory on the CPU: which values share a buffer, and the addresses of buffers.

A process takes more memory than its live values do. The buffer of a dead value is kept for a later value of the same
shape. Gaps between buffers may be too small for other buffers. A page that was written once stays with the process. All
of this follows from the sizes of the values, so that it can be simulated.

Source: AllocationPlanner (onnxruntime/core/framework/allocation_planner.cc) and BFCArena (bfc_arena.cc) with its
default settings: best fit, regions in powers of two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Sequence

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.live_memory import IN_PLACE
from onnxgrad_cli.cost.steps import ScheduledNode

UNIT = 256
"""Sizes of buffers are multiples of this number of bytes."""

FIRST_REGION, LARGEST_REGION = 1 << 20, 1 << 30
"""Bytes of the first and of the largest region.

Each region is twice as large as the one before, up to the largest size.
"""

MOST_WASTED = 128 << 20
"""A free chunk is split if at least this many bytes of it are left over after a buffer is taken from it.

A chunk of at least twice the buffer's size is split in any case.
"""

RUNS = 3
"""Number of simulated runs. Later runs write no new pages.

The second run may place buffers differently from the first.
"""

PAGE = 4096
"""Size of a page in bytes. The system gives a page to a process when the process first writes to it."""


class Arena:
    """A memory arena that requests regions from the system and never returns them.

    Attributes:
        size: the bytes of all regions.
        touched: the bytes of all pages that were written to.
    """

    def __init__(self) -> None:
        self.size = self.touched = 0
        self._region = FIRST_REGION
        self._end = 0  # end address of the next region: the system returns decreasing addresses
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._starts: dict[int, int] = {}  # free chunk's address -> size
        self._ends: dict[int, int] = {}  # end address of a free chunk -> its address
        self._taken: dict[int, int] = {}  # address of a buffer -> size of its chunk
        self._pages: dict[int, bytearray] = {}
        self._regions: list[int] = []

    def take(self, size: int) -> int:
        """Allocate a buffer of `size` bytes, mark its pages as written, and return its address."""
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
        """Free a buffer, and merge its memory with adjacent free chunks."""
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


def after_runs(
    steps: Sequence[ScheduledNode], outputs: Collection[str], facts: Facts, elsewhere: Collection[str] = ()
) -> Arena:
    """Return the memory arena of a session after `RUNS` runs of a model.

    Args:
        steps: the nodes, in the order in which they run.
        outputs: the outputs, which stay in memory until the end of a run.
        facts: the size of every value; values of unknown size count as 0 bytes.
        elsewhere: the outputs that are written to existing buffers outside the arena.
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
                    kind = _kind(name, facts)
                    addresses[name] = arena.take(kind[1] if kind else 0)
            for name in gone.get(at, ()):
                if name in addresses:
                    arena.give_back(addresses.pop(name))
        for name in list(addresses):
            arena.give_back(addresses.pop(name))
    return arena


def _owners(steps: Sequence[ScheduledNode], outputs: frozenset[str], facts: Facts) -> dict[str, str]:
    """Return a map: value that a node computes -> the value that owns its buffer, possibly itself.

    A result that is a view shares the buffer of its operand. Any other result gets the first of these that exists: the
    buffer of an operand that it may overwrite, the last freed buffer of the same shape, a new buffer. A view of an
    input or a constant has no owner.
    """
    owners: dict[str, str] = {}
    uses = Counter(name for step in steps for name in step.reads)
    uses.update(outputs)
    left: Counter[str] = Counter()  # buffer -> number of remaining reads
    free: list[str] = []  # free buffers, the last freed one at the end
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
    step: ScheduledNode,
    owners: dict[str, str],
    left: Counter[str],
    free: list[str],
    outputs: frozenset[str],
    facts: Facts,
) -> str | None:
    """Return the owner of the buffer that a result gets; None if the result is a view of an input or a constant."""
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
    """Return the shape of a value and its size in bytes; None if the size is unknown."""
    try:
        return facts[name].shape, facts.bytes(name)
    except LookupError:
        return None
