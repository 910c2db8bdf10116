"""The agents of Table 1: one line each, the classes of their learners and settings, and the values that they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bayesadam.bandits.settings import AgentSettings, HybridSettings
from bayesadam.errors import SettingError
from experiments import networks
from experiments.facts import FACTS
from experiments.rules import Adam, Badam, BayesByBackprop, Rule, Vadam
from experiments.showdown import RMSprop, ShowdownSettings, local_bayes_by_backprop


class Entry(NamedTuple):
    """An agent: its learner, and the class of its settings."""

    learner: Callable[[Any, networks.Buffer, int, Sequence[int]], networks.Uniform]
    settings: type[AgentSettings]


def _network(rule: networks.MakeRule | type[Rule], settings: type[AgentSettings], *, drops: bool = False) -> Entry:
    made = networks.by(rule) if isinstance(rule, type) else rule
    return Entry(partial(networks.NetworkLearner, made, drops=drops), settings)


AGENTS: Mapping[str, Entry] = {
    **dict.fromkeys(("hybrid", "linear"), Entry(networks.EachRun, HybridSettings)),
    "greedy": _network(Adam, networks.GreedySettings),
    **dict.fromkeys(("badam", "badam-map"), _network(Badam, networks.BadamSettings)),
    "mc-dropout": _network(Adam, networks.GreedySettings, drops=True),
    "bbb": _network(BayesByBackprop, networks.VariationalSettings),
    "vadam": _network(Vadam, networks.VariationalSettings),
    "uniform": Entry(networks.Uniform, AgentSettings),
    "mc-dropout-showdown": _network(RMSprop, networks.GreedySettings, drops=True),
    "bbb-showdown": _network(local_bayes_by_backprop, ShowdownSettings),
    "greedy-showdown": _network(RMSprop, networks.GreedySettings),
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
    shared = known["shared"] if issubclass(entry.settings, networks.NetworkSettings) else {}
    values = {**{name: value for name, value in shared.items() if name in names}, **known.get(agent, {})}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return entry.settings(**{**values, **changes})
