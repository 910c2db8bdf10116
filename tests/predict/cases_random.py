"""Families of small random networks, with sizes that often coincide, and what their predictions must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

from bayesadam.predict import linearised
from predict.cases_networks import Lambda, error_of, few_outputs, posterior_of, randomise_norms

P = nn.Parameter
STRUCTURES = ("diagonal", "inputs", "kronecker")


class Sizes:
    """Numbers of one random network: b examples, t positions, k features, c outputs, all of them 1 to 4."""

    def __init__(self, r: Random) -> None:
        self.r = r
        self.b, self.t, self.k, self.c = (r.randint(1, 4) for _ in range(4))
        self.b += r.choice((0, 0, 3))

    def act(self) -> Callable[[Tensor], Tensor]:
        """A nonlinearity."""
        return self.r.choice((torch.tanh, torch.sin, F.gelu, F.silu, F.relu, F.softplus))

    def maybe(self) -> bool:
        """A coin."""
        return self.r.random() < 0.5

    def flat(self, *shape: int) -> Tensor:
        """Inputs of a shape behind the batch's; the first rows may be positive, so that gates open for later ones."""
        x = torch.randn(self.b, *shape)
        if self.maybe():
            x[: max(1, self.b - 1)] = x[: max(1, self.b - 1)].abs()
        return x


Made = tuple[nn.Module, Any]
Family = Callable[[Sizes], Made]


def _ended(s: Sizes, function: Callable[..., Tensor], **members: Any) -> nn.Module:
    """The function, then one of several ends, with or without weights."""
    end = s.r.choice(("few", "few", "mean", "raw"))

    def forward(self: Any, *args: Any) -> Tensor:
        z = function(self, *args)
        if end == "few":
            return few_outputs(z)
        return z.flatten(1).mean(dim=1) if end == "mean" else z

    return Lambda(forward, **members)


def gates(s: Sizes) -> Made:
    act, twice, whole = s.act(), s.maybe(), s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        z = act(self.a(x))
        shut = (x[:, :1] < 0).to(x)
        if whole and not bool(shut.any()):
            return self.b(z)
        more = self.b(act(self.a(z))) if twice else self.offset * self.b(z).sin()
        return self.b(z) + shut * more

    return Lambda(forward, a=nn.Linear(s.k, s.k), b=nn.Linear(s.k, s.c), offset=P(torch.randn(s.c))), s.flat(s.k)


def scalars(s: Sizes) -> Made:
    shapes = ((), (1,), (s.k,), (1, s.k), (1, 1, s.k), (1, s.t, 1), (s.t, 1), (s.t, s.k), (1, s.t, s.k))
    first, second = s.r.choice(shapes), s.r.choice(shapes)
    act, where = s.act(), s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x * self.one if where else x)
        return act(z if where else z * self.one) + self.two

    members = {"layer": nn.Linear(s.k, s.k), "one": P(torch.randn(first)), "two": P(torch.randn(second))}
    return _ended(s, forward, **members), s.flat(s.t, s.k)


def several_uses(s: Sizes) -> Made:
    act, times, beside = s.act(), s.r.randint(1, 3), s.r.choice(("none", "linear", "transposed", "norm", "bias"))

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = act(self.layer(x))
        w = self.layer.weight
        if beside == "linear":
            x = x + F.linear(x, w)
        if beside == "transposed":
            x = x @ w
        if beside == "bias":
            x = x * self.layer.bias
        return self.head(x) * (w.square().sum() if beside == "norm" else 1.0)

    layer = nn.Linear(s.k, s.k, bias=beside == "bias" or s.maybe())
    return Lambda(forward, layer=layer, head=nn.Linear(s.k, s.c)), s.flat(*((s.t,) if s.maybe() else ()), s.k)


def tied_embeddings(s: Sizes) -> Made:
    words, act = s.r.randint(2, 5), s.act()
    table = nn.Embedding(words, s.k, padding_idx=0 if s.maybe() else None, scale_grad_by_freq=False)
    head = nn.Linear(s.k, words, bias=s.maybe())
    how = s.r.choice(("tied", "matmul", "apart"))
    if how == "tied":
        head.weight = table.weight

    def forward(self: Any, x: Tensor) -> Tensor:
        z = act(self.mid(self.table(x) * math.sqrt(s.k)))
        return z @ self.table.weight.T if how == "matmul" else self.head(z)

    return Lambda(forward, table=table, mid=nn.Linear(s.k, s.k), head=head), torch.randint(words, (s.b, s.t))


def attention(s: Sizes) -> Made:
    heads, first = s.r.choice((1, 2)), s.maybe()
    options: dict[str, Any] = {"bias": s.maybe(), "batch_first": first, "dropout": 0.1}
    if s.r.random() < 0.2:
        options["add_bias_kv"] = True
    cross, causal = s.maybe(), s.maybe()
    width = 2 * heads
    if cross:
        options |= {"kdim": s.k, "vdim": s.c}
    layer, u = nn.MultiheadAttention(width, heads, **options), s.r.randint(1, 3) if cross else s.t

    def forward(self: Any, x: Tensor, *others: Tensor) -> Tensor:
        q, k, v = (x, *others) if others else (x, x, x)
        if not first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        mask = torch.ones(x.shape[1], u, dtype=torch.bool).triu(1) if causal else None
        z = self.layer(q, k, v, attn_mask=mask, need_weights=s.k > 2)[0]
        return z if first else z.transpose(0, 1)

    x = s.flat(s.t, width)
    return _ended(s, forward, layer=layer), (x, s.flat(u, s.k), s.flat(u, s.c)) if cross else x


def attention_by_hand(s: Sizes) -> Made:
    """Rotary positions, ALiBi with learnt slopes, fewer heads of keys, SDPA or mathematics."""
    heads, shared = 2, s.r.choice((1, 2))
    how, hand, causal = s.r.choice(("none", "rotary", "alibi")), s.maybe(), s.maybe()
    d, act = 2, s.act()

    def forward(self: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, heads, d).transpose(1, 2)
        k, v = (part.view(b, t, shared, d).transpose(1, 2) for part in self.kv(x).chunk(2, dim=-1))
        k, v = (part.repeat_interleave(heads // shared, dim=1) for part in (k, v))
        place = torch.arange(t, dtype=x.dtype)
        if how == "rotary":
            angle = place[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)[: d // 2]
            turn = lambda z: torch.cat([  # noqa: E731
                z[..., :1] * angle.cos() - z[..., 1:] * angle.sin(), z[..., :1] * angle.sin() + z[..., 1:] * angle.cos()
            ], dim=-1)  # fmt: skip
            q, k = turn(q), turn(k)
        bias = torch.zeros(heads, t, t, dtype=x.dtype)
        if how == "alibi":
            bias = -self.slopes[:, None, None] * (place[:, None] - place).abs()
        if causal:
            bias = bias.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
        if hand:
            z = (q @ k.mT / math.sqrt(d) + bias).softmax(dim=-1) @ v
        else:
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(b, -1, -1, -1))
        return x + act(self.out(z.transpose(1, 2).reshape(b, t, heads * d)))

    parts = {"q": nn.Linear(s.k, heads * d), "kv": nn.Linear(s.k, 2 * shared * d), "out": nn.Linear(heads * d, s.k)}
    return _ended(s, forward, **parts, slopes=P(torch.rand(heads))), s.flat(s.t, s.k)


def transformers(s: Sizes) -> Made:
    kind = s.r.choice((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    first = s.maybe()
    layer = kind(4, 2, s.k, dropout=0.1, batch_first=first, norm_first=s.maybe())

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        z = self.layer(x) if kind is nn.TransformerEncoderLayer else self.layer(x, x.sin())
        return z if first else z.transpose(0, 1)

    return Lambda(lambda self, x: few_outputs(forward(self, x)), layer=layer), s.flat(s.t, 4)


def recurrent(s: Sizes) -> Made:
    kind, first = s.r.choice((nn.RNN, nn.LSTM, nn.GRU)), s.maybe()
    options: dict[str, Any] = {"num_layers": s.r.choice((1, 1, 2)), "bidirectional": s.maybe(), "batch_first": first}
    hidden = s.r.randint(2, 3)
    if kind is nn.LSTM and s.maybe():
        options["proj_size"] = 1
    layer = kind(s.k, hidden, bias=s.maybe(), **options)

    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x if first else x.transpose(0, 1))[0]
        return z if first else z.transpose(0, 1)

    return Lambda(lambda self, x: few_outputs(forward(self, x)), layer=layer), s.flat(s.t, s.k)


def cells(s: Sizes) -> Made:
    kind, backwards = s.r.choice((nn.RNNCell, nn.LSTMCell, nn.GRUCell)), s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in reversed(x.unbind(dim=1)) if backwards else x.unbind(dim=1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)

    return Lambda(forward, cell=kind(s.k, 2), head=nn.Linear(2, s.c)), s.flat(s.t, s.k)


def convolutions(s: Sizes) -> Made:
    dims, groups = s.r.choice((1, 1, 2, 3)), s.r.choice((1, 1, 2))
    channels, outputs, stride = groups * s.r.randint(1, 2), groups * s.r.randint(1, 2), s.r.choice((1, 2))
    options: dict[str, Any] = {"dilation": s.r.choice((1, 1, 2)), "groups": groups, "bias": s.maybe()}
    if s.r.random() < 0.3:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        layer, side = kind(channels, outputs, 2, stride, **options), 3
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        kernel, side = s.r.randint(1, 3 if dims < 3 else 2), 5 if dims < 3 else 3
        options["padding_mode"] = s.r.choice(("zeros", "circular", "reflect", "replicate"))
        options |= {"padding": "same"} if s.maybe() else {"stride": stride, "padding": s.r.choice((0, 1))}
        layer = kind(channels, outputs, kernel, **options)
    if s.maybe():
        return _ended(s, lambda self, x: self.layer(x).tanh(), layer=layer), s.flat(channels, *[side] * dims)
    # Frames folded into the batch.
    fold = lambda self, x: few_outputs(self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))  # noqa: E731
    return Lambda(fold, layer=layer), s.flat(s.t, channels, *[side] * dims)


def norms(s: Sizes) -> Made:
    """Of (b, k, t); in a residual block or alone, used once or twice."""
    k = 2 * s.r.randint(1, 2)
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.BatchNorm1d(k), lambda: nn.GroupNorm(s.r.choice((1, 2, k)), k), lambda: nn.LayerNorm(s.t + 1),
        lambda: nn.LayerNorm((k, s.t + 1)), lambda: nn.InstanceNorm1d(k, affine=True), lambda: nn.RMSNorm(s.t + 1),
        lambda: nn.InstanceNorm1d(k, affine=True, track_running_stats=True), lambda: nn.BatchNorm1d(k, affine=False),
    )  # fmt: skip
    norm, twice, act, inner = s.r.choice(kinds)(), s.r.random() < 0.3, s.act(), nn.Conv1d(k, k, 1)

    def forward(self: Any, x: Tensor) -> Tensor:
        z = act(self.norm(self.inner(x)))
        return x + (self.norm(z) if twice else z)

    return _ended(s, forward, norm=norm, inner=inner), s.flat(k, s.t + 1)


def experts(s: Sizes) -> Made:
    """Soft, hard with all experts run, or hard with the rows of each expert taken out, at positions or at examples."""
    how, number, act = s.r.choice(("soft", "hard", "routed")), s.r.randint(2, 3), s.act()

    def forward(self: Any, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(dim=-1)
        if how == "soft":
            return sum(gate[..., i : i + 1] * act(e(x)) for i, e in enumerate(self.experts))
        best = gate.argmax(dim=-1)
        if how == "hard":
            return sum((best == i)[..., None] * gate[..., i : i + 1] * act(e(x)) for i, e in enumerate(self.experts))
        out = x.new_zeros(*x.shape[:-1], s.c)
        for i, e in enumerate(self.experts):
            rows = best == i
            out[rows] = gate[rows][:, i : i + 1] * act(e(x[rows]))
        return out

    members = nn.ModuleList(nn.Linear(s.k, s.c) for _ in range(number))
    shape = (s.t, s.k) if s.maybe() else (s.k,)
    return Lambda(forward, router=nn.Linear(s.k, number), experts=members), s.flat(*shape)


def bilinear(s: Sizes) -> Made:
    return _ended(s, lambda self, x, y: self.layer(x, y).tanh(), layer=nn.Bilinear(s.k, s.c, s.r.randint(1, 3))), (
        s.flat(s.k),
        s.flat(s.c),
    )


def einsums(s: Sizes) -> Made:
    act, high = s.act(), s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        z = act(torch.einsum("btk,khd->bthd", x, self.w) + self.bias)
        scores = torch.einsum("bthd,buhd->bhtu", z, z).softmax(dim=-1)
        z = torch.einsum("bhtu,buhd->bthd", scores, z) if high else z
        return torch.einsum("bthd,hdc->btc", z, self.out)

    w, out, bias = torch.randn(s.k, 2, s.c), torch.randn(2, s.c, s.c), torch.randn(2, s.c)
    return _ended(s, forward, w=P(w), out=P(out), bias=P(bias)), s.flat(s.t, s.k)


def parametrised(s: Sizes) -> Made:
    kind = s.r.choice((parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal))
    old = s.r.random() < 0.2
    layer = torch.nn.utils.weight_norm(nn.Linear(s.k, 3)) if old else kind(nn.Linear(s.k, 3))
    return Lambda(lambda self, x: self.b(self.a(x).tanh()), a=layer, b=nn.Linear(3, s.c)), s.flat(s.k)


def prelus(s: Sizes) -> Made:
    prelu = nn.PReLU(s.r.choice((1, s.k)))
    if s.maybe():
        return nn.Sequential(nn.Linear(s.k, s.k), prelu, nn.Linear(s.k, s.c)), s.flat(s.k)
    conv = nn.Conv1d(s.k, s.k, 1)
    return _ended(s, lambda self, x: self.prelu(self.conv(x)), conv=conv, prelu=prelu), s.flat(s.k, s.t)


def functional(s: Sizes) -> Made:
    """Bare parameters in functions of torch."""
    k = s.k

    def forward(self: Any, x: Tensor) -> Tensor:
        z = F.layer_norm(F.linear(x, self.w, self.b), (k,), self.gain, self.b)
        z = F.conv1d(z.transpose(1, 2), self.kernel).transpose(1, 2)
        return torch.func.functional_call(self.layer, {"bias": self.b}, (z,))

    members = {"w": P(torch.randn(k, k)), "b": P(torch.randn(k)), "gain": P(torch.randn(k))}
    return _ended(s, forward, **members, kernel=P(torch.randn(k, k, 1)), layer=nn.Linear(k, k)), s.flat(s.t, k)


def dropouts(s: Sizes) -> Made:
    """And parameters that are unused, frozen, or reached without gradients."""
    layers = [nn.Linear(s.k, s.k), nn.Dropout(0.5), nn.Tanh(), nn.Linear(s.k, s.k), nn.Tanh(), nn.Linear(s.k, s.c)]
    if s.maybe():
        layers[s.r.choice((0, 3))].requires_grad_(False)
    for layer in layers:
        if isinstance(layer, nn.Linear) and s.r.random() < 0.3:
            layer.bias.requires_grad_(False)
    spare = nn.Linear(2, 2)
    return Lambda(lambda self, x: self.net(x), net=nn.Sequential(*layers), spare=spare), s.flat(s.k)


def transposed_weights(s: Sizes) -> Made:
    act, how = s.act(), s.r.choice(("decoder", "view", "slice", "flip"))

    def forward(self: Any, x: Tensor) -> Tensor:
        z, w = act(self.layer(x)), self.layer.weight
        if how == "decoder":
            return F.linear(z, w.T, self.bias)
        if how == "view":
            return z @ w.reshape(3, s.k)
        return z * w[:, 0] if how == "slice" else z @ w.flip(0)

    return _ended(s, forward, layer=nn.Linear(s.k, 3), bias=P(torch.randn(s.k))), s.flat(s.k)


def added_products(s: Sizes) -> Made:
    act, batched = s.act(), s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        if not batched:
            return act(torch.addmm(self.bias, x[:, 0], self.w, beta=0.5, alpha=2.0)) @ self.out
        w = self.w.expand(len(x), -1, -1)
        return act(torch.baddbmm(self.bias.expand(len(x), 1, -1), x, w)) @ self.out

    w, bias, out = torch.randn(s.k, s.c), torch.randn(s.c), torch.randn(s.c, 2)
    return Lambda(forward, w=P(w), bias=P(bias), out=P(out)), s.flat(s.t, s.k)


def mixed_precision(s: Sizes) -> Made:
    """Layers of float32 in a network of float64, or the other way round."""
    inner = s.maybe()

    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.a(x.to(self.a.weight.dtype)).tanh()
        return self.b(z.to(self.b.weight.dtype))

    model = Lambda(forward, a=nn.Linear(s.k, 3), b=nn.Linear(3, s.c))
    (model.b if inner else model.a).narrow = True
    return model, s.flat(s.k)


def positions(s: Sizes) -> Made:
    """Vectors of positions: an embedding of an arange, a parameter or a buffer, and a token before all."""
    how, act = s.r.choice(("table", "parameter", "rows", "buffer")), s.act()

    def forward(self: Any, x: Tensor) -> Tensor:
        t = x.shape[1]
        place = {"table": lambda: self.table(torch.arange(t)), "parameter": lambda: self.vectors,
                 "rows": lambda: self.table(torch.arange(t).expand(len(x), -1)),
                 "buffer": lambda: self.places}[how]()  # fmt: skip
        z = self.layer(x) + place
        z = torch.cat([self.token.expand(len(x), -1, -1), z], dim=1)
        return self.head(act(z))

    members = {"vectors": P(torch.randn(1, s.t, s.k)), "token": P(torch.randn(1, 1, s.k))}
    layers = {"table": nn.Embedding(s.t, s.k), "layer": nn.Linear(s.k, s.k), "head": nn.Linear(s.k, s.c)}
    model = _ended(s, forward, **members, **layers)
    model.register_buffer("places", torch.randn(s.t, s.k))
    return model, s.flat(s.t, s.k)


def layouts(s: Sizes) -> Made:
    """Positions before examples, folded behind or before them, or outputs of several shapes."""
    how, act = s.r.choice(("first", "folded", "folded-first", "features")), s.act()

    def forward(self: Any, x: Tensor) -> Tensor:
        b, t, k = x.shape
        if how == "first":
            z = self.b(act(self.a(x.transpose(0, 1)))).transpose(0, 1)
        elif how == "folded":
            z = self.b(act(self.a(x.reshape(b * t, k)))).view(b, t, -1)
        elif how == "folded-first":
            z = self.b(act(self.a(x.transpose(0, 1).reshape(t * b, k)))).view(t, b, -1).transpose(0, 1)
        else:
            z = self.b(act(self.a(x))).transpose(1, 2)
        return z

    return _ended(s, forward, a=nn.Linear(s.k, s.k), b=nn.Linear(s.k, s.c)), s.flat(s.t, s.k)


def hyper(s: Sizes) -> Made:
    """Weights that a network makes for each example."""
    act = s.act()

    def forward(self: Any, x: Tensor, code: Tensor) -> Tensor:
        w = self.maker(code).view(len(x), s.c, s.k)
        return act(torch.bmm(w, self.layer(x).unsqueeze(2)).squeeze(2))

    return Lambda(forward, maker=nn.Linear(2, s.c * s.k), layer=nn.Linear(s.k, s.k)), (s.flat(s.k), s.flat(2))


def bags(s: Sizes) -> Made:
    """Tables that are summed, looked up several times, or looked up beside real numbers."""
    how, words = s.r.choice(("bag", "twice", "beside")), s.r.randint(2, 4)
    tables: dict[str, nn.Module] = {"table": nn.EmbeddingBag(words, s.k, mode=s.r.choice(("sum", "mean")))}
    if how != "bag":
        tables = {"table": nn.Embedding(words, s.k)}

    def forward(self: Any, ids: Tensor, x: Tensor) -> Tensor:
        z = self.table(ids)
        if how != "bag":
            z = z.sum(dim=1) if how == "beside" else (z * self.table(ids.flip(1)).sin()).sum(dim=1)
        return self.head(z.tanh() * x)

    return Lambda(forward, **tables, head=nn.Linear(s.k, s.c)), (torch.randint(words, (s.b, s.t)), s.flat(s.k))


FAMILIES: tuple[Family, ...] = (
    gates, scalars, several_uses, tied_embeddings, attention, attention_by_hand, transformers, recurrent, cells,
    convolutions, norms, experts, bilinear, einsums, parametrised, prelus,
    functional, dropouts, transposed_weights, added_products, mixed_precision, positions, layouts, hyper, bags,
)  # fmt: skip


def made(family: Family, seed: int) -> tuple[Made, Random]:
    """The network of a seed in float64, in evaluation mode, and its batch."""
    torch.manual_seed(seed)
    r = Random(seed)
    model, inputs = family(Sizes(r))
    randomise_norms(model)
    model = model.double().eval()
    for module in model.modules():
        if getattr(module, "narrow", False):
            module.float()
    wide = lambda leaf: leaf.double() if leaf.is_floating_point() else leaf  # noqa: E731
    return (model, pytree.tree_map(wide, inputs)), r


def error_of_random(family: Family, seed: int, structure: str) -> float:
    """The error of a network whose posterior may have seen other batches before, where memory may be short."""
    (model, inputs), r = made(family, seed)
    q = posterior_of(structure, model, inputs)
    if r.random() < 0.5:
        linearised(q, pytree.tree_map(lambda leaf: leaf.flip(0)[: max(1, len(leaf) // 2)], inputs))
    return error_of(q, inputs, budget=r.choice((1 << 30, 1 << 30, 1 << 16)))
