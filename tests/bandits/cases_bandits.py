"""Small agents, what they are told, and how two of them are compared."""

import numpy as np

from bayesadam.bandits import Agent, make_agent
from floats import assert_close

SMALL = {"hidden": (8,), "batch_size": 16, "train_every": 5, "train_steps": 4}
ROWS = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
ARMS = np.random.default_rng(1).integers(3, size=2000)
PAID = np.abs(ROWS[np.arange(2000), ARMS]) + 0.1 * np.random.default_rng(2).normal(size=2000)


def new(name: str = "hybrid", n_arms: int = 3, **changes: object) -> Agent:
    return make_agent(name, 3, n_arms, **{"seed": 7, **(SMALL if name == "hybrid" else {}), **changes})


def feed(agent: Agent, first: int, last: int) -> None:
    for at in range(first, last):
        agent.update(ROWS[at], int(ARMS[at]), float(PAID[at]))


def state_of(agent: Agent) -> dict[str, np.ndarray]:
    state = agent._learner.state() | {name: tensor.numpy() for name, tensor in agent._seen.state().items()}
    return {name: array.copy() for name, array in state.items()}


def learnt(agent: Agent) -> dict[str, np.ndarray]:
    """All but the random numbers of choices."""
    return {name: a for name, a in state_of(agent).items() if name not in ("stream.hybrid", "stream.explore")}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def assert_alike(one: Agent, other: Agent, rtol: float = 1e-6) -> None:
    """In what they have learnt."""
    assert_close(learnt(one), learnt(other), rtol=rtol, atol=1e-9)
