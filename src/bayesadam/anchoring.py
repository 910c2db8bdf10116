"""Training on new data that stays near what was learnt from the old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._checks import count, positive
from bayesadam._warnings import warn
from bayesadam.errors import ImproperError, MatchError, StateError
from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import Named, Structure
from bayesadam.gaussian.sums import check_growth
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.readers import Group, StateReader, read_entry
from bayesadam.readers.match import Entry, check_parameter, listed_optimizers, own_parameters
from bayesadam.readers.registry import reader_of
from bayesadam.readers.rotated import Rotation

__all__ = ["Anchor", "anchor"]

_SETTINGS = ("strength", "n_data", "every")
# The least resistance of a weight, as a share of the mean: weights that the new data do not move have next to none.
_LEAST = 1e-3
# Readers of optimisers that size their steps in another way than by lr.
_OTHER_STEPS = ("adadelta", "adafactor")


class Anchor:
    r"""Keep training near a posterior, so that what it was trained on is not forgotten.

    The loss on the new data, a mean over N examples, gets the penalty of a posterior N(μ, P⁻¹):

    .. math::
        \frac{\lambda}{2N} (\theta - \mu)^\top P\, (\theta - \mu), \qquad P = w c + \delta

    The penalty is not added to the loss. After every k-th step of the optimiser, k times as far, and for the remaining
    steps at the end, it is an implicit step :math:`\theta \leftarrow \theta + (A + P)^{-1} P\, (\mu - \theta)` with
    :math:`A = N D/(k \lambda)`, D = (√v̂ + ε)/lr of that optimiser. So neither its moments nor a `Recorder` see the
    penalty, and the next posterior is of the new data alone.

    λ = 1 is Bayes' rule, and right for a Kronecker-factored posterior; a diagonal one is best at more. A parameter with
    more rows than before, a head with new classes, is held in its old rows. Parameters that the posterior does not have
    are free. The anchor holds until `remove` or the end of the `with` block.

    Args:
        optimizer: the optimiser of the new training, or several over one model: any of Adam's kind, or SGD.
        posterior: of the training before, or the sum of all before, uncalibrated: calibration fits probabilities.
        strength: λ.
        n_data: N, the number of new examples; None takes the posterior's, which for a sum is that of all its parts.
        model: the model that is trained now, where it is not the posterior's own.
        every: k.
        free: parameters, or modules, that are not held though the posterior has them; one name or several.

    Attributes:
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
        count("every", every, "steps")
        self.strength, self.every = float(strength), every
        self.n_data = posterior.n_data if n_data is None else n_data
        positive("n_data", self.n_data, "the number of new examples, over which the loss is a mean")
        self._optimizers = listed_optimizers(optimizer)
        self._readers = [_reader_with_metric(each) for each in self._optimizers]
        named = own_parameters(posterior.model if model is None else model)
        trained = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        self._parameters = _held(named, posterior, (free,) if isinstance(free, str) else free)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self.anchored = tuple(name for name, p in self._parameters.items() if id(p) in trained)
        self.free = tuple(name for name, p in named.items() if id(p) in trained and name not in self.anchored)
        if not self.anchored:
            raise MatchError("the optimiser trains none of the posterior's parameters: pass model=, what it trains")
        mean = posterior.mean
        self._mean = {name: mean[name].to(p.device, copy=True) for name, p in self._parameters.items()}
        self._pull = Pull.of(posterior.structure, posterior.settings, self._mean)
        if not any(bool(values.any()) for each in (self._pull.diagonal, self._pull.rows) for values in each.values()):
            raise ImproperError("the posterior's precision is 0 for every trained weight: no gradient and no prior")
        self._pending: dict[str, float | Tensor] = {}
        self._steps = [0] * len(self._optimizers)
        groups = [group for index in range(len(self._optimizers)) for group in self._trained(index).values()]
        if decay := max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0):
            warn(f"a weight decay of {decay:g} pulls to 0 beside the anchor: train with weight_decay=0.0")
        if posterior.calibration is not None:
            warn("anchor to the posterior as it was before calibrate, which says nothing of forgetting")
        self._handles = [
            each.register_step_post_hook(partial(self._after_step, index))
            for index, each in enumerate(self._optimizers)
        ]

    def remove(self) -> None:
        """Take the implicit step for the steps since the last one, and let go of the optimiser."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for index in range(len(self._optimizers) if handles else 0):
            self._pull_back(index)

    def __enter__(self) -> Anchor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """(λ/2N) (θ − μ)ᵀ P (θ − μ) as it is now, for a logger."""
        gaps = self._gaps()
        parts = [(gaps[name] * product).sum() for name, product in self._pull.product(gaps).items()]
        total = reduce(lambda one, other: one + other.to(one.device), parts)
        return total * (self.strength / (2 * self.n_data))

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` resumes from; tensors and plain data."""
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "steps": list(self._steps),
            "pending": {name: float(rate) for name, rate in self._pending.items()},
            "mean": dict(self._mean),
            "precision": self._pull.tensors(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`, its posterior and settings, over parameters of the same names and shapes."""
        if not {*_SETTINGS, "steps", "pending", "mean", "precision"} <= state.keys():
            raise MatchError("not the state of an Anchor")
        mean = state["mean"]
        own, theirs = ({name: tuple(t.shape) for name, t in named.items()} for named in (self._mean, mean))
        if own != theirs or len(state["steps"]) != len(self._steps):
            wrong = dict(own.items() ^ theirs.items())
            raise MatchError(f"the anchor's state is of other parameters or optimisers: {sorted(wrong)[:4]} differ")
        self._mean = {name: mean[name].to(value, copy=True) for name, value in self._mean.items()}
        self._pull = Pull.load(state["precision"], self._mean)
        self.strength, self.n_data, self.every = (state[name] for name in _SETTINGS)
        self._steps, self._pending = list(state["steps"]), dict(state["pending"])

    def _gaps(self) -> dict[str, Tensor]:
        """μ − θ, of the old rows."""
        rows = {name: self._old_rows(self._parameters[name].detach(), name) for name in self.anchored}
        return {name: self._mean[name] - theta.to(self._mean[name].dtype) for name, theta in rows.items()}

    def _old_rows(self, tensor: Tensor, name: str) -> Tensor:
        shape = self._mean[name].shape
        return tensor if tensor.shape == shape else tensor[: shape[0]]

    def _trained(self, index: int) -> dict[str, Group]:
        """The held parameters of an optimiser, each with its group."""
        groups = self._optimizers[index].param_groups
        named = ((self._names.get(id(p)), group) for group in groups for p in group["params"])
        return {name: group for name, group in named if name is not None}

    @torch.no_grad()
    def _after_step(self, index: int, *_: Any) -> None:
        # Under a GradScaler a fused optimiser skips overflows inside its own step.
        overflow = getattr(self._optimizers[index], "found_inf", None)
        if overflow is not None and bool(overflow):
            return
        for name, group in self._trained(index).items():
            if self._parameters[name].grad is not None:
                self._pending[name] = self._pending.get(name, 0.0) + group["lr"]
        self._steps[index] += 1
        if self._steps[index] % self.every == 0:
            self._pull_back(index)

    @torch.no_grad()
    def _pull_back(self, index: int) -> None:
        optimizer, reader = self._optimizers[index], self._readers[index]
        resistance = {}
        for name, group in self._trained(index).items():
            if name not in self._pending:
                continue
            rate, parameter = float(self._pending[name]), self._parameters[name]
            found = _metric(Entry(name, parameter, optimizer.state.get(parameter, {}), group, reader))
            if rate > 0 and found is not None:
                scale = self.n_data / (self.strength * rate)
                full = found if isinstance(found, Tensor) else torch.full_like(self._mean[name], found)
                resistance[name] = self._old_rows(full, name).to(self._mean[name]) * scale
                del self._pending[name]
        for name, change in self._pull.change(self._gaps(), resistance).items():
            rows = self._old_rows(self._parameters[name], name)
            rows.copy_(rows + change)


# `with anchor(...)` reads as what it does.
anchor = Anchor


def _held(named: Mapping[str, nn.Parameter], posterior: Posterior, free: Sequence[str]) -> dict[str, nn.Parameter]:
    """The model's parameters that the posterior has, except the free ones; shapes are checked."""

    def chosen(name: str, by: Sequence[str]) -> bool:
        return any(name == each or name.startswith(f"{each}.") for each in by)

    idle = [each for each in free if not any(chosen(name, [each]) for name in (*named, *posterior.mode))]
    if idle:
        raise MatchError(f"free names {idle[:4]}, which are no parameters or modules")
    missing = [name for name in posterior.mode if name not in named and not chosen(name, free)]
    if missing:
        raise MatchError(f"the model has not all of the posterior's parameters: pass model=, or free={missing[:4]}")
    held = {name: named[name] for name in posterior.mode if name in named and not chosen(name, free)}
    for name, parameter in held.items():
        check_growth(name, posterior.mode[name].shape, parameter.shape, "the posterior", "the model")
        check_parameter(name, parameter)
    return held


@dataclass(frozen=True, eq=False)
class Pull:
    r"""P over named parameters, and the implicit step on (θ − μ)ᵀ P (θ − μ).

    A step of the optimiser lowers the loss at the price ½ (θ − θ_t)ᵀ D (θ − θ_t). With a penalty beside the loss, and
    θ' where the optimiser went, price and penalty are least at

    .. math::
        \theta = \arg\min_x \tfrac12 (x - \theta')^\top D\, (x - \theta')
                 + \tfrac{\lambda}{2N} (x - \mu)^\top P\, (x - \mu)
               = \theta' + (A + P)^{-1} P\, (\mu - \theta'), \qquad A = N D / \lambda

    It is stable for any size of the step, and where training rests the gradients of loss and penalty cancel.

    P = diag(d) for each parameter by itself, in the coordinates of its bases; A, which is not diagonal there, is taken
    as one number, the geometric mean of its entries. Or P = diag(d) + Rᵀ R, with K rows R over all parameters together;
    then the step is exact, by Woodbury's identity:

    .. math::
        (E + R^\top R)^{-1} = E^{-1} - E^{-1} R^\top (I + R E^{-1} R^\top)^{-1} R E^{-1}, \qquad
        E = A + \operatorname{diag}(d)
    """

    diagonal: Named
    bases: Mapping[str, Rotation]
    rows: Named

    @classmethod
    def of(cls, structure: Structure, settings: Settings, like: Named) -> Pull:
        """P = w c + δ of a structure, for the parameters and on the devices of `like`."""
        diagonal, rows = structure.precision_factors(settings)
        return cls(
            {name: diagonal[name].to(theta) for name, theta in like.items()},
            {n: basis.to(like[n].device, like[n].dtype) for n, basis in structure.bases.items() if n in like},
            {name: r.to(like[name]) for name, r in rows.items() if name in like},
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """P by role and parameter name."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        return {"precision": dict(self.diagonal), "left": left, "right": right, "rows": dict(self.rows)}

    @classmethod
    def load(cls, tensors: Mapping[str, Named], like: Named) -> Pull:
        """P from its tensors, on the devices of `like`; release 0.2 has `diagonal` for `precision` beside rows."""
        placed = {role: {n: t.to(like[n], copy=True) for n, t in named.items()} for role, named in tensors.items()}
        left, right = placed.get("left", {}), placed.get("right", {})
        bases = {name: Rotation(left.get(name), right.get(name)) for name in like if name in left or name in right}
        return cls(placed["precision" if "precision" in placed else "diagonal"], bases, placed.get("rows", {}))

    def product(self, gaps: Named) -> dict[str, Tensor]:
        """P x, x by parameter name; 0 for those that are not named."""
        found = {name: self._scaled(name, gap, self.diagonal[name]) for name, gap in gaps.items()}
        return self._plus_combined(found, self._along(gaps)) if self.rows else found

    def change(self, gaps: Named, resistance: Named) -> dict[str, Tensor]:
        """(A + P)⁻¹ P (μ − θ') of the parameters that have a resistance A; the others stay where they are."""
        if self.rows and resistance:
            return self._change_along_rows(gaps, resistance)
        found = {}
        for name, against in resistance.items():
            if name in self.bases:
                against = against.clamp(min=_LEAST * against.mean()).log_().mean().exp_()
            total = self.diagonal[name] + against
            share = self.diagonal[name] / total.clamp_(min=torch.finfo(total.dtype).tiny)
            found[name] = self._scaled(name, gaps[name], share)
        return found

    def _change_along_rows(self, gaps: Named, resistance: Named) -> dict[str, Tensor]:
        """x − (A + P)⁻¹ A x; the gaps of parameters that stay pull at the others."""
        push = {name: against * gaps[name] for name, against in resistance.items()}
        staying = {name: gap for name, gap in gaps.items() if name not in resistance}
        if staying:
            push = self._plus_combined(push, -self._along(staying))
        inverse = {name: (against + self.diagonal[name]).reciprocal() for name, against in resistance.items()}
        outside = {name: value * inverse[name] for name, value in push.items()}
        first = next(iter(self.rows.values()))
        gram = torch.eye(len(first), dtype=first.dtype, device=first.device)
        for name, scale in inverse.items():
            flat = self.rows[name].unsqueeze(-1).flatten(1)
            gram += ((flat * scale.reshape(1, -1)) @ flat.T).to(first.device)
        inside = torch.cholesky_solve(self._along(outside).unsqueeze(-1), torch.linalg.cholesky(gram)).squeeze(-1)
        solved = self._plus_combined(push, -inside)
        return {name: gaps[name] - inverse[name] * solved[name] for name in resistance}

    def _scaled(self, name: str, x: Tensor, factors: Tensor) -> Tensor:
        basis = self.bases.get(name)
        return x * factors if basis is None else basis.out_of(basis.into(x, x.dim()) * factors, x.dim())

    def _along(self, named: Named) -> Tensor:
        """R x."""
        device = next(iter(self.rows.values())).device
        parts = [torch.tensordot(self.rows[name], x, dims=x.dim()).to(device) for name, x in named.items()]
        return torch.stack(parts).sum(dim=0)

    def _plus_combined(self, named: Named, weights: Tensor) -> dict[str, Tensor]:
        """x + Rᵀ weights."""
        return {n: x + torch.tensordot(weights.to(x), self.rows[n], dims=1) for n, x in named.items()}


def _reader_with_metric(optimizer: Optimizer) -> StateReader:
    reader = reader_of(optimizer)
    if reader is None or reader.name in _OTHER_STEPS or (reader.statistic == "none" and reader.name != "sgd"):
        raise StateError(
            f"{type(optimizer).__name__} has no reader, or does not go by lr g/(√v̂ + ε), so a penalty cannot be "
            "weighed against its steps: train with Adam, AdamW, RMSprop, Adagrad or SGD"
        )
    return reader


def _metric(entry: Entry) -> Tensor | float | None:
    """A of the optimiser's last step θ ← θ − lr g/A; None before the first.

    Adam and its kind √v̂ + ε; Adagrad √Σg² + ε; SGD (1 − μ)/(1 − dampening), for momentum μ repeats each gradient
    1/(1 − μ) times.
    """

    def number(name: str) -> float:
        value = entry.group.get(name, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    steps = entry.reader.steps(entry.state, entry.group)
    if steps == 0:
        return None
    if entry.reader.name == "sgd":
        return (1 - number("momentum")) / (1 - number("dampening") if number("momentum") else 1.0)
    v = read_entry(entry)[1]
    if entry.reader.name == "adagrad" and steps:
        return v.mul_(steps).sqrt_().add_(number("eps")).mul_(1 + (steps - 1) * number("lr_decay"))
    return v.sqrt_().add_(number("eps"))
