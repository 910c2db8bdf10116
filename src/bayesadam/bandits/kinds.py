"""Which learner each kind of agent is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bayesadam.bandits.agents import AgentSettings
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.learners import (
    IVON,
    Badam,
    BayesByBackprop,
    Bootstrap,
    Learner,
    MCDropout,
    NetworkLearner,
    Uniform,
    Vadam,
)
from bayesadam.bandits.linear import Linear, NeuralLinear

_LEARNERS: Mapping[str, type[Learner]] = {
    "badam": Badam,
    "mc-dropout": MCDropout,
    "bbb": BayesByBackprop,
    "vadam": Vadam,
    "ivon": IVON,
    "greedy": NetworkLearner,
    "uniform": Uniform,
    "neural-linear": NeuralLinear,
    "linear": Linear,
    "bootstrap": Bootstrap,
}


def learner_of(settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> Learner:
    """The learner that the settings ask for."""
    return _LEARNERS[settings.kind](settings, buffer, n_arms, seeds)
