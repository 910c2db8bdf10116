"""What learns, for a stack of runs at once: scores of every arm, and training on what was seen.

A learner owns its memory and only writes into it, so that a training can be captured as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.bandits.agents import AgentSettings
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.gradients import ChosenArmGradient, Layers, layers_of, outputs, sampled_outputs
from bayesadam.engine.network import Network, flatten, initial
from bayesadam.engine.stack import captured
from bayesadam.engine.streams import Streams
from bayesadam.structures.formulas import precision, shrunk_mean
from bayesadam.structures.noise import stream_seed


class Learner(ABC):
    """Scores the arms of contexts, one independent draw a row, and learns from a buffer.

    Args:
        settings: see `AgentSettings`.
        buffer: what the runs have seen; the learner keeps it.
        n_arms: how many arms.
        seeds: one a run.
    """

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.settings, self.buffer, self.n_arms = settings, buffer, n_arms
        self.device = buffer.contexts.device
        self.seeds = tuple(seeds)
        self._explore = Streams(seeds, "explore", self.device)

    def scores(self, contexts: Tensor) -> Tensor:
        """(runs, k, features) → (runs, k, arms); the arm to choose is the largest."""
        found = self._scores(contexts)
        if not self.settings.epsilon:
            return found
        draws = self._explore.uniform(contexts.shape[1], 1 + self.n_arms)
        return torch.where(draws[..., :1] < self.settings.epsilon, draws[..., 1:], found)

    @abstractmethod
    def _scores(self, contexts: Tensor) -> Tensor: ...

    def observe(self, places: slice) -> None:  # noqa: B027
        """Take note of what came into the buffer at these places."""

    def train(self) -> None:  # noqa: B027
        """Learn from the buffer."""

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up the learner's state, by name."""
        return {}

    def streams(self) -> dict[str, Streams]:
        """The sources of random numbers, by name."""
        return {"explore": self._explore}

    def state(self) -> dict[str, Tensor]:
        """A copy of the whole state, on the CPU."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors().items()}
        return state | {f"stream.{name}": stream.state() for name, stream in self.streams().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, with the same settings and seeds."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])
        for name, stream in self.streams().items():
            stream.restore(state[f"stream.{name}"])


class Adam:
    """torch's own fused Adam over stacked weights; its state is there from the start, so that it can be restored.

    Attributes:
        first: the first moment, shaped as the weights.
        second: the second moment.
        step_count: the steps done, one number for each piece that the optimiser is given.
    """

    def __init__(self, weights: Tensor, gradient: Tensor, lr: float | Tensor, betas: tuple[float, float]) -> None:
        cuda = weights.device.type == "cuda"
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        size = -(-weights.numel() // _ADAM_PIECES) if cuda else weights.numel()
        pieces = [torch.split(of.view(-1), size) for of in (weights, gradient, self.first, self.second)]
        self.step_count = torch.zeros(len(pieces[0]), device=weights.device)
        for leaf, into in zip(pieces[0], pieces[1], strict=True):
            leaf.grad = into
        self._optimizer = torch.optim.Adam(list(pieces[0]), lr=lr, betas=betas, fused=True, capturable=cuda)
        for leaf, _, first, second, step in zip(*pieces, self.step_count, strict=True):
            self._optimizer.state[leaf] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def step(self) -> None:
        """Move the weights."""
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state, by name."""
        return {"first": self.first, "second": self.second, "step": self.step_count}


class Uniform(Learner):
    """Every arm alike."""

    def _scores(self, contexts: Tensor) -> Tensor:
        return self._explore.uniform(contexts.shape[1], self.n_arms)


# The first rewards' noise has this weight against what is observed, and each observation forgets this share of the others.
_NOISE_START, _NOISE_MEMORY = 100.0, 0.9995
# As many pieces as torch's fused Adam takes in one launch: a block of a GPU has one piece, however long.
_ADAM_PIECES = 30


class NetworkLearner(Learner):
    """A network a run, trained by Adam on the squared error of the chosen arm; scores are its outputs (greedy).

    A training is `train_steps` mini-batches from the whole buffer. The gradient's norm is clipped run by run. What acts is
    the average of the weights where the settings ask for one.

    The rewards' noise is estimated as the mean squared error, in units of the targets, of predictions made before their
    rewards were learnt from: unlike the training error it does not fall when the network learns by heart.
    """

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self.network = Network(buffer.contexts.shape[2], settings.hidden, n_arms, settings.activation)
        self.owners = self._owners()
        self.weights = initial_weights(self.network, self.owners, settings.init_range, self.device)
        self._at = self.weights if self._optimises_in_place() else torch.empty_like(self.weights)
        self._gradient = ChosenArmGradient(self.network, self._at, settings.batch_size)
        self._batches = Streams(self.owners, "batches", self.device)
        self._noise = Streams(self.owners, "training", self.device)
        self._posterior_noise = Streams(seeds, "posterior", self.device)
        self.mean = self.weights.clone() if settings.average else self.weights
        self._layers = layers_of(self.network, self.mean)
        self._moments: tuple[Layers, Layers] | None = None
        # What a step reads beside the buffer: device memory that `_prepare` fills for a whole training.
        networks, steps = len(self.owners), settings.train_steps
        self._rows = torch.zeros(steps, networks, settings.batch_size, dtype=torch.int64, device=self.device)
        self._next = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._rates = torch.zeros(steps, 4, device=self.device)
        self._rate = torch.full((1, 4), settings.lr, device=self.device)
        self._shift = torch.zeros(networks, 1, device=self.device)
        self._scale = torch.ones(networks, 1, device=self.device)
        self._n = torch.ones((), device=self.device)
        self._l2 = torch.full((networks, 1), settings.l2, device=self.device)
        self._half_precision = torch.full((networks, 1), 0.5 / (settings.noise_variance or 1), device=self.device)
        self._errors = torch.full((networks, 2), _NOISE_START, device=self.device)
        self._drawn: Tensor | None = None
        self._steps = torch.zeros((), dtype=torch.int64)
        self._run_steps: Callable[[], None] = self._all_steps
        self._start()

    # --- what kinds differ in -----------------------------------------------------------------------------------

    def _owners(self) -> tuple[int, ...]:
        """The networks' seeds."""
        return self.seeds

    def _optimises_in_place(self) -> bool:
        """Whether the gradient is taken at the weights themselves, and not at perturbed ones."""
        return True

    def _start(self) -> None:
        """Make the optimiser."""
        self._optimizer = self._adam(self.weights, self._gradient.gradient)

    def _training_noise(self, *lead: int) -> Tensor | None:
        """Random numbers of steps, (networks, *lead, ...): masks of the hidden units where there is dropout."""
        if not self.settings.dropout:
            return None
        return self._noise.masks(self.settings.dropout, *lead, self.settings.batch_size * sum(self.settings.hidden))

    def _masks(self, noise: Tensor | None) -> list[Tensor] | None:
        return None if noise is None else self._by_layer(noise)

    def _by_layer(self, masks: Tensor) -> list[Tensor]:
        """(n, b × units of all layers) as (n, b, units) layer by layer, each in one piece."""
        hidden = self.settings.hidden
        b = masks.shape[1] // sum(hidden)
        parts = torch.split(masks, [b * units for units in hidden], dim=1)
        return [part.view(-1, b, units) for part, units in zip(parts, hidden, strict=True)]

    def _perturb(self, noise: Tensor | None) -> None:
        """Put the weights where the gradient is taken."""

    def _update(self, gradient: Tensor, noise: Tensor | None) -> None:
        """One step of the optimiser."""
        gradient.addcmul_(self.weights, self._l2)
        self._optimizer.step()

    def _gaussian(self) -> tuple[Tensor, Tensor] | None:
        """The posterior's mean and variance, (networks, weights); None where scores need none."""
        return None

    def _importance(self, rows: Tensor) -> Tensor | None:
        return None

    # --- scores -------------------------------------------------------------------------------------------------

    def posterior(self) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of the weights, (runs, weights), where the agent has a Gaussian over them."""
        return self._gaussian()

    def _scores(self, contexts: Tensor) -> Tensor:
        if self._moments is None:
            found = self._gaussian()
            if found is None:
                return outputs(self.network, self._layers, contexts)
            mean, variance = found
            self._moments = layers_of(self.network, mean), layers_of(self.network, variance)
        return sampled_outputs(self.network, *self._moments, contexts, self._posterior_noise)

    # --- the rewards' noise -------------------------------------------------------------------------------------

    def observe(self, places: slice) -> None:
        """Compare the new rewards with what the network, which has not seen them, predicts."""
        if not (self._estimates_noise() and int(self._steps)):
            return
        members = len(self.owners) // self.buffer.runs
        contexts, arms, rewards = (
            of[:, places].repeat_interleave(members, dim=0)
            for of in (self.buffer.contexts, self.buffer.arms, self.buffer.rewards)
        )
        found = outputs(self.network, self._layers, contexts).gather(2, arms.unsqueeze(2)).squeeze(2)
        errors = found.sub_((rewards - self._shift) / self._scale).square_().sum(dim=1)
        count = places.stop - places.start
        self._errors.mul_(_NOISE_MEMORY**count).add_(torch.stack([errors, torch.full_like(errors, count)], dim=1))

    def _estimates_noise(self) -> bool:
        return self.settings.l2_by_noise

    def noise_variance(self) -> Tensor:
        """Of the rewards, as they are learnt, (networks, 1)."""
        return self._errors[:, :1] / self._errors[:, 1:]

    # --- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """t_s mini-batches; on CUDA the second training and all later ones are replays of one graph."""
        self._prepare()
        if self.device.type == "cuda" and self._run_steps == self._all_steps and int(self._steps):
            self._run_steps = captured(self._all_steps, [])
        self._run_steps()
        self._steps += self.settings.train_steps
        self._moments = None

    def _all_steps(self) -> None:
        for _ in range(self.settings.train_steps):
            self._step()

    def _prepare(self) -> None:
        """Everything that a training's steps read and that is not known before: rows, rates, N, the rewards' scale."""
        settings, buffer = self.settings, self.buffer
        done = int(self._steps)
        rows = self._batches.rows(buffer.count, settings.train_steps, settings.batch_size)
        self._rows.copy_(rows.transpose(0, 1))
        self._next.zero_()
        # On the device: a copy from the host would wait for all that is queued there.
        steps = torch.arange(done, done + settings.train_steps, dtype=torch.float64, device=self.device)
        corrections = [1 - beta ** (steps + 1) for beta in settings.betas]
        newest = 1 - (steps / (steps + 1)).clamp_(max=settings.average)
        self._rates.copy_(torch.stack([settings.lr / (1 + settings.lr_decay * steps), *corrections, newest], dim=1))
        self._n.fill_(settings.n_data(buffer.count))
        if settings.l2_by_noise:
            torch.mul(self.noise_variance(), settings.l2, out=self._l2)
        if settings.standardise:
            members = len(self.owners) // buffer.runs
            shift, scale = buffer.moments()
            self._shift.copy_(shift.repeat_interleave(members, dim=0))
            self._scale.copy_(scale.repeat_interleave(members, dim=0))
        if self.device.type == "cuda":
            # Drawn outside the graph, for all of its replays: a source inside costs two kernels a run and replay.
            noise = self._training_noise(settings.train_steps)
            if noise is not None:
                if self._drawn is None:
                    self._drawn = torch.empty_like(noise.transpose(0, 1), memory_format=torch.contiguous_format)
                self._drawn.copy_(noise.transpose(0, 1))

    def _step(self) -> None:
        rows = self._rows.index_select(0, self._next)[0]
        self._rate.copy_(self._rates.index_select(0, self._next))
        if self.device.type == "cuda":
            noise = None if self._drawn is None else self._drawn.index_select(0, self._next)[0]
        else:
            noise = self._training_noise()
        buffer = self.buffer
        by_run = rows.view(buffer.runs, -1)
        arms = buffer.arms.gather(1, by_run).view_as(rows)
        targets = buffer.rewards.gather(1, by_run).view(len(self.owners), -1)
        if self.settings.standardise:
            targets = targets.sub_(self._shift).div_(self._scale)
        self._perturb(noise)
        gradient = self._gradient(
            buffer.rows(rows), arms, targets, masks=self._masks(noise), importance=self._importance(rows)
        )
        if self.settings.clip is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((self.settings.clip / norm.clamp_(min=1e-12)).clamp_(max=1))
        self._update(gradient, noise)
        if self.settings.average:
            self.mean.lerp_(self.weights, self._rate[0, 3])
        self._next += 1

    def _adam(self, weights: Tensor, gradient: Tensor) -> Adam:
        rate: float | Tensor = self._rate[0, 0] if self.settings.lr_decay else self.settings.lr
        return Adam(weights, gradient, rate, self.settings.betas)

    # --- state --------------------------------------------------------------------------------------------------

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return self._optimizer.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Weights, the optimiser's state, the counts, and what the noise is estimated from."""
        averaged = {"mean": self.mean} if self.settings.average else {}
        counts = {"steps": self._steps, "n": self._n}
        errors = {"shift": self._shift, "scale": self._scale, "errors": self._errors}
        return {"weights": self.weights, **averaged, **counts, **errors, **self._optimizer_tensors()}

    def streams(self) -> dict[str, Streams]:
        """Exploration, mini-batches, training noise and posterior draws."""
        own = {"batches": self._batches, "training": self._noise, "posterior": self._posterior_noise}
        return super().streams() | own

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken."""
        super().restore(state)
        self._moments = None


class Badam(NetworkLearner):
    """The Gaussian that Adam's state already holds: precision N c + δ with c = v̂ᵖ, around θ or N c/(N c + δ) θ."""

    def _gaussian(self) -> tuple[Tensor, Tensor]:
        settings = self.settings
        moment = self._optimizer.second / max(1 - settings.betas[1] ** int(self._steps), torch.finfo().tiny)
        n, delta = settings.n_data(self.buffer.count), 1 / settings.prior_variance
        variance = precision(moment, n, delta, settings.power).reciprocal_()
        if settings.form == "map":
            return self.mean, variance
        return shrunk_mean(self.mean, moment, n, delta, settings.power), variance


class MCDropout(NetworkLearner):
    """Units are switched off in training and when choosing alike, a mask of its own for every row."""

    def _scores(self, contexts: Tensor) -> Tensor:
        drawn = self._posterior_noise.masks(self.settings.dropout, contexts.shape[1] * sum(self.settings.hidden))
        return outputs(self.network, self._layers, contexts, self._by_layer(drawn))


class _Perturbed(NetworkLearner):
    """Kinds whose gradient is taken at a draw of the weights, θ = μ + σ ε, the same for a whole mini-batch."""

    def _optimises_in_place(self) -> bool:
        return False

    def _training_noise(self, *lead: int) -> Tensor:
        return self._noise.normal(*lead, self.weights.shape[1])

    def _masks(self, noise: Tensor | None) -> list[Tensor] | None:
        return None

    def _estimates_noise(self) -> bool:
        return self.settings.noise_variance is None

    def _prepare(self) -> None:
        super()._prepare()
        if self.settings.noise_variance is None:
            torch.div(0.5, self.noise_variance(), out=self._half_precision)

    def _likelihood(self, gradient: Tensor) -> Tensor:
        """The squared error's gradient as that of the mean negative log-likelihood, error²/(2 noise variance)."""
        return gradient.mul_(self._half_precision)


class BayesByBackprop(_Perturbed):
    """q = N(μ, softplus(ρ)²); Adam on mean NLL + KL(q‖p)/N with the Gaussian KL in closed form."""

    def _start(self) -> None:
        inverse = math.log(math.expm1(self.settings.initial_std))
        self.rho = torch.full_like(self.weights, inverse)
        self._into_mean, self._into_rho = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self._optimizer = self._adam(self.weights, self._into_mean)
        self._beside = self._adam(self.rho, self._into_rho)

    def _perturb(self, noise: Tensor | None) -> None:
        assert noise is not None
        # softplus(ρ) and its slope, sigmoid(ρ), from one exponential.
        power = self.rho.exp()
        self._std = power.log1p()
        self._slope = power.div_(power + 1)
        torch.addcmul(self.weights, self._std, noise, out=self._at)

    def _update(self, gradient: Tensor, noise: Tensor | None) -> None:
        assert noise is not None
        gradient, prior = self._likelihood(gradient), 1 / self.settings.prior_variance
        # ∂KL/∂μ = λ μ and ∂KL/∂σ = λ σ − 1/σ; ∂σ/∂ρ = sigmoid(ρ).
        torch.add(gradient, self.weights * (prior / self._n), out=self._into_mean)
        by_std = (self._std * prior).sub_(self._std.reciprocal()).div_(self._n)
        torch.mul(by_std.addcmul_(gradient, noise), self._slope, out=self._into_rho)
        self._optimizer.step()
        self._beside.step()

    def _gaussian(self) -> tuple[Tensor, Tensor]:
        return self.mean, F.softplus(self.rho).square()

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        beside = {f"rho.{name}": tensor for name, tensor in self._beside.tensors().items()}
        return {**super()._optimizer_tensors(), "rho": self.rho, **beside}


class _Curved(_Perturbed):
    """Kinds with an optimiser of their own: momentum, and a curvature that starts from `initial_std`."""

    def _start(self) -> None:
        self.momentum = torch.zeros_like(self.weights)
        self.curvature = torch.zeros_like(self.weights)
        self._first_curvature = torch.zeros((), device=self.device)
        self._prior = 1 / self.settings.prior_variance
        self._begin()

    def _begin(self) -> None:
        """(1/σ₀² − λ)/N, for the N of the first training."""
        self._first_curvature.copy_((self.settings.initial_std**-2 - self._prior) / self._n)
        self.curvature.copy_(self._first_curvature)

    def _prepare(self) -> None:
        super()._prepare()
        if not int(self._steps):
            self._begin()

    def _precision(self) -> Tensor:
        """N h + λ, Vadam's v and IVON's h alike: IVON's weight decay is λ/N."""
        return (self.curvature * self._n).add_(self._prior)

    def _perturb(self, noise: Tensor | None) -> None:
        assert noise is not None
        self._root = self._precision().sqrt_()
        torch.addcdiv(self.weights, noise, self._root, out=self._at)

    def _gaussian(self) -> tuple[Tensor, Tensor]:
        return self.mean, self._precision().reciprocal_()

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {"momentum": self.momentum, "curvature": self.curvature, "first_curvature": self._first_curvature}


class Vadam(_Curved):
    """m ← β₁ m + (1−β₁)(ĝ + λμ/N), v ← β₂ v + (1−β₂) ĝ², μ ← μ − α m̂/(√v̂ + λ/N); q = N(μ, 1/(N v + λ))."""

    def _update(self, gradient: Tensor, noise: Tensor | None) -> None:
        gradient, (beta1, beta2), pull = self._likelihood(gradient), self.settings.betas, self._prior / self._n
        rate, first, second, _ = self._rate[0].unbind()
        self.curvature.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.momentum.mul_(beta1).add_(gradient.addcmul_(self.weights, pull), alpha=1 - beta1)
        below = (self.curvature / second).sqrt_().add_(pull)
        self.weights.addcdiv_(self.momentum * (-rate / first), below)


class IVON(_Curved):
    """f = (N h + λ) n ĝ, h ← β₂ h + (1−β₂) f + ½(1−β₂)²(h−f)²/(h+d), μ ← μ − α(h₀+d)(g/(1−β₁ᵗ) + d μ)/(h+d), d = λ/N."""

    def _update(self, gradient: Tensor, noise: Tensor | None) -> None:
        assert noise is not None
        gradient, (beta1, beta2), decay = self._likelihood(gradient), self.settings.betas, self._prior / self._n
        rate, first, _, _ = self._rate[0].unbind()
        estimate = self._root.mul_(noise).mul_(gradient)
        self.momentum.lerp_(gradient, 1 - beta1)
        gap = (self.curvature - estimate).square_().div_(self.curvature + decay)
        self.curvature.mul_(beta2).add_(estimate, alpha=1 - beta2).add_(gap, alpha=0.5 * (1 - beta2) ** 2)
        ahead = (self.momentum / first).addcmul_(self.weights, decay)
        scale = -rate * (self._first_curvature + decay)
        self.weights.addcdiv_(ahead.mul_(scale), self.curvature + decay)


class Bootstrap(NetworkLearner):
    """An ensemble a run: every member weighs an observation 0 or 2, each with probability ½; one is drawn a round."""

    def _owners(self) -> tuple[int, ...]:
        return tuple(
            stream_seed(seed, "member", number) for seed in self.seeds for number in range(self.settings.members)
        )

    def _start(self) -> None:
        super()._start()
        room = self.buffer.contexts.shape[1]
        self._counts = torch.zeros(len(self.owners), room, dtype=torch.uint8, device=self.device)
        self._bootstrap = Streams(self.owners, "bootstrap", self.device)

    def observe(self, places: slice) -> None:
        """Draw the members' weights of the new observations."""
        super().observe(places)
        self._counts[:, places] = 2 * self._bootstrap.rows(2, places.stop - places.start).to(torch.uint8)

    def _importance(self, rows: Tensor) -> Tensor:
        return self._counts.gather(1, rows).float()

    def _scores(self, contexts: Tensor) -> Tensor:
        members, (runs, k, _) = self.settings.members, contexts.shape
        every = outputs(self.network, self._layers, contexts.repeat_interleave(members, dim=0))
        chosen = self._posterior_noise.rows(members, k)
        by_run = every.view(runs, members, k, self.n_arms)
        return by_run.gather(1, chosen[:, None, :, None].expand(-1, 1, -1, self.n_arms)).squeeze(1)

    def tensors(self) -> dict[str, Tensor]:
        """The members' weights of the observations too."""
        return {**super().tensors(), "counts": self._counts}

    def streams(self) -> dict[str, Streams]:
        """The bootstrap's own too."""
        return super().streams() | {"bootstrap": self._bootstrap}


def initial_weights(network: Network, seeds: Sequence[int], span: float | None, device: torch.device) -> Tensor:
    """Flat weights (n, weights): U[−span, span] with biases of 0, or torch's own U(±1/√fan-in) for None."""
    params = initial(network, seeds)
    if span is not None:
        for name, tensor in params.items():
            tensor.mul_(span * math.sqrt(tensor.shape[-1]) if name.endswith("weight") else 0.0)
    return flatten(params).to(device)
