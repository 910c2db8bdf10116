"""A bandit whose rewards come later, saved and loaded half way: `python examples/bandit_delayed.py`.

Which of four offers to show a visitor. Whether it was bought is known ten visitors later, for some never; half way
through, the process is replaced by another, which goes on from a file.
"""

import tempfile
from collections import deque
from pathlib import Path

import numpy as np

import bayesadam as ba

VISITORS, FEATURES, OFFERS, DELAY = 400, 6, 4, 10
rng = np.random.default_rng(0)
taste = rng.normal(size=(FEATURES, OFFERS))
visitors = rng.normal(size=(VISITORS, FEATURES))
buys = rng.random((VISITORS, OFFERS)) < 1 / (1 + np.exp(-2 * visitors @ taste))
reports = rng.random(VISITORS) < 0.9  # one visitor in ten never comes back to tell

agent = ba.bandits.make_agent(n_features=FEATURES, n_arms=OFFERS, seed=0)
waiting: deque[tuple[int, int, int]] = deque()
earned = np.zeros(VISITORS)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "agent.safetensors"
    for visitor, context in enumerate(visitors):
        if visitor == VISITORS // 2:
            agent.save(file)
            agent = ba.bandits.Agent.load(file)
            print(f"loaded at visitor {visitor}: {len(agent.pending)} decisions without a reward")
        decision = agent.decide(context, draws=20)
        earned[visitor] = buys[visitor, decision.arm]
        waiting.append((visitor, decision.id, decision.arm))
        if len(waiting) > DELAY:
            past, identifier, arm = waiting.popleft()
            if reports[past]:
                agent.reward(identifier, float(buys[past, arm]))
            else:
                agent.forget(identifier)

best = (1 / (1 + np.exp(-2 * visitors @ taste))).max(axis=1).mean()
print(f"bought: {earned[:100].mean():.2f} of the first hundred, {earned[-200:].mean():.2f} of the last 200")
print(f"by chance {buys.mean():.2f}; by one who knows every taste {best:.2f}")
print(f"the last decision: offer {decision.arm}, chosen with probability {decision.probability:.2f}")
