"""Methods that start from the optimum Adam found: MAP, Badam, Laplace with the GGN, and ensembles."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesadam.calibration import calibrate
from bayesadam.engine.network import Network, forward, member
from bayesadam.errors import UnusedPosteriorWarning
from bayesadam.likelihoods import Component, Predictive, likelihood
from bayesadam.paper.methods.base import Fitted, Problem, held_out_noise, sampled
from bayesadam.posterior import Posterior

N_MEMBERS = 5


def fit_map(problem: Problem) -> Fitted:
    """The network itself: no uncertainty of the weights, noise from the held-out residuals."""
    return sampled("map", replace(problem, draws=1), problem.optimum)


def fit_badam(problem: Problem) -> Fitted:
    """The paper's method: the posterior is read off Adam's state, calibrated, and the network linearised."""
    data = problem.data
    posteriors = []
    for index, network in enumerate(_networks(problem)):
        read = Posterior.from_state_dict(network, problem.optimum.state_dict(index), len(data))
        held_out = (data.x_held_out[index], data.y_held_out[index])
        with warnings.catch_warnings():
            # Methods are compared by what the held-out data prefer, whichever it is.
            warnings.simplefilter("ignore", UnusedPosteriorWarning)
            posteriors.append(calibrate(read.replace(prior_precision=1.0), held_out, likelihood=data.likelihood))
    return Fitted("badam", tuple(_linearised(p, problem) for p in posteriors), tuple(posteriors))


def fit_laplace_diagonal(problem: Problem) -> Fitted:
    """Laplace with the diagonal of the GGN, H = Σ_n J_nᵀ Λ_n J_n + δ, and δ by evidence; the network linearised."""
    posteriors = []
    for index, network in enumerate(_networks(problem)):
        jacobian, noise = _scaled_jacobian(problem, network, index)
        names, parameters = zip(*network.named_parameters(), strict=True)
        curvature = jacobian.square().sum(dim=0)
        delta = _evidence(curvature, _flat(network))
        pieces = torch.split((curvature + delta).reciprocal().float(), [p.numel() for p in parameters])
        variance = {n: v.view_as(p) for n, v, p in zip(names, pieces, parameters, strict=True)}
        posterior = Posterior.from_moments(network, dict(network.named_parameters()), variance, len(problem.data))
        posteriors.append(posterior.replace(noise_variance=noise))
    return Fitted("laplace-diagonal", tuple(_linearised(p, problem) for p in posteriors), tuple(posteriors))


def fit_laplace_full(problem: Problem) -> Fitted:
    """Laplace with the whole GGN; J (JᵀJ + δ)⁻¹ Jᵀ through the data's own kernel matrix, so no (weights, weights) matrix."""
    predictors: list[Callable[[Tensor], Predictive]] = []
    for index, network in enumerate(_networks(problem)):
        jacobian, noise = _scaled_jacobian(problem, network, index)
        kernel = jacobian @ jacobian.T
        delta = _evidence(torch.linalg.eigvalsh(kernel).clamp(min=0), _flat(network))
        factor = torch.linalg.cholesky(kernel + delta * torch.eye(len(kernel), dtype=torch.float64))
        predictors.append(_full_predictor(problem, network, jacobian, factor, delta, noise))
    return Fitted("laplace-full", tuple(predictors))


def fit_ensemble(problem: Problem, *, members: int = N_MEMBERS) -> Fitted:
    """A deep ensemble: the mixture of independently initialised networks.

    The first is the network that the other methods start from; the rest of all seeds train as one stack.
    """
    rest = members - 1
    seeds = tuple(1_000_003 * (k + 1) + seed for seed in problem.seeds for k in range(rest))
    wide = replace(problem, data=problem.data.repeated(rest), seeds=seeds)
    first, others, kind = problem.optimum.params, wide.optimum.params, problem.data.kind

    def predictor(index: int) -> Callable[[Tensor], Predictive]:
        own = {
            name: torch.cat([first[name][index : index + 1], t[index * rest : (index + 1) * rest]])
            for name, t in others.items()
        }

        def draw(x: Tensor) -> Tensor:
            return forward(problem.network, own, x)

        noise = held_out_noise(problem, index, draw)
        weights = (1 / members,) * members

        def components(x: Tensor) -> list[Component]:
            return [Component(f, torch.zeros_like(f), noise_variance=noise) for f in draw(x)]

        return lambda x: kind.predictive(components(x), weights)

    return Fitted("ensemble", tuple(map(predictor, range(len(problem.seeds)))))


def diagonal_ggn(
    network: Network, params: Mapping[str, Tensor], x: Tensor, *, at_once: int = 1000
) -> dict[str, Tensor]:
    """diag Σ_n J_nᵀ (diag p − p pᵀ) J_n of a stack of classifiers, (s, *shape), layer by layer and never a Jacobian.

    With A Aᵀ the softmax's curvature and D = ∂(Aᵀf)/∂z back-propagated, a layer's share is Σ_n Σ_c D²ᵀ a².
    The inputs, (n, inputs), are the same for all, and taken `at_once` at a time.
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    for part in x.split(at_once):  # type: ignore[no-untyped-call]
        seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        with torch.enable_grad():
            f = forward(network, {n: t.detach().requires_grad_() for n, t in params.items()}, part, seen=seen)
        root = likelihood("classification").hessian_root(f.detach())
        for c in range(f.shape[-1]):
            grads = torch.autograd.grad(f, seen[1], root[..., c], retain_graph=True)
            for number, (grad, inputs) in enumerate(zip(grads, seen[0], strict=True)):
                squares = grad.square()
                total[f"layer{number}.weight"] += torch.bmm(squares.mT.contiguous(), inputs.detach().square())
                total[f"layer{number}.bias"] += squares.sum(dim=1)
    return total


def _networks(problem: Problem) -> list[nn.Sequential]:
    stack = problem.optimum
    return [stack.network.build(member(stack.params, index)) for index in range(len(problem.seeds))]


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()]).double()


def _linearised(posterior: Posterior, problem: Problem) -> Callable[[Tensor], Predictive]:
    return lambda x: posterior.predict(x, likelihood=problem.data.likelihood, novelty=False)


def _jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """J of all examples and outputs, (b, outputs, weights), float64."""
    params = {name: p.detach().double() for name, p in network.named_parameters()}
    parts: dict[str, Tensor] = jacrev(lambda p: functional_call(network, p, (x.double(),)))(params)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def _scaled_jacobian(problem: Problem, network: nn.Module, index: int) -> tuple[Tensor, Tensor | None]:
    """Λ^(1/2) J of the training data, rows by example and output, and the noise where the likelihood has one."""
    x = problem.data.x[index]
    with torch.no_grad():
        noise = held_out_noise(problem, index, lambda inputs: network(inputs)[None])
        root = problem.data.kind.hessian_root(network(x).double(), None if noise is None else noise.double())
        return (root.mT @ _jacobian(network, x)).flatten(0, 1), noise


def _evidence(eigenvalues: Tensor, theta: Tensor) -> float:
    """MacKay's fixed point δ = γ/|θ|², γ = Σ h/(h + δ)."""
    delta, square = 1.0, float(theta.square().sum())
    for _ in range(200):
        gamma = float((eigenvalues / (eigenvalues + delta)).sum())
        following = max(gamma / square, 1e-10)
        if abs(following - delta) <= 1e-8 * delta:
            break
        delta = following
    return delta


def _full_predictor(
    problem: Problem, network: nn.Module, jacobian: Tensor, factor: Tensor, delta: float, noise: Tensor | None
) -> Callable[[Tensor], Predictive]:
    def predictor(x: Tensor) -> Predictive:
        here = _jacobian(network, x)
        with torch.no_grad():
            mean = network(x)
            # (JᵀJ + δ)⁻¹ = (1 − Jᵀ (J Jᵀ + δ)⁻¹ J)/δ, by Woodbury.
            cross = torch.linalg.solve_triangular(factor, jacobian @ here.flatten(0, 1).T, upper=False)
            cross = cross.T.view(*here.shape[:2], -1)
            covariance = ((here @ here.mT - cross @ cross.mT) / delta).float()
        variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0)
        found: Predictive = problem.data.kind.predictive([Component(mean, variance, covariance, noise_variance=noise)])
        return found

    return predictor
