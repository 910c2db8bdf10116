"""The methods of the paper, and more, behind one protocol: a `Problem` in, a predictor for each seed out.

Networks train as stacks, one for each seed, by `experiments.rules`. What a method predicts is a function's
mean and variance; the targets' noise, where it is not learnt, is what the held-out part leaves unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesadam import Posterior
from bayesadam._extras import require
from bayesadam.engine.gradients import Slope, loss_and_slope
from bayesadam.engine.network import ACTIVATIONS, Network, forward, linear, member
from bayesadam.engine.rules import Adam as Engine
from bayesadam.engine.stack import constant
from bayesadam.engine.streams import Streams
from bayesadam.likelihoods import Component, Moments, Prediction, likelihood
from experiments.rules import RULES, Adam, Rule
from experiments.stacks import Stack, blocks

# Noise is at least this share of the held-out squared residual, however large the function's own variance.
_LEAST_NOISE = 0.05
N_MEMBERS = 5


@dataclass(frozen=True, eq=False)
class Data:
    """Of a stack of networks: x (s, n, inputs) and y (s, n, targets), or class indices (s, n); others to calibrate."""

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    likelihood: Literal["regression", "classification"]

    def __len__(self) -> int:
        return self.x.shape[1]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of every network of the stack, (s,)."""
        return likelihood(self.likelihood).loss(outputs, targets)


@dataclass(frozen=True)
class Training:
    """How a network is trained; the defaults are the paper's for its toy problem. An epoch is counted in examples."""

    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)

    def steps(self, n: int) -> int:
        return max(1, round(self.epochs * n / min(self.batch_size, n)))


@dataclass(frozen=True, eq=False)
class Problem:
    """What every method is given: data and one network for each seed, and the draws behind a sampled prediction."""

    data: Data
    network: Network
    training: Training
    seeds: tuple[int, ...]
    draws: int = 100

    @cached_property
    def optimum(self) -> Stack:
        """The networks at their optimum under Adam: trained once, shared by the methods that start from there."""
        return trained(self, Adam)

    def networks(self) -> list[nn.Sequential]:
        return [self.network.build(member(self.optimum.params, index)) for index in range(len(self.seeds))]


Predictor = Callable[[Tensor], Prediction]
# One predictor for each seed.
Method = Callable[[Problem], list[Predictor]]


def gaussians(means: Tensor, variances: Tensor, noise: Tensor) -> Prediction:
    """y as an even mixture of N(means, variances + noise): (k, b, outputs), and noise (outputs,)."""
    pairs = zip(means, variances, strict=True)
    parts = (Component(Moments(*pair), noise, weight=1 / len(means)) for pair in pairs)
    return Prediction(likelihood("regression"), tuple(parts))


def trained(
    problem: Problem, kind: type[Rule], *, lr: float | None = None, learn_noise: bool = False, **changes: Any
) -> Stack:
    """A stack trained on the problem's data by one rule, with changes to its settings; `lr=None` is its usual rate.

    Where the rule needs the noise of a regression, σ² is the held-out squared error of the network under Adam; or with
    `learn_noise` log σ is learnt beside the weights, one per network, by Adam on r²/(2σ²) + log σ with r² the squared
    error.
    """
    data, training, n = problem.data, problem.training, len(problem.data)
    rule, device = kind.with_settings(**{**vars(training), **changes}), data.x.device
    index = torch.arange(len(problem.seeds), device=device)[:, None]
    log_noise = torch.full((len(problem.seeds),), -1.0, device=device)
    noise_state, noise_lr = Engine().start(log_noise), torch.tensor(training.lr, device=device)
    needs_noise = rule.needs_noise and data.likelihood == "regression"

    def batch(rows: Tensor) -> tuple[Tensor, Slope]:
        y = data.y[index, rows]

        def slope(outputs: Tensor) -> Tensor:
            losses, gradient = loss_and_slope(lambda f: data.loss(f, y), outputs)
            if needs_noise and learn_noise:
                precision = torch.exp(-2 * log_noise)
                Engine().update(log_noise, 1 - losses * precision, noise_state, noise_lr)
                stack.scale.copy_(0.5 * precision.unsqueeze(1))
            return gradient

        return data.x[index, rows], slope

    stack = Stack(problem.network, rule, problem.seeds, batch, n_data=n, device=device)
    if needs_noise and not learn_noise:
        error = data.loss(forward(problem.network, problem.optimum.params, data.x_held_out), data.y_held_out)
        stack.scale.copy_(0.5 / error.clamp(min=1e-12).unsqueeze(1))
    for rows in blocks(n, min(training.batch_size, n), problem.seeds, training.steps(n)):
        stack.train(rows, constant(lr or rule.lr or training.lr))
    return stack


def noise_variance(draws: Tensor, y: Tensor) -> Tensor:
    """σ² per output from held-out residuals, E[r²] = σ² + Var[f], not below a small share of them; draws (n, b, o)."""
    square = (y - draws.mean(dim=0)).square().mean(dim=0)
    spread = draws.var(dim=0, correction=int(len(draws) > 1)).mean(dim=0)
    return (square - spread).clamp(min=_LEAST_NOISE * square)


def drawn(name: str, problem: Problem, stack: Stack, index: int) -> Callable[[Tensor], Tensor]:
    """One seed's functions, always the same: from inputs to draws of f, (n, b, outputs)."""

    def draw(x: Tensor) -> Tensor:
        streams = Streams([problem.seeds[index]], f"{name}-prediction", x.device)
        params, masks = stack.functions(index, problem.draws, streams)
        return forward(stack.network, params, x, masks=masks)

    return draw


def _sampled(problem: Problem, draws: Sequence[Callable[[Tensor], Tensor]], *, mixed: bool = False) -> list[Predictor]:
    """Predictors of the moments of drawn functions, or of the mixture of them."""
    data = problem.data

    def predictor(index: int, draw: Callable[[Tensor], Tensor]) -> Predictor:
        noise = noise_variance(draw(data.x_held_out[index]), data.y_held_out[index])

        def predict(x: Tensor) -> Prediction:
            f = draw(x)
            if mixed or len(f) == 1:
                return gaussians(f, torch.zeros_like(f), noise)
            return gaussians(f.mean(dim=0, keepdim=True), f.var(dim=0, keepdim=True), noise)

        return predict

    return [predictor(index, draw) for index, draw in enumerate(draws)]


def fit_rule(name: str, problem: Problem, **changes: Any) -> list[Predictor]:
    """A method that predicts by functions drawn from what its rule has learnt; `changes` are to the rule's settings."""
    if name == "mc-dropout" and not problem.network.dropout:
        problem = replace(problem, network=replace(problem.network, dropout=0.2))
    stack = trained(problem, RULES[name], **changes)
    return _sampled(problem, [drawn(name, problem, stack, index) for index in range(len(problem.seeds))])


def fit_map(problem: Problem) -> list[Predictor]:
    """The network itself: no uncertainty of the weights."""
    return _sampled(problem, [partial(_once, network) for network in problem.networks()])


@torch.no_grad()
def _once(network: nn.Module, x: Tensor) -> Tensor:
    return network(x).unsqueeze(0)  # type: ignore[no-any-return]


def fit_ensemble(problem: Problem) -> list[Predictor]:
    """A deep ensemble: the mixture of five independently initialised networks.

    The first is the network that the other methods start from; the rest of all seeds train as one stack.
    """
    rest = N_MEMBERS - 1
    seeds = tuple(1_000_003 * (k + 1) + seed for seed in problem.seeds for k in range(rest))
    parts = ("x", "y", "x_held_out", "y_held_out")
    data = replace(problem.data, **{name: getattr(problem.data, name).repeat_interleave(rest, dim=0) for name in parts})
    first, others = problem.optimum.params, replace(problem, data=data, seeds=seeds).optimum.params
    draws = []
    for index in range(len(problem.seeds)):
        members = slice(index * rest, (index + 1) * rest)
        params = {name: torch.cat([first[name][index, None], t[members]]) for name, t in others.items()}
        draws.append(partial(forward, problem.network, params))
    return _sampled(problem, draws, mixed=True)


def with_noise(problem: Problem, posteriors: Sequence[Posterior]) -> list[Predictor]:
    """Posteriors as they are: the network linearised, σ² its held-out squared error."""
    predictors: list[Predictor] = []
    for index, posterior in enumerate(posteriors):
        noise = noise_variance(_once(posterior.model, problem.data.x_held_out[index]), problem.data.y_held_out[index])
        predictors.append(posterior.replace(noise_variance=noise).predict)
    return predictors


def read(problem: Problem, **settings: Any) -> list[Posterior]:
    """The posterior of every seed, read off Adam's state."""
    n, kind, numbers = len(problem.data), problem.data.likelihood, range(len(problem.seeds))
    pairs = zip(problem.networks(), map(problem.optimum.state_dict, numbers), strict=True)
    return [Posterior.from_state_dict(*pair, n, kind, **settings) for pair in pairs]


def fit_badam(problem: Problem) -> list[Predictor]:
    """The paper's method: the posterior is read off Adam's state, tuned by evidence, and the network linearised."""
    held_out = zip(problem.data.x_held_out, problem.data.y_held_out, strict=True)
    pairs = zip(read(problem, prior_precision=1.0), held_out, strict=True)
    return [posterior.tune(data).predict for posterior, data in pairs]


def fit_laplace_diagonal(problem: Problem) -> list[Predictor]:
    """Laplace with the diagonal of the GGN, H = Σ_n J_nᵀ J_n/σ² + δ, and δ by evidence; the network linearised."""
    predictors: list[Predictor] = []
    for index, network in enumerate(problem.networks()):
        (jacobian, noise), params = _scaled_jacobian(problem, network, index), dict(network.named_parameters())
        curvature = jacobian.square().sum(dim=0)
        variance = (curvature + _evidence(curvature, params)).reciprocal().float()
        pieces = zip(params.items(), torch.split(variance, [p.numel() for p in params.values()]), strict=True)
        named = {name: piece.view_as(p) for (name, p), piece in pieces}
        posterior = Posterior.from_moments(network, params, named, len(problem.data), "regression")
        predictors.append(posterior.replace(noise_variance=noise).predict)
    return predictors


def fit_laplace_full(problem: Problem) -> list[Predictor]:
    """Laplace with the whole GGN, through the data's own kernel matrix, so that no (weights, weights) matrix is needed.

    (JᵀJ + δ)⁻¹ = (1 − Jᵀ (J Jᵀ + δ)⁻¹ J)/δ, by Woodbury, with J divided by σ.
    """

    def predictor(index: int, network: nn.Sequential) -> Predictor:
        jacobian, noise = _scaled_jacobian(problem, network, index)
        kernel = jacobian @ jacobian.T
        delta = _evidence(torch.linalg.eigvalsh(kernel).clamp(min=0), dict(network.named_parameters()))
        factor = torch.linalg.cholesky(kernel + delta * torch.eye(len(kernel), dtype=torch.float64))

        def predict(x: Tensor) -> Prediction:
            here = _jacobian(network, x)
            explained = torch.linalg.solve_triangular(factor, jacobian @ here.flatten(0, 1).T, upper=False)
            variance = here.square().sum(dim=2) - explained.square().sum(dim=0).view(here.shape[:2])
            return gaussians(_once(network, x), (variance / delta).clamp(min=0).float()[None], noise)

        return predict

    return [predictor(*pair) for pair in enumerate(problem.networks())]


@torch.no_grad()
def _jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """J of all examples and outputs, (b, outputs, weights), float64."""
    params = {name: p.double() for name, p in network.named_parameters()}
    parts: dict[str, Tensor] = jacrev(lambda p: functional_call(network, p, (x.double(),)))(params)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def _scaled_jacobian(problem: Problem, network: nn.Module, index: int) -> tuple[Tensor, Tensor]:
    """J/σ of the training data, rows by example and output, and σ²."""
    data = problem.data
    noise = noise_variance(_once(network, data.x_held_out[index]), data.y_held_out[index])
    return (_jacobian(network, data.x[index]) / noise.double().sqrt()[:, None]).flatten(0, 1), noise


def _evidence(eigenvalues: Tensor, params: Mapping[str, Tensor]) -> float:
    """MacKay's fixed point δ = γ/|θ|², γ = Σ h/(h + δ)."""
    delta, square = 1.0, sum(float(p.detach().double().square().sum()) for p in params.values())
    for _ in range(200):
        gamma = float((eigenvalues / (eigenvalues + delta)).sum())
        following = max(gamma / square, 1e-10)
        if abs(following - delta) <= 1e-8 * delta:
            break
        delta = following
    return delta


def diagonal_ggn(network: Network, params: Mapping[str, Tensor], x: Tensor, at_once: int = 1000) -> dict[str, Tensor]:
    """diag Σ_n J_nᵀ (diag p − p pᵀ) J_n of a stack of classifiers, (s, *shape), layer by layer and never a Jacobian.

    With A Aᵀ the softmax's curvature and D = ∂(Aᵀf)/∂z back-propagated, a layer's share is Σ_n Σ_c D²ᵀ a².
    The inputs, (n, inputs), are the same for all, and taken `at_once` at a time.
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    activation = ACTIVATIONS[network.activation]()
    for first in range(0, len(x), at_once):
        # Of every layer.
        inputs, outputs = [x[first : first + at_once].expand(len(params["layer0.bias"]), -1, -1)], list[Tensor]()
        with torch.enable_grad():
            weights = {name: t.detach().requires_grad_() for name, t in params.items()}
            for number in range(len(network.hidden) + 1):
                outputs.append(linear(inputs[-1], weights[f"layer{number}.weight"], weights[f"layer{number}.bias"]))
                inputs.append(activation(outputs[-1]))
        f = outputs[-1]
        p = f.detach().softmax(dim=-1)
        # A = diag(√p) − p √pᵀ.
        root = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        for c in range(f.shape[-1]):
            grads = torch.autograd.grad(f, outputs, root[..., c], retain_graph=True)
            for number, (grad, a) in enumerate(zip(grads, inputs[:-1], strict=True)):
                squares = grad.square()
                total[f"layer{number}.weight"] += torch.bmm(squares.mT.contiguous(), a.detach().square())
                total[f"layer{number}.bias"] += squares.sum(dim=1)
    return total


def fit_gp(problem: Problem) -> list[Predictor]:
    """The reference of Figure 1: an exact Gaussian process whose hyperparameters maximise the marginal likelihood.

    An RBF kernel with one lengthscale per input and Gaussian noise, around the targets' mean; one process per seed.
    """
    processes, kernels = require("sklearn.gaussian_process"), require("sklearn.gaussian_process.kernels")

    def predictor(x: Tensor, y: Tensor) -> Predictor:
        variance = float(y.var())
        kernel = kernels.ConstantKernel(variance) * kernels.RBF((0.3 * (x.amax(dim=0) - x.amin(dim=0))).tolist())
        kernel += kernels.WhiteKernel(0.1 * variance)
        process = processes.GaussianProcessRegressor(kernel).fit(x.numpy(), (y - y.mean()).numpy())
        noise = process.kernel_.k2.noise_level

        def predict(at: Tensor) -> Prediction:
            mean, std = (torch.from_numpy(part)[None, :, None] for part in process.predict(at.numpy(), return_std=True))
            f_variance = (std.square() - noise).clamp(min=0).float()
            return gaussians((mean + y.mean()).float(), f_variance, torch.tensor([noise]).float())

        return predict

    targets = problem.data.y.double().squeeze(2)
    return [predictor(x, y) for x, y in zip(problem.data.x.double(), targets, strict=True)]


# The first five as in the paper's figure, in its order.
METHODS: Mapping[str, Method] = {
    "gp": fit_gp,
    "badam": fit_badam,
    **{name: partial(fit_rule, name) for name in ("mc-dropout", "bbb", "vadam")},
    "map": fit_map,
    "laplace-diagonal": fit_laplace_diagonal,
    "laplace-full": fit_laplace_full,
    # With a noise as small as the toy problem's its usual rate diverges.
    "ivon": partial(fit_rule, "ivon", learn_noise=True),
    "ensemble": fit_ensemble,
}
