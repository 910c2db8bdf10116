"""Training on new data that stays near what was learnt from the old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._warnings import warn
from bayesadam.anchoring.metrics import metric, reader_for
from bayesadam.anchoring.pulls import loaded_pull, pull_of
from bayesadam.errors import ImproperError, MatchError, SettingError
from bayesadam.gaussian.settings import positive
from bayesadam.gaussian.sums import check_growth
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.readers.match import Entry, check_parameter, listed_optimizers, own_parameters

_SETTINGS = ("strength", "n_data", "every")


def anchor(
    optimizer: Optimizer | Sequence[Optimizer],
    posterior: Posterior,
    *,
    strength: float = 1.0,
    n_data: float | None = None,
    model: nn.Module | None = None,
    every: int = 10,
    free: str | Sequence[str] = (),
) -> Anchor:
    r"""Keep training near a posterior, so that what it was trained on is not forgotten.

    The loss on the new data, a mean over N examples, gets the penalty of a posterior N(μ, P⁻¹):

    .. math::
        \frac{\lambda}{2N} (\theta - \mu)^\top P\, (\theta - \mu), \qquad P = w c + \delta

    It is not added to the loss. After every k-th step of the optimiser, k times as far, and for the steps that are left once
    more at the end, it is an implicit step
    :math:`\theta \leftarrow \theta + (A + P)^{-1} P\, (\mu - \theta)` with :math:`A = N D/(k \lambda)`, D = (√v̂ + ε)/lr of that
    optimiser. So neither its moments nor a `Recorder` see the penalty, and the next posterior is of the new data alone:

    >>> model = torch.nn.Linear(3, 2)
    >>> def trained(optimizer):
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 3)).square().mean().backward()
    ...         optimizer.step()
    >>> first = torch.optim.Adam(model.parameters())
    >>> trained(first)
    >>> before = Posterior.from_optimizer(model, first, 160, power=1, batch_size=8, prior_precision=1.0)
    >>> second = torch.optim.Adam(model.parameters())
    >>> with anchor(second, before, n_data=160):
    ...     trained(second)
    >>> after = before + Posterior.from_optimizer(model, second, 160, power=1, batch_size=8, prior_precision=1.0)
    >>> after.n_data
    320

    λ = 1 is Bayes' rule, and right for a Kronecker-factored posterior; a diagonal one is best at more. A parameter that has
    more rows than it had, a head with new classes, is held in its old rows. Parameters that the posterior has not are free.

    Args:
        optimizer: the optimiser of the new training, or several over one model: any of Adam's kind, or SGD.
        posterior: of the training before, or the sum of all before, as it was read: calibration fits probabilities.
        strength: λ.
        n_data: N, the number of new examples; None takes the posterior's, which for a sum is that of all its parts.
        model: what is trained now, where it is not the posterior's own model.
        every: k.
        free: parameters, or modules, that are not held though the posterior has them; one name or several.
    """
    return Anchor(optimizer, posterior, strength=strength, n_data=n_data, model=model, every=every, free=free)


class Anchor:
    """Holds the optimiser's parameters near a posterior until `remove`, or the end of the `with` block; see `anchor`.

    Attributes:
        strength: λ.
        n_data: N.
        every: k.
        anchored: the names of the parameters that are held.
        free: the optimiser's other parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        posterior: Posterior,
        *,
        strength: float = 1.0,
        n_data: float | None = None,
        model: nn.Module | None = None,
        every: int = 10,
        free: str | Sequence[str] = (),
    ) -> None:
        require_posterior(posterior, "an anchor")
        posterior.require_whole("an anchor")
        positive("strength", strength, "1 is Bayes' rule; without an anchor there is none")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"every must be a whole number of at least 1, got {every!r}")
        self.strength, self.every = float(strength), every
        self.n_data = posterior.n_data if n_data is None else n_data
        positive("n_data", self.n_data, "the number of new examples, over which the loss is a mean")
        self._optimizers = listed_optimizers(optimizer)
        self._readers = [reader_for(each) for each in self._optimizers]
        named = own_parameters(posterior.model if model is None else model)
        trained = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        self._parameters = _held(named, posterior, (free,) if isinstance(free, str) else free)
        self.anchored = tuple(name for name, p in self._parameters.items() if id(p) in trained)
        self.free = tuple(name for name, p in named.items() if id(p) in trained and name not in self.anchored)
        if not self.anchored:
            raise MatchError(
                f"the optimiser trains none of the posterior's parameters, {sorted(posterior.mode)[:4]}: pass the optimiser "
                "of the same model, or model=, what it trains now"
            )
        mean = posterior.mean
        self._mean = {name: mean[name].to(p.device, copy=True) for name, p in self._parameters.items()}
        self._pull = pull_of(posterior.structure, posterior.settings, self._mean)
        if not any(bool(values.any()) for named in self._pull.tensors().values() for values in named.values()):
            raise ImproperError(
                "the posterior's precision is 0 for every weight that is trained, and so would the penalty be: it has seen no "
                "gradient, and has no prior"
            )
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._pending: dict[str, float | Tensor] = {}
        self._steps = [0] * len(self._optimizers)
        _warn_of_others(self, posterior)
        _active.add(self)
        self._handles = [
            each.register_step_post_hook(partial(self._after_step, index))
            for index, each in enumerate(self._optimizers)
        ]

    def remove(self) -> None:
        """Take the implicit step for the steps since the last one, and let go of the optimiser."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        _active.discard(self)
        for index in range(len(self._optimizers) if handles else 0):
            self._pull_back(index)

    def __enter__(self) -> Anchor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """(λ/2N) (θ − μ)ᵀ P (θ − μ) as it is now, for a logger."""
        gaps = {name: self._gap(name) for name in self.anchored}
        return self._pull.quadratic(gaps) * (self.strength / (2 * self.n_data))

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` resumes from; tensors and plain data."""
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "steps": list(self._steps),
            "pending": {name: float(rate) for name, rate in self._pending.items()},
            "mean": dict(self._mean),
            "precision": self._pull.tensors(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict()` was taken, with its posterior and settings, over parameters of the same names and shapes."""
        try:
            settings = {name: state[name] for name in _SETTINGS}
            steps, pending, mean, precision = (state[key] for key in ("steps", "pending", "mean", "precision"))
        except (KeyError, TypeError) as missing:
            raise MatchError(f"not the state of an Anchor: it has no {missing}") from None
        for name, value in self._mean.items():
            if name not in mean or mean[name].shape != value.shape:
                found = tuple(mean[name].shape) if name in mean else "missing"
                raise MatchError(f"in the anchor's state {name!r} is {found}, here it has shape {tuple(value.shape)}")
        if mean.keys() != self._mean.keys() or len(steps) != len(self._steps):
            raise MatchError("the anchor's state is of other parameters, or of another number of optimisers")
        self._mean = {name: mean[name].to(value, copy=True) for name, value in self._mean.items()}
        self._pull = loaded_pull(precision, self._mean)
        self.strength, self.n_data, self.every = (settings[name] for name in _SETTINGS)
        self._steps, self._pending = list(steps), dict(pending)

    def __repr__(self) -> str:
        return (
            f"Anchor({len(self.anchored)} parameters held, {len(self.free)} free, strength={self.strength:g}, "
            f"N={self.n_data:g}, every={self.every})"
        )

    def _gap(self, name: str) -> Tensor:
        """μ − θ, of the rows that there were."""
        return self._mean[name] - self._rows(self._parameters[name].detach(), name).to(self._mean[name].dtype)

    def _rows(self, tensor: Tensor, name: str) -> Tensor:
        shape = self._mean[name].shape
        return tensor if tensor.shape == shape else tensor[: shape[0]]

    @torch.no_grad()
    def _after_step(self, index: int, *_: Any) -> None:
        optimizer = self._optimizers[index]
        # Under a GradScaler a fused optimiser skips overflows inside its own step.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and bool(overflow):
            return
        for name, group in self._trained(index).items():
            if self._parameters[name].grad is not None:
                self._pending[name] = self._pending.get(name, 0.0) + group["lr"]
        self._steps[index] += 1
        if self._steps[index] % self.every == 0:
            self._pull_back(index)

    def _trained(self, index: int) -> dict[str, Mapping[str, Any]]:
        """The parameters of an optimiser that are held, each with its group."""
        named = (
            (self._names.get(id(p)), group) for group in self._optimizers[index].param_groups for p in group["params"]
        )
        return {name: group for name, group in named if name is not None}

    @torch.no_grad()
    def _pull_back(self, index: int) -> None:
        optimizer, reader = self._optimizers[index], self._readers[index]
        resistance = {}
        for name, group in self._trained(index).items():
            if name not in self._pending:
                continue
            rate, parameter = float(self._pending[name]), self._parameters[name]
            found = metric(Entry(name, parameter, optimizer.state.get(parameter, {}), group, reader))
            if rate > 0 and found is not None:
                scale = self.n_data / (self.strength * rate)
                full = found if isinstance(found, Tensor) else torch.full_like(self._mean[name], found)
                resistance[name] = self._rows(full, name).to(self._mean[name]) * scale
                del self._pending[name]
        gaps = {name: self._gap(name) for name in self.anchored}
        for name, change in self._pull.change(gaps, resistance).items():
            rows = self._rows(self._parameters[name], name)
            rows.copy_(rows + change)


# Those that are attached to an optimiser.
_active: WeakSet[Anchor] = WeakSet()


def _warn_of_others(found: Anchor, posterior: Posterior) -> None:
    """Warn of all else that pulls at the weights, and of a posterior that was made for something else."""
    mine = set(map(id, found._optimizers))
    if any(mine & set(map(id, other._optimizers)) and set(found.anchored) & set(other.anchored) for other in _active):
        warn(
            "the optimiser is anchored already, and both anchors will pull: call remove() of the first, or anchor once, to the "
            "sum of the posteriors"
        )
    groups = [group for index in range(len(found._optimizers)) for group in found._trained(index).values()]
    decay = max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)
    if decay:
        warn(
            f"the optimiser has a weight decay of {decay:g}, which pulls to 0 what the anchor holds at the mean; the posterior's "
            "prior is in the anchor already: train with weight_decay=0.0"
        )
    if posterior.calibration is not None:
        warn(
            "the posterior is calibrated, which fits probabilities and says nothing of forgetting: anchor to the posterior as it "
            "was read, before calibrate"
        )


def _held(named: Mapping[str, nn.Parameter], posterior: Posterior, free: Sequence[str]) -> dict[str, nn.Parameter]:
    """The model's parameters that the posterior has, but for those that are to be free; shapes are checked."""
    let_go = {name for name in posterior.mode if any(name == each or name.startswith(f"{each}.") for each in free)}
    known = {*named, *posterior.mode}
    idle = [each for each in free if not any(name == each or name.startswith(f"{each}.") for name in known)]
    missing = [name for name in posterior.mode if name not in named and name not in let_go]
    if idle or missing:
        raise MatchError(
            f"free names {idle[:4]}, which are no parameters or modules"
            if idle
            else f"the posterior has parameters {missing[:4]} that the model has not: pass model=, what is trained now, or "
            f"leave them out, free={missing[:4]}"
        )
    held = {name: named[name] for name in posterior.mode if name in named and name not in let_go}
    for name, parameter in held.items():
        check_growth(name, posterior.mode[name].shape, parameter.shape, "the posterior", "the model")
        check_parameter(name, parameter)
    return held
