"""Recurrent layers that keep the slopes of every step, so that their gradients are one short recursion back in time.

With z_t = W_ih x_t + b_ih and z'_t = W_hh h_{t−1} + b_hh, which the gates are functions of, a gradient with respect to
W_ih is Σ_t δ_t x_tᵀ, and one with respect to W_hh Σ_t δ'_t h_{t−1}ᵀ, where δ = ∂f/∂z and δ' = ∂f/∂z'. With dh and dc,
the gradients of the states, and products of entries,

    LSTM  dc_t = dc_{t+1} f_{t+1} + dh_t ∂h_t/∂c_t,  δ_t = dc_t ∂c_t/∂z_t, of the last gate dh_t ∂h_t/∂z_t,  δ'_t = δ_t
    GRU   δ_t = dh_t ∂h_t/∂z_t,  δ'_t = dh_t ∂h_t/∂z'_t
    RNN   δ_t = dh_t ∂h_t/∂z_t,  δ'_t = δ_t

and dh_{t−1} = ∂f/∂y_{t−1} + W_hhᵀ δ'_t, of a GRU + u_t dh_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_sigmoid_slope, _tanh_slope = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
# Computes the gates of a step before their functions, where the slopes will be.
_Run = Callable[[int], Tensor]
# A parameter, zeros that its gradients arrive at, (b, T, ·), and what it is multiplied by; None of a bias.
Arrival = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps:
    """T steps of a layer, one way along b sequences, as they ran.

    Attributes:
        x, before, after: x_t, h_{t−1} and h_t, (T, b, ·).
        cell: c_T of an LSTM, (b, h).
        slopes: of the states by the gates, (T, b, gates, h); a GRU's fourth are by z' of its new gate.
        back: from the gates to h_{t−1}, (gates · h, outputs).
        carry: ∂c_t/∂c_{t−1} of an LSTM, u of a GRU, (T, b, h).
        through: ∂h_t/∂c_t of an LSTM, (T, b, h).
        projection, inner: W_hr of an LSTM, and h_t before it, (T, b, h).
    """

    x: Tensor
    before: Tensor
    after: Tensor
    cell: Tensor
    slopes: Tensor
    back: Tensor
    carry: Tensor | None = None
    through: Tensor | None = None
    projection: Tensor | None = None
    inner: Tensor | None = None

    def gradients(self, dy: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the gates and of h, (…, b, T, ·), of h_0 and of c_0, (…, b, ·), by those of y and of c_T."""
        gates = dy.new_empty(len(self.slopes), *dy.shape[:-2], *self.slopes.shape[2:])
        dh, of_h = torch.zeros_like(dy[..., 0, :]), []
        for t in reversed(range(len(gates))):
            slopes, gate, dh = self.slopes[t], gates[t], dh + dy[..., t, :]
            carry = None if self.carry is None else self.carry[t]
            if self.projection is not None:
                of_h.append(dh)
                dh = dh @ self.projection
            if self.through is not None and carry is not None:
                dc = torch.addcmul(dc, dh, self.through[t])
                torch.mul(slopes[:, :3], dc.unsqueeze(-2), out=gate[..., :3, :])
                torch.mul(slopes[:, 3], dh, out=gate[..., 3, :])
                dc, beside = dc * carry, None
            else:
                torch.mul(slopes, dh.unsqueeze(-2), out=gate)
                beside = None if carry is None else dh * carry
            dh = gate.flatten(-2) @ self.back
            dh = dh if beside is None else dh + beside
        return gates.flatten(-2).movedim(0, -2), torch.stack(of_h[::-1], dim=-2) if of_h else dy[..., :0, :], dh, dc


def _stepped(m: nn.RNNBase, weights: list[Any], x: Tensor, h: Tensor, c: Tensor) -> Steps:
    """The steps of a layer of m along x, (T, b, ·), from h and c."""
    (w_ih, w_hh, b_ih, b_hh, projection), (length, size, inputs) = weights, x.shape
    one = inputs + 1
    # Both products are one, with what every step sees, (x_t, 1, h_{t−1}).
    of_x, of_h = w_hh.new_zeros(2, len(w_hh), one + w_hh.shape[1])
    of_x[:, :inputs], of_h[:, one:] = w_ih, w_hh
    if b_ih is not None:
        of_x[:, inputs], of_h[:, inputs] = b_ih, b_hh
    matrix = of_x + of_h
    if isinstance(m, nn.GRU):
        new = 2 * m.hidden_size
        matrix = torch.cat([matrix[:new], of_x[new:], of_h[new:]])
    seen, z = x.new_empty(length + 1, size, matrix.shape[1]), x.new_empty(length, size, len(matrix))
    seen[:-1, :, :inputs], seen[..., inputs], seen[0, :, one:] = x, 1.0, h

    def run(t: int) -> Tensor:
        return torch.mm(seen[t], matrix.T, out=z[t])

    hidden, kind = seen[..., one:], _lstm if isinstance(m, nn.LSTM) else _gru if isinstance(m, nn.GRU) else _rnn
    more = kind(run, m, z, hidden, c, projection)
    slopes = z.view(length, size, -1, m.hidden_size)
    x = seen[:-1, :, :inputs]
    return Steps(x=x, before=hidden[:-1], after=hidden[1:], slopes=slopes, back=matrix[:, one:], **more)


# Each of these runs the steps, h into `hidden`, and leaves slopes in z, where the gates were. A CPU has a step's gates
# in its cache; elsewhere the slopes of all steps at once take few calls.


def _lstm(run: _Run, m: Any, z: Tensor, hidden: Tensor, c: Tensor, projection: Tensor | None) -> dict[str, Any]:
    cells, width, on_cpu = z.new_empty(len(z) + 1, *c.shape), m.hidden_size, z.device.type == "cpu"
    tanh, carry, through = z.new_empty(3, len(z), *c.shape)
    inner, cells[0] = hidden[1:] if projection is None else torch.empty_like(tanh), c

    def keep_slopes(steps: Any) -> None:
        i, f, g, o = z[steps].chunk(4, dim=-1)
        carry[steps], of_i = f, _sigmoid_slope(g, i)
        _tanh_slope.grad_input(o, tanh[steps], grad_input=through[steps])
        _tanh_slope.grad_input(i, g, grad_input=g)
        _sigmoid_slope.grad_input(cells[:-1][steps], f, grad_input=f)
        _sigmoid_slope.grad_input(tanh[steps], o, grad_input=o)
        i.copy_(of_i)

    for t in range(len(z)):
        i, f, g, o = run(t).chunk(4, dim=1)
        z[t, :, : 2 * width].sigmoid_(), g.tanh_(), o.sigmoid_()
        torch.tanh(torch.addcmul(f * cells[t], i, g, out=cells[t + 1]), out=tanh[t])
        torch.mul(o, tanh[t], out=inner[t])
        if projection is not None:
            torch.mm(inner[t], projection.T, out=hidden[t + 1])
        if on_cpu:
            keep_slopes(t)
    if not on_cpu:
        keep_slopes(slice(None))
    return {"cell": cells[-1], "carry": carry, "through": through, "projection": projection, "inner": inner}


def _gru(run: _Run, m: Any, z: Tensor, hidden: Tensor, c: Tensor, _: None) -> dict[str, Any]:
    carry, width, on_cpu = torch.empty_like(hidden[1:]), m.hidden_size, z.device.type == "cpu"

    def keep_slopes(steps: Any) -> None:
        r, u, n, of_h = z[steps].chunk(4, dim=-1)
        carry[steps], new = u, _tanh_slope(1 - u, n)
        _sigmoid_slope.grad_input(hidden[:-1][steps] - n, u, grad_input=u)
        n.copy_(new)
        of_r = _sigmoid_slope(new * of_h, r)
        torch.mul(new, r, out=of_h)
        r.copy_(of_r)

    for t in range(len(z)):
        r, u, n, of_h = run(t).chunk(4, dim=1)
        z[t, :, : 2 * width].sigmoid_(), n.addcmul_(r, of_h).tanh_()
        torch.lerp(n, hidden[t], u, out=hidden[t + 1])
        if on_cpu:
            keep_slopes(t)
    if not on_cpu:
        keep_slopes(slice(None))
    return {"cell": c, "carry": carry}


def _rnn(run: _Run, m: Any, z: Tensor, hidden: Tensor, c: Tensor, _: None) -> dict[str, Any]:
    relu = m.nonlinearity == "relu"
    for t in range(len(z)):
        hidden[t + 1] = run(t).relu_() if relu else run(t).tanh_()
    # The slope of relu is 1 where its value is above 0.
    z.sign_() if relu else torch.sub(1, z.square(), out=z)
    return {"cell": c}


# --- as a function that autograd knows -------------------------------------------------------------------------------


class _Gradients(torch.autograd.Function):
    """`Steps.gradients`, of many outputs in one."""

    @staticmethod
    def forward(steps: Steps, dy: Tensor, dc: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return steps.gradients(dy, dc)

    @staticmethod
    def setup_context(*_: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], steps: Steps, *ds: Tensor) -> tuple[tuple[Tensor, ...], int]:
        at = zip(ds, dims[1:], strict=True)
        rows = (d.expand(info.batch_size, *d.shape) if dim is None else d.movedim(dim, 0) for d, dim in at)
        return _Gradients.forward(steps, *rows), 0


class _Layer(torch.autograd.Function):
    """y, (b, T, outputs), and c_T. Weights get no gradients, but zeros that are added to z, to z' and to h."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, w_ih: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        ctx.steps, ctx.w_ih = steps, w_ih
        return steps.after.transpose(0, 1).contiguous(), steps.cell.clone()

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("slopes are kept without a graph: no second gradient goes through a recurrent layer")
        gates, of_h, dh, dc = _Gradients.apply(ctx.steps, *ds)  # type: ignore[no-untyped-call]
        rows = len(ctx.w_ih)
        z = back = gates[..., :rows]
        if gates.shape[-1] > rows:
            back = torch.cat([gates[..., : rows // 3 * 2], gates[..., rows:]], dim=-1)
        dx = z @ ctx.w_ih.to(z) if ctx.needs_input_grad[2] else None
        return None, None, dx, dh, dc, z, back, of_h


def run_recurrent(m: Any, x: Tensor, hx: Any) -> tuple[Any, list[Arrival], list[tuple[Tensor, int]]]:
    """What a recurrent layer returns, where its parameters' gradients arrive, and what these all come through.

    The last are its outputs, each with the dimension of its batch.
    """
    a, widths = x if m.batch_first else x.transpose(0, 1), (m.proj_size or m.hidden_size, m.hidden_size)
    like, starts = m.weight_ih_l0, hx if isinstance(hx, tuple) else (hx, None)
    arrivals: list[Arrival] = []
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(m.num_layers):
        ways = []
        for way in ("", "_reverse") if m.bidirectional else ("",):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            weights: list[Any] = [getattr(m, f"{name}_l{layer}{way}", None) for name in names]
            given = (None if state is None else state[len(ends)] for state in starts)
            h, c = (like.new_zeros(len(a), n) if s is None else s.to(like) for s, n in zip(given, widths, strict=True))
            along = (a.flip(1) if way else a).to(like)
            with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
                steps = _stepped(m, weights, along.transpose(0, 1), h, c)
            gates = along.shape[1], len(weights[0])
            shapes = gates, gates, (along.shape[1] if m.proj_size else 0, widths[0])
            zeros = [like.new_zeros(()).expand(len(a), *shape).requires_grad_() for shape in shapes]
            y, c = _Layer.apply(steps, weights[0].detach(), along, h, c, *zeros)  # type: ignore[no-untyped-call]
            factors = steps.x, steps.before, None, None, steps.inner
            for weight, z, factor in zip(weights, (*zeros[:2], *zeros), factors, strict=True):
                if weight is not None:
                    arrivals.append((weight, z, None if factor is None else factor.transpose(0, 1)))
            ends.append((y[:, -1], c))
            ways.append(y.flip(1) if way else y)
        a = torch.cat(ways, dim=2) if len(ways) > 1 else ways[0]
    h, c = (torch.stack(last) for last in zip(*ends, strict=True))
    y = a if m.batch_first else a.transpose(0, 1).contiguous()
    return (y, (h, c) if isinstance(m, nn.LSTM) else h), arrivals, [(a, 0), (h, 1), (c, 1)]
