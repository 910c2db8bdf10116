"""Other packages' bandit agents behind one interface: Vowpal Wabbit, mabwiser, calvera; see `strangers.py`.

All but Vowpal Wabbit, which adds its own, are given a constant feature beside the context, and all rewards divided by
the problem's largest. mabwiser cannot choose before it has seen a reward: it first pulls every arm three times in turn.
calvera trains every 20 rounds: after every reward, as in its own experiments, it makes fewer than 20 decisions a
second.
"""

from __future__ import annotations

import importlib
import logging
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from experiments.problems import BanditProblem, Numbers, Rounds

# What nearly all rewards of a problem lie between, by its name: rivals are told.
RANGES: dict[str, tuple[float, float]] = {}
FIRST_PULLS, TRAIN_EVERY = 3, 20
HIDDEN, GRADIENT_CLIP = 128, 20.0


class Rival(Protocol):
    """An agent of another package. What it is shown is a context that `prepare` put into the package's own format."""

    def prepare(self, context: Numbers) -> Any:
        """A context, (features,), in the package's own format."""

    def act(self, context: Any) -> int:
        """The arm it chooses."""

    def learn(self, context: Any, arm: int, reward: float) -> None:
        """Show it the reward of the arm it chose."""


# (problem, rounds, seed) → the rival.
Make = Callable[[BanditProblem, int, int], Rival]


@dataclass(frozen=True)
class Entrant:
    """A rival: the module that it needs, and its settings by name, the default first."""

    module: str
    settings: Mapping[str, Make]


def play(chosen: BanditProblem, rounds: Rounds, make: Make, seed: int) -> Numbers:
    """The arms that a rival chooses in one run."""
    rival, pays, arms = make(chosen, len(rounds.contexts), seed), rounds.rewards.tolist(), []
    for row, context in enumerate(rounds.contexts):
        shown = rival.prepare(context)
        arms.append(rival.act(shown))
        rival.learn(shown, arms[-1], pays[row][arms[-1]])
    return np.array(arms)


def scaled(chosen: BanditProblem, reward: float) -> float:
    """A reward in units of the problem's largest."""
    return reward / max(map(abs, RANGES.get(chosen.name, (0.0, 1.0))))


def with_constant(context: Numbers) -> Numbers:
    """A context as one row, (1, features + 1), that ends with a 1."""
    return np.append(context, np.ones(1, context.dtype))[None]


# --- Vowpal Wabbit --------------------------------------------------------------------------------------------------


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


# --- calvera --------------------------------------------------------------------------------------------------------


class Calvera:
    """`"NeuralUCBBandit"` or `"NeuralTSBandit"` of calvera: two hidden layers of 128, a block of inputs per arm."""

    def __init__(self, chosen: BanditProblem, rounds: int, seed: int, *, bandit: str) -> None:
        bandits, utils = (importlib.import_module(f"calvera.{name}") for name in ("bandits", "utils"))
        self._lightning = importlib.import_module("lightning")
        for talkative in ("lightning.pytorch", "calvera"):
            logging.getLogger(talkative).setLevel(logging.ERROR)
        torch.manual_seed(seed)
        inputs = (chosen.n_features + 1) * chosen.n_arms
        network = nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self._agent = getattr(bandits, bandit)(n_features=inputs, network=network)
        self._blocks = utils.MultiClassContextualizer(chosen.n_arms)
        self._chosen, self._seen = chosen, 0

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
            max_epochs=1,
            gradient_clip_val=GRADIENT_CLIP,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )


# --- all of them ----------------------------------------------------------------------------------------------------


def _vowpal_wabbit(*options: str) -> Entrant:
    """Options, and the costs after a comma."""
    pairs = [one.partition(", costs ") for one in options]
    makes = {f"{o}, costs {costs}": partial(VowpalWabbit, options=o, costs=costs) for o, _, costs in pairs}
    return Entrant("vowpalwabbit", makes)


def _mabwiser(policy: str) -> Entrant:
    makes = {
        f"alpha {alpha:g}, l2_lambda 1": partial(Mabwiser, policy=policy, alpha=alpha, l2=1.0)
        for alpha in (1.0, 0.3, 0.1, 0.03)
    }
    return Entrant("mabwiser.mab", makes)


RIVALS: dict[str, Entrant] = {
    "Vowpal Wabbit": _vowpal_wabbit(
        "--epsilon 0.05 -l 0.5, costs negated",
        "--epsilon 0.02 -l 0.5, costs shifted",
        "--epsilon 0.02 -l 0.05, costs shifted",
        "--squarecb -l 0.5, costs shifted",
        "--squarecb --gamma_scale 1000 -l 0.5, costs shifted",
        "--squarecb --gamma_scale 1000 -l 0.05, costs shifted",
        "--regcbopt --mellowness 0.001 -l 0.5, costs shifted",
        "--bag 5 -l 0.5, costs shifted",
        "--cover 5 --psi 0.01 --nounif -l 0.5, costs shifted",
    ),
    "mabwiser LinTS": _mabwiser("LinTS"),
    "mabwiser LinUCB": _mabwiser("LinUCB"),
    "calvera NeuralUCB": Entrant("calvera.bandits", {"defaults": partial(Calvera, bandit="NeuralUCBBandit")}),
    "calvera NeuralTS": Entrant("calvera.bandits", {"defaults": partial(Calvera, bandit="NeuralTSBandit")}),
}
