"""Compile by LLVM, where llvmlite is installed, what an optimizer does to each element of a weight: as one loop.

The loop reads and writes each number once, and needs no lock of Python's. It does what numpy's functions do one after
the other (`elementwise`): the same operations of IEEE 754 in the same order, of which LLVM contracts none, so that the
bits are the same. AdamW on two million numbers takes 0.6 to 0.7 ns a number so, and 2.1 to 3 by numpy (one thread).
numba compiles to the same loop, but takes 0.8 s and 128 MB until it has: LLVM alone takes 0.05 s and 76 MB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import signature
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np

from onnxgrad_cli.passes.optimizer.slices import Update
from onnxgrad_cli.training.steps.elementwise import InPlace, Scratch

TYPES: Mapping[np.dtype, Callable[[ModuleType], Any]] = {
    np.dtype(np.float32): lambda ir: ir.FloatType(),
    np.dtype(np.float64): lambda ir: ir.DoubleType(),
    np.dtype(np.bool_): lambda ir: ir.IntType(1),
}
"""The types in which a processor computes the terms exactly -> LLVM's, of the package `ir`."""


def _call(b: Any, name: str, *operands: Any) -> Any:
    """Call a function of LLVM's own, of which the operands and the result have one type."""
    kinds = [operand.type for operand in operands]
    kind = load_llvm().ir.FunctionType(kinds[0], kinds)
    return b.call(b.module.declare_intrinsic(f"llvm.{name}", kinds[:1], kind), operands)


def _equal(b: Any, x: Any, y: Any) -> Any:
    """Whether two floats, or two truths, are equal."""
    compare = b.icmp_unsigned if isinstance(x.type, load_llvm().ir.IntType) else b.fcmp_ordered
    return compare("==", x, y)


TERMS: Mapping[str, Callable[..., Any]] = {
    "Abs": lambda b, x: _call(b, "fabs", x),
    "Add": lambda b, x, y: b.fadd(x, y),
    "And": lambda b, x, y: b.and_(x, y),
    "Clip": lambda b, x, low, high: _call(b, "minimum", _call(b, "maximum", x, low), high),
    "Div": lambda b, x, y: b.fdiv(x, y),
    "Equal": _equal,
    "Greater": lambda b, x, y: b.fcmp_ordered(">", x, y),
    "GreaterOrEqual": lambda b, x, y: b.fcmp_ordered(">=", x, y),
    "Less": lambda b, x, y: b.fcmp_ordered("<", x, y),
    "LessOrEqual": lambda b, x, y: b.fcmp_ordered("<=", x, y),
    "Max": lambda b, x, y: _call(b, "maximum", x, y),
    "Min": lambda b, x, y: _call(b, "minimum", x, y),
    "Mul": lambda b, x, y: b.fmul(x, y),
    "Neg": lambda b, x: b.fneg(x),
    "Not": lambda b, x: b.not_(x),
    "Or": lambda b, x, y: b.or_(x, y),
    "Sign": lambda b, x: b.select(
        b.fcmp_ordered("!=", x, x.type(0.0)), _call(b, "copysign", x.type(1.0), x), b.fadd(x, x.type(0.0))
    ),
    "Sqrt": lambda b, x: _call(b, "sqrt", x),
    "Sub": lambda b, x, y: b.fsub(x, y),
    "Sum": lambda b, x, y: b.fadd(x, y),
    "Where": lambda b, condition, x, y: b.select(condition, x, y),
}
"""Operator -> what an LLVM builder `b` is asked for an element of the result. All are exact or rounded once;
exponentials and powers are not, and libraries differ in their last digits. The sign of a zero is 0, as numpy has it; of
two zeros, numpy leaves open which is the larger."""

OPERANDS = {op_type: len(signature(term).parameters) - 1 for op_type, term in TERMS.items()}
"""How many each of them takes."""

MEMORY = 76 * 10**6
"""Bytes that it takes to load llvmlite 0.50 and to compile, which takes 0.05 s; 0.45 takes 87 MB."""


def update_of(update: Update) -> InPlace | CompiledUpdate:
    """An update, compiled where that can be."""
    return CompiledUpdate(update) if is_compiled(update) else InPlace(update)


def is_compiled(update: Update) -> bool:
    """Whether an update is compiled: there is llvmlite, and it gives the bits that numpy gives."""
    return is_covered(update) and load_llvm() is not None


def is_covered(update: Update) -> bool:
    """Whether all that an update computes has a term, of as many operands, and a type that is computed exactly."""
    kinds = {*update.dtypes.values(), *(constant.dtype for constant in update.constants.values())}
    return kinds <= TYPES.keys() and all(
        all(node.input) and OPERANDS.get(node.op_type) == len(node.input) for node in update.nodes
    )


class CompiledUpdate:
    """An `Update` as a loop over elements; used as `InPlace` is.

    Attributes:
        loop: the one of all weights that are updated alike.
    """

    def __init__(self, update: Update) -> None:
        """Compile the loop, where no weight before was updated alike.

        Args:
            update: one that `is_covered`.
        """
        self._vectors = tuple(dict.fromkeys((*update.vectors, *update.outputs.values())))
        self._read = (*self._vectors, *update.scalars)
        self._pick = itemgetter(*self._read)
        self._constants = list(update.constants.values())
        self._places = [array.ctypes.data for array in self._constants]
        self.loop = _compiled(self._assembly(update), len(self._read) + len(self._constants))

    def run(self, values: Mapping[str, int], start: int, stop: int, scratch: Scratch) -> None:
        """Update the elements from `start` to `stop`; see `InPlace.run`.

        Args:
            values: the addresses of weights, slots, gradients and scalars.
            start, stop, scratch: see `InPlace.run`.
        """
        self.loop.run(start, stop, *self._pick(values), *self._places)

    def _assembly(self, update: Update) -> str:
        """The loop in LLVM's assembly: the same for weights updated alike, as the builder numbers all values."""
        ir = load_llvm().ir
        dtypes = {**update.dtypes, **{name: array.dtype for name, array in update.constants.items()}}
        dtypes |= {old: dtypes[new] for new, old in update.outputs.items()}
        types = {name: TYPES[dtype](ir) for name, dtype in dtypes.items()}
        names, number = (*self._read, *update.constants), ir.IntType(64)
        taken = [number, number, *[ir.PointerType()] * len(names)]
        loop = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), taken), "loop")
        start, stop, *places = loop.args
        for place in places:
            place.add_attribute("noalias")  # no two overlap: LLVM may compute several elements at once
        at = dict(zip(names, places, strict=True))
        before, head, body, after = map(loop.append_basic_block, ("before", "head", "body", "after"))

        b = ir.IRBuilder(before)
        values = {name: b.load(at[name], typ=types[name]) for name in names if name not in self._vectors}
        b.branch(head)

        b.position_at_end(head)
        i = b.phi(number)
        i.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", i, stop), body, after)

        b.position_at_end(body)
        for name in self._vectors:
            at[name] = b.gep(at[name], [i], source_etype=types[name])
            values[name] = b.load(at[name], typ=types[name])
        for node in update.nodes:
            values[node.output[0]] = TERMS[node.op_type](b, *(values[name] for name in node.input))
        for new, old in update.outputs.items():
            b.store(values[new], at[old])
        i.add_incoming(b.add(i, number(1)), body)
        b.branch(head)

        b.position_at_end(after)
        b.ret_void()
        return str(loop.module)


class _Loop:
    """A loop in the processor's code."""

    def __init__(self, assembly: str, places: int) -> None:
        llvm = load_llvm().binding
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        host = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
        machine = llvm.Target.from_default_triple().create_target_machine(opt=3, **host)
        module = llvm.parse_assembly(assembly)
        module.triple = machine.triple
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # which holds the code
        self._engine.finalize_object()
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * places)
        self.run = prototype(self._engine.get_function_address("loop"))


_compiled = cache(_Loop)


OLDEST = 0, 45
"""The version of llvmlite that has what compiles here: before, LLVM's pointers had types."""


@cache
def load_llvm() -> Any:
    """The package llvmlite, of which `ir` writes LLVM's assembly and `binding` binds LLVM; None where it is not
    installed, or is older than what is asked of it."""
    try:
        llvmlite = import_module("llvmlite")
        if tuple(map(int, llvmlite.__version__.split(".")[:2])) < OLDEST:
            return None
        import_module("llvmlite.ir")
        import_module("llvmlite.binding")
        return llvmlite
    except ImportError:
        return None
