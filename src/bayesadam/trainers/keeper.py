"""What the callbacks share: settings, how N is found, and the posterior read, logged and saved."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SubsetRandomSampler

from bayesadam._shards import is_first_rank, whole
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers.tracking import Hooked, What
from bayesadam.readers.tracking import track as attach_tracker
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.settings import Settings

FILE_NAME = "posterior.safetensors"


class PosteriorKeeper:
    """A posterior read when training ends, whatever the trainer: `ba.calibrate(callback.posterior, held_out)` follows.

    Wrong settings are refused when training starts. A failure at the end is a `BayesAdamWarning`, and `posterior`
    raises the reason. In distributed training every rank reads its own optimiser; the first one logs and writes.

    Args:
        n_data: N, the number of training examples: what the loss is an average over. None takes the length of the
            training data set. A language model's loss averages over tokens; N sequences of T tokens are N T there.
        path: where the posterior is saved; None is `posterior.safetensors` in the trainer's own folder.
        track: for optimisers that keep no second moment, `"diagonal"` or `"factored"`: as `ba.track` does, from before
            the first step to the end. A mapping has its other arguments too, such as `every`.
        **options: those of `Posterior.from_optimizer`, such as `likelihood` and `prior_precision`. `power=1` needs
            `batch_size`: the examples behind one step, over all processes and accumulated batches.
    """

    def __init__(
        self,
        n_data: float | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        track: What | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        try:
            inspect.signature(Posterior.from_optimizer).bind(None, None, 1, **options)
        except TypeError as error:
            raise SettingError(f"{error}: the options are those of Posterior.from_optimizer") from None
        self.n_data = self._stated = n_data
        self.path = None if path is None else Path(path)
        self.options = options
        self.track: Mapping[str, Any] | None = {"what": track} if isinstance(track, str) else track
        self._tracker: Hooked | None = None
        self._posterior: Posterior | Exception | None = None

    @property
    def posterior(self) -> Posterior:
        """The posterior at the end of training; raises the reason where there is none."""
        if self._posterior is None:
            raise MatchError("there is no posterior yet: it is read when training ends")
        if isinstance(self._posterior, Exception):
            raise self._posterior
        return self._posterior

    def _begin(self, loader: Any, optimizers: Any) -> None:
        """Find N, refuse what would fail at the end, and track the optimisers where that was asked for."""
        self._posterior = None
        self._stop_tracking()
        self.n_data = count_examples(loader) if self._stated is None else self._stated
        if self.n_data is None:
            raise SettingError("the training data have no one length: pass PosteriorCallback(n_data=...)")
        settings = {"batch_size": (self.track or {}).get("batch_size"), **self.options}
        names = ("power", "form", "batch_size")
        Settings(self.n_data, {}, **{key: settings[key] for key in names if key in settings})
        if self.track is not None:
            self._tracker = attach_tracker(optimizers, **self.track)

    def _stop_tracking(self) -> None:
        if self._tracker is not None:
            self._tracker.remove()
        self._tracker = None

    def _finish(
        self, read: Callable[..., Posterior], path: Path | None, log: Callable[[dict[str, float]], None]
    ) -> None:
        """Read, save and log, unless `path` is None; a failure is a warning."""
        self._stop_tracking()
        try:
            posterior = read(**self.options, n_data=self.n_data)
            # A sharded posterior is written by all ranks together.
            if path is not None and (posterior.is_sharded or is_first_rank()):
                path.parent.mkdir(parents=True, exist_ok=True)
                posterior.save(path)
            snr = torch.cat([whole(values).flatten().cpu() for values in posterior.snr().values()])
            if is_first_rank():
                below = float((snr < 1).double().mean())
                log({"posterior/snr_median": float(snr.median()), "posterior/snr_below_1": below})
            self._posterior = posterior
        # Hours of training must not be lost to whatever the user's model or disk raises here.
        except Exception as error:
            self._posterior = error
            warn(f"training is over, but there is no posterior: {type(error).__name__}: {error}")


def count_examples(loader: Any) -> int | None:
    """The number of examples behind a loader; None where that is not known, or there are several loaders."""
    sampler = getattr(loader, "sampler", None)
    source = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(source) or None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
