"""Agents with a network per run: greedy, ε-greedy, badam, MC dropout, Bayes by Backprop, Vadam, IVON, bootstrap."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam._checks import is_count, is_number
from bayesadam.bandits.learner import (
    AgentSettings,
    Buffer,
    Check,
    Count,
    Entry,
    Flag,
    Learner,
    NotNegative,
    Positive,
    PositiveOrNone,
    with_constant,
)
from bayesadam.engine.gradients import Slope, sampled_outputs
from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.rules import (
    IVON,
    Adam,
    BayesByBackprop,
    Dropout,
    Gaussian,
    Rule,
    Vadam,
    second_moment,
)
from bayesadam.engine.stack import Stack
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from bayesadam.weights.draws import stream_seed
from bayesadam.weights.settings import PrecisionRule

# The first rewards' noise has this weight against observations, and each observation forgets this share of the others.
_NOISE_START, _NOISE_MEMORY = 100.0, 0.9995


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _all(holds: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, tuple) and all(map(holds, value))


Share = Annotated[float, Check(_is_share, "at least 0 and below 1")]
Betas = Annotated[tuple[float, float], Check(lambda v: _all(_is_share, v) and len(v) == 2, "two numbers in [0, 1)")]
Widths = Annotated[tuple[int, ...], Check(partial(_all, is_count), "a tuple of whole numbers like (100, 100)")]
SomeWidths = Annotated[Widths, Check(lambda v: v != (), "one hidden layer or more")]
Form = Annotated[Literal["likelihood", "map"], Check(lambda v: v in ("likelihood", "map"), "'likelihood' or 'map'")]


@dataclass(frozen=True)
class NetworkSettings(AgentSettings):
    """A network per run, trained by one of the engine's rules.

    Attributes:
        activation: `"relu"`, `"tanh"`, `"sigmoid"`, `"silu"`, `"gelu"` or `"elu"`.
        init_range: weights start in U[−r, r], biases at 0; None for torch's U(±1/√fan-in) of both.
        lr_decay: κ of the inverse decay lr/(1 + κ t) over mini-batches t; 0 for a constant rate.
        average: β of the moving average of the weights that acts in their place; 0 for none.
        clip: the norm at which the gradient of each run is clipped; None for no clipping.
        train_steps: t_s, the mini-batches of a training.
        standardise: whether rewards are learnt in units of their mean and standard deviation so far.
    """

    hidden: Widths = (100, 100)
    activation: str = "relu"
    init_range: PositiveOrNone = None
    lr: Positive = 1e-3
    lr_decay: NotNegative = 0.0
    betas: Betas = (0.9, 0.999)
    average: Share = 0.0
    clip: PositiveOrNone = 5.0
    batch_size: Count = 512
    train_steps: Count = 50
    standardise: Flag = False


class NetworkLearner(Learner):
    """A network per run, trained by one of the engine's rules on the squared error of the chosen arm.

    Scores are outputs at draws from the Gaussian that the rule ends with.
    """

    settings: NetworkSettings

    def __init__(self, settings: NetworkSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        n_inputs, dropout = buffer.contexts.shape[2], getattr(settings, "dropout", 0.0)
        self.network = Network(n_inputs, settings.hidden, n_arms, settings.activation, dropout)
        # The networks' seeds: one per run, or one per member.
        self.owners = self._owners()
        # N of the last training, by which the Gaussian is read: a saved agent resumes with it.
        self._n = self._n_data()
        self.stack = Stack(
            self.network,
            self._rule(),
            self.owners,
            self._batch,
            n_data=self._n,
            weights=initial_weights(self.network, self.owners, settings.init_range, self.device),
            device=self.device,
            average=settings.average,
            clip=settings.clip,
            predraw=True,
        )
        self.params = self.stack.params
        self._batches = self._stream("batches", self.owners)
        self._choice = self._stream("posterior", seeds)
        self._streams["training"] = self.stack.streams
        # The Gaussian, kept until the next training.
        self._moments: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._shift = torch.zeros(len(self.owners), 1, device=self.device)
        self._scale = torch.ones_like(self._shift)
        self._memory |= {"shift": self._shift, "scale": self._scale}

    @abstractmethod
    def _rule(self) -> Rule:
        """How the networks learn."""

    def _owners(self) -> tuple[int, ...]:
        return self.seeds

    def _importance(self, rows: Tensor) -> Tensor | None:
        """The weights of the examples of a mini-batch, (networks, b); None for ones."""
        return None

    def _n_data(self) -> float:
        own = self.settings
        return own.n_data(self.buffer.effective_count) if isinstance(own, GaussianSettings) else 1.0

    def gaussian(self) -> Gaussian | None:
        """Mean and variance of the weights, (networks, weights), of agents with a Gaussian over them."""
        return self.stack.gaussian()

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        if self._moments is None:
            found = self.gaussian()
            assert found is not None
            self._moments = unflatten(self.network, found.mean), unflatten(self.network, found.variance)
        scores = sampled_outputs(self.network, *self._moments, contexts.repeat_interleave(n, dim=1), streams)
        return scores.view(*contexts.shape[:2], n, self.n_arms)

    def _by_network(self, of_runs: Tensor) -> Tensor:
        return of_runs.repeat_interleave(len(self.owners) // self.buffer.runs, dim=0)

    def train(self) -> None:
        """t_s mini-batches, with the learning rate lr/(1 + κ t) over the mini-batches t of all trainings."""
        self._prepare()
        lr, decay = self.settings.lr, self.settings.lr_decay
        self.stack.prepare(self._rows().transpose(0, 1), lambda done: lr / (1 + decay * done))
        self.stack.run(self.settings.train_steps)
        self._moments = None

    def _rows(self) -> Tensor:
        """The rows of a training's examples, (networks, steps, b)."""
        return self.buffer.drawn(self._batches, self.settings.train_steps, self.settings.batch_size)

    def _prepare(self) -> None:
        """Write N and the rewards' scale, which a training's steps read."""
        self._n = self._n_data()
        self.stack.n_data.fill_(self._n)
        if self.settings.standardise:
            shift, scale = self.buffer.moments()
            self._shift.copy_(self._by_network(shift))
            self._scale.copy_(self._by_network(scale))

    def _batch(self, rows: Tensor) -> tuple[Tensor, Slope]:
        """Contexts, and the gradient by f of (1/b) Σ_i w_i (f_{arm_i}(x_i) − target_i)²."""
        contexts, arms, targets = self.buffer.at(rows)
        if self.settings.standardise:
            targets = targets.sub_(self._shift).div_(self._scale)
        importance, arms = self._importance(rows), arms.unsqueeze(2)

        def slope(outputs: Tensor) -> Tensor:
            errors = outputs.gather(2, arms).squeeze(2).sub_(targets).mul_(2 / rows.shape[1])
            if importance is not None:
                errors.mul_(importance)
            return torch.zeros_like(outputs).scatter_(2, arms, errors.unsqueeze(2))

        return contexts, slope

    def tensors(self) -> dict[str, Tensor]:
        """Weights, the rule's memory, the counts, and the errors from which the noise is estimated."""
        # A training writes the scale before it reads it.
        learnt = {name: tensor for name, tensor in self.stack.tensors().items() if name != "scale"}
        return learnt | self._memory | {"steps": torch.tensor(self.stack.done)}

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """The layers of flat weights."""
        flat = tensor.shape[1:] == self.stack.weights.shape[1:]
        return tuple(unflatten(self.network, tensor).values()) if flat else (tensor,)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over N and the count of steps too."""
        super().load(tensors)
        self.stack.done, self._n, self._moments = int(tensors["steps"]), float(tensors["n_data"]), None


def initial_weights(network: Network, seeds: Sequence[int], span: float | None, device: torch.device) -> Tensor:
    """Flat weights (n, weights): U[−span, span] with biases of 0, or torch's own U(±1/√fan-in) for None."""
    params = initial(network, seeds)
    if span is not None:
        for name, tensor in params.items():
            tensor.mul_(span * math.sqrt(tensor.shape[-1]) if name.endswith("weight") else 0.0)
    return flatten(params).to(device)


@dataclass(frozen=True)
class GreedySettings(NetworkSettings):
    """Adam, with a penalty and dropout as regularisers.

    Attributes:
        l2: λ of the penalty (λ/2)|θ|².
        l2_by_noise: whether λ is multiplied by the estimated variance of the rewards' noise.
        dropout: the rate at which hidden units are dropped in training.
    """

    l2: NotNegative = 0.0
    l2_by_noise: Flag = False
    dropout: Share = 0.0


class AdamLearner(NetworkLearner):
    """Networks trained by Adam with an L2 penalty and dropout.

    The rewards' noise is the mean squared error, in units of the targets, of predictions made before their rewards were
    learnt: unlike the training error it does not fall when the network memorises.
    """

    settings: GreedySettings

    def __init__(self, settings: GreedySettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self._errors = torch.full((len(self.owners), 2), _NOISE_START, device=self.device)
        self._memory["errors"] = self._errors
        self._l2 = torch.full((len(self.owners), 1), settings.l2, device=self.device)
        self.stack.penalty = self._l2 if settings.l2 else None

    def _rule(self) -> Rule:
        return (Dropout if self.settings.dropout else Adam)(betas=self.settings.betas)

    def _prepare(self) -> None:
        super()._prepare()
        if self.settings.l2_by_noise:
            torch.mul(self.noise_variance(), self.settings.l2, out=self._l2)

    def observe(self, rows: slice) -> None:
        """Compare the new rewards with the predictions of the network, which has not seen them."""
        if not (self.settings.l2_by_noise and self.stack.done):
            return
        contexts, arms, rewards = map(self._by_network, self.buffer.seen(rows))
        found = forward(self.network, self.params, contexts).gather(2, arms.unsqueeze(2)).squeeze(2)
        errors = found.sub_((rewards - self._shift) / self._scale).square_().sum(dim=1)
        count = rows.stop - rows.start
        memory = min(_NOISE_MEMORY, self.buffer.faded(1)) ** count
        self._errors.mul_(memory).add_(torch.stack([errors, torch.full_like(errors, count)], dim=1))

    def noise_variance(self) -> Tensor:
        """Of the rewards in units of the targets, (networks, 1)."""
        return self._errors[:, :1] / self._errors[:, 1:]

    def _last_hidden(self, contexts: Tensor) -> Tensor:
        """The last hidden layer with a constant 1 appended, float64; of one run by numpy, whose calls cost less."""
        if len(contexts) > 1 or self.device.type != "cpu" or self.network.activation != "relu":
            return with_constant(forward(self.network, self.params, contexts, n_layers=len(self.network.hidden)))
        h = contexts.numpy()[0]
        for weight, bias in self._first_layers:
            h = h @ weight.T
            h += bias
            np.maximum(h, 0, out=h)
        return with_constant(torch.from_numpy(h[None]))

    @cached_property
    def _first_layers(self) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
        """The hidden layers of the first run's network, in the same memory."""
        first = {name: tensor.numpy()[0] for name, tensor in self.params.items()}
        numbers = range(len(self.network.hidden))
        return [(first[f"layer{number}.weight"], first[f"layer{number}.bias"]) for number in numbers]


class Greedy(AdamLearner):
    """Scores are the outputs of the network."""

    def _outcomes(self, contexts: Tensor) -> Tensor:
        return forward(self.network, self.params, contexts).unsqueeze(2)

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        return self._outcomes(contexts).expand(-1, -1, n, -1)


GREEDY = Entry(Greedy, GreedySettings)
EPSILON_GREEDY = Entry(Greedy, GreedySettings, tuned={"epsilon": 0.05}, paper={"epsilon": 0.05})


class MCDropout(AdamLearner):
    """Units are dropped in training and when choosing alike, with one mask per row."""

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        rule, (runs, k, _) = self.stack.rule, contexts.shape
        masks = rule.masks(rule.noise(streams, self.network, k * n), self.network)
        scores = forward(self.network, self.params, contexts.repeat_interleave(n, dim=1), masks=masks)
        return scores.view(runs, k, n, self.n_arms)


MC_DROPOUT = Entry(MCDropout, GreedySettings, tuned={"dropout": 0.2}, paper={"dropout": 0.2})


@dataclass(frozen=True)
class GaussianSettings(NetworkSettings):
    """A Gaussian over the weights.

    Attributes:
        n_per_round: N is the number of rounds, less those forgotten, times this; None for the batch size.
        prior_variance: of the weights, 1/δ.
    """

    n_per_round: PositiveOrNone = None
    prior_variance: Positive = 0.1

    def n_data(self, rounds: float) -> float:
        """N after `rounds` rounds that are not forgotten."""
        return max(rounds, 1) * (self.n_per_round or self.batch_size)


@dataclass(frozen=True)
class BadamSettings(GreedySettings, GaussianSettings):
    """The Gaussian that Adam's state holds.

    Attributes:
        form: of the posterior, `"likelihood"` or `"map"`.
        power: p of the curvature c = v̂ᵖ.
    """

    form: Form = "likelihood"
    power: Positive = 0.5


class Badam(AdamLearner):
    """The Gaussian that Adam's state already holds: precision N c + δ with c = v̂ᵖ, around θ or N c/(N c + δ) θ."""

    settings: BadamSettings

    def gaussian(self) -> Gaussian:
        """Computed from Adam's second moment."""
        own, moment = self.settings, second_moment(self.stack.state, self.settings.betas[1])
        rule = PrecisionRule(self._n, 1 / own.prior_variance, own.power, own.form == "likelihood")
        return Gaussian(rule.mean(self.stack.mean, moment), rule.precision(moment).reciprocal_())


# Of badam, badam-map, bbb, vadam and ivon: chosen by `benchmarks/tune_bandits.py`, with seeds 7001 and 7002.
_BADAM = {"lr": 1.33e-4, "betas": (0.9, 0.9999), "average": 0.0, "train_steps": 20, "l2": 5.82e-4, "l2_by_noise": False}
_BADAM |= {"dropout": 0.1, "prior_variance": 0.0836, "n_per_round": 1000.0}
# The released code's `sigma_prior=0.1` is a standard deviation.
_RELEASED = {"prior_variance": 0.01}
BADAM = Entry(Badam, BadamSettings, tuned=_BADAM, paper=_RELEASED)
BADAM_MAP = Entry(Badam, BadamSettings, tuned={**_BADAM, "form": "map"}, paper={**_RELEASED, "form": "map"})


@dataclass(frozen=True)
class VariationalSettings(GaussianSettings):
    """A rule that learns a Gaussian by perturbing the weights: Bayes by Backprop, Vadam, IVON.

    Attributes:
        noise_variance: of a reward.
        initial_std: the standard deviation that every weight starts from.
    """

    noise_variance: Positive = 0.5
    initial_std: Positive = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        widest = math.sqrt(self.prior_variance)
        if self.initial_std > widest:
            raise SettingError(f"initial_std={self.initial_std!r} is wider than the prior: take at most {widest:g}")


class Variational(NetworkLearner):
    """Any rule that learns a Gaussian over the weights."""

    settings: VariationalSettings

    def __init__(
        self, kind: type[Rule], settings: VariationalSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]
    ) -> None:
        self._kind = kind
        super().__init__(settings, buffer, n_arms, seeds)
        self.stack.scale.fill_(0.5 / settings.noise_variance)

    def _rule(self) -> Rule:
        own = self.settings
        # The engine's IVON calls betas `averages`, and takes its initial Hessian from `initial_std` where it is None.
        given = {"averages": own.betas, "prior_precision": 1 / own.prior_variance, "initial_hessian": None}
        return self._kind.with_settings(**vars(own), **given)


_BBB = {"lr": 4.93e-4, "betas": (0.9, 0.9999), "train_steps": 100, "standardise": False, "prior_variance": 0.189}
_BBB |= {"n_per_round": 10.0, "noise_variance": 0.5, "initial_std": 0.0349}
_VADAM = {"lr": 4.9e-3, "betas": (0.9, 0.9999), "average": 0.0, "train_steps": 50, "prior_variance": 7.39e-3}
_VADAM |= {"n_per_round": 10.0, "noise_variance": 0.003, "initial_std": 0.0732}
_IVON = {"lr": 0.0183, "train_steps": 20, "standardise": False, "prior_variance": 0.994}
_IVON |= {"n_per_round": 1000.0, "noise_variance": 0.1, "initial_std": 0.0458}
BBB = Entry(partial(Variational, BayesByBackprop), VariationalSettings, _BBB, paper={"noise_variance": 0.01})
# With the paper's settings: searched on problems that are not in its table.
_PAPER_VADAM = {"noise_variance": 0.01, "prior_variance": 1e-3, "initial_std": 0.03}
VADAM = Entry(partial(Variational, Vadam), VariationalSettings, _VADAM, _PAPER_VADAM)
IVON_AGENT = Entry(partial(Variational, IVON), VariationalSettings, _IVON)


@dataclass(frozen=True)
class BootstrapSettings(GreedySettings):
    """An ensemble, with so many members in each run."""

    members: Count = 5


class Bootstrap(AdamLearner):
    """An ensemble per run: a member weighs an observation 0 or 2, each with probability ½; one acts in each round."""

    settings: BootstrapSettings

    def __init__(self, settings: BootstrapSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        room = buffer.contexts.shape[1]
        self._counts = torch.zeros(len(self.owners), room, dtype=torch.uint8, device=self.device)
        self._memory["counts"] = self._counts
        self._bootstrap = self._stream("bootstrap", self.owners)

    def _owners(self) -> tuple[int, ...]:
        members = range(self.settings.members)
        return tuple(stream_seed(seed, "member", number) for seed in self.seeds for number in members)

    def observe(self, rows: slice) -> None:
        """Draw the members' weights of the new observations."""
        super().observe(rows)
        self._counts[:, rows] = 2 * self._bootstrap.rows(2, rows.stop - rows.start).to(torch.uint8)

    def use(self, buffer: Buffer) -> None:
        """Make room for the weights."""
        super().use(buffer)
        more = buffer.contexts.shape[1] - self._counts.shape[1]
        self._counts = self._memory["counts"] = F.pad(self._counts, (0, max(0, more)))

    def thin(self, rows: Tensor) -> None:
        """Keep the weights of these rows."""
        self._counts[:, : len(rows)] = self._counts[:, rows]

    def _importance(self, rows: Tensor) -> Tensor:
        return self._counts.gather(1, rows).float()

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        chosen = streams.rows(self.settings.members, contexts.shape[1], n)
        return self._outcomes(contexts).gather(2, chosen.unsqueeze(3).expand(-1, -1, -1, self.n_arms))

    def _outcomes(self, contexts: Tensor) -> Tensor:
        runs, k, _ = contexts.shape
        every = forward(self.network, self.params, self._by_network(contexts))
        return every.view(runs, self.settings.members, k, self.n_arms).transpose(1, 2)


BOOTSTRAP = Entry(Bootstrap, BootstrapSettings)
