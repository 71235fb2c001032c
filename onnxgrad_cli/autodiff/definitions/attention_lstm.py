"""AttnLSTM (domain com.microsoft): an LSTM that attends to a memory after each step, in operators of the standard.

Source: D. Bahdanau et al., Neural Machine Translation by Jointly Learning to Align and Translate, 2015, appendix A.1.2;
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
"""Each direction of a layer: True if it begins at the last step."""


@definition("AttnLSTM", domain="com.microsoft", needs_opset=16)
def attention_lstm(
    op, x, weight, recurrence, bias=None, lengths=None, initial_h=None, initial_c=None, peepholes=None,
    query_weight=None, memory_weight=None, score_weight=None, memory=None, memory_lengths=None, output_weight=None, *,
    hidden_size, activations=None, activation_alpha=None, activation_beta=None, clip=None, direction="forward",
    input_forget=0,
):  # fmt: skip
    """All outputs of the LSTM, the last ones, and the last cells.

    A step reads its input and the attention after the step before. Its own output is the query of a softmax over the
    memory; the attention is the memory so weighted, or a projection of the output and the weighted memory.
    """
    if lengths is not None or peepholes is not None or input_forget or clip or activation_alpha or activation_beta:
        raise Unknown("it has lengths, peepholes, coupled gates, a clip, or activations with parameters")
    names = [name.decode() if isinstance(name, bytes) else name for name in activations or ()]
    if [name.lower() for name in names] != ["sigmoid", "tanh", "tanh"] * (len(names) // 3):
        raise Unknown(f"its activations are {', '.join(names)}")
    if direction not in DIRECTIONS or memory is None or query_weight is None:
        raise Unknown("it has no memory, or its direction is not known")
    parts: list[tuple[Val, Val, Val]] = []
    for at, reverse in enumerate(DIRECTIONS[direction]):
        own = [
            None if each is None else op.Gather(each, op.const(at), axis=0)
            for each in (weight, recurrence, bias, initial_h, initial_c, query_weight, memory_weight, score_weight,
                         output_weight)
        ]  # fmt: skip
        parts.append(_direction(op, x, memory, memory_lengths, own, hidden_size, reverse))
    return (
        op.Concat(*(op.unsqueeze(y, [1]) for y, _, _ in parts), axis=1),
        *(op.Concat(*(op.unsqueeze(part[i], [0]) for part in parts), axis=0) for i in (1, 2)),
    )


def _direction(
    op: Op, x: Val, memory: Val, lengths: Val | None, weights: list[Val | None], size: int, reverse: bool
) -> tuple[Val, Val, Val]:
    """Return the outputs of one direction, the last output and the last cell."""
    w, r, bias, h, c, query_weight, memory_weight, score_weight, output_weight = weights
    assert w is not None and r is not None and query_weight is not None and memory_weight is not None
    w, r = op.swap_last(w), op.swap_last(r)
    batch, valid = op.size(x, 1), None
    if lengths is not None:
        valid = op.steps(op.size(memory, 1), axis=1, rank=2) < op.unsqueeze(op.cast(lengths, TensorProto.INT64), [1])
        memory = op.Where(op.unsqueeze(valid, [2]), memory, op.const(0.0, memory))
    keys = memory @ memory_weight
    both = None if bias is None else op.sum(op.reshape(bias, [2, 4 * size]), [0])
    width = op.size(memory if output_weight is None else output_weight, -1)
    states = [each if each is not None else op.zeros([batch, size], x) for each in (h, c)]
    states.append(op.zeros([batch, width], x))

    def step(op: Op, states: list[Val], steps: list[Val]) -> tuple[list[Val], list[Val]]:
        h, c, attention = states
        z = op.Concat(steps[0], attention, axis=1) @ w + h @ r
        gates = op.split(z if both is None else z + both, [size] * 4, axis=1)
        i, o, f = (op.Sigmoid(gate) for gate in gates[:3])
        cell = f * c + i * op.Tanh(gates[3])
        y = o * op.Tanh(cell)
        scores = op.sum(op.Tanh(op.unsqueeze(y @ query_weight, [1]) + keys) * score_weight, [2], keepdims=False)
        if valid is not None:
            scores = op.Where(valid, scores, op.const(float("-inf"), scores))
        share = op.unsqueeze(op.Softmax(scores, axis=1), [1])
        seen = op.squeeze(share @ memory, [1])
        after = seen if output_weight is None else op.Concat(y, seen, axis=1) @ output_weight
        return [op.state(new, old.shape) for new, old in zip((y, cell, after), states, strict=True)], [y]

    (last_h, last_c, _), (y,) = scan(op, step, states, [x], reverse=reverse)
    return y, last_h, last_c
