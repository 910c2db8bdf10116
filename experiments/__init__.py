"""The paper's experiments, run again: `python -m experiments figure1 | figure2 | table1 | cost | report`."""

from experiments.problems import classification_problem, reward_problem
from experiments.simulation import simulate

__all__ = ["classification_problem", "reward_problem", "simulate"]
