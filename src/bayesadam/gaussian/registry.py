"""Every covariance structure, by name."""

from bayesadam.errors import FileError, SettingError
from bayesadam.gaussian.diagonal import DIAGONAL
from bayesadam.gaussian.kronecker import KRONECKER
from bayesadam.gaussian.low_rank import LOW_RANK, LOW_RANK_DIAGONAL
from bayesadam.gaussian.structure import Stored, Structure, StructureSpec

STRUCTURES: dict[str, StructureSpec] = {spec.name: spec for spec in (DIAGONAL, KRONECKER, LOW_RANK, LOW_RANK_DIAGONAL)}


def structure_named(name: str, *, recorded: bool) -> StructureSpec:
    """The structure of that name; `recorded` says whether gradients are."""
    if name not in STRUCTURES:
        raise SettingError(f"structure must be one of {tuple(STRUCTURES)}, got {name!r}")
    if STRUCTURES[name].needs_gradients and not recorded:
        raise SettingError(
            f"structure={name!r} is built from recorded gradients: recorder = bayesadam.Recorder(optimizer) before training, "
            "then Posterior.from_optimizer(..., recorder=recorder)"
        )
    return STRUCTURES[name]


def load_structure(name: str, stored: Stored) -> Structure:
    """The structure in a file; a KeyError is a tensor that is missing."""
    if name not in STRUCTURES:
        unknown = f"a {name!r} posterior, which this version does not know: upgrade bayesadam"
        raise FileError(f"{stored.path} holds {unknown}")
    return STRUCTURES[name].load(stored)
