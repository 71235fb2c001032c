"""Compile by LLVM, where llvmlite is installed, what an optimizer does to each element of a weight: as one loop.

The loop reads and writes each number once, and needs no lock of Python's. It does what numpy's functions do one after
the other (`elementwise`): the same operations of IEEE 754 in the same order, of which LLVM contracts none, so that the
bits are the same. AdamW on two million numbers takes 0.6 ns a number so, and 2.1 to 3 by numpy (one thread). numba
compiles to the same loop, but takes 0.8 s and 128 MB until it has: LLVM alone takes a tenth of that, and 76 MB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from operator import itemgetter
from types import ModuleType

import numpy as np

from onnxgrad_cli.passes.optimizer.slices import Update
from onnxgrad_cli.training.steps.elementwise import InPlace, Scratch

TYPES: Mapping[np.dtype, tuple[str, str]] = {
    np.dtype(np.float32): ("float", "f32"),
    np.dtype(np.float64): ("double", "f64"),
    np.dtype(np.bool_): ("i1", "i1"),
}
"""The types in which a processor computes the terms exactly -> what LLVM calls them, alone and in names of
functions."""


def _of_two(word: str) -> str:
    return f"{{y}} = {word} {{t}} {{0}}, {{1}}"


def _called(name: str, operands: str = "{t} {0}", result: str = "{y}") -> str:
    return f"{result} = call {{t}} @llvm.{name}.{{s}}({operands})"


TERMS = {
    "Abs": _called("fabs"), "Add": _of_two("fadd"), "And": _of_two("and"),
    "Clip": _called("maximum", "{t} {0}, {t} {1}", "{y}a") + "\n" + _called("minimum", "{t} {y}a, {t} {2}"),
    "Div": _of_two("fdiv"), "Equal": _of_two("fcmp oeq"),
    "Greater": _of_two("fcmp ogt"), "GreaterOrEqual": _of_two("fcmp oge"), "Less": _of_two("fcmp olt"),
    "LessOrEqual": _of_two("fcmp ole"), "Max": _called("maximum", "{t} {0}, {t} {1}"),
    "Min": _called("minimum", "{t} {0}, {t} {1}"), "Mul": _of_two("fmul"), "Neg": "{y} = fneg {t} {0}",
    "Not": "{y} = xor {t} {0}, true", "Or": _of_two("or"),
    "Sign": "{y}a = fadd {t} {0}, 0.0\n{y}b = fcmp olt {t} {0}, 0.0\n{y}c = select i1 {y}b, {t} -1.0, {t} {y}a\n"
            "{y}d = fcmp ogt {t} {0}, 0.0\n{y} = select i1 {y}d, {t} 1.0, {t} {y}c",
    "Sqrt": _called("sqrt"), "Sub": _of_two("fsub"), "Sum": _of_two("fadd"),
    "Where": "{y} = select i1 {0}, {t} {1}, {t} {2}",
}  # fmt: skip
"""Operator -> LLVM's instructions for an element of the result `y`; `t` and `s` are the type of the last operand. All
are exact or rounded once; exponentials and powers are not, and libraries differ in their last digits. The sign of a
zero is 0, as numpy has it; of two zeros, numpy leaves open which is the larger."""

OPERANDS = {op_type: sum(f"{{{i}}}" in term for i in range(3)) for op_type, term in TERMS.items()}
"""How many each of them takes."""

CALLED = (("fabs", 1), ("sqrt", 1), ("maximum", 2), ("minimum", 2))
"""LLVM's functions in them, and how many operands they take."""

MEMORY = 76 * 10**6
"""Bytes that it takes to load LLVM and to compile, which takes 0.1 s."""


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
    """An `Update` as a loop over elements; used as `InPlace` is."""

    def __init__(self, update: Update) -> None:
        """Compile the loop, once for all weights that are updated alike.

        Args:
            update: one that `is_covered`.
        """
        self._vectors = tuple(dict.fromkeys((*update.vectors, *update.outputs.values())))
        self._read = (*self._vectors, *update.scalars)
        self._pick = itemgetter(*self._read)
        self._constants = list(update.constants.values())
        self._places = [array.ctypes.data for array in self._constants]
        self._loop = _compiled(self._source(update), len(self._read) + len(self._constants))

    def run(self, values: Mapping[str, int], start: int, stop: int, scratch: Scratch) -> None:
        """Update the elements from `start` to `stop`; see `InPlace.run`.

        Args:
            values: the addresses of weights, slots, gradients and scalars.
            start, stop, scratch: see `InPlace.run`.
        """
        self._loop.run(start, stop, *self._pick(values), *self._places)

    def _source(self, update: Update) -> str:
        """The loop in LLVM's language, in which values have numbers: it is the same for weights updated alike."""
        kinds = {**update.dtypes, **{name: array.dtype for name, array in update.constants.items()}}
        kinds |= {old: kinds[new] for new, old in update.outputs.items()}
        places = {name: f"%p{i}" for i, name in enumerate((*self._read, *update.constants))}
        types = {name: TYPES[kind] for name, kind in kinds.items()}
        element = {name: f"%a{i}" for i, name in enumerate(places)}
        before = [f"{element[n]} = load {types[n][0]}, ptr {places[n]}" for n in places if n not in self._vectors]
        body = []
        for name in self._vectors:
            body.append(f"{element[name]}p = getelementptr {types[name][0]}, ptr {places[name]}, i64 %i")
            body.append(f"{element[name]} = load {types[name][0]}, ptr {element[name]}p")
        at = {name: f"{element[name]}p" for name in self._vectors}
        for number, node in enumerate(update.nodes):
            kind, suffix = types[node.input[-1]]
            operands = map(element.__getitem__, node.input)
            body.append(TERMS[node.op_type].format(*operands, y=f"%x{number}", t=kind, s=suffix))
            element[node.output[0]] = f"%x{number}"
        body += [f"store {types[new][0]} {element[new]}, ptr {at[old]}" for new, old in update.outputs.items()]
        return _LOOP.format(
            declared="\n".join(
                f"declare {kind} @llvm.{name}.{suffix}({', '.join([kind] * count)})"
                for name, count in CALLED
                for kind, suffix in TYPES.values()
                if kind != "i1"
            ),
            places=", ".join(f"ptr noalias {place}" for place in places.values()),
            before="\n".join(before),
            body="\n".join(body),
        )


_LOOP = """
{declared}
define void @loop(i64 %start, i64 %stop, {places}) {{
entry:
{before}
%some = icmp slt i64 %start, %stop
br i1 %some, label %body, label %done
body:
%i = phi i64 [%start, %entry], [%next, %body]
{body}
%next = add nsw i64 %i, 1
%more = icmp slt i64 %next, %stop
br i1 %more, label %body, label %done
done:
ret void
}}
"""


class _Loop:
    """A loop in the processor's code."""

    def __init__(self, source: str, places: int) -> None:
        llvm = load_llvm()
        assert llvm is not None
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        host = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
        machine = llvm.Target.from_default_triple().create_target_machine(opt=3, **host)
        module = llvm.parse_assembly(source)
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # which holds the code
        self._engine.finalize_object()
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * places)
        self.run = signature(self._engine.get_function_address("loop"))


_compiled = cache(_Loop)


OLDEST = 0, 45
"""The version of llvmlite that has what compiles here: before, LLVM's pointers had types."""


@cache
def load_llvm() -> ModuleType | None:
    """The package that binds LLVM; None where it is not installed, or is older than what its loops are written for."""
    try:
        version = import_module("llvmlite").__version__
        return import_module("llvmlite.binding") if tuple(map(int, version.split(".")[:2])) >= OLDEST else None
    except ImportError:
        return None
