"""If, Loop, Scan, sequences and optionals."""

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from tests.harness import Case, const

DOUBLE, INT64, BOOL = TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def value(name: str, rank: int = 2, dtype: int = DOUBLE) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, [None] * rank)


def sequence(name: str, dtype: int = DOUBLE) -> ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, dtype, None)


def branches(condition: str = "x0") -> NodeProto:
    """y0 = tanh(x1 @ x2), or x1 * x1: x2 is read in one branch only."""
    yes = helper.make_graph([node("MatMul", ["x1", "x2"], ["a"]), node("Tanh", ["a"], ["t"])], "yes", [], [value("t")])
    no = helper.make_graph([node("Mul", ["x1", "x1"], ["m"])], "no", [], [value("m")])
    return node("If", [condition], ["y0"], name="node", then_branch=yes, else_branch=no)


def step(*more: NodeProto, state: str = "s2", condition: str = "c", trips: str = "x0", start: str = "") -> NodeProto:
    """s <- tanh(s @ x2) from s = x1; y0 is the last state, y1 stacks the square of each."""
    nodes = [node("MatMul", ["s", "x2"], ["a"]), node("Tanh", ["a"], ["s2"]), *more]
    nodes += [node("Mul", [state, state], ["o"]), node("Identity", [condition], ["c2"])]
    inputs = [value("i", 0, INT64), value("c", 0, BOOL), value("s")]
    body = helper.make_graph(nodes, "body", inputs, [value("c2", 0, BOOL), value(state), value("o")])
    return node("Loop", [trips, start, "x1"], ["y0", "y1"], name="node", body=body)


def scan(**attrs: object) -> NodeProto:
    """s <- tanh(s @ x2 + row of x1) from s = x0; y0 is the last state, y1 stacks row * s."""
    nodes = [node("MatMul", ["s", "x2"], ["a"]), node("Add", ["a", "r"], ["b"]), node("Tanh", ["b"], ["s2"])]
    nodes.append(node("Mul", ["r", "s2"], ["o"]))
    body = helper.make_graph(nodes, "body", [value("s"), value("r")], [value("s2"), value("o")])
    return node("Scan", ["x0", "x1"], ["y0", "y1"], name="node", body=body, num_scan_inputs=1, **attrs)


def rows_of(axis: int, count: int = 4) -> tuple[int, ...]:
    return (count, 2, 3) if axis == 0 else (2, count, 3) if axis == 1 else (2, 3, count)


IF = [
    Case("If", [np.array(yes), (2, 3), (3, 3)], nodes=[branches()], opset=opset, note=note, symbolic=False)
    for yes, note in ((True, "then"), (False, "else"))
    for opset in (13, 16, 19, 21)
]

early = [
    node("ReduceSum", ["s2"], ["total"], keepdims=0),
    node("Less", ["i", "x3"], ["soon"]),
    node("And", ["soon", "c"], ["more"]),
]
nested = (
    helper.make_graph([node("Mul", ["s2", "x2"], ["p"]), node("Sin", ["p"], ["u"])], "yes", [], [value("u")]),
    helper.make_graph([node("Identity", ["s2"], ["v"])], "no", [], [value("v")]),
)
odd = [
    node("Mod", ["i", "x3"], ["rest"]),
    node("Cast", ["rest"], ["odd"], to=BOOL),
    node("If", ["odd"], ["w"], then_branch=nested[0], else_branch=nested[1]),
]
inner_step = helper.make_graph(
    [node("MatMul", ["u", "x2"], ["u1"]), node("Sin", ["u1"], ["u2"]), node("Identity", ["d"], ["d2"])],
    "inner",
    [value("j", 0, INT64), value("d", 0, BOOL), value("u")],
    [value("d2", 0, BOOL), value("u2")],
)
square = (3, 3)

LOOP = [
    *(
        Case("Loop", [np.array(3), (2, 3), square], nodes=[step()], outputs=2, opset=opset, symbolic=False)
        for opset in (13, 16, 19, 21, 23, 24, 25)
    ),
    Case("Loop", [const(3), (2, 3), square], nodes=[step()], outputs=2, note="constant count", symbolic=False),
    Case("Loop", [np.array(1), (2, 3), square], nodes=[step()], outputs=2, note="once", symbolic=False),
    Case(
        "Loop", [np.array(9), (2, 3), square, np.array(2)], nodes=[step(*early, condition="more")], outputs=2,
        note="early exit", symbolic=False,
    ),
    Case(
        "Loop", [np.array(9), (2, 3), square, np.array(2), np.array(True)], symbolic=False,
        nodes=[step(*early, condition="more", trips="", start="x4")], outputs=2, note="no limit but a condition",
    ),
    Case(
        "Loop", [np.array(4), square, square, np.array(2)], nodes=[step(*odd, state="w")], outputs=2,
        note="an If inside", symbolic=False,
    ),
    Case(
        "Loop", [np.array(2), (2, 3), square, np.array(3)], outputs=2, symbolic=False, note="a Loop inside",
        nodes=[step(node("Loop", ["x3", "", "s2"], ["w"], body=inner_step), state="w")],
    ),
]  # fmt: skip

SCAN = [
    *(
        Case(
            "Scan", [(2, 3), rows_of(axis), square], nodes=[scan(
                scan_input_axes=[axis], scan_output_axes=[out],
                scan_input_directions=[back], scan_output_directions=[out_back],
            )], outputs=2, note=f"axes {axis} {out} directions {back} {out_back}", symbolic=False,
        )
        for axis, out in ((0, 0), (1, 2), (-1, -1))
        for back in (0, 1)
        for out_back in (0, 1)
    ),
    *(
        Case("Scan", [(2, 3), rows_of(0), square], nodes=[scan()], outputs=2, opset=opset, symbolic=False)
        for opset in (13, 16, 19, 21)
    ),
    Case("Scan", [(2, 3), rows_of(0, 1), square], nodes=[scan()], outputs=2, note="once", symbolic=False),
]  # fmt: skip

elements = node("SequenceConstruct", ["x0", "x1", "x0"], ["s"])
flat = node("ConcatFromSequence", ["s"], ["y0"], axis=0)


def appended(*nodes: NodeProto, result: str = "t") -> list[NodeProto]:
    return [elements, *nodes, node("ConcatFromSequence", [result], ["y0"], axis=0)]


grow = helper.make_graph(
    [
        node("MatMul", ["s", "x2"], ["a"]), node("Tanh", ["a"], ["s2"]),
        node("SequenceInsert", ["q", "s2"], ["q2"]), node("Identity", ["c"], ["c2"]),
    ],
    "body",
    [value("i", 0, INT64), value("c", 0, BOOL), value("s"), sequence("q")],
    [value("c2", 0, BOOL), value("s2"), sequence("q2")],
)  # fmt: skip

SEQUENCES = [
    Case("SequenceConstruct", [(2, 3), (4, 3)], nodes=[elements, flat], second_order=False, note="no sum of sequences"),
    Case("ConcatFromSequence", [(2, 3), (2, 3)], nodes=[
        elements, node("ConcatFromSequence", ["s"], ["y0"], axis=1, new_axis=1)
    ], second_order=False, note="new axis", symbolic=False),
    *(
        Case("SequenceAt", [(2, 3), (2, 3), np.array(at)], nodes=[elements, node("SequenceAt", ["s", "x2"], ["y0"])],
             second_order=False, note=f"{at}")
        for at in (0, 1, -1, -3)
    ),
    *(
        Case("SequenceInsert", [(2, 3), (4, 3), (1, 3), np.array(at)], second_order=False, note=f"{at}",
             nodes=appended(node("SequenceInsert", ["s", "x2", "x3"], ["t"])))
        for at in (0, 2, 3, -1, -3)
    ),
    Case("SequenceInsert", [(2, 3), (4, 3), (1, 3)], second_order=False, note="at the end",
         nodes=appended(node("SequenceInsert", ["s", "x2"], ["t"]))),
    *(
        Case("SequenceErase", [(2, 3), (4, 3), np.array(at)], second_order=False, note=f"{at}",
             nodes=appended(node("SequenceErase", ["s", "x2"], ["t"])))
        for at in (0, 1, -1, -3)
    ),
    Case("SequenceErase", [(2, 3), (4, 3)], second_order=False, note="the last",
         nodes=appended(node("SequenceErase", ["s"], ["t"]))),
    *(
        Case("SplitToSequence", [(5, 3), *extra], note=note, nodes=[
            node("SplitToSequence", ["x0", *(f"x{i + 1}" for i in range(len(extra)))], ["s"], **attrs),
            node("Constant", [], ["at"], value_int=1),
            node("SequenceAt", ["s", "at"], ["p"]), node("Mul", ["p", "p"], ["y0"]),
        ])
        for extra, attrs, note in (
            ((), {}, "one by one"), ((), {"keepdims": 0, "axis": 1}, "axis dropped"),
            ((np.array(2),), {}, "by two"), ((np.array([1, 4]),), {"axis": 0}, "sizes"),
        )
    ),
    Case("SequenceMap", [(5, 3), np.array(2)], second_order=False, note="squares", nodes=[
        node("SplitToSequence", ["x0", "x1"], ["s"]),
        node("SequenceMap", ["s"], ["q"], name="node", body=helper.make_graph(
            [node("Mul", ["e", "e"], ["m"])], "body", [value("e")], [value("m")]
        )),
        node("Constant", [], ["at"], value_int=1), node("SequenceAt", ["q", "at"], ["y0"]),
    ]),
    Case("SequenceEmpty", [np.array(4), (2, 3), square], note="grows in a Loop", second_order=False, symbolic=False,
         nodes=[
             node("SequenceEmpty", [], ["q0"], dtype=DOUBLE),
             node("Loop", ["x0", "", "x1", "q0"], ["y1", "qs"], body=grow, name="node"),
             node("ConcatFromSequence", ["qs"], ["y0"], axis=1),
         ], outputs=2),
    Case("Optional", [(2, 3)], nodes=[
        node("Optional", ["x0"], ["o"]), node("OptionalGetElement", ["o"], ["e"]), node("Sin", ["e"], ["y0"])
    ]),
    *(Case("OptionalGetElement", [(2, 3)], opset=opset, note="of a tensor") for opset in (18, 28)),
]  # fmt: skip

ROWS = [*IF, *LOOP, *SCAN, *SEQUENCES]
