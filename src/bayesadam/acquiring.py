"""What to label next: the inputs of a pool whose labels would teach a posterior most."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesadam._checks import count, require_kind
from bayesadam._progress import progress
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Likelihood, agreed
from bayesadam.predict import Forward, linearised
from bayesadam.predict.batches import chosen_examples, inputs_of, joined, parts
from bayesadam.predict.tap import first_input, observed, watched
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

__all__ = ["acquire"]

# Inputs of a pool at a time, and those among which a joint choice is made.
_CHUNK, _CANDIDATES = 1000, 1000


def acquire(
    posterior: Posterior | Mixture,
    pool: Any,
    k: int,
    *,
    likelihood: str | None = None,
    forward: Forward | None = None,
    seed: int = 0,
) -> Tensor:
    """The indices of k inputs of a pool to label next, (k,), in the order in which they were chosen.

    Of classes these are k gradients of the last linear layer at the likeliest class, g = (p − e_ŷ) hᵀ, far from each
    other: the longest first, then with probability |g − nearest chosen|², the rule of k-means++ (BADGE, Ash et al.
    2020). One forward pass; the network alone decides, and of a mixture all networks.

    Of numbers it is one after the other what adds most to the information of all labels about the weights,

        I(y₁…y_k; θ) = ½ log det(1 + H^½ K H^½),

    with K the covariance of the linearised network's outputs between inputs and H the Hessian of −log p. Of a large
    pool the 1,000 inputs of the largest information by themselves are candidates.

    Args:
        pool: inputs as `predict` takes them, or a loader that does not shuffle, whose targets are left out.
        k: how many to choose.
        likelihood: None for the posterior's own. A regression needs its noise: `posterior.tune`, or
            `posterior.replace(noise_variance=...)`.
        forward: `forward(model, inputs)` for models whose call is unusual.
        seed: of the random numbers, of classes.
    """
    require_kind(posterior, (Posterior, Mixture), "posterior")
    count("k", k, "inputs")
    q = posterior if isinstance(posterior, Mixture) else Mixture([posterior])
    kind = agreed(likelihood, q.likelihood)
    chunks = (part for batch in inputs_of(pool, q.members[0].model) for part in parts(batch, _CHUNK))
    if kind.is_classes:
        factors = [_gradients(q, part, kind, forward) for part in progress(chunks, "acquire")]
        errors, hidden = (torch.cat(factor, dim=1) for factor in zip(*factors, strict=True))
        _check_size(errors.shape[1], k)
        return _spread(errors, hidden, k, seed)
    batches, single = [], []
    for batch in progress(chunks, "acquire"):
        mean, covariance = _moments(q, batch, forward, joint=False)
        single.append(_information(covariance, _hessian(q, kind, mean)))
        batches.append(batch)
    _check_size(sum(map(len, single)), k)
    candidates = torch.cat(single).argsort(descending=True, stable=True)[: max(k, _CANDIDATES)].cpu()
    mean, covariance = _moments(q, chosen_examples(joined(batches), candidates), forward, joint=True)
    return candidates[_most_information(covariance, _hessian(q, kind, mean), k)]


def _check_size(size: int, k: int) -> None:
    if k > size:
        raise MatchError(f"the pool has {size} inputs, and k={k} were asked for")


# --- classes ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _gradients(q: Mixture, inputs: Any, kind: Likelihood, forward: Forward | None) -> tuple[Tensor, Tensor]:
    """Factors e and h of the gradients e hᵀ of the last linear layer at the likeliest class, (members, n, ·) each."""
    errors, hidden = [], []
    for member in q.members:
        features: list[Tensor] = []
        layers = [module for module in member.model.modules() if isinstance(module, nn.Linear)]

        def see(_: nn.Module, args: Any, kwargs: Any, __: Any, features: list[Tensor] = features) -> None:
            features.append(first_input(args, kwargs))

        with watched(layers, see):
            outputs, _ = observed(member, (), inputs, forward)
        if not features or features[-1].dim() != 2 or outputs.dim() != 2:
            raise MatchError(
                f"an input has one label here, from a linear layer; the outputs are {tuple(outputs.shape)}"
            )
        probs = outputs.softmax(dim=1) if kind.coupled else outputs.sigmoid()
        likeliest = F.one_hot(outputs.argmax(dim=1), outputs.shape[1]) if kind.coupled else outputs > 0
        errors.append(probs - likeliest.to(probs))
        hidden.append(features[-1])
    return torch.stack(errors), torch.stack(hidden)


def _spread(errors: Tensor, hidden: Tensor, k: int, seed: int) -> Tensor:
    """k of the gradients e hᵀ, of (members, n, ·), by k-means++."""
    square = (errors.square().sum(dim=2) * hidden.square().sum(dim=2)).sum(dim=0).double()
    source, nearest, chosen = torch.Generator().manual_seed(seed), square.clone(), [int(square.argmax())]
    while len(chosen) < k:
        last = chosen[-1]
        products = [torch.einsum("mnc,mc->mn", factor, factor[:, last]) for factor in (errors, hidden)]
        away = (square + square[last] - 2 * (products[0] * products[1]).sum(dim=0).double()).clamp(min=0)
        nearest = away if len(chosen) == 1 else torch.minimum(nearest, away)
        nearest[chosen] = 0
        if not bool(nearest.any()):
            nearest = torch.ones_like(nearest)
            nearest[chosen] = 0
        chosen.append(int(torch.multinomial(nearest.float().cpu(), 1, generator=source)))
    return torch.tensor(chosen)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _moments(q: Mixture, inputs: Any, forward: Forward | None, *, joint: bool) -> tuple[Tensor, Tensor]:
    """E[f], (n, c), and Cov[f], (n, c, c), or between inputs too, (n c, n c), of the mixture's members together."""
    moments = [linearised(member, inputs, forward=forward, covariance=not joint, joint=joint) for member in q.members]
    means = torch.stack([m.mean.reshape(len(m.mean), -1).double() for m in moments])
    shares = torch.tensor(q.weights, dtype=torch.float64, device=means.device)
    mean = torch.einsum("m,mnc->nc", shares, means)
    away = (means - mean).flatten(1) if joint else means - mean
    within = torch.stack([c.double() for m in moments if (c := m.joint if joint else m.covariance) is not None])
    total = within + away[..., :, None] * away[..., None, :]
    return mean, torch.tensordot(shares, total, dims=1)


def _hessian(q: Mixture, kind: Likelihood, mean: Tensor) -> Tensor:
    """H of −log p(y | f) at the mean, (n, c)."""
    noise = q.members[0].noise_variance
    if kind.noise and (noise is None or not bool((noise > 0).all())):
        raise SettingError("the noise of a label is not known: posterior.replace(noise_variance=...)")
    return kind.hessian_diagonal(mean, None if noise is None else noise.to(mean))


def _information(covariance: Tensor, hessian: Tensor) -> Tensor:
    """log det(1 + H^½ K H^½) of each input by itself, (n,)."""
    root, eye = hessian.sqrt(), torch.eye(hessian.shape[1]).to(hessian)
    information: Tensor = torch.linalg.slogdet(eye + root[:, :, None] * covariance * root[:, None, :]).logabsdet
    return information


def _most_information(covariance: Tensor, hessian: Tensor, k: int) -> Tensor:
    """Greedy choice of k inputs by ½ log det(1 + H^½ K H^½), K conditioned on each."""
    n, c = hessian.shape
    rest, chosen = covariance.clone(), list[int]()
    for _ in range(k):
        gain = _information(rest.view(n, c, n, c).diagonal(dim1=0, dim2=2).movedim(-1, 0), hessian)
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        chosen.append(best)
        own = slice(best * c, (best + 1) * c)
        root = hessian[best].sqrt()[:, None]
        inner = torch.eye(c).to(rest) + root * rest[own, own] * root.T
        rows = rest[own] * root
        rest = rest - rows.T @ torch.linalg.solve(inner, rows)
    return torch.tensor(chosen)
