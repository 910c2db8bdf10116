"""Contextual bandits: an agent that learns from delayed rewards, its log, and off-policy estimates."""

from bayesadam.bandits.agent import AGENTS, Agent, make_agent, replay
from bayesadam.bandits.log import Decision, Log, read_log
from bayesadam.bandits.off_policy import Comparison, ConfidenceSequence, Estimate, Estimates, compare, evaluate
from bayesadam.bandits.settings import AgentSettings, HybridSettings

__all__ = [
    "AGENTS",
    "Agent",
    "AgentSettings",
    "Comparison",
    "ConfidenceSequence",
    "Decision",
    "Estimate",
    "Estimates",
    "HybridSettings",
    "Log",
    "compare",
    "evaluate",
    "make_agent",
    "read_log",
    "replay",
]
