"""The settings under which a posterior tells familiar inputs from others."""

from dataclasses import replace

from bayesadam._shards import whole
from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import Structure

# δ as a share of the mean curvature, of each coordinate by itself and of rotated ones. Along its own axes a curvature has
# more very small eigenvalues, which a large δ would hide.
EPSILON, ROTATED_EPSILON = 1e-3, 1e-4
# Where nothing says how many examples were behind one gradient.
_USUAL_BATCH = 100


def novelty_share(structure: Structure) -> float:
    """ε of a structure."""
    return ROTATED_EPSILON if structure.bases else EPSILON


def novelty_settings(structure: Structure, settings: Settings, n_weights: int) -> Settings:
    """p = 1, s = 1 and δ = ε mean(w c), the mean over all weights, w = N B; δ = ε mean(w c/R) R under a prior of shape R.

    Neither calibration nor the units of the loss change what follows from them: v̂ N B is the curvature of the whole
    training loss, and δ goes with it. An unknown B is taken as 100; a wrong one scales all variances alike.
    """
    batch = settings.batch_size or _USUAL_BATCH
    base = replace(settings, power=1.0, scale=1.0, batch_size=batch, form="map")
    total = sum(float(whole(c.sum(dtype=c.dtype))) for c in structure.curvatures(1.0, base.prior_shape))
    delta = novelty_share(structure) * base.weight * total / n_weights
    prior = base.prior_at(delta or 1.0)
    by_name = prior if isinstance(prior, dict) else dict.fromkeys(settings.prior_precision, prior)
    return replace(base, prior_precision=by_name)
