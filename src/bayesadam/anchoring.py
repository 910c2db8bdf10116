"""Training on new data that stays near what was learnt from the old."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers
from bayesadam._checks import positive
from bayesadam._warnings import warn
from bayesadam.errors import ImproperError, MatchError, SettingError
from bayesadam.readers import Group, StateReader, read_entry
from bayesadam.readers.match import Entry, check_parameter, own_parameters
from bayesadam.readers.registry import reader_of
from bayesadam.readers.tracking import Hooked
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.sums import check_growth

__all__ = ["Anchor", "anchor"]

# Steps of the optimiser between two implicit steps.
_EVERY = 10
# The least resistance of a weight, as a share of the mean: weights that the new data do not move have next to none.
_LEAST = 1e-3
# Readers of optimisers that size their steps in another way than by lr.
_OTHER_STEPS = ("adadelta", "adafactor")


class Anchor(Hooked):
    r"""Keep training near a posterior, so that what it was trained on is not forgotten.

    The loss on the new data, a mean over N examples, gets the penalty of a posterior N(μ, P⁻¹):

    .. math::
        \frac{\lambda}{2N} (\theta - \mu)^\top P\, (\theta - \mu), \qquad P = w c + \delta

    The penalty is not added to the loss: neither the optimiser's moments nor a `Recorder` see it, and the next
    posterior is of the new data alone. A step of the optimiser lowers the loss at the price
    ½ (θ − θ_t)ᵀ D (θ − θ_t), D = (√v̂ + ε)/lr. With θ' where the optimiser went, price and penalty are least at

    .. math::
        \theta = \theta' + (A + P)^{-1} P\, (\mu - \theta'), \qquad A = N D / (k \lambda)

    and that implicit step, stable for any size, is taken after every tenth step of the optimiser, k = 10, and for the
    remaining steps at the end. In the eigenbases of a Kronecker-factored P, A is taken as one number, the geometric
    mean of its entries. To resume a training, anchor it to the same posterior again.

    λ = 1 is Bayes' rule, and right for a Kronecker-factored posterior; a diagonal one is best at more. A head with more
    rows than before is held in its old rows. The anchor holds until `remove` or the end of the `with` block.

    Args:
        optimizer: the optimiser of the new training, or several over one model: any of Adam's kind, or SGD.
        posterior: of the training before, or the sum of all before, diagonal or Kronecker-factored.
        strength: λ.
        n_data: N, the number of new examples; None takes the posterior's, which for a sum is that of all its parts.
        model: the model that is trained now, where it is not the posterior's own.

    Attributes:
        anchored: the names of the parameters that are held, those that the posterior and the model share.
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
    ) -> None:
        require_posterior(posterior, "an anchor")
        posterior.require_whole("an anchor")
        if posterior.curvature.inputs:
            raise SettingError("anchor to the posterior as it was before with_inputs: steps are not taken in its bases")
        positive("strength", strength, "1 is Bayes' rule; without an anchor there is none")
        self.strength = float(strength)
        self.n_data = posterior.n_data if n_data is None else n_data
        positive("n_data", self.n_data, "the number of new examples, over which the loss is a mean")
        super().__init__(listed_optimizers(optimizer))
        self._readers = [_reader_with_metric(each) for each in self.optimizers]
        named = own_parameters(posterior.model if model is None else model)
        trained = {id(p) for each in self.optimizers for group in each.param_groups for p in group["params"]}
        self._parameters = {name: named[name] for name in posterior.mode if name in named}
        for name, parameter in self._parameters.items():
            check_growth(name, posterior.mode[name].shape, parameter.shape, "the posterior", "the model")
            check_parameter(name, parameter)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self.anchored = tuple(name for name, p in self._parameters.items() if id(p) in trained)
        self.free = tuple(name for name, p in named.items() if id(p) in trained and name not in self.anchored)
        if not self.anchored:
            raise MatchError("the optimiser trains none of the posterior's parameters: pass model=, what it trains")
        mean, curvature, settings = posterior.mean, posterior.curvature, posterior.settings
        self._mean = {name: mean[name].to(p.device, copy=True) for name, p in self._parameters.items()}
        self._precision = {name: curvature.precision(name, settings).to(mu) for name, mu in self._mean.items()}
        bases = {name: mu for name, mu in self._mean.items() if name in curvature.bases}
        self._bases = {name: curvature.bases[name].to(mu.device, mu.dtype) for name, mu in bases.items()}
        if not any(bool(values.any()) for values in self._precision.values()):
            raise ImproperError("the posterior's precision is 0 for every trained weight: no gradient and no prior")
        self._pending: dict[str, float | Tensor] = {}
        self._steps = [0] * len(self.optimizers)
        groups = [group for index in range(len(self.optimizers)) for group in self._trained(index).values()]
        if decay := max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0):
            warn(f"a weight decay of {decay:g} pulls to 0 beside the anchor: train with weight_decay=0.0")
        hooks = [partial(self._after_step, index) for index in range(len(self.optimizers))]
        self._handles = [o.register_step_post_hook(hook) for o, hook in zip(self.optimizers, hooks, strict=True)]

    def remove(self) -> None:
        """Take the implicit step for the steps since the last one, and let go of the optimiser."""
        super().remove()
        for index in range(len(self.optimizers) if self._handles else 0):
            self._pull_back(index)
        self._handles = []

    def _old_rows(self, tensor: Tensor, name: str) -> Tensor:
        return tensor[: len(self._mean[name])] if tensor.dim() else tensor

    def _trained(self, index: int) -> dict[str, Group]:
        """The held parameters of an optimiser, each with its group."""
        groups = self.optimizers[index].param_groups
        named = ((self._names.get(id(p)), group) for group in groups for p in group["params"])
        return {name: group for name, group in named if name is not None}

    @torch.no_grad()
    def _after_step(self, index: int, *_: object) -> None:
        # Under a GradScaler a fused optimiser skips overflows inside its own step.
        overflow = getattr(self.optimizers[index], "found_inf", None)
        if overflow is not None and bool(overflow):
            return
        for name, group in self._trained(index).items():
            if self._parameters[name].grad is not None:
                self._pending[name] = self._pending.get(name, 0.0) + group["lr"]
        self._steps[index] += 1
        if self._steps[index] % _EVERY == 0:
            self._pull_back(index)

    @torch.no_grad()
    def _pull_back(self, index: int) -> None:
        optimizer, reader = self.optimizers[index], self._readers[index]
        for name, group in self._trained(index).items():
            if name not in self._pending:
                continue
            rate, parameter, mean = float(self._pending[name]), self._parameters[name], self._mean[name]
            metric = _metric(Entry(name, parameter, optimizer.state.get(parameter, {}), group, reader))
            if rate <= 0 or metric is None:
                continue
            del self._pending[name]
            full = metric if isinstance(metric, Tensor) else torch.full_like(mean, metric)
            resistance = self._old_rows(full, name).to(mean) * (self.n_data / (self.strength * rate))
            if name in self._bases:
                resistance = resistance.clamp(min=_LEAST * resistance.mean()).log_().mean().exp_()
            total = (self._precision[name] + resistance).clamp_(min=torch.finfo(mean.dtype).tiny)
            rows = self._old_rows(parameter, name)
            gap, factors = mean - rows.to(mean.dtype), self._precision[name] / total
            basis = self._bases.get(name)
            pull = factors * gap if basis is None else basis.out_of(basis.into(gap, gap.dim()) * factors, gap.dim())
            rows.copy_(rows + pull)


# `with anchor(...)` reads as what it does.
anchor = Anchor


def _reader_with_metric(optimizer: Optimizer) -> StateReader:
    reader = reader_of(optimizer)
    if reader is None or reader.name in _OTHER_STEPS or (reader.statistic == "none" and reader.name != "sgd"):
        name = type(optimizer).__name__
        raise MatchError(f"{name} does not go by lr g/(√v̂ + ε): train with Adam, AdamW, RMSprop, Adagrad or SGD")
    return reader


def _metric(entry: Entry) -> Tensor | float | None:
    """A of the optimiser's last step θ ← θ − lr g/A; None before the first.

    Adam and its kind √v̂ + ε; Adagrad √Σg² + ε; SGD (1 − μ)/(1 − dampening), for momentum μ repeats each gradient
    1/(1 − μ) times.
    """
    group, steps = entry.group, entry.steps
    if steps == 0:
        return None
    if entry.reader.name == "sgd":
        momentum = float(group.get("momentum", 0.0))
        return (1 - momentum) / (1 - float(group.get("dampening", 0.0)) if momentum else 1.0)
    v, eps = read_entry(entry)[1], float(group.get("eps", 0.0))
    if entry.reader.name == "adagrad" and steps:
        return v.mul_(steps).sqrt_().add_(eps).mul_(1 + (steps - 1) * float(group.get("lr_decay", 0.0)))
    return v.sqrt_().add_(eps)
