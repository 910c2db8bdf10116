"""Vadam (Khan et al. 2018, arXiv 1806.04854) and IVON (Shen et al. 2024, arXiv 2402.17641).

Both take gradients at weights drawn from their own Gaussian, whose precision the first has from squares of gradients
and the second from the noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._checks import not_negative, positive
from bayesadam.engine import rules
from bayesadam.engine.rules import Perturbed, Step
from bayesadam.errors import MatchError, SettingError, StateError
from bayesadam.gaussian.noise import fresh_seed, standard_normal, stream_seed
from bayesadam.gaussian.settings import Precision
from bayesadam.posterior import Posterior
from bayesadam.readers import StateReader, match_optimizers, working_dtype

Group = Mapping[str, Any]
# Of the data and of the run, so the same in every group. Kept in the groups, since every tool that saves an optimiser
# saves those: the seed and the number of passes so far are the whole state of the noise.
_SHARED = ("n_data", "seed", "passes")


class PerturbedOptimizer(Optimizer, ABC):
    """An optimiser that holds a Gaussian q over the weights and asks for gradients at draws from it.

    The equations are those of a rule of the engine.
    """

    reader: ClassVar[StateReader]
    # The last pass, (parameter, gradient, noise), not summed yet; the sums of gradient and product over the passes.
    _open: list[tuple[Tensor, Tensor, Tensor]]
    _sums: dict[Tensor, tuple[Tensor, Tensor]]

    def __init__(self, params: Iterable[Any], generator: torch.Generator | int | None, **defaults: Any) -> None:
        if isinstance(generator, bool) or not isinstance(generator, torch.Generator | int | None):
            raise SettingError(f"generator must be a torch.Generator, a seed or None, got {generator!r}")
        seed = generator if isinstance(generator, int) else fresh_seed(generator)
        super().__init__(params, {**defaults, "seed": seed, "passes": 0})
        self._start_over()
        self._inside = False

    @abstractmethod
    def _rule(self, group: Group) -> Perturbed:
        """The equations, with the settings of a group."""

    @abstractmethod
    def _prior(self, curvature: Tensor, group: Group) -> Precision:
        """δ of `Posterior`, such that it has q's precision."""

    @contextmanager
    def sampled_parameters(self) -> Iterator[None]:
        """The parameters at one draw θ = μ + σ ε, for `backward()` inside; afterwards they are μ again, to the bit.

        The gradients are those of this block, summed over its `backward()` calls. They may be clipped in place until
        the next block or `step()`. A block that ends in an exception, or without a gradient, is no sample.
        """
        self._require_outside("sampled_parameters()")
        with torch.no_grad():
            self._gather()
            noise = self._draw()
        originals = {parameter: parameter.data for parameter in noise}
        try:
            self._inside = True
            for parameter, n in noise.items():
                parameter.grad = None
                parameter.data = (originals[parameter] + n).to(parameter.dtype)
            yield
            self._open = [(p, p.grad, n) for p, n in noise.items() if p.grad is not None]
        finally:
            for parameter, data in originals.items():
                parameter.data = data
            self._inside = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients go, and with them the samples since the last step; inside a block, that block's alone."""
        if not self._inside:
            self._start_over()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average over the blocks since the last step, and move; parameters without a gradient stay as they are.

        A `closure`, which is not needed, opens `sampled_parameters()`, calls `backward()` and returns the loss.
        """
        self._require_outside("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._gather()
            if not self._passes:
                raise StateError("there is no gradient: call backward() inside `with optimizer.sampled_parameters():`")
            for parameter, group in self._grouped():
                if parameter in self._sums:
                    self._move(parameter, group)
        self._start_over()
        return loss

    def posterior(self, model: nn.Module) -> Posterior:
        """q as it stands, the very Gaussian that the next sample is drawn from; no change to the model nor to this."""
        self._require_outside("posterior()")
        entries = match_optimizers(model, self, self.reader).entries
        return Posterior.from_optimizer(
            model,
            self,
            self.param_groups[0]["n_data"],
            prior_precision={e.name: self._prior(e.state[self.reader.key], e.group) for e in entries},
            power=1.0,
            batch_size=1,
            reader=self.reader,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with settings of its own; N, the samples and the noise are the optimiser's."""
        self._check({**self.defaults, **param_group})
        shared = {key: (self.param_groups[0] if self.param_groups else self.defaults)[key] for key in _SHARED}
        if other := [key for key, value in shared.items() if param_group.get(key, value) != value]:
            raise SettingError(f"{other[0]} is one for all parameter groups: {shared[other[0]]!r}")
        super().add_param_group({**param_group, **shared})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict()` was taken."""
        if missing := self.defaults.keys() - state_dict["param_groups"][0].keys():
            raise MatchError(f"not the state dict of a {type(self).__name__}: a group has no {min(missing)!r}")
        super().load_state_dict(state_dict)
        # torch casts what it loads to the parameters' type, and rounds it: the state of 16-bit ones is float32.
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    own = self.state[parameter]
                    own[name] = value.to(own[name].device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_over()
        self._inside = False

    def _check(self, settings: Group) -> None:
        positive("n_data", settings["n_data"], "the number of training examples")
        not_negative("lr", settings["lr"])
        if len(betas := settings["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise SettingError(f"betas must be two numbers of at least 0 and below 1, got {betas!r}")

    def _grouped(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter with its group, in the optimiser's order."""
        return ((parameter, group) for group in self.param_groups for parameter in group["params"])

    def _draw(self) -> dict[Tensor, Tensor]:
        """σ ε for each parameter that is trained."""
        noise: dict[Tensor, Tensor] = {}
        for index, (parameter, group) in enumerate(self._grouped()):
            if not parameter.requires_grad:
                continue
            if parameter.is_complex():
                raise SettingError(f"a parameter of shape {tuple(parameter.shape)} is complex: make it two real ones")
            rule, state = self._rule(group), self.state[parameter]
            if not state:
                weights = parameter.to(working_dtype(parameter.dtype))
                state |= {"step": torch.zeros(()), **rule.start(weights, group["n_data"])}
            seed = stream_seed(group["seed"], "pass", group["passes"], index)
            scale = rule.gaussian(parameter, state, group["n_data"]).variance.sqrt_()
            noise[parameter] = standard_normal(scale.shape, scale, seed).mul_(scale)
        for group in self.param_groups:
            group["passes"] += 1
        return noise

    def _gather(self) -> None:
        """Add the last pass to the sums; only now, so that its gradients can be clipped after the block."""
        rule = self._rule(self.param_groups[0])
        for parameter, gradient, noise in self._open:
            # A copy: data-parallel training reuses the memory of its gradients.
            gradient = gradient.detach().to_dense().to(noise.dtype, copy=True)
            product = rule.product(gradient, noise)
            if parameter in self._sums:
                self._sums[parameter][0].add_(gradient)
                self._sums[parameter][1].add_(product)
            else:
                self._sums[parameter] = (gradient, product)
        self._passes += bool(self._open)
        self._open = []

    def _move(self, parameter: Tensor, group: Group) -> None:
        gradient, product = self._sums[parameter]
        if self._passes > 1:
            gradient.div_(self._passes)
            product.div_(self._passes)
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        taken = float(state["step"])
        mean = parameter.to(gradient.dtype)
        step = Step(group["lr"], 1 - beta1**taken, 1 - beta2**taken, group["n_data"])
        self._rule(group).move(mean, gradient, product, state, step)
        if mean.dtype != parameter.dtype:
            parameter.copy_(mean)

    def _start_over(self) -> None:
        self._open, self._sums, self._passes = [], {}, 0

    def _require_outside(self, what: str) -> None:
        if self._inside:
            raise StateError(f"{what} was called inside a sampled_parameters() block, where the weights are perturbed")


class Vadam(PerturbedOptimizer):
    r"""Variational Adam, a mean-field Gaussian :math:`q = \mathcal N(\mu, (N v + \lambda)^{-1})`.

    .. math::
        &\textbf{input}: \mu, \alpha\ (\text{lr}), \beta_1, \beta_2, N, \lambda\ (\text{prior precision}),
            \rho_0\ (\text{initial precision}), S\ (\text{blocks}); \quad m = 0,\ v = (\rho_0 - \lambda)/N \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad \textbf{for}\ s = 1, \ldots, S: \quad
            \theta_s = \mu + \epsilon_s / \sqrt{N v + \lambda}, \quad \epsilon_s \sim \mathcal N(0, 1) \\
        &\quad \hat g = \tfrac1S \sum_s \nabla L(\theta_s), \qquad \hat h = \tfrac1S \sum_s (\nabla L(\theta_s))^2 \\
        &\quad m \leftarrow \beta_1 m + (1 - \beta_1)(\hat g + \tfrac{\lambda}{N} \mu), \qquad
            v \leftarrow \beta_2 v + (1 - \beta_2) \hat h \\
        &\quad \hat m = m / (1 - \beta_1^t), \qquad \hat v = v / (1 - \beta_2^t) \\
        &\quad \mu \leftarrow \mu - \alpha\, \hat m / (\sqrt{\hat v} + \lambda / N)

    :math:`L` is the *mean* negative log-likelihood of a mini-batch, without the prior.

    The posterior takes v as it stands, without the correction by :math:`1 - \beta_2^t`: v does not start from zero. The
    step divides all the same, as published. Too small a :math:`\rho_0` drowns the gradients in noise: try several.

    v averages squares of mini-batch *means*. Of M examples these are near 1/M of the per-example ones, so q is about M
    times wider than a Laplace posterior; `posterior(model).replace(batch_size=M)` has the precision N M v + λ instead.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = Vadam(model.parameters(), n_data=100, prior_precision=1.0, initial_precision=50.0, generator=0)
    >>> with optimizer.sampled_parameters():
    ...     model(torch.ones(1, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.posterior(model)
    Posterior(Linear, diagonal, 3 weights in 2 parameters, N=100, power=1, form='map')

    Args:
        params: parameters or groups of them; a group may have its own lr, betas, prior_precision and initial_precision.
        lr, betas: α and (β₁, β₂).
        n_data: N, the number of training examples.
        prior_precision: λ of the prior N(0, 1/λ).
        initial_precision: ρ₀, what q's precision starts from; at least λ.
        generator: a seed, or a generator that gives one; None takes torch's default one. Replicas need the same seed.
    """

    reader = StateReader(
        "vadam",
        (),
        key="second_moment",
        decay=("betas", 1),
        note="Squared gradients at perturbed weights. Its precision is N v + λ: power=1, batch_size=1, uncorrected.",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        n_data: float,
        prior_precision: float,
        initial_precision: float,
        betas: tuple[float, float] = (0.9, 0.999),
        generator: torch.Generator | int | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "prior_precision": prior_precision, "initial_precision": initial_precision}
        super().__init__(params, generator, n_data=n_data, **own)

    def _check(self, settings: Group) -> None:
        super()._check(settings)
        prior, initial = settings["prior_precision"], settings["initial_precision"]
        positive("prior_precision", prior, "λ of the prior N(0, 1/λ)")
        positive("initial_precision", initial, "what q starts from")
        if initial < prior:
            raise SettingError(f"initial_precision={initial!r} is below prior_precision={prior!r}: v would be negative")

    def _rule(self, group: Group) -> Perturbed:
        return rules.Vadam(group["betas"], group["prior_precision"], group["initial_precision"] ** -0.5)

    def _prior(self, curvature: Tensor, group: Group) -> Precision:
        return float(group["prior_precision"])


class IVON(PerturbedOptimizer):
    r"""Improved variational online Newton, a mean-field Gaussian :math:`q = \mathcal N(m, (\kappa (h + d))^{-1})`.

    .. math::
        &\textbf{input}: m, \alpha\ (\text{lr}), \beta_1, \beta_2, \kappa\ (\text{n\_data}), d\ (\text{weight decay}),
            h_0\ (\text{initial Hessian}), S\ (\text{blocks}); \quad g = 0,\ h = h_0 \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad \textbf{for}\ s = 1, \ldots, S: \quad
            n_s = \epsilon_s / \sqrt{\kappa (h + d)}, \quad \epsilon_s \sim \mathcal N(0, 1) \\
        &\quad \hat g = \tfrac1S \sum_s \nabla L(m + n_s), \qquad
            f = \kappa (h + d)\, \tfrac1S \sum_s n_s \nabla L(m + n_s) \\
        &\quad g \leftarrow \beta_1 g + (1 - \beta_1) \hat g \\
        &\quad h \leftarrow \beta_2 h + (1 - \beta_2) f + \tfrac12 (1 - \beta_2)^2 (h - f)^2 / (h + d) \\
        &\quad m \leftarrow m - \alpha (h_0 + d)\, \bigl(g / (1 - \beta_1^t) + d\, m\bigr) / (h + d)

    :math:`L` is the *mean* negative log-likelihood of a mini-batch, without the prior, which is
    :math:`\mathcal N(0, 1/(\kappa d))`. By Stein's identity f is an unbiased estimate of the diagonal of L's Hessian
    averaged over q, whatever the batch size.

    The last term of h keeps :math:`h + d` positive, at least half of what it was, but h itself may be negative where
    the loss curves downwards. `posterior` then splits the same precision as :math:`\kappa \max(h, 0)` for the data and
    :math:`\kappa (d + \min(h, 0))` for the prior, of which one number :math:`\kappa d` is the rule.

    h forgets h₀ after about 1/(1 − β₂) steps, 100,000 by default: in shorter runs a smaller β₂ lets the data speak.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = IVON(model.parameters(), lr=0.1, n_data=100, generator=0)
    >>> with optimizer.sampled_parameters():
    ...     model(torch.ones(1, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.posterior(model)
    Posterior(Linear, diagonal, 3 weights in 2 parameters, N=100, power=1, form='map')

    Args:
        params: parameters or groups of them; a group may have its own lr, betas, initial_hessian and weight_decay.
        lr, betas, initial_hessian, weight_decay: α, (β₁, β₂), h₀ and d.
        n_data: κ, the number of training examples; a larger one makes q narrower, as a lower temperature does.
        generator: a seed, or a generator that gives one; None takes torch's default one. Replicas need the same seed.
    """

    reader = StateReader(
        "ivon",
        (),
        key="hessian",
        decay=("betas", 1),
        # A posterior's curvature is not negative.
        read=lambda state, group, shape: state["hessian"].clamp(min=0.0),
        note="A Hessian, not a square of gradients. Its precision is κ (h + d): power=1, batch_size=1, uncorrected.",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        n_data: float,
        initial_hessian: float = 1.0,
        weight_decay: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99999),
        generator: torch.Generator | int | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "initial_hessian": initial_hessian, "weight_decay": weight_decay}
        super().__init__(params, generator, n_data=n_data, **own)

    def _check(self, settings: Group) -> None:
        super()._check(settings)
        positive("initial_hessian", settings["initial_hessian"], "what h starts from")
        not_negative("weight_decay", settings["weight_decay"])

    def _rule(self, group: Group) -> Perturbed:
        prior = group["n_data"] * group["weight_decay"]
        return rules.IVON(group["betas"], prior_precision=prior, initial_hessian=group["initial_hessian"])

    def _prior(self, curvature: Tensor, group: Group) -> Precision:
        prior = float(group["n_data"] * group["weight_decay"])
        return curvature.clamp(max=0.0).mul_(group["n_data"]).add_(prior) if bool((curvature < 0).any()) else prior
