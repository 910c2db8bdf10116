"""Methods that start from the optimum Adam found: MAP, Badam, Laplace with the GGN, SWAG, and ensembles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesadam.calibration import calibrate
from bayesadam.engine.network import Network, flatten, forward, member, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.likelihoods import RegressionPredictive
from bayesadam.methods.base import (
    AnyPredictive,
    Fitted,
    Problem,
    WeightGaussian,
    from_draws,
    noise_beside,
    sampled_predictors,
    train_with_adam,
)
from bayesadam.methods.training import descend, negative_log_likelihood
from bayesadam.posterior import Posterior

N_MEMBERS = 5


def fit_map(problem: Problem) -> Fitted:
    """The network itself: no uncertainty of the weights, noise from the held-out residuals."""
    networks = _networks(problem)

    def draw(index: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = networks[index](x)
        return output.expand(2, *output.shape)

    return Fitted("map", sampled_predictors(problem, draw))


def fit_badam(problem: Problem) -> Fitted:
    """The paper's method: the posterior is read off Adam's state, calibrated, and the network linearised."""
    data = problem.data
    posteriors = []
    for index, network in enumerate(_networks(problem)):
        read = Posterior.from_state_dict(network, problem.optimum.state_dict(index), len(data))
        held_out = (data.x_held_out[index], data.y_held_out[index])
        posteriors.append(calibrate(read.replace(prior_precision=1.0), held_out, likelihood=data.likelihood))
    return Fitted("badam", tuple(_linearised(p, problem) for p in posteriors), tuple(posteriors))


def fit_laplace_diagonal(problem: Problem) -> Fitted:
    """Laplace with the diagonal of the GGN, H = Σ_n J_nᵀ Λ_n J_n + δ, and δ by evidence; the network linearised."""
    posteriors = []
    for index, network in enumerate(_networks(problem)):
        jacobian, noise = _scaled_jacobian(problem, network, index)
        names = [name for name, _ in network.named_parameters()]
        sizes = [parameter.numel() for parameter in network.parameters()]
        curvature = jacobian.square().sum(dim=0)
        theta = torch.cat([p.detach().flatten() for p in network.parameters()]).double()
        delta = _evidence(curvature, theta)
        pieces = torch.split((curvature + delta).reciprocal().float(), sizes)
        variance = {n: v.view_as(p) for n, v, p in zip(names, pieces, network.parameters(), strict=True)}
        posterior = Posterior.from_moments(network, dict(network.named_parameters()), variance, len(problem.data))
        posteriors.append(posterior.replace(noise_variance=noise))
    return Fitted("laplace-diagonal", tuple(_linearised(p, problem) for p in posteriors), tuple(posteriors))


def fit_laplace_full(problem: Problem) -> Fitted:
    """Laplace with the whole GGN; J (JᵀJ + δ)⁻¹ Jᵀ through the data's own kernel matrix, so no (weights, weights) matrix."""
    predictors: list[Callable[[Tensor], AnyPredictive]] = []
    for index, network in enumerate(_networks(problem)):
        jacobian, noise = _scaled_jacobian(problem, network, index)
        kernel = jacobian @ jacobian.T
        theta = torch.cat([p.detach().flatten() for p in network.parameters()]).double()
        delta = _evidence(torch.linalg.eigvalsh(kernel).clamp(min=0), theta)
        factor = torch.linalg.cholesky(kernel + delta * torch.eye(len(kernel), dtype=torch.float64))
        predictors.append(_full_predictor(problem, network, jacobian, factor, delta, noise))
    return Fitted("laplace-full", tuple(predictors))


def fit_swag(problem: Problem) -> Fitted:
    """SWAG, predicting by weight draws θ = w̄ + 2^(-1/2) (√var z₁ + D z₂/√(K−1))."""
    found = train_swag(problem)
    network, mean, variance = problem.network, found.gaussian.mean, found.gaussian.variance
    columns = _by_name(network, found.deviations)

    def draw(index: int, x: Tensor) -> Tensor:
        source = Streams([problem.seeds[index]], "swag", x.device)
        k = found.deviations.shape[-1]
        z2 = source.normal(problem.draws, k)[0]
        weights = {}
        for name in mean:
            low_rank = columns[name][index] @ z2.T / math.sqrt(k - 1)
            noise = source.normal(problem.draws, *mean[name].shape[1:])[0]
            spread = variance[name][index].sqrt() * noise + low_rank.movedim(-1, 0)
            weights[name] = mean[name][index] + spread / math.sqrt(2)
        return forward(network, weights, x)

    posteriors = tuple(
        Posterior.from_moments(network.build(member(mean, i)), member(mean, i), member(variance, i), len(problem.data))
        for i in range(len(problem.seeds))
    )
    return Fitted("swag", sampled_predictors(problem, draw), posteriors)


@dataclass(frozen=True, eq=False)
class SwagMoments:
    """Mean and variance of SGD's iterates, and the last deviations D, (s, weights, K)."""

    gaussian: WeightGaussian
    deviations: Tensor


def train_swag(
    problem: Problem, *, rank: int = 20, snapshots: int = 100, every: int = 10, lr: float = 1e-2
) -> SwagMoments:
    """Moments of SGD's iterates around the optimum that Adam found."""
    data, network, optimum = problem.data, problem.network, problem.optimum
    flat = flatten(optimum.params).requires_grad_()
    mean, squares = torch.zeros_like(flat.detach()), torch.zeros_like(flat.detach())
    deviations: list[Tensor] = []
    count = 0

    def collect(step: int) -> None:
        nonlocal count
        if step % every:
            return
        count += 1
        value = flat.detach()
        surprise = value - mean
        mean.add_(surprise / count)
        deviations.append(value - mean)
        # Welford's sum: w² less w̄² would leave the difference of two large numbers.
        squares.add_(surprise * deviations[-1])
        del deviations[:-rank]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return negative_log_likelihood(forward(network, unflatten(network, flat), x), y, data.likelihood)

    size = min(problem.training.batch_size, len(data))
    epochs = max(1, math.ceil(snapshots * every * size / len(data)))
    training = replace(problem.training, epochs=epochs, sparsity=0.0)
    optimizer = torch.optim.SGD([flat], lr=lr, weight_decay=problem.training.weight_decay)
    descend(optimizer, loss, data, training, problem.seeds, each_step=collect)
    variance = (squares / count).clamp(min=1e-12)
    moments = WeightGaussian(unflatten(network, mean), unflatten(network, variance))
    return SwagMoments(moments, torch.stack(deviations, dim=-1))


def _by_name(network: Network, columns: Tensor) -> dict[str, Tensor]:
    """(s, weights, K) as (s, *shape, K) by name."""
    stack, _, count = columns.shape
    parts = unflatten(network, columns.permute(0, 2, 1).reshape(stack * count, -1))
    return {name: part.view(stack, count, *part.shape[1:]).movedim(1, -1) for name, part in parts.items()}


def fit_ensemble(problem: Problem, *, members: int = N_MEMBERS) -> Fitted:
    """A deep ensemble: independently initialised networks, averaged.

    The first is the network that the other methods start from; the rest of all seeds train as one stack.
    """
    rest = members - 1
    seeds = [1_000_003 * (k + 1) + seed for seed in problem.seeds for k in range(rest)]
    data = problem.data
    wide = replace(
        problem,
        data=replace(
            data,
            x=data.x.repeat_interleave(rest, dim=0),
            y=data.y.repeat_interleave(rest, dim=0),
            x_held_out=data.x_held_out.repeat_interleave(rest, dim=0),
            y_held_out=data.y_held_out.repeat_interleave(rest, dim=0),
        ),
        seeds=tuple(seeds),
    )
    params = train_with_adam(wide, problem.network, seeds).params
    first = problem.optimum.params

    def draw(index: int, x: Tensor) -> Tensor:
        own = {
            name: torch.cat([first[name][index : index + 1], t[index * rest : (index + 1) * rest]])
            for name, t in params.items()
        }
        return forward(problem.network, own, x)

    return Fitted("ensemble", sampled_predictors(problem, draw))


def diagonal_ggn(
    network: Network, params: Mapping[str, Tensor], x: Tensor, *, at_once: int = 1000
) -> dict[str, Tensor]:
    """diag Σ_n J_nᵀ (diag p − p pᵀ) J_n of a stack of classifiers, (s, *shape), layer by layer and never a Jacobian.

    With A Aᵀ the softmax's curvature and D = ∂(Aᵀf)/∂z back-propagated, a layer's share is Σ_n Σ_c D²ᵀ a².

    Args:
        network: the recipe.
        params: stacked weights.
        x: inputs, (n, inputs), the same for all.
        at_once: examples at a time.
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    depth = len(network.hidden) + 1
    for part in x.split(at_once):  # type: ignore[no-untyped-call]
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.enable_grad():
            f = forward(
                network, {n: t.detach().requires_grad_() for n, t in params.items()}, part, seen=(inputs, outputs)
            )
        root = _softmax_root(f.detach().softmax(dim=-1))
        for c in range(f.shape[-1]):
            grads = torch.autograd.grad(f, outputs, root[..., c], retain_graph=True)
            for number in range(depth):
                squares, read = grads[number].square(), inputs[number].detach().square()
                total[f"layer{number}.weight"] += torch.bmm(squares.mT.contiguous(), read.contiguous())
                total[f"layer{number}.bias"] += squares.sum(dim=1)
    return total


def _softmax_root(p: Tensor) -> Tensor:
    """A with diag(p) − p pᵀ = A Aᵀ: diag(√p) − p √pᵀ."""
    return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)


def _networks(problem: Problem) -> list[nn.Sequential]:
    stack = problem.optimum.params
    return [problem.network.build(member(stack, index)) for index in range(len(problem.seeds))]


def _linearised(posterior: Posterior, problem: Problem) -> Callable[[Tensor], AnyPredictive]:
    return lambda x: posterior.predict(x, likelihood=problem.data.likelihood)


def _jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """J of all examples and outputs, (b, outputs, weights), float64."""
    params = {name: p.detach().double() for name, p in network.named_parameters()}

    def outputs(p: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(network, p, (x.double(),))
        return found

    parts: dict[str, Tensor] = jacrev(outputs)(params)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def _scaled_jacobian(problem: Problem, network: nn.Module, index: int) -> tuple[Tensor, Tensor | None]:
    """Λ^(1/2) J of the training data, rows by example and output, and the noise for regression."""
    data = problem.data
    jacobian = _jacobian(network, data.x[index])
    with torch.no_grad():
        output = network(data.x[index]).double()
        if data.likelihood == "regression":
            held_out = network(data.x_held_out[index])
            noise = noise_beside(held_out, torch.zeros_like(held_out), data.y_held_out[index])
            return (jacobian / noise.double().sqrt()[None, :, None]).flatten(0, 1), noise
        if data.likelihood == "binary":
            p = output.sigmoid()
            return (jacobian * (p * (1 - p)).sqrt().unsqueeze(-1)).flatten(0, 1), None
        return (_softmax_root(output.softmax(dim=-1)).mT @ jacobian).flatten(0, 1), None


def _evidence(eigenvalues: Tensor, theta: Tensor) -> float:
    """MacKay's fixed point δ = γ/|θ|², γ = Σ h/(h + δ)."""
    delta, square = 1.0, float(theta.square().sum())
    for _ in range(200):
        gamma = float((eigenvalues / (eigenvalues + delta)).sum())
        fresh = max(gamma / square, 1e-10)
        if abs(fresh - delta) <= 1e-8 * delta:
            break
        delta = fresh
    return delta


def _full_predictor(
    problem: Problem, network: nn.Module, jacobian: Tensor, factor: Tensor, delta: float, noise: Tensor | None
) -> Callable[[Tensor], AnyPredictive]:
    def predictor(x: Tensor) -> AnyPredictive:
        here = _jacobian(network, x)
        with torch.no_grad():
            mean = network(x)
            # (JᵀJ + δ)⁻¹ = (1 − Jᵀ (J Jᵀ + δ)⁻¹ J)/δ, by Woodbury.
            cross = torch.linalg.solve_triangular(factor, jacobian @ here.flatten(0, 1).T, upper=False)
            cross = cross.T.view(*here.shape[:2], -1)
            covariance = ((here @ here.mT - cross @ cross.mT) / delta).float()
        variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0)
        if problem.data.likelihood == "regression":
            assert noise is not None
            return RegressionPredictive(mean, variance, None, None, noise)
        draws = mean + variance.sqrt() * Streams([0], "laplace").normal(problem.draws, *mean.shape)[0]
        return from_draws(draws, problem.data.likelihood, None)

    return predictor
