"""The second moments of a saved posterior: v̂ itself, free of bias, in the weights' coordinates or in those of its bases."""

import torch

from bayesadam.readers.reader import Group, State, StateReader
from bayesadam.readers.rotated import LEFT_KEY, RIGHT_KEY, Factors, RotatedReader, require_shape

# Names of their own, so that no optimiser's reader takes them for what it stores.
MOMENT_KEY, ROTATED_MOMENT_KEY = "second_moment", "rotated_second_moment"
PLAIN_MARK, ROTATED_MARK = "saved_posterior", "saved_rotated_posterior"
BETA_KEY = "beta2"


def _factors(state: State, group: Group, shape: torch.Size) -> Factors:
    moment = state[ROTATED_MOMENT_KEY if ROTATED_MOMENT_KEY in state else MOMENT_KEY]
    require_shape(moment, moment.shape == shape, shape)
    if len(shape) < 2:
        return moment, [state.get(RIGHT_KEY)] * len(shape)
    return moment.flatten(1), [state.get(LEFT_KEY), state.get(RIGHT_KEY)]


PUBLISHED_READERS = (
    StateReader(
        "published",
        (),
        key=MOMENT_KEY,
        decay=(BETA_KEY, None),
        mark=PLAIN_MARK,
        note="The second moments of a saved posterior.",
    ),
    RotatedReader(
        "published-kronecker",
        (),
        key=f"{MOMENT_KEY} or {ROTATED_MOMENT_KEY}",
        decay=(BETA_KEY, None),
        mark=ROTATED_MARK,
        factors=_factors,
        bases=(LEFT_KEY, RIGHT_KEY),
        note="The second moments of a saved Kronecker-factored posterior, of which structure='diagonal' has the diagonal.",
    ),
)
