"""A mixture of posteriors: a deep ensemble whose networks each know how sure they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._alone import unwrap
from bayesadam._checks import count, require_kind
from bayesadam._files import damage_named
from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.likelihoods import Prediction
from bayesadam.predict import Forward, predicting
from bayesadam.weights.draws import fresh_seed, stream_seed
from bayesadam.weights.named import AnyPath, DrawKeywords, Inputs, Named
from bayesadam.weights.networks import copy_into, running_statistics
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.store import warn_of_calibration

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KIND = "mixture"
# The role, in a file, of what a network has besides the weights of its posterior.
_BESIDES = "besides"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Mixture:
    """q(θ) = Σ_m π_m N(μ_m, Σ_m) over the weights of networks of one architecture, trained from different starts.

    Members may have a model each or share one; a shared model's buffers and frozen weights are then those of all, so
    that networks with batch norm need a model each.

    >>> def member(seed):
    ...     model, generator = torch.nn.Linear(2, 1), torch.Generator().manual_seed(seed)
    ...     mean = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    ...     return Posterior.from_moments(model, mean, {name: torch.ones_like(mu) for name, mu in mean.items()}, 10)
    >>> mixture = Mixture([member(0), member(1)])
    >>> mixture.sample(3)["weight"].shape, mixture.weights
    (torch.Size([3, 1, 2]), (0.5, 0.5))

    Attributes:
        members: the posteriors, over parameters of the same names and shapes.
        weights: π, positive, of sum 1.
    """

    members: tuple[Posterior, ...]
    weights: tuple[float, ...]

    def __init__(self, members: Iterable[Posterior], weights: Iterable[float] | Tensor | None = None) -> None:
        if isinstance(members, Posterior):
            raise SettingError("a mixture is of several posteriors: Mixture([first, second, ...])")
        members = tuple(members)
        _check_members(members)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "weights", _normalised(weights, len(members)))
        _warn_of_shared_statistics(members)

    @property
    def likelihood(self) -> str | None:
        """The likelihood of its members' outputs."""
        return next((member.likelihood for member in self.members if member.likelihood is not None), None)

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draws from q, each from a member picked with probability π_m, in the types of the models' parameters.

        Args:
            n: the number of draws, a leading dimension; None for one draw without it, the first of any number.
            generator: makes picks and draws reproducible; they depend on it alone.
        """
        count("n", 1 if n is None else n, "draws, or None for one")
        self.require_proper()
        seed = fresh_seed(generator)
        picked = self._picks(n or 1, seed)
        if n is None:
            return self.members[picked[0]].sample(generator=_stream(seed, picked[0]))
        draws: dict[str, Tensor] = {}
        for number in sorted(set(picked)):
            places = [place for place, pick in enumerate(picked) if pick == number]
            for name, values in self.members[number].sample(len(places), generator=_stream(seed, number)).items():
                whole = draws.setdefault(name, values.new_empty((n, *values.shape[1:])))
                whole[places] = values.to(whole)
        return draws

    def _picks(self, n: int, seed: int) -> list[int]:
        """n members' numbers, drawn with probabilities π from a stream of their own."""
        random = np.random.Generator(np.random.SFC64(stream_seed(seed, "pick")))
        return list(map(int, np.searchsorted(np.cumsum(self.weights)[:-1], random.random(n), side="right")))

    @overload
    def predict(self, inputs: Inputs, **how: Unpack[DrawKeywords]) -> Prediction: ...  # type: ignore[overload-overlap]

    @overload
    def predict(self, inputs: Iterable[Any], **how: Unpack[DrawKeywords]) -> Iterator[Prediction]: ...

    def predict(
        self,
        inputs: Any,
        *,
        draws: int | None = None,
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction | Iterator[Prediction]:
        """p(y) = Σ π_m p_m(y) of a batch, or of a loader, as `Posterior.predict` has it; `draws` are of each member."""
        self.require_proper()
        return predicting.predict(self.members, self.weights, inputs, draws=draws, forward=forward, generator=generator)

    @contextmanager
    def sampled(self, *, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """A member's model with one draw as its weights, that of `sample`; afterwards all is as before."""
        self.require_proper()
        seed = fresh_seed(generator)
        (number,) = self._picks(1, seed)
        with self.members[number].sampled(generator=_stream(seed, number)) as model:
            yield model

    def require_proper(self) -> None:
        """Raise unless every weight of every member has a finite variance."""
        for member in self.members:
            member.require_proper()

    def replace(self, **changes: Any) -> Mixture:
        """A new mixture with some settings of every member changed, those that `Posterior.replace` takes."""
        return Mixture([member.replace(**changes) for member in self.members], self.weights)

    def save(self, path: AnyPath) -> None:
        """Write one safetensors file, in place of an older one once complete.

        Of networks of their own it has the buffers and frozen weights, too.
        """
        tensors: dict[str, Tensor] = {}
        headers = []
        share = len({id(member.model) for member in self.members}) == 1
        for number, member in enumerate(self.members):
            parts, header = member.packed()
            besides = {} if share else {n: t for n, t in _tensors(member.model).items() if n not in member.mode}
            tensors |= {f"{number}.{key}": parts[key] for key in parts}
            tensors |= {f"{number}.{_BESIDES}.{name}": tensor for name, tensor in besides.items()}
            headers.append(header)
        about = {"version": __version__, "structure": _KIND, "weights": list(self.weights), "members": headers}
        storage.write(path, tensors, about)

    @classmethod
    def load(cls, path: AnyPath, model: nn.Module) -> Mixture:
        """Read a saved mixture for `model`, one module for all members, which gets the first member's mean as weights.

        Networks that had buffers or frozen weights of their own get copies of the model.
        """
        require_kind(model, nn.Module, "the one model for all members")
        tensors, about = storage.read(path)
        if about.get("structure") != _KIND:
            kind = about.get("structure")
            raise FileError(f"{path} holds a {kind!r} posterior and no mixture: read it with Posterior.load")
        members = []
        with damage_named(path, "Mixture.save"):
            for number, header in enumerate(about["members"]):
                parts = storage.under(f"{number}.", tensors)
                besides = storage.under(f"{_BESIDES}.", parts)
                own = _filled(path, model, besides) if besides else model
                parts = {key: tensor for key, tensor in parts.items() if not key.startswith(f"{_BESIDES}.")}
                members.append(Posterior.unpacked(path, parts, header, own))
            try:
                mixture = cls(members, about["weights"])
            except MatchError as error:
                raise FileError(f"{path} is damaged: {error}") from error
        warn_of_calibration(path, about, *about["members"])
        copy_into(model, members[0].mean)
        return mixture

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Posterior]:
        return iter(self.members)

    def __repr__(self) -> str:
        shares = ", ".join(f"{weight:.3g}" for weight in self.weights)
        return f"Mixture({len(self)} x {type(self.members[0].model).__name__}, weights=({shares}))"


def _stream(seed: int, number: int) -> torch.Generator:
    """A member's own random numbers."""
    return torch.Generator().manual_seed(stream_seed(seed, "member", number))


def require_one_network(posterior: object, what: str) -> None:
    """Refuse a mixture."""
    if isinstance(posterior, Mixture):
        raise SettingError(
            f"{what} is of one network, and a Mixture has {len(posterior)}: go through them, `for member in mixture`"
        )


def require_posterior(posterior: object, what: str) -> None:
    """Raise unless it is the posterior of one network."""
    require_one_network(posterior, what)
    require_kind(posterior, Posterior, "posterior")


def _check_members(members: Sequence[Posterior]) -> None:
    """Refuse what is no set of whole posteriors over one architecture, naming the first difference."""
    if not members:
        raise SettingError("a mixture needs at least one member")
    for number, member in enumerate(members):
        require_kind(member, Posterior, f"member {number}")
        member.require_whole("a mixture")
        for name in {**members[0].mode, **member.mode}:
            first, other = members[0].mode.get(name), member.mode.get(name)
            if first is None or other is None or (first.shape, first.device) != (other.shape, other.device):
                kinds = ["none" if t is None else f"{tuple(t.shape)} on {t.device}" for t in (first, other)]
                raise MatchError(
                    f"the members of a mixture have the same parameters, but {name!r} is {kinds[0]} in member 0 and "
                    f"{kinds[1]} in member {number}"
                )


def _normalised(weights: Iterable[float] | Tensor | None, n: int) -> tuple[float, ...]:
    """Weights of sum 1, equal ones for None."""
    numbers = [1.0] * n if weights is None else [float(weight) for weight in weights]
    if len(numbers) != n or not all(0 < weight < math.inf for weight in numbers):
        raise SettingError(f"weights must be one positive number for each of the {n} members, got {weights!r}")
    total = math.fsum(numbers)
    return tuple(numbers) if math.isclose(total, 1, rel_tol=1e-15) else tuple(weight / total for weight in numbers)


def _warn_of_shared_statistics(members: Sequence[Posterior]) -> None:
    """Networks that differ in their weights differ in their batch norms' running statistics."""
    owners: dict[int, Posterior] = {}
    for member in members:
        first = owners.setdefault(id(member.model), member)
        tracked = [name for name in running_statistics(member.model) if name.endswith("running_mean")]
        if tracked and not all(torch.equal(theta, first.mode[name]) for name, theta in member.mode.items()):
            warn(
                f"members of different weights share one model, and with it {tracked[0]!r}, which is right for one "
                "network alone: give each member a model of its own"
            )
            return


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    model = unwrap(model)
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _filled(path: AnyPath, model: nn.Module, besides: Named) -> nn.Module:
    """A copy of the model that holds other buffers and frozen weights."""
    network = copy.deepcopy(unwrap(model))
    places = _tensors(network)
    storage.check_owner(path, {name: tensor.shape for name, tensor in besides.items()}, places)
    for name, tensor in besides.items():
        places[name].copy_(tensor)
    return network
