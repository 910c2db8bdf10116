"""Contextual bandits: problems, agents, simulation, logs, and off-policy evaluation."""

from bayesadam.bandits.agent import Agent, Decision, make_agent, replay
from bayesadam.bandits.agents import AGENTS, PAPER_AGENTS, SETTINGS, agent_settings
from bayesadam.bandits.learner import AgentSettings
from bayesadam.bandits.log import Log, read_log
from bayesadam.bandits.off_policy import Comparison, ConfidenceSequence, Estimate, Estimates, compare, evaluate
from bayesadam.bandits.prior import Prior, fit_prior
from bayesadam.bandits.problems import (
    PROBLEMS,
    BanditProblem,
    Rounds,
    classification_problem,
    problem,
    reward_problem,
    wheel,
)
from bayesadam.bandits.simulation import Simulation, simulate

__all__ = [
    "AGENTS",
    "PAPER_AGENTS",
    "PROBLEMS",
    "SETTINGS",
    "Agent",
    "AgentSettings",
    "BanditProblem",
    "Comparison",
    "ConfidenceSequence",
    "Decision",
    "Estimate",
    "Estimates",
    "Log",
    "Prior",
    "Rounds",
    "Simulation",
    "agent_settings",
    "classification_problem",
    "compare",
    "evaluate",
    "fit_prior",
    "make_agent",
    "problem",
    "read_log",
    "replay",
    "reward_problem",
    "simulate",
    "wheel",
]
