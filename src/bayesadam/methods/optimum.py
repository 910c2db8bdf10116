"""Methods that start from the optimum Adam found: MAP, Badam, Laplace with the GGN, SWAG, and ensembles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesadam.calibrate import calibrate
from bayesadam.methods.base import (
    AnyPredictive,
    Fitted,
    Problem,
    from_draws,
    noise_beside,
    sampled_predictors,
    train_with_adam,
)
from bayesadam.methods.network import forward, member
from bayesadam.methods.training import Streams, descend
from bayesadam.posterior import Posterior
from bayesadam.predict.predictive import RegressionPredictive

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
        read = Posterior.from_state_dict(network, state_of_member(problem, index), len(data))
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


def fit_swag(problem: Problem, *, rank: int = 20, snapshots: int = 100, every: int = 10, lr: float = 1e-2) -> Fitted:
    """SWAG: moments of SGD's iterates around the optimum; θ = w̄ + 2^(-1/2) (√var z₁ + D z₂/√(K−1))."""
    data, network = problem.data, problem.network
    params = {name: t.clone().requires_grad_() for name, t in problem.optimum.params.items()}
    mean = {name: torch.zeros_like(t) for name, t in params.items()}
    square = {name: torch.zeros_like(t) for name, t in params.items()}
    deviations: dict[str, list[Tensor]] = {name: [] for name in params}
    count = 0

    def collect(step: int) -> None:
        nonlocal count
        if step % every:
            return
        count += 1
        for name, tensor in params.items():
            value = tensor.detach()
            mean[name] += (value - mean[name]) / count
            square[name] += (value.square() - square[name]) / count
            deviations[name] = [*deviations[name], value - mean[name]][-rank:]

    steps = snapshots * every
    size = min(problem.training.batch_size, len(data))
    training = replace(problem.training, epochs=max(1, math.ceil(steps * size / len(data))))
    optimizer = torch.optim.SGD(list(params.values()), lr=lr, weight_decay=problem.training.weight_decay)
    descend(params, optimizer, problem.loss(network), data, training, problem.seeds, each_step=collect)
    variance = {name: (square[name] - mean[name].square()).clamp(min=1e-12) for name in params}
    columns = {name: torch.stack(parts, dim=-1) for name, parts in deviations.items()}

    def draw(index: int, x: Tensor) -> Tensor:
        source = Streams([problem.seeds[index]], "swag")
        k = next(iter(columns.values())).shape[-1]
        z2 = source.normal(problem.draws, k)[0]
        weights = {}
        for name in params:
            low_rank = columns[name][index] @ z2.T / math.sqrt(k - 1)
            noise = source.normal(problem.draws, *mean[name].shape[1:])[0]
            spread = variance[name][index].sqrt() * noise + low_rank.movedim(-1, 0)
            weights[name] = mean[name][index] + spread / math.sqrt(2)
        return forward(network, weights, x)

    posteriors = tuple(
        Posterior.from_moments(network.build(member(mean, i)), member(mean, i), member(variance, i), len(data))
        for i in range(len(problem.seeds))
    )
    return Fitted("swag", sampled_predictors(problem, draw), posteriors)


def fit_ensemble(problem: Problem, *, members: int = N_MEMBERS) -> Fitted:
    """A deep ensemble: independently initialised networks, averaged; all members of all seeds train as one stack."""
    seeds = [1_000_003 * (k + 1) + seed for seed in problem.seeds for k in range(members)]
    data = problem.data
    wide = replace(
        problem,
        data=replace(
            data,
            x=data.x.repeat_interleave(members, dim=0),
            y=data.y.repeat_interleave(members, dim=0),
            x_held_out=data.x_held_out.repeat_interleave(members, dim=0),
            y_held_out=data.y_held_out.repeat_interleave(members, dim=0),
        ),
        seeds=tuple(seeds),
    )
    params = train_with_adam(wide, problem.network, seeds).params

    def draw(index: int, x: Tensor) -> Tensor:
        own = {name: t[index * members : (index + 1) * members] for name, t in params.items()}
        return forward(problem.network, own, x)

    return Fitted("ensemble", sampled_predictors(problem, draw))


def state_of_member(problem: Problem, index: int) -> dict[str, object]:
    """One network's part of the stacked Adam's state, as Adam's own state dict for that network alone."""
    saved = problem.optimum.optimizer.state_dict()
    state = {
        key: {entry: t[index] if t.dim() else t for entry, t in values.items()}
        for key, values in saved["state"].items()
    }
    group = {**saved["param_groups"][0], "param_names": list(problem.optimum.params)}
    return {"state": state, "param_groups": [group]}


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
        # diag(p) − p pᵀ = A Aᵀ with A = diag(√p) − p √pᵀ.
        p = output.softmax(dim=-1)
        root = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        return (root.mT @ jacobian).flatten(0, 1), None


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
