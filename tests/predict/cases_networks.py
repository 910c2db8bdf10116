"""Small networks with their inputs, one of every kind of layer and of every way to use one, and the brute-force
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import bayesadam as ba
from bayesadam.predict import linearised, linearised_draws, moments, sampled
from cases import mlp

# Ways to predict, four draws from one seed.
METHODS: dict[str, Callable[..., Any]] = {
    "linearised": linearised,
    "sampled": lambda q, x, **how: sampled(q, x, 4, generator=torch.Generator().manual_seed(3), **how),
    "linearised_draws": lambda q, x, **how: linearised_draws(
        q, x, 4, generator=torch.Generator().manual_seed(3), **how
    ),
}


@dataclass(frozen=True)
class Network:
    """One row of the table.

    Attributes:
        name: what pytest calls it.
        build: makes the module; run under a fixed seed, in float64.
        inputs: makes the batch.
        generic: the parameters that must go through autograd, all others being in closed form; "all" of them, or None
            where either is right.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    generic: tuple[str, ...] | str | None = ()

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
        """The module, in eval mode, and its batch."""
        torch.manual_seed(0)
        model, inputs = self.build(), self.inputs()
        randomise_norms(model)
        cast = lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf  # noqa: E731
        return model.to(dtype).eval(), pytree.tree_map(cast, inputs)


def randomise_norms(model: nn.Module) -> None:
    """Norms start as the identity, which would hide a wrong scale or a forgotten running statistic."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
            for tensor in module.parameters(recurse=False):
                nn.init.normal_(tensor)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_bias is not None:
            nn.init.normal_(module.in_proj_bias)
            nn.init.normal_(module.out_proj.bias)


def posterior_over(
    model: nn.Module, *, n_data: float = 50, prior_precision: float = 3.0, form: str = "map"
) -> ba.Posterior:
    """A posterior with different variances for all weights, around the weights the model has."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = (
            torch.randn(parameter.shape, generator=generator).to(parameter) if parameter.requires_grad else None
        )
    optimizer.step()
    optimizer.zero_grad()
    return ba.Posterior.from_optimizer(model, optimizer, n_data, prior_precision=prior_precision).replace(form=form)


def jacobian(named: Mapping[str, Tensor], output: Tensor) -> Tensor:
    """∂f/∂θ, (b, c, P): one reverse pass for every single output of every example."""
    tensors, rows = list(named.values()), []
    for value in output.flatten():
        grads = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)
        pairs = zip(tensors, grads, strict=True)
        rows.append(torch.cat([(torch.zeros_like(t) if g is None else g.to_dense()).flatten() for t, g in pairs]))
    return torch.stack(rows).view(output.shape[0], -1, rows[0].numel())


def parameters_of(posterior: ba.Posterior) -> dict[str, nn.Parameter]:
    return {name: posterior.model.get_parameter(name) for name in posterior.mean}


def brute_force(posterior: ba.Posterior, call: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
    """f, (b, ...), and J Σ Jᵀ, (b, c, c), with the whole Jacobian and the whole Σ in memory."""
    output = call(posterior.model)
    j = jacobian(parameters_of(posterior), output)
    sigma = torch.cat([variance.flatten() for variance in posterior.variance.values()])
    return output.detach(), torch.einsum("bcp,p,bdp->bcd", j, sigma.to(j), j)


def spread_inputs(model: nn.Module, inputs: Any) -> Tensor:
    """The plain call that a batch stands for."""
    output: Tensor = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return output


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of covariances (b, c, c) in units of the standard deviations of their row and column."""
    stddev = expected.diagonal(dim1=1, dim2=2).sqrt()
    scale = (stddev[:, :, None] * stddev[:, None, :]).clamp(min=1e-300)
    return float(((found - expected).abs() / scale).max())


def posterior_of(structure: str, model: nn.Module, inputs: Any) -> ba.Posterior:
    """One of the three structures, around the weights that the model has."""
    if structure == "kronecker":
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.0)
        recorder = ba.Recorder(optimizer, keep=4, every=1)
        for _ in range(4):
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.randn_like(p) if p.requires_grad else None
            optimizer.step()
        optimizer.zero_grad()
        return ba.Posterior.from_recorder(model, recorder, 50, batch_size=8, prior_precision=3.0)
    q = posterior_over(model)
    return q.with_inputs(inputs) if structure == "inputs" else q


def covariance_of_weights(q: ba.Posterior) -> Tensor:
    """Σ, the inverse of the Hessian of −log q; of a diagonal its variances."""
    if q.structure == "diagonal":
        return torch.diag(torch.cat([q.variance[name].double().flatten() for name in q.mean]))
    names, mean = list(q.mean), q.mean

    def log_prob(flat: Tensor) -> Tensor:
        parts = zip(names, flat.split([mean[name].numel() for name in names]), strict=True)
        return q.log_prob({name: part.view(mean[name].shape).to(mean[name]) for name, part in parts})

    at = torch.cat([mean[name].double().flatten() for name in names]).requires_grad_()
    (slope,) = torch.autograd.grad(log_prob(at), at, create_graph=True)
    rows = torch.autograd.grad(slope, at, torch.eye(len(at), dtype=at.dtype), is_grads_batched=True)[0]
    return torch.linalg.inv(-rows)


def error_of(q: ba.Posterior, inputs: Any, *, budget: int = 1 << 30) -> float:
    """The largest error of f, of variances, covariances and joint covariances, in standard deviations of the outputs."""
    output = spread_inputs(q.model, inputs)
    j = jacobian(parameters_of(q), output).double()
    rows = j.flatten(0, 1)
    whole = rows @ covariance_of_weights(q) @ rows.T
    b, c = j.shape[:2]
    scale = whole.diagonal().sqrt() + 1e-6 * whole.diagonal().max().sqrt() + 1e-30
    whole, scale = (x.view(b, c, b, c) for x in (whole, scale[:, None] * scale))
    blocks, of_blocks = (x.diagonal(dim1=0, dim2=2).movedim(2, 0) for x in (whole, scale))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "BUDGET", budget)
        alone, block = linearised(q, inputs), linearised(q, inputs, covariance=True)
    joint = linearised(q, inputs, joint=True)
    assert alone.covariance is None
    assert alone.mean.shape == alone.variance.shape == block.variance.shape == output.shape
    variance, of_variance = (x.diagonal(dim1=1, dim2=2) for x in (blocks, of_blocks))
    errors = [(p.mean - output).abs().max() / (output.abs().max() + 1e-9) for p in (alone, block, joint)]
    errors += [((p.variance.reshape(b, c) - variance).abs() / of_variance).max() for p in (alone, block, joint)]
    errors += [((p.covariance - blocks).abs() / of_blocks).max() for p in (block, joint)]
    errors.append(((joint.joint.view(b, c, b, c) - whole).abs() / scale).max())
    return float(torch.stack(errors).detach().max())


class Then(nn.Module):
    """A module, and a function of its output."""

    def __init__(self, module: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self.module(*args, **kwargs))


class Lambda(nn.Module):
    """Modules by name, and a forward of them all."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def few_outputs(z: Tensor) -> Tensor:
    """Three outputs that all entries of z have a part in, at every place another one."""
    flat = z.flatten(1)
    weights = torch.linspace(0.2, 3.0, 3 * flat.shape[1], dtype=flat.dtype).sin().view(flat.shape[1], 3)
    return flat.tanh() @ weights


def after(layer: nn.Module) -> nn.Module:
    """The layer, then a network without weights that makes every place count differently."""
    return Then(layer, few_outputs)


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def tokens(*shape: int, below: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randint(below, shape)


class Attend(nn.Module):
    """Attention of one sequence, or of three, the batch first outside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, *parts: Tensor) -> Tensor:
        q, k, v = parts if len(parts) > 1 else parts * 3
        first = self.attention.batch_first
        if not first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        mixed, _ = self.attention(q, k, v)
        return mixed if first else mixed.transpose(0, 1)


def padded_keys(size: int, keys: int) -> Tensor:
    """The last keys of every example but the first are padding, one more each."""
    return torch.arange(keys)[None, :] >= keys - torch.arange(size)[:, None]


def encoder(layers: int, *, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, dropout=0.3)
    whole = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers > 1 else layer
    # Every layer of an encoder starts as a copy of the first.
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5)

    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.whole(x if batch_first else x.transpose(0, 1))
        return self.head(few_outputs(z if batch_first else z.transpose(0, 1)))

    return Lambda(forward, whole=whole, head=nn.Linear(3, 2))


class Conv1D(nn.Module):
    """As transformers has it, whose name tells it: a linear layer whose weight has its inputs first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class LlamaRMSNorm(nn.Module):
    """As transformers' models have it, or as Gemma's."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.randn(width)), offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = hidden_states.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return (self.weight + self.offset) * (hidden_states * scale)


class NoLayerNorm(LlamaRMSNorm):
    """Its outputs are not linear in its weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.weight


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * F.linear(input, self.weight.tanh(), self.bias)


class OldSine(torch.autograd.Function):
    """As most were written: nothing that torch.func could vectorise or push forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Residual(nn.Module):
    """A block of a ResNet, with everything in place that can be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(3)
        self.second, self.norm2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.down, self.norm3 = nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.relu(self.norm(self.first(x)))
        z = self.norm2(self.second(z))
        z += self.norm3(self.down(x))
        return self.head(self.relu(z).mean(dim=(2, 3)))


def gated(self: Any, x: Tensor) -> Tensor:
    """What is computed depends on the values, row by row: nothing that `vmap` or a batched plan could follow."""
    rows = [self.positive(row) if row.sum().item() > 0 else self.negative(row) * self.scale for row in x]
    return torch.stack(rows)


def late_offset(self: Any, x: Tensor) -> Tensor:
    negative = x[:, :1] < 0
    return self.layer(x) + self.offset * negative if negative.any().item() else self.layer(x)


def behind_a_gate(self: Any, x: Tensor) -> Tensor:
    """A second use of both layers, which the first examples do not reach; the graph is the same for all."""
    z = self.first(x).tanh()
    return self.second(z) + (x[:, :1] < 0) * self.second(self.first(z).sin())


def scaled(width: int, *, scalar: bool, places: bool = False) -> nn.Module:
    """A number, or one a feature, times what a layer gives: a copy for each example might be taken along any side."""
    scale = nn.Parameter(torch.randn(() if scalar else width))
    end = few_outputs if places else lambda z: z
    return Lambda(lambda self, x: end(self.layer(x) * self.scale), layer=nn.Linear(3, width), scale=scale)


def late_sequence(self: Any, x: Tensor) -> Tensor:
    sequence_first = self.second(x.transpose(0, 1)).transpose(0, 1)
    return few_outputs(self.first(x)) + few_outputs(sequence_first) * (x[:, 0, :1] < 0)


def frozen_first(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    model = mlp(3, 4, 2, activation=activation)
    model[0].requires_grad_(False)
    return model


def folded_frames(self: Any, x: Tensor) -> Tensor:
    frames = self.norm(self.convolution(x.flatten(0, 1))).tanh()
    per_frame = self.linear(frames.mean(dim=(2, 3)))
    return per_frame.view(*x.shape[:2], -1).flatten(1)


CONVOLUTIONS = [
    Network("conv1d-reflect-same", lambda: after(nn.Conv1d(2, 3, 4, padding="same", padding_mode="reflect")), normal(4, 2, 6)),
    Network("conv2d-groups", lambda: after(nn.Conv2d(4, 6, 2, groups=2)), normal(3, 4, 4, 3)),
    Network("conv2d-uneven", lambda: after(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))), normal(3, 2, 5, 4)),
    Network("conv3d", lambda: after(nn.Conv3d(2, 2, 2, (1, 2, 1), 1, groups=2)), normal(2, 2, 2, 3, 3)),
    Network("transposed2d-everything", lambda: after(nn.ConvTranspose2d(2, 4, (3, 2), (2, 3), (1, 0), (1, 2), 2, False, (2, 1))), normal(3, 2, 3, 2)),
    Network("transposed2d-output-size", lambda: Lambda(lambda self, x: few_outputs(self.layer(x, output_size=(6, 5))), layer=nn.ConvTranspose2d(2, 2, 3, 2, 1)), normal(2, 2, 3, 3)),
]  # fmt: skip

NORMS = [
    Network("layer-norm-sequence", lambda: after(nn.LayerNorm(5)), normal(3, 4, 5)),
    Network("rms-norm-2d", lambda: after(nn.RMSNorm((4, 5), eps=0.1)), normal(3, 4, 5)),
    Network("group-norm", lambda: after(nn.GroupNorm(2, 4)), normal(3, 4, 3, 2)),
    Network("batch-norm-2d", lambda: after(nn.BatchNorm2d(3)), normal(4, 3, 2, 4)),
    Network("instance-norm-with-statistics", lambda: after(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), normal(4, 3, 5)),
    Network("rms-norm-of-transformers", lambda: after(nn.Sequential(LlamaRMSNorm(5), nn.Linear(5, 5), LlamaRMSNorm(5))), normal(3, 4, 5)),
    Network("rms-norm-of-one-plus-its-weight", lambda: after(LlamaRMSNorm(5, offset=1.0)), normal(3, 4, 5)),
    Network("norm-that-is-none", lambda: after(NoLayerNorm(5)), normal(3, 4, 5), generic="all"),
]  # fmt: skip

EMBEDDINGS = [
    Network("embedding-repeated-tokens", lambda: after(nn.Embedding(3, 2)), tokens(4, 9, below=3)),
    Network("embedding-padding", lambda: after(nn.Embedding(4, 3, padding_idx=1)), tokens(4, 6, below=4)),
    Network("embedding-used-twice", lambda: Lambda(lambda self, a, b: few_outputs(self.table(a) * self.table(b)), table=nn.Embedding(4, 3)), lambda: (tokens(4, 3, below=4)(), tokens(4, 3, below=4)())),
    Network("embedding-sequence-first", lambda: Lambda(lambda self, x: few_outputs(self.table(x.T).transpose(0, 1)), table=nn.Embedding(4, 3)), tokens(3, 3, below=4)),
]  # fmt: skip

ATTENTION = [
    Network("attention", lambda: after(Attend(batch_first=True)), normal(4, 3, 4)),
    Network("attention-sequence-first-batch-is-length", lambda: after(Attend()), normal(3, 3, 4)),
    Network("attention-cross-sequence-first", lambda: after(Attend(kdim=6, vdim=3, bias=False)), lambda: (normal(3, 2, 4)(), normal(3, 5, 6)(), normal(3, 5, 3)())),
    Network("attention-key-padding", lambda: Lambda(lambda self, x, mask: few_outputs(self.attention(x, x, x, key_padding_mask=mask)[0]), attention=nn.MultiheadAttention(4, 2, batch_first=True)), lambda: (normal(3, 4, 4)(), padded_keys(3, 4))),
    # Two heads, a mask each; as wide as the batch that the library may cut, so the model builds it per batch.
    Network("attention-mask-by-head", lambda: Lambda(lambda self, x: few_outputs(self.attention(x, x, x, attn_mask=torch.stack([torch.eye(3), -torch.eye(3)]).to(x).repeat(len(x), 1, 1))[0]), attention=nn.MultiheadAttention(4, 2, batch_first=True)), normal(5, 3, 4)),
    Network("attention-weights-in-the-output", lambda: Lambda(lambda self, x: few_outputs(torch.cat([part.flatten(1) for part in self.attention(x, x, x)], dim=1)), attention=nn.MultiheadAttention(4, 2, batch_first=True)), normal(3, 2, 4), generic=None),
    Network("attention-zero-key", lambda: after(Attend(add_zero_attn=True)), normal(3, 2, 4), generic=None),
]  # fmt: skip

TRANSFORMERS = [
    Network("encoder-layer-sequence-first", lambda: encoder(1, batch_first=False), normal(4, 3, 4)),
    Network("encoder-layer-sequence-first-batch-is-length", lambda: encoder(1, batch_first=False), normal(3, 3, 4)),
    Network("encoder-sequence-first-batch-two-length-two", lambda: encoder(2, batch_first=False), normal(2, 2, 4)),
    Network("encoder-sequence-first-length-twice-the-batch", lambda: encoder(1, batch_first=False), normal(2, 4, 4)),
    Network("encoder-sequence-first-batch-one", lambda: encoder(1, batch_first=False), normal(1, 2, 4)),
]  # fmt: skip

STRUCTURES = [
    Network("operation-that-cannot-be-vectorised", lambda: Lambda(lambda self, x: self.b(OldSine.apply(self.a(x)) * self.scale).sum(dim=1), a=nn.Linear(3, 4), b=nn.Linear(4, 2), scale=nn.Parameter(torch.randn(4))), normal(3, 2, 3), generic=None),
    Network("mlp-tanh", lambda: mlp(3, 5, 4, 2), normal(6, 3)),
    Network("mlp-relu-inplace", lambda: mlp(3, 5, 4, 2, activation=lambda: nn.ReLU(inplace=True)), normal(6, 3)),
    Network("output-is-an-image", lambda: Then(mlp(3, 4, 6), lambda z: z.view(-1, 2, 3)), normal(4, 3)),
    Network("output-is-transposed", lambda: Then(nn.Conv1d(2, 3, 2), lambda z: z.transpose(1, 2)), normal(4, 2, 3)),
    Network("sequence-first-inside", lambda: Lambda(lambda self, x: few_outputs(self.net(x.transpose(0, 1)).transpose(0, 1)), net=mlp(3, 4, 2)), normal(3, 3, 3)),
    Network("bare-parameters", lambda: Lambda(lambda self, x: (x @ self.w).tanh() @ self.u + self.c, w=nn.Parameter(torch.randn(3, 4)), u=nn.Parameter(torch.randn(4, 2)), c=nn.Parameter(torch.randn(2))), normal(4, 3), generic=("w", "u")),
    Network("norm-used-twice", lambda: Lambda(lambda self, x: few_outputs(self.norm(self.norm(x).tanh())), norm=nn.LayerNorm(4)), normal(3, 4)),
    Network("tied-linear", lambda: tied_autoencoder(transposed=False), normal(4, 3)),
    Network("tied-transposed", lambda: tied_autoencoder(transposed=True), normal(4, 3), generic=("layer.weight",)),
    Network("weight-used-beside-its-layer", lambda: Lambda(lambda self, x: self.layer(F.linear(x, self.layer.weight).tanh()), layer=nn.Linear(3, 3)), normal(4, 3), generic=("layer.weight",)),
    Network("linear-subclass", lambda: nn.Sequential(ScaledLinear(3, 4), nn.Tanh(), nn.Linear(4, 2)), normal(4, 3), generic=("0.weight",)),
    Network("linear-with-a-users-hook", lambda: hooked(mlp(3, 4, 2)), normal(4, 3), generic=None),
    Network("parametrised-weight", lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), normal(4, 3), generic=("0.parametrizations.weight.original0", "0.parametrizations.weight.original1")),
    Network("bilinear", lambda: nn.Bilinear(2, 3, 4), lambda: (normal(4, 2)(), normal(4, 3)()), generic="all"),
    # torch's vmap of a vmap gets the gradients of PReLU wrong where both are equally long.
    Network("prelu-as-many-examples-as-outputs", lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), normal(2, 3)),
    Network("lstm", lambda: Then(nn.LSTM(3, 4, batch_first=True), lambda z: few_outputs(z[0])), normal(3, 4, 3)),
    Network("recurrent-of-everything", lambda: Lambda(lambda self, x: few_outputs(torch.cat([z.flatten(1) for z in states_of(self.lstm(x.transpose(0, 1)))], dim=1)), lstm=nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2)), normal(3, 4, 3)),
    Network("recurrent-from-states", lambda: Lambda(lambda self, x: few_outputs(self.lstm(x, tuple(z(x[:, 0])[None] for z in (self.h, self.c)))[0]), lstm=nn.LSTM(3, 4, batch_first=True), h=nn.Linear(3, 4), c=nn.Linear(3, 4)), normal(3, 4, 3)),
    Network("rnn-relu-both-ways", lambda: Then(nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, batch_first=True, bias=False), lambda z: few_outputs(z[0])), normal(3, 4, 3)),
    Network("recurrent-used-twice", lambda: Lambda(lambda self, x: self.head(self.gru(x)[0][:, -1] - self.gru(x.flip(1))[1][-1]), gru=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 2)), normal(3, 4, 3)),
    Network("recurrent-after-an-embedding", lambda: nn.Sequential(nn.Embedding(7, 3), nn.GRU(3, 4, batch_first=True), Then(nn.Identity(), lambda z: few_outputs(z[0]))), tokens(3, 4)),
    Network("recurrent-in-place-after", lambda: Then(nn.LSTM(3, 4, batch_first=True), lambda z: few_outputs(z[0].mul_(2.0).relu_())), normal(3, 4, 3)),
    Network("recurrent-weights-used-elsewhere", lambda: Lambda(lambda self, x: few_outputs(self.rnn(F.linear(x, self.rnn.weight_ih_l0))[0]), rnn=nn.RNN(3, 3, batch_first=True)), normal(3, 4, 3), generic=("rnn.weight_ih_l0",)),
    Network("recurrent-of-packed-sequences", lambda: Lambda(packed, gru=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 2)), normal(3, 4, 3), generic=None),
    Network("recurrent-over-windows-of-examples", lambda: Lambda(lambda self, x: few_outputs(self.rnn(x.transpose(0, 1).flatten(0, 1))[0].unflatten(0, x.shape[1::-1]).transpose(0, 1)), rnn=nn.RNN(3, 4, batch_first=True)), normal(3, 2, 4, 3), generic="all"),
    Network("recurrent-differentiated-inside", lambda: Lambda(slope_inside, rnn=nn.RNN(3, 4, batch_first=True), head=nn.Linear(3, 2)), normal(3, 4, 3), generic=None),
    Network("embedding-bag", lambda: nn.Sequential(nn.EmbeddingBag(6, 3), nn.Linear(3, 2)), tokens(4, 5, below=6), generic=("0.weight",)),
    Network("resnet-block", Residual, normal(3, 2, 6, 6)),
    Network("frames-folded-into-the-batch", lambda: Lambda(folded_frames, convolution=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3), linear=nn.Linear(3, 2)), normal(3, 4, 2, 3, 3)),
    Network("frozen-first-layer", frozen_first, normal(4, 3)),
    Network("unused-parameter", lambda: Lambda(lambda self, x: self.used(x), used=mlp(3, 4, 2), spare=nn.Linear(3, 3), bare=nn.Parameter(torch.randn(2))), normal(4, 3)),
    Network("zero-gradient", lambda: Lambda(lambda self, x: self.used(x) + 0.0 * self.silent(x) + 0.0 * self.bare, used=mlp(3, 4, 2), silent=nn.Linear(3, 2), bare=nn.Parameter(torch.randn(2))), normal(4, 3), generic=None),
    Network("dead-units", lambda: dead_units(), normal(4, 3)),
    Network("values-decide-the-way", lambda: Lambda(gated, positive=nn.Linear(3, 2), negative=nn.Linear(3, 2), scale=nn.Parameter(torch.randn(2))), normal(7, 3), generic=None),
    Network("values-decide-late", lambda: Lambda(gated, positive=nn.Linear(3, 2), negative=nn.Linear(3, 2), scale=nn.Parameter(torch.randn(2))), lambda: torch.cat([normal(3, 3)().abs(), -normal(3, 3)().abs()]), generic=None),
    # The first examples say nothing about these weights; the later ones do.
    Network("weight-used-by-later-examples", lambda: Lambda(late_offset, layer=nn.Linear(3, 2), offset=nn.Parameter(torch.randn(2))), lambda: torch.cat([normal(3, 3)().abs(), -normal(3, 3)().abs()]), generic=None),
    Network("layer-counted-for-later-examples", lambda: Lambda(late_sequence, first=nn.Linear(3, 2), second=nn.Linear(3, 2)), lambda: torch.cat([normal(3, 3, 3)().abs(), -normal(3, 3, 3)().abs()])),
    Network("second-use-behind-a-gate", lambda: Lambda(behind_a_gate, first=nn.Linear(3, 3), second=nn.Linear(3, 3)), lambda: torch.cat([normal(5, 3)().abs(), -normal(1, 3)().abs()]), generic=None),
    Network("number-times-features", lambda: scaled(4, scalar=True), normal(5, 3), generic=("scale",)),
    Network("number-times-as-many-features-as-examples", lambda: scaled(3, scalar=True), normal(3, 3), generic=None),
    Network("number-times-one-feature", lambda: scaled(1, scalar=True), normal(4, 3), generic=None),
    Network("features-of-places", lambda: scaled(4, scalar=False, places=True), normal(5, 3, 3), generic=None),
    Network("features-of-as-many-places-as-examples", lambda: scaled(4, scalar=False, places=True), normal(3, 3, 3), generic=None),
    Network("features-places-and-examples-alike", lambda: scaled(3, scalar=False, places=True), normal(3, 3, 3), generic=None),
    Network("a-branch-without-gradient", lambda: Lambda(no_gradient_inside, body=nn.Linear(3, 4), head=nn.Linear(4, 2)), normal(4, 3)),
    Network("keyword-calls-inside", lambda: Lambda(lambda self, x: self.b(input=self.a(input=x).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), normal(4, 3)),
]  # fmt: skip


def states_of(outcome: Any) -> list[Tensor]:
    """All that a recurrent layer with the sequence first returns, the batch first."""
    y, (h, c) = outcome
    return [z.transpose(0, 1) for z in (y, h.view(2, 2, *h.shape[1:]).flatten(0, 1), c)]


def packed(self: Any, x: Tensor) -> Tensor:
    sequences = nn.utils.rnn.pack_padded_sequence(x, [3] * len(x), batch_first=True)
    return self.head(self.gru(sequences)[1][-1])


def slope_inside(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.rnn(x)[0].square().sum(), x, create_graph=True)
    return self.head(slope.sum(dim=1))


def tied_autoencoder(*, transposed: bool) -> nn.Module:
    if transposed:
        return Lambda(lambda self, x: F.linear(self.layer(x).tanh(), self.layer.weight.T), layer=nn.Linear(3, 4))
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def hooked(model: nn.Sequential) -> nn.Sequential:
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    return model


def dead_units() -> nn.Module:
    model = mlp(3, 4, 2, activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return model


def no_gradient_inside(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = self.body(x)
    return self.head(z.tanh())


NETWORKS = [*STRUCTURES, *CONVOLUTIONS, *NORMS, *EMBEDDINGS, *ATTENTION, *TRANSFORMERS]
