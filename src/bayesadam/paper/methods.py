"""Every method of the paper, and more, behind one protocol: fit a `Problem`, get a `Fitted` that predicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesadam.calibration import calibrate
from bayesadam.engine.gradients import Slope, loss_and_slope
from bayesadam.engine.network import Network as Network
from bayesadam.engine.network import forward, member
from bayesadam.engine.process import gaussian_process
from bayesadam.engine.rules import RULES, Adam, Dropout, Rule, adam_state, adam_update
from bayesadam.engine.stack import Stack, constant, cosine, train
from bayesadam.engine.streams import Streams, blocks
from bayesadam.errors import SettingError
from bayesadam.likelihoods import Component, Likelihood, LikelihoodName, Predictive
from bayesadam.likelihoods import likelihood as likelihood_named
from bayesadam.weights.draws import stream_seed
from bayesadam.weights.posterior import Posterior

# Noise is at least this share of the held-out squared residual, however large the function's own variance.
_LEAST_NOISE = 0.05
N_MEMBERS = 5
Predictor = Callable[[Tensor], Predictive]


@dataclass(frozen=True, eq=False)
class Data:
    """Data for a stack of networks: x (s, n, inputs) and y (s, n, targets), or class indices (s, n), seed by seed.

    The held-out part, (s, m, ...), calibrates and is not trained on.
    """

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    likelihood: LikelihoodName

    def __len__(self) -> int:
        return self.x.shape[1]

    @property
    def kind(self) -> Likelihood[Predictive]:
        """The likelihood's record."""
        return likelihood_named(self.likelihood)


@dataclass(frozen=True)
class Training:
    """How a network is trained; the defaults are the paper's for its toy problem.

    The loss has the penalties (`weight_decay`/2)|θ|² and `sparsity` |θ|₁, a Laplace prior that Adam's second moment
    never sees; an epoch is counted in examples, and a `"cosine"` schedule ends at nothing.
    """

    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    sparsity: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"

    def steps(self, n: int) -> int:
        """The number of steps for n examples."""
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
        return trained(self, Dropout if self.network.dropout or self.network.input_dropout else Adam)

    def networks(self) -> list[nn.Sequential]:
        """The networks at their optimum as modules."""
        return [self.network.build(member(self.optimum.params, index)) for index in range(len(self.seeds))]


@dataclass(frozen=True, eq=False)
class Fitted:
    """One predictor per seed, from inputs (b, inputs) to a predictive distribution, and its posterior if it has one."""

    predictors: tuple[Callable[[Tensor], Any], ...]
    posteriors: tuple[Posterior, ...] = ()

    def predict(self, x: Tensor) -> list[Any]:
        """The predictive distribution of each seed's network."""
        return [predictor(x) for predictor in self.predictors]


Method = Callable[[Problem], Fitted]


def fit(
    method: str,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: LikelihoodName,
    hidden: tuple[int, ...] = (50, 50),
    activation: str = "relu",
    seeds: Sequence[int] = (0,),
    held_out: float = 0.2,
    **training: Any,
) -> Fitted:
    """Train one of the methods on your own data, once for each seed, all seeds as one stack.

    >>> x = torch.linspace(-1, 1, 100).unsqueeze(1)
    >>> fitted = fit("badam", x, x.square(), likelihood="regression", hidden=(8,), epochs=5)
    >>> fitted.predict(x)[0].stddev.shape
    torch.Size([100, 1])

    Args:
        method: one of `METHODS`.
        x, y: inputs (n, inputs), and targets: (n,) or (n, targets) numbers, or (n,) class indices.
        seeds: one network each; a seed also decides which examples are held out.
        held_out: the share of the examples that calibrates and is not trained on.
        training: settings of `Training`: epochs, batch_size, lr, weight_decay, betas.
    """
    if method not in METHODS:
        raise SettingError(f"method must be one of {tuple(METHODS)}, got {method!r}")
    n_train = round(len(x) * (1 - held_out))
    if not 0 < n_train < len(x):
        raise SettingError(f"held_out={held_out!r} of {len(x)} examples leaves none to train on, or none held out")
    kind = likelihood_named(likelihood)
    y = kind.shaped(y, x)
    sources = [torch.Generator().manual_seed(stream_seed(seed, "held-out")) for seed in seeds]
    orders = torch.stack([torch.randperm(len(x), generator=source) for source in sources])
    rows, rest = orders[:, :n_train], orders[:, n_train:]
    network = Network(x.shape[1], hidden, kind.n_outputs(y), activation)
    data = Data(x[rows], y[rows], x[rest], y[rest], likelihood)
    return METHODS[method](Problem(data, network, Training(**training), tuple(seeds)))


def trained(
    problem: Problem, kind: type[Rule], *, lr: float | None = None, learn_noise: bool = False, **own: Any
) -> Stack:
    """A stack trained on the problem's data by one rule, with settings of its own; `lr=None` is the rule's usual rate.

    Where the rule needs the noise of a regression, σ² is the held-out squared error of the network under Adam; or with
    `learn_noise` log σ is learnt beside the weights, one per network, by Adam on r²/(2σ²) + log σ with r² the squared
    error.
    """
    data, training, n = problem.data, problem.training, len(problem.data)
    rule, device = kind.with_settings(**{**vars(training), **own}), data.x.device
    index = torch.arange(len(problem.seeds), device=device)[:, None]
    log_noise = torch.full((len(problem.seeds),), -1.0, device=device)
    noise_state, noise_lr = adam_state(log_noise), torch.tensor(training.lr, device=device)
    needs_noise = rule.needs_noise and data.kind.noise

    def batch(rows: Tensor) -> tuple[Tensor, Slope]:
        y = data.y[index, rows]

        def slope(outputs: Tensor) -> Tensor:
            losses, found = loss_and_slope(lambda f: data.kind.loss(f, y), outputs)
            if needs_noise and learn_noise:
                precision = torch.exp(-2 * log_noise)
                adam_update(log_noise, 1 - losses * precision, noise_state, noise_lr)
                stack.scale.copy_(0.5 * precision.unsqueeze(1))
            return found

        return data.x[index, rows], slope

    weights = problem.optimum.weights.clone() if rule.starts_trained else None
    stack = Stack(problem.network, rule, problem.seeds, batch, n_data=n, weights=weights, device=device)
    if needs_noise and not learn_noise:
        known = data.kind.loss(forward(problem.network, problem.optimum.params, data.x_held_out), data.y_held_out)
        stack.scale.copy_(0.5 / known.clamp(min=1e-12).unsqueeze(1))
    steps, rate = rule.steps(training.steps(n)), lr or rule.lr or training.lr
    schedule = cosine(rate, steps) if training.schedule == "cosine" else constant(rate)
    train(stack, blocks(n, min(training.batch_size, n), problem.seeds, steps), schedule)
    return stack


def posteriors(problem: Problem, stack: Stack) -> tuple[Posterior, ...]:
    """The Gaussian of each network, where the rule has one."""
    found = filter(None, map(stack.moments, range(len(problem.seeds))))
    models = ((stack.network.build(mean), mean, variance) for mean, variance in found)
    return tuple(Posterior.from_moments(*each, len(problem.data)) for each in models)


def noise_variance(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """σ² per output from held-out residuals, E[r²] = σ² + Var[f], not below a small share of them."""
    square = (y.reshape(mean.shape) - mean).square().mean(dim=0)
    return (square - variance.mean(dim=0)).clamp(min=_LEAST_NOISE * square)


def held_out_noise(problem: Problem, index: int, draw: Callable[[Tensor], Tensor]) -> Tensor | None:
    """σ² of one seed's held-out data given draws of f, (n, b, outputs); None where the likelihood has none."""
    data = problem.data
    if not data.kind.noise:
        return None
    draws = draw(data.x_held_out[index])
    return noise_variance(draws.mean(dim=0), draws.var(dim=0, correction=int(len(draws) > 1)), data.y_held_out[index])


def sampled(name: str, problem: Problem, stack: Stack) -> Fitted:
    """Predictions from functions drawn from what a rule has learnt, with noise from the held-out part."""

    def predictor(index: int) -> Predictor:
        def draw(x: Tensor) -> Tensor:
            streams = Streams([problem.seeds[index]], f"{name}-prediction", x.device)
            params, masks = stack.functions(index, problem.draws, streams)
            return forward(stack.network, params, x, masks=masks)

        noise = held_out_noise(problem, index, draw)

        def predict(x: Tensor) -> Predictive:
            draws = draw(x)
            # One draw is a function that is known.
            known = len(draws) == 1
            variance, own = (torch.zeros_like(draws[0]), None) if known else (draws.var(dim=0), draws)
            found = Component(draws.mean(dim=0), variance, draws=own, noise_variance=noise)
            return problem.data.kind.predictive([found])

        return predict

    return Fitted(tuple(map(predictor, range(len(problem.seeds)))), posteriors(problem, stack))


def _linearised(problem: Problem, found: Sequence[Posterior], *, shift: bool = False) -> Fitted:
    asked: Any = {"likelihood": problem.data.likelihood, "shift": shift}
    return Fitted(tuple(partial(posterior.predict, **asked) for posterior in found), tuple(found))


def _once(network: nn.Module, x: Tensor) -> Tensor:
    outputs: Tensor = network(x)
    return outputs.unsqueeze(0)


def with_noise(problem: Problem, found: Sequence[Posterior]) -> Fitted:
    """Posteriors of a regression as they are: the network linearised, σ² its held-out squared error."""
    with torch.no_grad():
        noise = [held_out_noise(problem, number, partial(_once, each.model)) for number, each in enumerate(found)]
    return _linearised(problem, [each.replace(noise_variance=s) for each, s in zip(found, noise, strict=True)])


def fit_rule(name: str, problem: Problem, **own: Any) -> Fitted:
    """A method that predicts by functions drawn from what its rule has learnt: one of `bayesadam.engine.RULES`.

    `own` are settings of the rule.
    """
    if name == "mc-dropout" and not problem.network.dropout:
        problem = replace(problem, network=replace(problem.network, dropout=0.2))
    return sampled(name, problem, trained(problem, RULES[name], **own))


def fit_badam(problem: Problem, *, shift: bool = False) -> Fitted:
    """The paper's method: the posterior is read off Adam's state, calibrated, and the network linearised.

    With `shift` its variance grows with the leverage of an input, as it does where a user calls `predict`.
    """
    data, found = problem.data, []
    for index, network in enumerate(problem.networks()):
        read = Posterior.from_state_dict(network, problem.optimum.state_dict(index), len(data))
        held_out = (data.x_held_out[index], data.y_held_out[index])
        # Of classes, too, the posterior that is averaged over is what the paper means.
        method: Any = "validation" if likelihood_named(data.likelihood).tempered else None
        read = read.replace(prior_precision=1.0)
        found.append(calibrate(read, held_out, likelihood=data.likelihood, method=method))
    return _linearised(problem, found, shift=shift)


def fit_laplace_diagonal(problem: Problem) -> Fitted:
    """Laplace with the diagonal of the GGN, H = Σ_n J_nᵀ Λ_n J_n + δ, and δ by evidence; the network linearised."""
    found = []
    for index, network in enumerate(problem.networks()):
        jacobian, noise = _scaled_jacobian(problem, network, index)
        names, parameters = zip(*network.named_parameters(), strict=True)
        curvature = jacobian.square().sum(dim=0)
        delta = _evidence(curvature, parameters)
        pieces = torch.split((curvature + delta).reciprocal().float(), [p.numel() for p in parameters])
        variance = {n: v.view_as(p) for n, v, p in zip(names, pieces, parameters, strict=True)}
        posterior = Posterior.from_moments(network, dict(network.named_parameters()), variance, len(problem.data))
        found.append(posterior.replace(noise_variance=noise))
    return _linearised(problem, found)


def fit_laplace_full(problem: Problem) -> Fitted:
    """Laplace with the whole GGN, through the data's own kernel matrix, so that no (weights, weights) matrix is needed.

    (JᵀJ + δ)⁻¹ = (1 − Jᵀ (J Jᵀ + δ)⁻¹ J)/δ, by Woodbury, with J scaled by Λ^(1/2).
    """

    def predictor(index: int, network: nn.Sequential) -> Predictor:
        jacobian, noise = _scaled_jacobian(problem, network, index)
        kernel = jacobian @ jacobian.T
        delta = _evidence(torch.linalg.eigvalsh(kernel).clamp(min=0), tuple(network.parameters()))
        factor = torch.linalg.cholesky(kernel + delta * torch.eye(len(kernel), dtype=torch.float64))

        def predict(x: Tensor) -> Predictive:
            here = _jacobian(network, x)
            with torch.no_grad():
                mean = network(x)
                cross = torch.linalg.solve_triangular(factor, jacobian @ here.flatten(0, 1).T, upper=False)
                cross = cross.T.view(*here.shape[:2], -1)
                covariance = ((here @ here.mT - cross @ cross.mT) / delta).float()
            variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0)
            return problem.data.kind.predictive([Component(mean, variance, covariance, noise_variance=noise)])

        return predict

    return Fitted(tuple(predictor(*each) for each in enumerate(problem.networks())))


def fit_ensemble(problem: Problem) -> Fitted:
    """A deep ensemble: the mixture of five independently initialised networks.

    The first is the network that the other methods start from; the rest of all seeds train as one stack.
    """
    rest, weights = N_MEMBERS - 1, (1 / N_MEMBERS,) * N_MEMBERS
    seeds = tuple(1_000_003 * (k + 1) + seed for seed in problem.seeds for k in range(rest))
    parts = ("x", "y", "x_held_out", "y_held_out")
    data = replace(problem.data, **{name: getattr(problem.data, name).repeat_interleave(rest, dim=0) for name in parts})
    first, others = problem.optimum.params, replace(problem, data=data, seeds=seeds).optimum.params

    def predictor(index: int) -> Predictor:
        mine = slice(index * rest, (index + 1) * rest)
        own = {name: torch.cat([first[name][index, None], t[mine]]) for name, t in others.items()}
        draw = partial(forward, problem.network, own)
        noise = held_out_noise(problem, index, draw)

        def predict(x: Tensor) -> Predictive:
            members = [Component(f, torch.zeros_like(f), noise_variance=noise) for f in draw(x)]
            return problem.data.kind.predictive(members, weights)

        return predict

    return Fitted(tuple(map(predictor, range(len(problem.seeds)))))


def fit_gp(problem: Problem) -> Fitted:
    """The reference of Figure 1: an exact Gaussian process whose hyperparameters maximise the marginal likelihood.

    An RBF kernel with one lengthscale per input, a constant mean and Gaussian noise, one process per seed and output.
    """
    if problem.data.likelihood != "regression":
        raise SettingError(f"the Gaussian process is for regression, not {problem.data.likelihood!r}")

    def fitted(x: Tensor, y: Tensor) -> Tensor:
        spread, variance = (x.amax(dim=0) - x.amin(dim=0)).clamp(min=1e-6), y.var().clamp(min=1e-4)
        theta = torch.cat([(0.3 * spread).log(), torch.stack([variance.log(), (0.1 * variance).log(), y.mean()])])
        optimizer = torch.optim.LBFGS([theta.requires_grad_()], max_iter=100, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -gaussian_process(theta, x, y, x[:1])[0] / len(y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return theta.detach()

    def predictor(x: Tensor, y: Tensor) -> Predictor:
        outputs = [(fitted(x, column), column) for column in y.T]

        def predict(at: Tensor) -> Predictive:
            found = [gaussian_process(theta, x, column, at.double())[1:] for theta, column in outputs]
            mean, variance = (torch.stack(part, dim=-1).float() for part in zip(*found, strict=True))
            noise = torch.stack([theta[-2].exp() for theta, _ in outputs]).float()
            return problem.data.kind.predictive([Component(mean, variance, noise_variance=noise)])

        return predict

    pairs = zip(problem.data.x.double(), problem.data.y.double(), strict=True)
    return Fitted(tuple(predictor(*pair) for pair in pairs))


METHODS: Mapping[str, Method] = {
    "gp": fit_gp,
    "badam": fit_badam,
    **{name: partial(fit_rule, name) for name in RULES if name != "adam"},
    # With a noise as small as the toy problem's its usual rate diverges.
    "ivon": partial(fit_rule, "ivon", learn_noise=True),
    # The network itself: no uncertainty of the weights, noise from the held-out residuals.
    "map": lambda problem: sampled("map", replace(problem, draws=1), problem.optimum),
    "laplace-diagonal": fit_laplace_diagonal,
    "laplace-full": fit_laplace_full,
    "ensemble": fit_ensemble,
}


def diagonal_ggn(network: Network, params: Mapping[str, Tensor], x: Tensor, at_once: int = 1000) -> dict[str, Tensor]:
    """diag Σ_n J_nᵀ (diag p − p pᵀ) J_n of a stack of classifiers, (s, *shape), layer by layer and never a Jacobian.

    With A Aᵀ the softmax's curvature and D = ∂(Aᵀf)/∂z back-propagated, a layer's share is Σ_n Σ_c D²ᵀ a².
    The inputs, (n, inputs), are the same for all, and taken `at_once` at a time.
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    for part in x.split(at_once):  # type: ignore[no-untyped-call]
        seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        with torch.enable_grad():
            f = forward(network, {n: t.detach().requires_grad_() for n, t in params.items()}, part, seen=seen)
        root = likelihood_named("classification").hessian_root(f.detach())
        for c in range(f.shape[-1]):
            grads = torch.autograd.grad(f, seen[1], root[..., c], retain_graph=True)
            for number, (grad, inputs) in enumerate(zip(grads, seen[0], strict=True)):
                squares = grad.square()
                total[f"layer{number}.weight"] += torch.bmm(squares.mT.contiguous(), inputs.detach().square())
                total[f"layer{number}.bias"] += squares.sum(dim=1)
    return total


def _jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """J of all examples and outputs, (b, outputs, weights), float64."""
    params = {name: p.detach().double() for name, p in network.named_parameters()}
    parts: dict[str, Tensor] = jacrev(lambda p: functional_call(network, p, (x.double(),)))(params)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def _scaled_jacobian(problem: Problem, network: nn.Module, index: int) -> tuple[Tensor, Tensor | None]:
    """Λ^(1/2) J of the training data, rows by example and output, and the noise where the likelihood has one."""
    x = problem.data.x[index]
    with torch.no_grad():
        noise = held_out_noise(problem, index, partial(_once, network))
        root = problem.data.kind.hessian_root(network(x).double(), None if noise is None else noise.double())
        return (root.mT @ _jacobian(network, x)).flatten(0, 1), noise


def _evidence(eigenvalues: Tensor, parameters: Sequence[Tensor]) -> float:
    """MacKay's fixed point δ = γ/|θ|², γ = Σ h/(h + δ)."""
    delta, square = 1.0, sum(float(p.detach().double().square().sum()) for p in parameters)
    for _ in range(200):
        gamma = float((eigenvalues / (eigenvalues + delta)).sum())
        following = max(gamma / square, 1e-10)
        if abs(following - delta) <= 1e-8 * delta:
            break
        delta = following
    return delta
