"""What to label next: the inputs of a pool whose labels would teach a posterior most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._checks import count, require_kind
from bayesadam._progress import progress
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.predict import Forward, linearised
from bayesadam.predict.batches import batch_size, chosen_examples, examples, for_model, inputs_of, is_loader
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
    mixture = posterior if isinstance(posterior, Mixture) else Mixture([posterior])
    name = likelihood or posterior.likelihood
    if name is None:
        raise SettingError("acquire needs to know what the labels are: likelihood='classification', 'regression', …")
    batches = _batches(mixture.members[0].model, pool)
    if name in ("classification", "binary"):
        errors, hidden = [], []
        for batch in batches:
            pairs = [_gradients(member, batch, name, forward) for member in mixture.members]
            errors.append(torch.stack([e for e, _ in pairs]))
            hidden.append(torch.stack([h for _, h in pairs]))
        return _spread(torch.cat(errors, dim=1), torch.cat(hidden, dim=1), k, seed)
    parts = [(batch, _information(mixture, batch, name, forward)) for batch in batches]
    own = torch.cat([information for _, information in parts])
    _check_size(len(own), k)
    candidates = own.argsort(descending=True, stable=True)[: max(k, _CANDIDATES)].cpu()
    whole = pytree.tree_map(lambda *t: torch.cat(t) if isinstance(t[0], Tensor) else t[0], *(b for b, _ in parts))
    mean, covariance = _moments(mixture, chosen_examples(whole, candidates), forward, joint=True)
    return candidates[_most_information(covariance, _hessian(mixture, mean, name), k)]


def _batches(model: nn.Module, pool: Any) -> Iterator[Any]:
    """A pool in batches on the model's device."""
    if is_loader(pool):
        yield from (inputs_of(batch, model) for batch in progress(pool, "acquire"))
        return
    whole = for_model(pool, model)
    for start in range(0, batch_size(whole), _CHUNK):
        yield examples(whole, start, start + _CHUNK)


def _check_size(size: int, k: int) -> None:
    if k > size:
        raise MatchError(f"the pool has {size} inputs, and k={k} were asked for")


# --- classes ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _gradients(posterior: Posterior, inputs: Any, name: str, forward: Forward | None) -> tuple[Tensor, Tensor]:
    """Factors e and h of the gradients e hᵀ of the last linear layer at the likeliest class, (n, ·) each."""
    features: list[Tensor] = []
    layers = [module for module in posterior.model.modules() if isinstance(module, nn.Linear)]
    with watched(layers, lambda _, args, kwargs, output: features.append(first_input(args, kwargs))):
        outputs, _ = observed(posterior, (), inputs, forward)
    if not features or features[-1].dim() != 2 or outputs.dim() != 2:
        raise MatchError(f"an input has one label here, from a linear layer; the outputs are {tuple(outputs.shape)}")
    if name == "binary":
        return outputs.sigmoid() - (outputs > 0).to(outputs), features[-1]
    return outputs.softmax(dim=1) - F.one_hot(outputs.argmax(dim=1), outputs.shape[1]), features[-1]


def _spread(errors: Tensor, hidden: Tensor, k: int, seed: int) -> Tensor:
    """k of the gradients e hᵀ, of (members, n, ·), by k-means++."""
    own = (errors.square().sum(dim=2) * hidden.square().sum(dim=2)).sum(dim=0).double()
    _check_size(len(own), k)
    source, nearest, chosen = torch.Generator().manual_seed(seed), own.clone(), [int(own.argmax())]
    while len(chosen) < k:
        last = chosen[-1]
        products = [torch.einsum("mnc,mc->mn", factor, factor[:, last]) for factor in (errors, hidden)]
        away = (own + own[last] - 2 * (products[0] * products[1]).sum(dim=0).double()).clamp(min=0)
        nearest = away if len(chosen) == 1 else torch.minimum(nearest, away)
        nearest[chosen] = 0
        shares = nearest.cpu() if bool(nearest.any()) else torch.ones(len(own)).index_fill(0, torch.tensor(chosen), 0.0)
        chosen.append(int(torch.multinomial(shares.float(), 1, generator=source)))
    return torch.tensor(chosen)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _moments(q: Mixture, inputs: Any, forward: Forward | None, *, joint: bool) -> tuple[Tensor, Tensor]:
    """E[f], (n, c), and Cov[f], (n, c, c), or between inputs too, (n c, n c), of the mixture's members together."""
    moments = [linearised(member, inputs, forward=forward, covariance=not joint, joint=joint) for member in q.members]
    means = torch.stack([m.mean.reshape(len(m.mean), -1).double() for m in moments])
    shares = torch.tensor(q.weights, dtype=torch.float64, device=means.device)
    mean = torch.einsum("m,mnc->nc", shares, means)
    away = (means - mean).flatten(1)[:, None] if joint else means - mean
    within = torch.stack([(m.joint if joint else m.covariance).double() for m in moments])  # type: ignore[union-attr]
    within = within[:, None] if joint else within
    total = torch.einsum("m,mnij->nij", shares, within + away[..., :, None] * away[..., None, :])
    return mean, total[0] if joint else total


def _hessian(q: Mixture, mean: Tensor, name: str) -> Tensor:
    """H of −log p(y | f) at the mean, (n, c)."""
    record, noise = record_of(name), q.members[0].noise_variance
    if name == "regression" and (noise is None or not bool((noise > 0).all())):
        raise SettingError("the noise of a label is not known: posterior.replace(noise_variance=...)")
    diagonal: Tensor = record.hessian_diagonal(mean, None if noise is None else noise.to(mean))
    return diagonal


def _information(q: Mixture, inputs: Any, name: str, forward: Forward | None) -> Tensor:
    """I(y; θ) of each input by itself, (n,)."""
    mean, covariance = _moments(q, inputs, forward, joint=False)
    root = _hessian(q, mean, name).sqrt()
    inner = torch.eye(mean.shape[1]).to(mean) + root[:, :, None] * covariance * root[:, None, :]
    information: Tensor = torch.linalg.slogdet(inner).logabsdet / 2
    return information


def _most_information(covariance: Tensor, hessian: Tensor, k: int) -> Tensor:
    """Greedy choice of k inputs by ½ log det(1 + H^½ K H^½), K conditioned on each."""
    n, c = hessian.shape
    rest, eye = covariance.clone(), torch.eye(c).to(covariance)
    chosen: list[int] = []
    root = hessian.sqrt()
    for _ in range(k):
        own = rest.view(n, c, n, c).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        inner = eye + root[:, :, None] * own * root[:, None, :]
        gain = torch.linalg.slogdet(inner).logabsdet
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        chosen.append(best)
        rows = rest[best * c : (best + 1) * c] * root[best][:, None]
        rest = rest - rows.T @ torch.linalg.solve(inner[best], rows)
    return torch.tensor(chosen)
