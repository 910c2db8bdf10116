"""The agents of Table 1: one line each, the classes of their learners and settings, and the values that they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bayesadam.bandits.settings import AgentSettings, HybridSettings
from bayesadam.errors import SettingError
from experiments.facts import FACTS
from experiments.networks import (
    BadamSettings,
    Buffer,
    EachRun,
    GreedySettings,
    NetworkLearner,
    NetworkSettings,
    Uniform,
    VariationalSettings,
    adam,
    badam,
    variational,
)
from experiments.rules import BayesByBackprop, Vadam
from experiments.showdown import ShowdownSettings, local_bayes_by_backprop, rmsprop


class Entry(NamedTuple):
    """An agent: its learner, and the class of its settings."""

    learner: Callable[[Any, Buffer, int, Sequence[int]], Uniform]
    settings: type[AgentSettings]


_BADAM = Entry(partial(NetworkLearner, badam), BadamSettings)
AGENTS: Mapping[str, Entry] = {
    "hybrid": Entry(EachRun, HybridSettings),
    "linear": Entry(EachRun, HybridSettings),
    "greedy": Entry(partial(NetworkLearner, adam), GreedySettings),
    "badam": _BADAM,
    "badam-map": _BADAM,
    "mc-dropout": Entry(partial(NetworkLearner, adam, drops=True), GreedySettings),
    "bbb": Entry(partial(NetworkLearner, variational(BayesByBackprop)), VariationalSettings),
    "vadam": Entry(partial(NetworkLearner, variational(Vadam)), VariationalSettings),
    "uniform": Entry(Uniform, AgentSettings),
    "mc-dropout-showdown": Entry(partial(NetworkLearner, rmsprop, drops=True), GreedySettings),
    "bbb-showdown": Entry(partial(NetworkLearner, local_bayes_by_backprop), ShowdownSettings),
    "greedy-showdown": Entry(partial(NetworkLearner, rmsprop), GreedySettings),
}


def agent_settings(agent: str, settings: str | AgentSettings = "tuned", **changes: Any) -> AgentSettings:
    """The settings of an agent, the paper's, the tuned ones or your own, with changes to single ones.

    >>> agent_settings("badam", "paper").lr
    0.1
    >>> agent_settings("badam", hidden=(50,)).hidden
    (50,)
    """
    if agent not in AGENTS:
        raise SettingError(f"agent must be one of {', '.join(AGENTS)}, got {agent!r}")
    entry, names = AGENTS[agent], AGENTS[agent].settings.names()
    if unknown := sorted(set(changes) - set(names)):
        raise SettingError(f"{agent} has no setting {', '.join(unknown)}: choose from {', '.join(sorted(names))}")
    if isinstance(settings, AgentSettings):
        if type(settings) is not entry.settings:
            raise SettingError(f"{agent} takes {entry.settings.__name__}, not {type(settings).__name__}")
        return replace(settings, **changes)
    if settings not in FACTS["agents"]:
        raise SettingError(f"settings must be one of {tuple(FACTS['agents'])} or an AgentSettings, got {settings!r}")
    known = FACTS["agents"][settings]
    # Those that agents with a network per run share, each as far as it has the setting.
    shared = known["shared"] if issubclass(entry.settings, NetworkSettings) else {}
    values = {**{name: value for name, value in shared.items() if name in names}, **known.get(agent, {})}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return entry.settings(**{**values, **changes})
