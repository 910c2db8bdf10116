"""What to label next: the inputs of a pool whose labels would teach a posterior most."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesadam._checks import count, require_kind
from bayesadam._progress import progress
from bayesadam.errors import MatchError, MemoryBudgetError, SettingError
from bayesadam.likelihoods import Component
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.likelihoods.classification import ClassLikelihood, entropy
from bayesadam.likelihoods.predictive import average
from bayesadam.predict import DEFAULT_BUDGET, Forward
from bayesadam.predict.batches import batch_size, chosen_examples, examples, for_model, inputs_of, is_loader
from bayesadam.predict.tap import observed
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

__all__ = ["Method", "acquire"]

Method = Literal["batchbald", "bald", "epig", "leverage", "badge"]
# Joint entropies are sums over all answers up to so many, and over so many sampled ones beyond.
_EXACT, _SAMPLED = 1024, 512
# Target inputs out of the pool where none are given.
_TARGETS = 200
# Numbers that one part of the joint probabilities may have.
_AT_ONCE = 1 << 23


def acquire(
    posterior: Posterior | Mixture,
    pool: Any,
    k: int,
    *,
    method: Method | None = None,
    target: Any = None,
    likelihood: str | None = None,
    n_samples: int = 100,
    n_candidates: int = 1000,
    seed: int = 0,
    forward: Forward | None = None,
    chunk: int = 1000,
    memory_budget: int = DEFAULT_BUDGET,
) -> Tensor:
    """The indices of k inputs of a pool to label next, (k,), in the order in which they were chosen.

    | method        | chooses                                                                                       |
    |---------------|-----------------------------------------------------------------------------------------------|
    | `"batchbald"` | one after the other, what adds most to I(y₁…y_k; θ): the labels together teach most           |
    | `"bald"`      | the k largest I(y; θ), each by itself; alike inputs come together                             |
    | `"epig"`      | what teaches most about the labels of `target`: I(y; y*), or their expected variance reduction |
    | `"leverage"`  | the k most novel, by `posterior.novelty`: one forward pass                                    |
    | `"badge"`     | k gradients of the last layer far from each other, by the rule of k-means++; classes          |

    None is `"badge"` for classes and `"batchbald"` for numbers.

    The first three look at functions drawn from the linearised network, the same for all inputs. Of classes the joint
    entropy of y₁…y_j is a sum over all answers up to 1,024 of these, and over 512 sampled ones beyond. For numbers it
    is ½ log det(1 + H^½ K H^½), K the covariance between inputs and H the Hessian of −log p; after every choice K is
    conditioned on it. Of classes `"epig"` takes the k largest.

    A pool is gone through in chunks, for moments alone; functions are drawn at a few candidates. These are the inputs
    with the largest I(y; θ) of their own; for `"epig"` a random part of the pool.

    A posterior of few labels is as wide as its prior, which the first three depend on: a `prior_precision` of one over
    the mean square of the weights is a good start.

    Args:
        pool: inputs as `predict` takes them, or a loader that does not shuffle; a loader is gone through twice,
            by `"badge"` and `"leverage"` once.
        k: how many to choose.
        target: inputs like those that will be predicted, for `"epig"`; None takes 200 of the pool.
        likelihood: None for the posterior's own. A regression needs its noise: `calibrate`, or
            `posterior.replace(noise_variance=...)`.
        n_samples: functions drawn, over all members of a mixture.
        n_candidates: the inputs among which a joint choice is made.
        seed: of all random numbers; the answer depends on nothing else.
        forward: `forward(model, inputs)` for models whose call is unusual.
        chunk: inputs of the pool at a time.
    """
    require_kind(posterior, (Posterior, Mixture), "posterior")
    if method not in (None, *get_args(Method)):
        raise SettingError(f"method must be None or one of {get_args(Method)}, got {method!r}")
    for name, value in (("k", k), ("n_samples", n_samples), ("n_candidates", n_candidates), ("chunk", chunk)):
        count(name, value, "inputs or draws")
    found = _Pool(posterior, pool, chunk)
    name = posterior._likelihood(likelihood)
    each = max(2, -(-n_samples // len(posterior.members)))
    q = _Information(posterior, record_of(name), each, seed, {"likelihood": name, "forward": forward}, memory_budget)
    method = method or ("badge" if q.is_class else "batchbald")
    if method == "leverage":
        scores = posterior.novelty(((batch,) for batch in found.batches()), likelihood=name, forward=forward)
        return _largest(scores, k)
    if method == "badge":
        return _spread(*q.gradients(found.batches()), k, seed)
    if method == "epig":
        candidates = _some(found.size(), max(k, n_candidates), seed)
        near = _Pool(posterior, pool if target is None else target, chunk)
        inputs = found.some(candidates)
        return candidates[q.about(inputs, near.some(_some(near.size(), _TARGETS, seed + 1)), k)]
    scores = torch.cat([q.own(batch) for batch in found.batches()])
    candidates = _largest(scores, max(k, min(n_candidates, len(scores))))
    inputs = found.some(candidates)
    return candidates[_largest(q.alone(inputs), k) if method == "bald" else q.together(inputs, k)]


def _largest(scores: Tensor, k: int) -> Tensor:
    if k > len(scores):
        raise MatchError(f"the pool has {len(scores)} inputs, and k={k} were asked for")
    return scores.nan_to_num(-math.inf).argsort(descending=True, stable=True)[:k].cpu()


def _some(size: int, n: int, seed: int) -> Tensor:
    """At most n different numbers below `size`, sorted."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:n].sort().values


def _joined(*batches: Any) -> Any:
    return pytree.tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *batches)


@dataclass(frozen=True, eq=False)
class _Pool:
    """Inputs by number: a batch that is cut into chunks, or a loader."""

    posterior: Posterior | Mixture
    inputs: Any
    chunk: int

    def batches(self) -> Iterator[Any]:
        model = self.posterior.members[0].model
        if is_loader(self.inputs):
            yield from (inputs_of(batch, model) for batch in progress(self.inputs, "acquire"))
            return
        whole = for_model(self.inputs, model)
        for start in range(0, batch_size(whole), self.chunk):
            yield examples(whole, start, start + self.chunk)

    def size(self) -> int:
        return sum(batch_size(batch) for batch in self.batches())

    def some(self, rows: Tensor) -> Any:
        """Some inputs, in the order of their numbers `rows`."""
        parts, start, order = [], 0, rows.argsort()
        for batch in self.batches():
            stop = start + batch_size(batch)
            here = rows[order][(rows[order] >= start) & (rows[order] < stop)] - start
            if len(here):
                parts.append(chosen_examples(batch, here))
            start = stop
        if not start:
            raise MatchError("the loader gave no batch the second time: pass one that can be gone through again")
        return chosen_examples(_joined(*parts), order.argsort())


@dataclass(frozen=True, eq=False)
class _Information:
    """What labels would teach a posterior, by `n` draws of each member."""

    posterior: Posterior | Mixture
    record: Any
    n: int
    seed: int
    options: dict[str, Any]
    budget: int

    @property
    def is_class(self) -> bool:
        return isinstance(self.record, ClassLikelihood)

    def predict(self, inputs: Any, **options: Any) -> Any:
        source = torch.Generator().manual_seed(self.seed)
        how = {**self.options, "shift": False, "memory_budget": self.budget, "generator": source, **options}
        found = self.posterior.predict(inputs, **how)
        if found.mean.dim() > 2:
            raise MatchError(f"an input has one label here, and the outputs have shape {tuple(found.mean.shape)}")
        return found

    def own(self, inputs: Any) -> Tensor:
        """I(y; θ) of each input, (batch,), as of a Gaussian: ½ log det(1 + Aᵀ Cov[f] A), A Aᵀ the Hessian of −log p.

        That of classes is taken at their averaged probabilities; what members disagree on is added.
        """
        found = self.predict(inputs, covariance=True)
        if not self.is_class:
            return _log_det(found.covariance, torch.diag_embed(self.hessian(found).flatten(1).sqrt()))
        within = []
        for c in found.components:
            t = c.temperature
            probs = self.record.of_classes(self.record.probit(c.mean / t, c.variance / t**2)).clamp(min=1e-6)
            at = probs.log() if self.record.coupled else c.mean / t
            within.append(_log_det(c.covariance / t**2, self.record.hessian_root(at)))
        between = found.disagreement().reshape(len(found.mean), -1).sum(dim=1)
        total: Tensor = average(found.weights, within) + between
        return total

    def hessian(self, found: Any) -> Tensor:
        """H of −log p(y | f) at the mean, of the outputs' shape."""
        noise = found.components[0].noise_variance
        if self.record.noise and (noise is None or not bool((noise > 0).all())):
            raise SettingError("the noise of a label is not known: calibrate, or posterior.replace(noise_variance=...)")
        diagonal: Tensor = self.record.hessian_diagonal(found.mean, noise)
        return diagonal

    def probabilities(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """p(y | θ_s) of drawn functions, (s, n, classes), and the weights of the draws, (s,)."""
        found = self.predict(inputs, predictive="linearised-sampled", n_samples=self.n)
        each = [self.record.of_classes(self.record.draw_probs(c, 0)) for c in found.components]
        if each[0].dim() > 3 and each[0].shape[2] > 1:
            raise MatchError("an input has one label here, and the network has several binary outputs")
        weights = torch.tensor(found.weights).repeat_interleave(self.n) / self.n
        probs = torch.cat([p.reshape(*p.shape[:2], -1) for p in each])
        return probs, weights.to(probs)

    def covariance(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """K between inputs, (n c, n c), exact where memory allows, and H, (n, c)."""
        try:
            found = self.predict(inputs, joint=True)
        except MemoryBudgetError:
            found = self.predict(inputs, joint=True, predictive="linearised-sampled", n_samples=self.n)
        return found.joint_covariance.double(), self.hessian(found).double().reshape(len(found.mean), -1)

    def alone(self, inputs: Any) -> Tensor:
        """I(y; θ) of each input, (n,)."""
        if not self.is_class:
            return self.own(inputs)
        probs, weights = self.probabilities(inputs)
        return entropy(torch.einsum("s,snc->nc", weights, probs)) - torch.einsum("s,sn->n", weights, entropy(probs))

    def together(self, inputs: Any, k: int) -> Tensor:
        """k numbers of inputs whose labels together teach most, one after the other."""
        if self.is_class:
            return most_joint_information(*self.probabilities(inputs), k, self.seed)
        return _most_reduction(*self.covariance(inputs), k)

    def about(self, inputs: Any, target: Any, k: int) -> Tensor:
        """k numbers of inputs whose labels teach most about those of the target."""
        if k > (n := batch_size(inputs)):
            raise MatchError(f"the pool has {n} inputs, and k={k} were asked for")
        both = _joined(inputs, target)
        if not self.is_class:
            return _most_reduction(*self.covariance(both), k, n)
        probs, weights = self.probabilities(both)
        return _largest(_shared_information(probs[:, :n], probs[:, n:], weights), k)

    def gradients(self, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
        """Factors e and h of the gradients e hᵀ of the last layer at the likeliest class, (members, n, ·) each."""
        if not self.is_class:
            raise SettingError("method='badge' is for classes, whose labels it guesses: use 'batchbald' or 'epig'")
        errors, hidden = [], []
        for batch in batches:
            of_members = []
            for member in self.posterior.members:
                last = member.layers[-1]
                outputs, seen = observed(member, [last], batch, self.options["forward"])
                at = self.record.probs_at(outputs / member.temperature, Component(outputs, outputs))
                probs = self.record.of_classes(at)
                probs = probs.reshape(len(probs), -1)
                guess = torch.zeros_like(probs).scatter(1, probs.argmax(dim=1, keepdim=True), 1.0)
                of_members.append((probs - guess, seen[last.module]))
            errors.append(torch.stack([e for e, _ in of_members]))
            hidden.append(torch.stack([h for _, h in of_members]))
        return torch.cat(errors, dim=1), torch.cat(hidden, dim=1)


def _log_det(covariance: Tensor, root: Tensor) -> Tensor:
    """½ log det(1 + Aᵀ C A), (n,)."""
    inner = root.mT @ covariance @ root
    found: Tensor = torch.linalg.slogdet(inner + torch.eye(inner.shape[-1]).to(inner)).logabsdet
    return found / 2


# --- classes ---------------------------------------------------------------------------------------------------------


def most_joint_information(probs: Tensor, weights: Tensor, k: int, seed: int) -> Tensor:
    """Greedy maximisation of I(y₁…y_k; θ) = H[y₁…y_k] − Σ E_θ H[y_i | θ] over p(y | θ_s), (s, n, c).

    With P_ms = Π_j p(y_mj | θ_s) of answers y_m, H[y₁…y_j, y] = −Σ_m v_m Σ_c a_mc log a_mc, a_mc = Σ_s w_s P_ms p_sc;
    v = 1 where m goes over all answers, and 1/(M Σ_s w_s P_ms) where they are M samples.
    """
    s, _, classes = probs.shape
    within = torch.einsum("s,sn->n", weights, entropy(probs))
    source = torch.Generator(device=probs.device).manual_seed(seed)
    answers, v = probs.new_ones(1, s), probs.new_ones(1)
    chosen: list[int] = []
    for _ in range(k):
        if len(answers) * classes > _EXACT:
            answers, v = _sampled_answers(probs[:, chosen], weights, source)
        gain = _joint_entropies(answers * weights, v, probs) - within
        gain[chosen] = -math.inf
        chosen.append(int(gain.argmax()))
        answers = (answers[:, None] * probs[:, chosen[-1]].T).flatten(0, 1)
        v = v.repeat_interleave(classes)
    return torch.tensor(chosen)


def _sampled_answers(probs: Tensor, weights: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """P, (m, s), of answers drawn from the mixture, scaled so that Σ_s w_s P_ms = 1, and v."""
    functions = torch.multinomial(weights, _SAMPLED, replacement=True, generator=source)
    drawn = torch.multinomial(probs[functions].flatten(0, 1), 1, generator=source).view(_SAMPLED, -1)
    log_p = probs.new_zeros(_SAMPLED, len(probs))
    for number, own in enumerate(drawn.T):
        log_p += probs[:, number].clamp(min=1e-30).log()[:, own].T
    p = (log_p - log_p.amax(dim=1, keepdim=True)).exp()
    return p / (p @ weights)[:, None], probs.new_full((_SAMPLED,), 1 / _SAMPLED)


def _joint_entropies(answers: Tensor, v: Tensor, probs: Tensor) -> Tensor:
    """−Σ_m v_m Σ_c a log a for every input, (n,), up to what is the same for all of them."""
    s, n, classes = probs.shape
    found, step = [], max(1, _AT_ONCE // (len(answers) * classes))
    for start in range(0, n, step):
        a = answers @ probs[:, start : start + step].reshape(s, -1)
        found.append(-(v @ torch.special.xlogy(a, a)).view(-1, classes).sum(dim=1))
    return torch.cat(found)


def _shared_information(probs: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """The mean over targets of I(y; y*), (n,), of p(y | θ_s), (s, n, c), and p(y* | θ_s), (s, t, c)."""
    s, n, classes = probs.shape
    means = [torch.einsum("s,snc->nc", weights, p) for p in (probs, target)]
    apart = entropy(means[0]) + entropy(means[1]).mean()
    weighted, found = (weights[:, None, None] * target).reshape(s, -1), []
    step = max(1, _AT_ONCE // (classes * weighted.shape[1]))
    for start in range(0, n, step):
        joint = probs[:, start : start + step].reshape(s, -1).T @ weighted
        found.append(-torch.special.xlogy(joint, joint).view(-1, classes * weighted.shape[1]).sum(dim=1))
    return apart - torch.cat(found) / target.shape[1]


# --- numbers ---------------------------------------------------------------------------------------------------------


def _most_reduction(covariance: Tensor, hessian: Tensor, k: int, n: int | None = None) -> Tensor:
    """Greedy choice of k inputs, K conditioned on each: by ½ log det(1 + H^½ K H^½), or about the inputs from n on.

    About these it is the reduction of their variance, tr K_*i (H⁻¹ + K_ii)⁻¹ K_i*.
    """
    size, c = hessian.shape
    candidates, rest = n or size, covariance.clone()
    chosen: list[int] = []
    eye = torch.eye(c, dtype=rest.dtype, device=rest.device)
    for _ in range(k):
        own = rest.view(size, c, size, c).diagonal(dim1=0, dim2=2).movedim(-1, 0)[:candidates]
        root = hessian[:candidates].sqrt()
        inner = eye + root[:, :, None] * own * root[:, None, :]
        if n is None:
            gain = torch.linalg.slogdet(inner).logabsdet / 2
        else:
            # Σ_i = H^½ (1 + H^½ K_ii H^½)⁻¹ H^½, which a likelihood without noise has too.
            cross = rest.view(size, c, -1)[:candidates, :, n * c :] * root[:, :, None]
            gain = (cross * torch.linalg.solve(inner, cross)).sum(dim=(1, 2))
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        chosen.append(best)
        rows = rest[best * c : (best + 1) * c] * root[best][:, None]
        rest = rest - rows.T @ torch.linalg.solve(inner[best], rows)
    return torch.tensor(chosen)


# --- gradients -------------------------------------------------------------------------------------------------------


def _spread(errors: Tensor, hidden: Tensor, k: int, seed: int) -> Tensor:
    """k of the gradients e hᵀ by k-means++: the longest first, then with probability |g − nearest chosen|²."""
    own = (errors.square().sum(dim=2) * hidden.square().sum(dim=2)).sum(dim=0).double()
    if k > len(own):
        raise MatchError(f"the pool has {len(own)} inputs, and k={k} were asked for")
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
