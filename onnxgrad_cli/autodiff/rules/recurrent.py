"""Recurrent layers: LSTM, GRU and RNN, differentiated through time by one Scan per direction.

The forward node does not return its gate values and cell states. The rules recompute them from its output Y by matrix
products, for all time steps at once. For an LSTM with expensive products, `lstm_gates` keeps the gates instead. All
factors that do not depend on cotangents are computed before the backward Scan, so a step of the Scan has only a few
nodes. Forward and backward of an LSTM take 1.21 times as long as in PyTorch, those of GRU and RNN 0.5 to 0.7 times. The
times are for T = 50 steps, B = 16 samples and H = 128 units, with one and two threads. A graph unrolled in time would
have 15 to 40 times as many nodes. In both directions, time steps are in the order of the input. Steps beyond the length
of a sequence leave the state unchanged.

Source: S. Hochreiter and J. Schmidhuber, 1997; K. Cho et al., 2014; equations as on the ONNX operator pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules import activation
from onnxgrad_cli.autodiff.rules.lstm_gates import Gates, keep_gates, keeps_gates, of_direction, stack
from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown


def _affine(op: Op, g: Val, y: Val, x: Val, *, alpha: float, beta: float) -> Val:
    """Return g dy/dx for y = alpha x + beta, in the shape of x, to which g broadcasts."""
    return g * op.fill(alpha, x)


def _scaled_tanh(op: Op, g: Val, y: Val, x: Val, *, alpha: float, beta: float) -> Val:
    """Return g dy/dx for y = alpha tanh(beta x)."""
    return activation.tanh(op, g, op.Tanh(x * beta), x) * (alpha * beta)


ACTIVATIONS: dict[str, tuple[Callable[..., Val], dict[str, float | None]]] = {
    "Sigmoid": (activation.sigmoid, {}),
    "Tanh": (activation.tanh, {}),
    "Relu": (activation.relu, {}),
    "Softsign": (activation.softsign, {}),
    "Softplus": (activation.softplus, {}),
    "LeakyRelu": (activation.leaky_relu, {"alpha": 0.01}),
    "Elu": (activation.elu, {"alpha": 1.0}),
    "HardSigmoid": (activation.hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "ThresholdedRelu": (activation.thresholded_relu, {"alpha": None}),
    "Affine": (_affine, {"alpha": None, "beta": None}),
    "ScaledTanh": (_scaled_tanh, {"alpha": None, "beta": None}),
}
"""Map from an activation to a pair: its gradient rule, and a map from its parameters to their defaults.

A default of None means that the node must state the parameter. onnxruntime would use 0 for a missing one, but the
operator pages give a different default or none.
"""


DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
"""Map from the attribute `direction` to one bool per direction: True if it runs from the last step to the first."""


class Activation(NamedTuple):
    """An activation function of a cell, as a callable. It clips its input to [-clip, clip] first, if clip is given."""

    op: Op
    name: str
    parameters: dict[str, float]
    clip: float | None = None

    def __call__(self, x: Val, op: Op | None = None) -> Val:
        """Return the value of the activation at `x`."""
        op, given = op or self.op, self.parameters
        x = self._clipped(op, x)
        if self.name == "Affine":
            return x * given["alpha"] + given["beta"]
        if self.name == "ScaledTanh":
            return op.Tanh(x * given["beta"]) * given["alpha"]
        return getattr(op, self.name)(x, **given)

    def pull(self, g: Val, y: Val, x: Val | None) -> Val:
        """Return `g` times the derivative of the activation.

        Args:
            g: the cotangent of the activation's value.
            y: the value of the activation.
            x: the input of the activation. If it is None, the derivative is computed from `y` alone.
        """
        inside = x and self._clipped(self.op, x)
        g = ACTIVATIONS[self.name][0](self.op, g, y, inside, **self.parameters)
        if self.clip is None:
            return g
        assert x is not None  # callers with clip always recompute the input
        return g * self.op.cast(self.op.Abs(x) <= self.clip, g)

    def _clipped(self, op: Op, x: Val) -> Val:
        return x if self.clip is None else op.Clip(x, -self.clip, self.clip)


class LayerDirection(NamedTuple):
    """One direction of a layer: the operands of its cell, and the cotangents of its outputs.

    The names of cotangents begin with g. `h_before` is the state before each step. `active` is 1 for steps within a
    sequence and 0 beyond its end; `passing` is 1 - `active`. Shapes, with T steps, B samples, I inputs, H units and n
    gates:

    - x: [T, B, I]
    - y, h_before, gy: [T, B, H]
    - w: [nH, I]
    - r: [nH, H]
    - b: [2, nH] or None
    - p: [3H] or None
    - h, c, gh, gc: [B, H]
    - active, passing: [T, B, 1] or None
    """

    op: Op
    backwards: bool
    hidden: int
    acts: list[Activation]
    x: Val
    y: Val
    h_before: Val
    w: Val
    r: Val
    b: Val | None
    p: Val | None
    c: Val | None
    gy: Val | None
    gh: Val
    gc: Val | None
    active: Val | None
    passing: Val | None
    gates: Gates | None = None

    def split(self, v: Val, *gates: int, axis: int = -1) -> tuple[Val, ...]:
        """Split `v`, in which gates are concatenated along an axis. Part i consists of gates[i] gates."""
        sizes = self.op.ints([n * self.hidden for n in gates])
        return self.op.Split(v, sizes, axis=axis, outputs=len(gates))

    def join(self, *parts: Val, axis: int = -1) -> Val:
        """Concatenate the gates along an axis."""
        return self.op.Concat(*parts, axis=axis)

    def only_active(self, v: Val) -> Val:
        """Return `v` with 0 for steps beyond the end of a sequence."""
        return v if self.active is None else v * self.active

    def or_pass(self, v: Val) -> Val:
        """Return `v` with 1 for steps beyond the end of a sequence."""
        return v if self.active is None else v * self.active + self.passing

    def product(self, a: Val, b: Val) -> Val:
        """Return the sum over all steps and samples of the outer products of `a` and `b`."""
        return self.op.transpose(self._rows(a), [1, 0]) @ self._rows(b)

    def _rows(self, v: Val) -> Val:
        last = v.shape[-1]
        return self.op.reshape(v, [-1, last if isinstance(last, int) else self.op.dim(v, -1)])

    def total(self, v: Val) -> Val:
        """Return the sum of `v` over all steps and samples."""
        return self.op.sum(v, [0, 1], keepdims=False)

    def gradients(self, dz: Val, dh: Val) -> Grads:
        """Return the cotangents of x, w, r, b and h, given the cotangents dz (inputs of the gates) and dh (of h)."""
        total = self.total(dz)
        grads = {"x": dz @ self.w, "w": self.product(dz, self.x), "r": self.product(dz, self.h_before), "h": dh}
        return {**grads, "b": self.join(total, total)}

    def back(
        self, body: Callable[..., Any], states: Sequence[Val], steps: Sequence[Val]
    ) -> tuple[list[Val], list[Val]]:
        """Emit the backward Scan, which runs in the opposite direction. Return the last states and the stacked results.

        Args:
            body: a function that writes one step; see `emission.bodies.Body`. The cotangent of the step's Y is already
                added to the first state, dh.
            states: the states before the first step.
            steps: values that are sliced along the time axis.
        """
        gy = [] if self.gy is None else [self.only_active(self.gy)]

        def with_gy(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
            dh = states[0] + steps[0] if gy else states[0]
            return body(op, [dh, *states[1:]], steps[len(gy) :])

        return scan(self.op, with_gy, states, [*gy, *steps], reverse=not self.backwards)

    def let_pass(self, op: Op, dh_before: Val, dh: Val, passing: Sequence[Val]) -> Val:
        """Return the cotangent of the state before a step. Beyond the end of a sequence, it equals the one after it.

        Args:
            op: the emitter.
            dh_before: the cotangent within the sequence; 0 beyond its end.
            dh: the cotangent of the state after the step.
            passing: one value that is 1 beyond the end of the sequence and 0 within it; empty without lengths.
        """
        return dh_before + dh * passing[0] if passing else dh_before


Grads = dict[str, Val]


def _lstm(run: LayerDirection, coupled: bool) -> Grads:
    op, f, g, h = run.op, *run.acts
    h = h._replace(clip=None)  # as in onnxruntime; the operator page clips the inputs of all activations
    s = run.gates or _gates(run, coupled)
    by_i, by_o = f.pull(s.cand - s.c_before if coupled else s.cand, s.i, s.zi), f.pull(s.hc, s.o, s.zo)
    by_f = op.fill(0.0, s.i) if coupled else f.pull(s.c_before, s.f, s.zf)
    by_c, through = h.pull(s.o, s.hc, s.c), s.f
    if run.p is not None:
        pi, po, pf = run.split(run.p, 1, 1, 1)
        by_c, through = by_c + by_o * po, through + by_i * pi + by_f * pf
    factors = run.only_active(run.join(by_i, by_o, by_f, g.pull(s.i, s.cand, s.zg)))

    def body(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
        (dh, dc), (factors, by_c, through, *passing) = states, steps
        dc = dc + dh * by_c
        dz = op.Concat(dc, dh, dc, dc, axis=-1) * factors
        return [run.let_pass(op, dz @ run.r, dh, passing), dc * through], [dz]

    steps = [factors, run.only_active(by_c), run.or_pass(through), *([] if run.passing is None else [run.passing])]
    assert run.gc is not None
    (dh, dc), (dz,) = run.back(body, [run.gh, run.gc], steps)
    grads = {**run.gradients(dz, dh), "c": dc}
    if run.p is not None:
        assert s.c is not None
        di, do, df, _ = run.split(dz, 1, 1, 1, 1)
        grads["p"] = run.join(*(run.total(v) for v in (di * s.c_before, do * s.c, df * s.c_before)))
    return grads


def _gates(run: LayerDirection, coupled: bool) -> Gates:
    """Recompute the gates of an LSTM, which the operator does not return."""
    op, f, g, h = run.op, *run.acts
    h = h._replace(clip=None)
    z = run.x @ op.swap_last(run.w) + run.h_before @ op.swap_last(run.r)
    if run.b is not None:
        z = z + op.sum(run.b, [0], keepdims=False)
    zi, zo, zf, zg = run.split(z, 1, 1, 1, 1)
    cand = g(zg)
    assert run.c is not None
    if run.p is None:
        i, o = f(zi), f(zo)
        forget = 1 - i if coupled else f(zf)

        def cell(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
            return [steps[0] * states[0] + steps[1]], [states[0]]

        steps = [run.or_pass(forget), run.only_active(i * cand)]
        _, (c_before,) = scan(op, cell, [run.c], steps, reverse=run.backwards)
        c = forget * c_before + i * cand
    else:
        pi, po, pf = run.split(run.p, 1, 1, 1)

        def peeping(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
            (c,), (zi, zf, cand, *active) = states, steps
            i = f(zi + c * pi, op)
            after = (1 - i if coupled else f(zf + c * pf, op)) * c + i * cand
            return [op.Where(active[0] > 0, after, c) if active else after], [c]

        steps = [zi, zf, cand, *([] if run.active is None else [run.active])]
        _, (c_before,) = scan(op, peeping, [run.c], steps, reverse=run.backwards)
        zi, zf = zi + pi * c_before, zf + pf * c_before
        i = f(zi)
        forget = 1 - i if coupled else f(zf)
        c = forget * c_before + i * cand
        zo = zo + po * c
        o = f(zo)
    return Gates(i, o, forget, cand, c_before, h(c), zi, zo, zf, zg, c)


def _gru(run: LayerDirection, linear_before_reset: bool) -> Grads:
    op, f, g = run.op, *run.acts
    rb = None
    zx = run.x @ op.swap_last(run.w)
    if run.b is not None:
        wb, rb = (op.Gather(run.b, op.const(half), axis=0) for half in (0, 1))
        zx = zx + wb
    xz, xr, xh = run.split(zx, 1, 1, 1)
    r_zr, r_h = run.split(run.r, 2, 1, axis=0)
    rb_zr, rb_h = run.split(rb, 2, 1) if rb is not None else (None, None)
    h_zr = run.h_before @ op.swap_last(r_zr)
    hz, hr = run.split(h_zr if rb_zr is None else h_zr + rb_zr, 1, 1)
    az, ar = xz + hz, xr + hr
    z, r = f(az), f(ar)
    seen = run.h_before if linear_before_reset else r * run.h_before
    q = seen @ op.swap_last(r_h)
    q = q if rb_h is None else q + rb_h
    ah = xh + (r * q if linear_before_reset else q)
    cand = g(ah)
    by_z, by_h = f.pull(run.only_active(run.h_before - cand), z, az), g.pull(run.only_active(1 - z), cand, ah)
    keep = run.or_pass(z)
    if linear_before_reset:
        factors = run.join(by_z, f.pull(by_h * q, r, ar), by_h * r)

        def body(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
            (dh,), (factors, keep) = states, steps
            dz = op.Concat(dh, dh, dh, axis=-1) * factors
            return [dh * keep + dz @ run.r], [dz, dh]

        (dh,), (dz_r, dhs) = run.back(body, [run.gh], [factors, keep])
        dz_w = run.join(*run.split(dz_r, 1, 1, 1)[:2], dhs * by_h)
        dr = run.product(dz_r, run.h_before)
    else:

        def body(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
            (dh,), (by_z, by_h, by_r, r, keep) = states, steps
            da = dh * by_h
            dq = da @ r_h
            d_zr = op.Concat(dh * by_z, dq * by_r, axis=-1)
            return [dh * keep + dq * r + d_zr @ r_zr], [op.Concat(d_zr, da, axis=-1)]

        steps = [by_z, by_h, f.pull(run.h_before, r, ar), r, keep]
        (dh,), (dz_w,) = run.back(body, [run.gh], steps)
        dz_r = dz_w
        d_zr, da = run.split(dz_w, 2, 1)
        dr = run.join(run.product(d_zr, run.h_before), run.product(da, seen), axis=0)
    grads = {"x": dz_w @ run.w, "w": run.product(dz_w, run.x), "r": dr, "h": dh}
    return {**grads, "b": run.join(run.total(dz_w), run.total(dz_r))}


def _rnn(run: LayerDirection) -> Grads:
    op, (f,) = run.op, run.acts
    z = run.x @ op.swap_last(run.w) + run.h_before @ op.swap_last(run.r)
    if run.b is not None:
        z = z + op.sum(run.b, [0], keepdims=False)
    one = op.const(1.0, run.x)
    slope = run.only_active(f.pull(one, run.y, z))

    def body(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
        (dh,), (slope, *passing) = states, steps
        dz = dh * slope
        return [run.let_pass(op, dz @ run.r, dh, passing)], [dz]

    (dh,), (dz,) = run.back(body, [run.gh], [slope, *([] if run.passing is None else [run.passing])])
    return run.gradients(dz, dh)


def _layer(
    op: Op, gs: Sequence[Val | None], ys: Sequence[Val | None], cell: Callable[[LayerDirection], Grads],
    inputs: dict[str, Val | None], defaults: Sequence[str], attributes: dict[str, Any], may_keep: bool = False,
) -> list[Val | None]:  # fmt: skip
    """Split a layer into its directions, call `cell` for each, and return the cotangents of the layer's inputs.

    Args:
        op: the emitter.
        gs, ys: the cotangents and the values of the node's outputs.
        cell: the gradient of one direction.
        inputs: the inputs of the node, by name, in order.
        defaults: the default activations of one direction.
        attributes: the attributes of the node.
        may_keep: True if the forward node may be replaced by one that keeps the gates.

    Raises:
        Unknown: neither the node nor its recurrent weights give the size of the state, or onnxruntime does not support
            its attributes.
    """
    backwards = DIRECTIONS.get(attributes["direction"], (False,))
    acts = _activations(op, list(defaults) * len(backwards), attributes)
    time_first = not attributes.get("layout")
    require(
        time_first, "its attribute 'layout' is 1, which onnxruntime does not support", "transpose its operands instead"
    )
    wide = {name: v and op.wide(v) for name, v in inputs.items()}
    gs = [g and op.wide(g) for g in gs]
    hidden = attributes["hidden_size"] or wide["r"].known_size(-1, "the hidden size")  # type: ignore[union-attr]
    y = op.wide(ys[0] or _hand_out(op))
    plain = may_keep and [(a.name, a.clip) for a in acts] == [(name, None) for name in defaults] * len(backwards)
    gates: Sequence[Gates | None] = [None] * len(backwards)
    if plain and keeps_gates(op, inputs, hidden):
        gates = keep_gates(op, inputs, hidden, backwards)
    wide["x"], steps = _within_length(op, wide["x"], wide["sequence_lens"])  # type: ignore[arg-type]
    each = len(defaults)
    found = [
        cell(_direction(op, d, backwards, hidden, acts[d * each : (d + 1) * each], wide, y, gs, steps, gates[d]))
        for d in range(len(backwards))
    ]
    return _joined(op, found, inputs)


def _joined(op: Op, found: Sequence[Grads], inputs: dict[str, Val | None]) -> list[Val | None]:
    """Combine the results of all directions into the cotangents of the layer's inputs.

    All directions read the same x, so its cotangents are added. The cotangents of the other inputs are stacked.
    """
    result: dict[str, Val | None] = {"x": found[0]["x"] if len(found) == 1 else found[0]["x"] + found[1]["x"]}
    for name in ("w", "r", "b", "h", "c", "p"):
        result[name] = None if inputs.get(name) is None else stack(op, [grads[name] for grads in found])
    return [(g := result.get(name)) and op.cast(g, x) for name, x in inputs.items()]  # type: ignore[arg-type]


class _Steps(NamedTuple):
    """The position of each time step in its sequence. All fields are None if no sequence lengths are given.

    Attributes:
        left: [time, batch, 1], the number of steps left in the sequence, including this one; 0 or less beyond its end.
        active: [time, batch, 1], 1 within the sequence and 0 beyond its end.
        passing: [time, batch, 1], 0 within the sequence and 1 beyond its end.
        some: [batch, 1], 1 if the sequence has any steps and 0 if it is empty.
    """

    left: Val | None = None
    active: Val | None = None
    passing: Val | None = None
    some: Val | None = None


def _within_length(op: Op, x: Val, lengths: Val | None) -> tuple[Val, _Steps]:
    """Return `x` with 0 beyond the end of each sequence, even in place of nan, and the positions of the steps."""
    if lengths is None:
        return x, _Steps()
    left = op.unsqueeze(op.cast(lengths, TensorProto.INT64), [0, 2]) - op.steps(op.size(x, 0), 0, 3)
    x = op.Where(left > 0, x, op.const(0.0, x))
    active = op.cast(left > 0, x)
    return x, _Steps(left, active, 1 - active, op.unsqueeze(op.cast(lengths > 0, x), [1]))


def _direction(
    op: Op, d: int, backwards: Sequence[bool], hidden: int, acts: list[Activation], inputs: dict[str, Val | None],
    y: Val, gs: Sequence[Val | None], steps: _Steps, gates: Gates | None,
) -> LayerDirection:  # fmt: skip
    """Return direction `d` of a layer, given inputs of all directions, the output Y, and the outputs' cotangents."""

    def of(v: Val | None, axis: int = 0) -> Val | None:
        return of_direction(op, v, d, len(backwards), axis)

    def end(position: int) -> Val | None:
        """Return the cotangent of a direction's last state, set to 0 for empty sequences."""
        g = of(gs[position] if position < len(gs) else None)
        return g if g is None or steps.some is None else g * steps.some

    own = of(y, 1)
    assert own is not None and inputs["x"] is not None
    zero = op.fill(0.0, op.Gather(own, op.const(0), axis=0))
    h, b = of(inputs["h"]), of(inputs["b"])
    return LayerDirection(
        op, backwards[d], hidden, acts,
        inputs["x"], own, _before(op, own, h, zero, backwards[d], steps.left),
        of(inputs["w"]), of(inputs["r"]),  # type: ignore[arg-type]
        None if b is None else op.reshape(b, [2, -1]),
        of(inputs.get("p")), of(inputs.get("c")) or zero,
        of(gs[0], 1), end(1) or zero, end(2) or zero,
        steps.active, steps.passing, gates,
    )  # fmt: skip


def _hand_out(op: Op) -> Val:
    """Add the output Y to a forward node that lacks it, and return this output."""
    assert op.node is not None
    name = op.node.output[0] = op.graph.fresh(f"{op.node.name}/Y")
    op.graph.types[name] = op.infer(op.node)[name]
    return op.val(name)


def _before(op: Op, y: Val, h: Val | None, zero: Val, backwards: bool, left: Val | None) -> Val:
    """Return the state before each step: Y of the preceding step, or the initial state at a sequence's first step."""
    first = op.unsqueeze(zero if h is None else h, [0])
    if not backwards:
        return op.Concat(first, op.Slice(y, op.ints([0]), op.ints([-1]), op.ints([0])), axis=0, shape=y.known_shape)
    rest = op.Slice(y, op.ints([1]), op.ints([2**62]), op.ints([0]))
    shifted = op.Concat(rest, first, axis=0, shape=y.known_shape)
    if left is None or h is None:
        return shifted
    return op.Where(left > 1, shifted, first)


def _activations(op: Op, defaults: Sequence[str], attributes: dict[str, Any]) -> list[Activation]:
    """Return the activations of all directions, with their parameters.

    The attributes activation_alpha and activation_beta have one entry for each activation that has the parameter, in
    the order of the activations.
    """
    clip, known = attributes["clip"], {name.lower(): name for name in ACTIVATIONS}
    if clip is not None and clip <= 0:
        raise Unknown(f"its attribute 'clip' is {clip:g}, which onnxruntime does not support", "remove it")
    names = [name.decode() if isinstance(name, bytes) else name for name in attributes["activations"] or defaults]
    count = f"it names {len(names)} activations, but needs {len(defaults)}"
    require(len(names) >= len(defaults), count, "name all activations, or none")
    left = {key: iter(attributes[f"activation_{key}"] or ()) for key in ("alpha", "beta")}
    found = []
    for name in names[: len(defaults)]:
        standard = f"choose from {', '.join(ACTIVATIONS)}"
        require(name.lower() in known, f"its activation '{name}' is not a standard activation", standard)
        name = known[name.lower()]
        parameters: dict[str, Any] = {key: next(left[key], default) for key, default in ACTIVATIONS[name][1].items()}
        missing = [f"activation_{key}" for key, value in parameters.items() if value is None]
        why = f"its activation '{name}' has no {' and '.join(missing)}, and onnxruntime would use zero"
        require(not missing, why, "set these attributes of the node")
        found.append(Activation(op, name, parameters, clip))
    return found


KINK = "1 at the bounds of clip; each activation as the operator of the same name"


@rule("LSTM", versions=(7, None), kink=KINK)
def lstm(op, gs, ys, x, w, r, b, sequence_lens, initial_h, initial_c, p, **attributes):
    """Gates i, o, f and candidate c, with peepholes p for i, o and f. With `input_forget`, f = 1 - i.

    `clip` bounds the inputs of the gates' activations f and g, including peepholes and biases.
    """
    inputs = {"x": x, "w": w, "r": r, "b": b, "sequence_lens": sequence_lens, "h": initial_h, "c": initial_c, "p": p}
    cell = partial(_lstm, coupled=bool(attributes["input_forget"]))
    return _layer(op, gs, ys, cell, inputs, ("Sigmoid", "Tanh", "Tanh"), attributes, not attributes["input_forget"])


@rule("GRU", versions=(7, None), kink=KINK)
def gru(op, gs, ys, x, w, r, b, sequence_lens, initial_h, *, linear_before_reset, **attributes):
    """Gates z, r and candidate h. The reset gate applies before or after the candidate's matrix product."""
    inputs = {"x": x, "w": w, "r": r, "b": b, "sequence_lens": sequence_lens, "h": initial_h}
    cell = partial(_gru, linear_before_reset=bool(linear_before_reset))
    return _layer(op, gs, ys, cell, inputs, ("Sigmoid", "Tanh"), attributes)


@rule("RNN", versions=(7, None), kink=KINK)
def rnn(op, gs, ys, x, w, r, b, sequence_lens, initial_h, **attributes):
    """h = f(W x + R h + b)."""
    inputs = {"x": x, "w": w, "r": r, "b": b, "sequence_lens": sequence_lens, "h": initial_h}
    return _layer(op, gs, ys, _rnn, inputs, ("Tanh",), attributes)
