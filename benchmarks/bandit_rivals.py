"""Other packages' bandit agents behind one interface, each with its default and a few settings more: see `bandits.py`.

All but Vowpal Wabbit, which adds its own, are given a constant feature beside the context. All are given rewards
divided by the problem's largest.

mabwiser cannot choose before it has seen a reward: it first pulls every arm three times in turn, as our agents do.
calvera trains every 20 rounds, as ours do: after every reward, as in its own experiments, it makes fewer than 20
decisions a second. ctx-bandits-mcmc has no neural agents in its wheel, and no defaults: "default" are the numbers of
its repository's experiments with linear bandits, on contexts of length 1, which keep its steps from diverging. Each
of its decisions goes over all rounds so far 25 times, so that it slows down as it plays: it plays the first 500
rounds. These two packages play five runs, for the time they take.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bayesadam.bandits import BanditProblem
from bayesadam.bandits.problems import EDIBLE, POISONED, Numbers

# What rewards lie between; nearly all of them on financial.
RANGES = {"mushroom": (POISONED, EDIBLE), "jester": (-10.0, 10.0), "financial": (-5.0, 5.0)}
FIRST_PULLS, TRAIN_EVERY, TRAIN_STEPS = 3, 20, 50
HIDDEN, GRADIENT_CLIP = 128, 20.0
FEW_RUNS = 5


class Diverged(ArithmeticError):
    """A rival's weights are no longer numbers, and its choices mean nothing."""


class Rival(Protocol):
    """An agent of another package. What it is shown is a context that `prepare` put into the package's own format."""

    def prepare(self, context: Numbers) -> Any:
        """A context, (features,), in the package's own format."""

    def act(self, context: Any) -> int:
        """The arm it chooses."""

    def learn(self, context: Any, arm: int, reward: float) -> None:
        """Show it the reward of the arm it chose."""


@dataclass(frozen=True)
class Setting:
    """One setting of a rival.

    Attributes:
        name: what it sets.
        make: (problem, rounds, seed) → the rival.
    """

    name: str
    make: Callable[[BanditProblem, int, int], Rival]


@dataclass(frozen=True)
class Entrant:
    """A rival and what it may play with.

    Attributes:
        package: its name on PyPI.
        load: imports it.
        settings: those that are screened; the first is its default.
        finalists: how many of the best go on to play all runs.
        most_rounds: how many rounds it plays at most; None for all.
        most_runs: in how many runs; None for all.
    """

    package: str
    load: Callable[[], ModuleType]
    settings: tuple[Setting, ...]
    finalists: int = 1
    most_rounds: int | None = None
    most_runs: int | None = None


def scaled(chosen: BanditProblem, reward: float) -> float:
    """A reward in units of the problem's largest."""
    return reward / max(map(abs, RANGES.get(chosen.name, (0.0, 1.0))))


def with_constant(context: Numbers) -> Numbers:
    """A context as one row, (1, features + 1), that ends with a 1."""
    return np.append(context, np.ones(1, context.dtype))[None]


# --- Vowpal Wabbit --------------------------------------------------------------------------------------------------

EXPLORATIONS = (
    "--epsilon 0.05",
    "--epsilon 0",
    "--epsilon 0.02",
    "--bag 5",
    "--cover 5",
    "--cover 5 --psi 0.01 --nounif",
    "--squarecb",
    "--squarecb --gamma_scale 1000",
    "--regcbopt --mellowness 0.001",
    "--softmax --lambda 10",
    "--first 70",
)
RATES = (0.5, 0.05, 2.0)
COSTS = ("negated", "shifted")
PRODUCTS = "-q ::"


class VowpalWabbit:
    """`--cb_explore`. Costs are −reward over the largest ("negated"), or mapped onto [0, 1] ("shifted")."""

    def __init__(self, chosen: BanditProblem, rounds: int, seed: int, *, options: str, costs: str) -> None:
        self._peer = importlib.import_module("vowpalwabbit")
        self._workspace = self._peer.Workspace(
            f"--cb_explore {chosen.n_arms} {options} -b 20 --quiet --random_seed {seed % 2**31}"
        )
        self._chosen, self._costs, self._random, self._share = chosen, costs, random.Random(seed), 1.0

    def prepare(self, context: Numbers) -> Any:
        """A parsed example. With bare numbers as names the weights of one arm would be those of another's."""
        text = "|s " + " ".join(f"f{number}:{value:.6g}" for number, value in enumerate(context.tolist()) if value)
        return self._workspace.parse(text, self._peer.LabelType.CONTEXTUAL_BANDIT)

    def act(self, context: Any) -> int:
        """An arm drawn from the probabilities it gives."""
        shares = self._workspace.predict(context)
        (arm,) = self._random.choices(range(len(shares)), shares)
        self._share = shares[arm]
        return arm

    def learn(self, context: Any, arm: int, reward: float) -> None:
        """Label the example with the cost and the probability of the arm, and learn from it."""
        context.set_label_string(f"{arm + 1}:{self._cost(reward)}:{self._share}")
        # An example set up without a label is for testing: until this is undone the peer learns nothing from it.
        context.unsetup_example()
        self._workspace.learn(context)
        self._workspace.finish_example(context)

    def _cost(self, reward: float) -> float:
        if self._costs == "negated":
            return -scaled(self._chosen, reward)
        low, high = RANGES.get(self._chosen.name, (0.0, 1.0))
        return (high - reward) / (high - low)


def vowpal_wabbit_settings() -> tuple[Setting, ...]:
    found = []
    for products, exploration, rate, costs in itertools.product(("", PRODUCTS), EXPLORATIONS, RATES, COSTS):
        # Ten times slower than the others on covertype, and far from the best wherever it was tried.
        if not (products and "--cover" in exploration):
            options = f"{exploration} -l {rate:g} {products}".strip()
            found.append(Setting(f"{options}, costs {costs}", partial(VowpalWabbit, options=options, costs=costs)))
    return tuple(found)


# --- mabwiser -------------------------------------------------------------------------------------------------------


class Mabwiser:
    """A linear policy of mabwiser, `"LinTS"` or `"LinUCB"`."""

    def __init__(self, chosen: BanditProblem, rounds: int, seed: int, *, policy: str, alpha: float, l2: float) -> None:
        peer = importlib.import_module("mabwiser.mab")
        learning = getattr(peer.LearningPolicy, policy)(alpha=alpha, l2_lambda=l2)
        self._agent = peer.MAB(list(range(chosen.n_arms)), learning, seed=seed % 2**31)
        self._chosen, self._seen = chosen, 0

    def prepare(self, context: Numbers) -> Numbers:
        """One row of float64."""
        return with_constant(context).astype(np.float64)

    def act(self, context: Numbers) -> int:
        """Every arm in turn at first."""
        if self._seen < FIRST_PULLS * self._chosen.n_arms:
            return self._seen % self._chosen.n_arms
        return int(self._agent.predict(context))

    def learn(self, context: Numbers, arm: int, reward: float) -> None:
        """The first reward begins the fit, the others continue it."""
        fit = self._agent.partial_fit if self._seen else self._agent.fit
        fit([arm], [scaled(self._chosen, reward)], context)
        self._seen += 1


def mabwiser_settings(policy: str) -> tuple[Setting, ...]:
    pairs = [(alpha, 1.0) for alpha in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)]
    pairs += [(0.3, 10.0), (0.1, 10.0), (0.03, 10.0), (0.1, 100.0)]
    return tuple(
        Setting(f"alpha {alpha:g}, l2_lambda {l2:g}", partial(Mabwiser, policy=policy, alpha=alpha, l2=l2))
        for alpha, l2 in pairs
    )


# --- calvera --------------------------------------------------------------------------------------------------------


class Calvera:
    """`"NeuralUCBBandit"` or `"NeuralTSBandit"` of calvera: two hidden layers of 128, a block of inputs per arm."""

    def __init__(
        self, chosen: BanditProblem, rounds: int, seed: int, *, bandit: str, steps: int | None = None, **values: Any
    ) -> None:
        bandits, utils = (importlib.import_module(f"calvera.{name}") for name in ("bandits", "utils"))
        self._lightning = importlib.import_module("lightning")
        for talkative in ("lightning.pytorch", "calvera"):
            logging.getLogger(talkative).setLevel(logging.ERROR)
        torch.manual_seed(seed)
        inputs = (chosen.n_features + 1) * chosen.n_arms
        network = nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self._agent = getattr(bandits, bandit)(n_features=inputs, network=network, **values)
        self._blocks = utils.MultiClassContextualizer(chosen.n_arms)
        self._chosen, self._steps, self._seen = chosen, steps, 0

    def prepare(self, context: Numbers) -> Tensor:
        """The inputs of every arm, (1, arms, arms × features)."""
        found: Tensor = self._blocks(torch.from_numpy(with_constant(context)))
        return found

    def act(self, context: Tensor) -> int:
        """The arm of the largest score."""
        return int(self._agent(context)[0].argmax())

    def learn(self, context: Tensor, arm: int, reward: float) -> None:
        """Keep the reward; every few rounds, train on all that was kept, where the bandit asks for it."""
        self._agent.record_feedback(context[:, arm : arm + 1], torch.tensor([[scaled(self._chosen, reward)]]))
        self._seen += 1
        if self._seen % TRAIN_EVERY == 0 and self._agent.should_train_network:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._trainer().fit(self._agent)

    def _trainer(self) -> Any:
        return self._lightning.Trainer(
            max_epochs=1 if self._steps is None else -1,
            max_steps=-1 if self._steps is None else self._steps,
            gradient_clip_val=GRADIENT_CLIP,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )


def calvera_settings(bandit: str) -> tuple[Setting, ...]:
    """Its defaults and the setting of its experiments on statlog and covertype, one epoch each; two with more steps."""
    small = {"weight_decay": 1e-5, "min_samples_required_for_training": TRAIN_EVERY}
    found = [
        Setting("defaults", partial(Calvera, bandit=bandit)),
        Setting(
            "exploration_rate 0.1, learning_rate 0.0001, weight_decay 1e-05",
            partial(Calvera, bandit=bandit, exploration_rate=0.1, learning_rate=1e-4, **small),
        ),
    ]
    for rate in (0.1, 0.01):
        made = partial(Calvera, bandit=bandit, steps=TRAIN_STEPS, exploration_rate=rate, learning_rate=1e-3, **small)
        found.append(Setting(f"exploration_rate {rate:g}, weight_decay 1e-05, {TRAIN_STEPS} steps", made))
    return tuple(found)


# --- ctx-bandits-mcmc -----------------------------------------------------------------------------------------------

LINEAR_EXPERIMENTS = {"std_prior": 0.01, "eta": 1.0, "step_size": 0.1, "K": 25, "K_not_updated": 1}
FEEL_GOOD = {"lambda": 0.1, "b": 1.0}


@cache
def mcmc_module() -> ModuleType:
    """Its samplers, from their file: the package is called `src`, and imports wandb for what is not needed here."""
    path = importlib.metadata.distribution("ctx-bandits-mcmc").locate_file("src/MCMC.py")
    spec = importlib.util.spec_from_file_location("ctx_bandits_mcmc", str(path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Langevin:
    """Linear Thompson sampling by Langevin dynamics, a class of ctx-bandits-mcmc, a block of weights per arm."""

    def __init__(self, chosen: BanditProblem, rounds: int, seed: int, *, sampler: str, **values: float) -> None:
        torch.manual_seed(seed)
        width = (chosen.n_features + 1) * chosen.n_arms
        info = {"d": width, "nb_arms": chosen.n_arms, "T": rounds, "phi": self._blocks, "phi_a": self._block}
        self._agent = getattr(mcmc_module(), sampler)({**info, **LINEAR_EXPERIMENTS, **FEEL_GOOD, **values})
        self._chosen, self._arms = chosen, torch.arange(chosen.n_arms)

    @staticmethod
    def _blocks(context: Tensor, n_arms: int) -> Tensor:
        return torch.block_diag(*[context] * n_arms)

    @staticmethod
    def _block(context: Tensor, arm: int, n_arms: int) -> Tensor:
        return torch.block_diag(*[context] * n_arms)[arm]

    def prepare(self, context: Numbers) -> Tensor:
        """One row of length 1."""
        return nn.functional.normalize(torch.from_numpy(with_constant(context)))

    def act(self, context: Tensor) -> int:
        """The arm of the largest reward under a draw of the weights."""
        arm = int(self._agent.choose_arm(context, self._arms))
        if not self._agent.theta.isfinite().all():
            raise Diverged("its weights are not finite")
        return arm

    def learn(self, context: Tensor, arm: int, reward: float) -> None:
        """Add the round to those that the next draw is of."""
        self._agent.update(arm, scaled(self._chosen, reward), context, self._arms)


def langevin_settings(*tried: tuple[str, float, float]) -> tuple[Setting, ...]:
    """Of samplers, step sizes and temperatures (`beta_inv`)."""
    return tuple(
        Setting(
            f"{sampler}, step_size {step:g}, beta_inv {heat:g}",
            partial(Langevin, sampler=sampler, step_size=step, beta_inv=heat),
        )
        for sampler, step, heat in tried
    )


def _module(name: str) -> Callable[[], ModuleType]:
    return partial(importlib.import_module, name)


def _langevin(settings: Sequence[Setting]) -> Entrant:
    return Entrant("ctx-bandits-mcmc", mcmc_module, tuple(settings), most_rounds=500, most_runs=FEW_RUNS)


def _calvera(bandit: str) -> Entrant:
    return Entrant("calvera", _module("calvera.bandits"), calvera_settings(bandit), most_runs=FEW_RUNS)


RIVALS: dict[str, Entrant] = {
    "Vowpal Wabbit": Entrant("vowpalwabbit", _module("vowpalwabbit"), vowpal_wabbit_settings(), finalists=4),
    "mabwiser LinTS": Entrant("mabwiser", _module("mabwiser.mab"), mabwiser_settings("LinTS")),
    "mabwiser LinUCB": Entrant("mabwiser", _module("mabwiser.mab"), mabwiser_settings("LinUCB")),
    "calvera NeuralUCB": _calvera("NeuralUCBBandit"),
    "calvera NeuralTS": _calvera("NeuralTSBandit"),
    "LMC-TS": _langevin(
        langevin_settings(("LMCTS", 0.1, 1e-3), ("LMCTS", 0.5, 1e-5), ("LMCTS", 0.5, 1e-7), ("PLMCTS", 0.5, 1e-6))
    ),
    "FG-LMC-TS": _langevin(
        langevin_settings(
            ("FGLMCTS", 0.1, 1e-3), ("FGLMCTS", 0.5, 1e-5), ("FGLMCTS", 0.5, 1e-7), ("SFGLMCTS", 0.5, 1e-6)
        )
    ),
}
