"""What the callbacks share: settings, how N is found, and the posterior read, calibrated, logged and saved."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SubsetRandomSampler

from bayesadam._shards import is_first_rank, on_first_rank, whole
from bayesadam._warnings import warn
from bayesadam.calibration import calibrate as calibrate_on
from bayesadam.errors import HeldOutWarning, NoPosteriorWarning, SettingError, StateError
from bayesadam.gaussian.settings import Settings
from bayesadam.likelihoods import LIKELIHOODS, LikelihoodName
from bayesadam.posterior import Posterior
from bayesadam.posterior.report import CalibrationReport
from bayesadam.predict import Forward
from bayesadam.predict.batches import Batch, batches_of
from bayesadam.readers.tracking import Tracker, What
from bayesadam.readers.tracking import track as attach_tracker

FILE_NAME = "posterior.safetensors"
Log = Callable[[dict[str, float]], None]


class PosteriorKeeper:
    """A posterior read when training ends, whatever the trainer.

    Wrong settings are refused when training starts. A failure at the end is a `NoPosteriorWarning`, and `posterior`
    raises the reason. If calibration failed, the file holds the posterior as it was read. In distributed training every
    rank reads its own optimiser; the first one calibrates, logs and writes, and the others get its settings.

    Args:
        n_data: N, the number of training examples: what the loss is an average over. None takes the length of the
            training data set. A language model's loss averages over tokens; N sequences of T tokens are N T there.
        path: where the posterior is saved; None is `posterior.safetensors` in the trainer's own folder.
        calibrate: calibrate on the held-out data before saving, and log how it scores there.
        likelihood: of the calibration.
        held_out: data to calibrate on, as `ba.calibrate` takes it; None takes the trainer's validation data.
        forward: as in `predict`, where the model's call is unusual.
        track: for optimisers that keep no second moment, `"diagonal"`, `"factored"` or `"kronecker"`: as `ba.track`
            does, from before the first step to the end. A mapping has its other arguments too, such as `every`.
        **options: those of `Posterior.from_optimizer`, such as `prior_precision`. `power=1` needs `batch_size`: the
            examples behind one step, over all processes and accumulated batches.
    """

    def __init__(
        self,
        n_data: float | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        calibrate: bool = False,
        likelihood: LikelihoodName | None = None,
        held_out: Any = None,
        forward: Forward | None = None,
        track: What | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if calibrate and likelihood not in LIKELIHOODS:
            raise SettingError(f"calibrate=True needs likelihood=, one of {tuple(LIKELIHOODS)}, got {likelihood!r}")
        try:
            inspect.signature(Posterior.from_optimizer).bind(None, None, 1, **options)
        except TypeError as error:
            raise SettingError(f"{error}: the options are those of Posterior.from_optimizer") from None
        self.n_data = self._given_n_data = n_data
        self.path = None if path is None else Path(path)
        self.calibrate, self.likelihood, self.held_out, self.forward = calibrate, likelihood, held_out, forward
        self.options = options
        self.track: dict[str, Any] = {"what": track} if isinstance(track, str) else dict(track or {})
        self._tracks = track is not None
        if self._tracks:
            try:
                attach_tracker(torch.optim.SGD([torch.zeros(1)]), **self.track)
            except TypeError as error:
                raise SettingError(f"{error}: track has the arguments of bayesadam.track") from None
        self._tracker: Tracker | None = None
        self._posterior: Posterior | Exception | None = None

    @property
    def posterior(self) -> Posterior:
        """The posterior at the end of training; raises the reason where there is none."""
        if self._posterior is None:
            raise StateError("there is no posterior yet: it is read when training ends")
        if isinstance(self._posterior, Exception):
            raise self._posterior
        return self._posterior

    def _begin(self, loader: Any, optimizers: Any, *, has_validation: bool) -> None:
        """Find N, refuse what would fail at the end, and track the optimisers where that was asked for."""
        self._posterior = None
        self._stop_tracking()
        self.n_data = count_examples(loader) if self._given_n_data is None else self._given_n_data
        if self.n_data is None:
            raise SettingError("the training data have no one length: pass PosteriorCallback(n_data=...)")
        if self.calibrate and self.held_out is None and not has_validation:
            raise SettingError("calibrate=True needs held-out data: the trainer's validation data, or held_out=")
        if self.calibrate and _same_data(self.held_out, loader):
            warn("held_out is the training data set: pass examples that training never sees", HeldOutWarning)
        given: dict[str, Any] = {"batch_size": self.track.get("batch_size"), **self.options}
        Settings(self.n_data, {}, **{key: given[key] for key in ("power", "form", "batch_size") if key in given})
        if self._tracks:
            self._tracker = attach_tracker(optimizers, **self.track)

    def _stop_tracking(self) -> None:
        if self._tracker is not None:
            self._tracker.remove()
        self._tracker = None

    def _settings(self) -> Any:
        return {**self.options, "n_data": self.n_data}

    def _finish(
        self, read: Callable[[], Posterior], validation: Callable[[], Any], path: Path | None, log: Log
    ) -> None:
        """Read, calibrate, log and save, unless `path` is None; a failure is a warning."""
        self._stop_tracking()
        saved = ""
        numbers: dict[str, float] = {}
        try:
            posterior = read()
            _save(posterior, path)
            if self.calibrate:
                saved = f"; as it was before calibration, it is in {path}" if path else ""
                if posterior.is_sharded:
                    raise SettingError("a sharded model cannot be calibrated here: load its posterior into a whole one")
                data = list(batches_of(validation() if self.held_out is None else self.held_out, posterior.model))
                changes, report = on_first_rank(lambda: self._calibration(posterior, data))
                posterior = replace(posterior.replace(**changes), calibration=report)
                _save(posterior, path)
                numbers["nll"] = report.nll["calibrated"]
                if "network alone" in report.nll:
                    numbers["network_nll"] = report.nll["network alone"]
                numbers["scale"] = posterior.settings.scale
            snr = torch.cat([whole(values).flatten().cpu() for values in posterior.snr().values()])
            numbers |= {"snr_median": float(snr.median()), "snr_below_1": float((snr < 1).double().mean())}
            if is_first_rank():
                log({f"posterior/{name}": value for name, value in numbers.items()})
            self._posterior = posterior
        # Hours of training must not be lost to whatever the user's loader or model raises here.
        except Exception as error:
            self._posterior = error
            said = f"training is over, but there is no posterior: {type(error).__name__}: {error}{saved}"
            warn(said, NoPosteriorWarning)

    def _calibration(self, posterior: Posterior, data: list[Batch]) -> tuple[dict[str, Any], CalibrationReport]:
        """The settings that calibration found, which other ranks can take over, and its report."""
        tuned = calibrate_on(posterior, data, likelihood=self.likelihood, forward=self.forward)
        assert tuned.calibration is not None
        names = ("prior_precision", "noise_variance", "temperature", "averaged", "leverage")
        changes = {name: getattr(tuned, name) for name in names}
        changes |= {"scale": tuned.settings.scale, "covariant": tuned.settings.covariant}
        return changes, tuned.calibration


def _same_data(held_out: Any, loader: Any) -> bool:
    """Whether two loaders draw on one data set, and none of them on a part of it."""
    own, other = getattr(held_out, "dataset", None), getattr(loader, "dataset", None)
    parts = (isinstance(getattr(each, "sampler", None), SubsetRandomSampler) for each in (held_out, loader))
    return own is not None and own is other and not any(parts)


def count_examples(loader: Any) -> int | None:
    """The number of examples behind a loader; None where that is not known, or there are several loaders."""
    sampler = getattr(loader, "sampler", None)
    source = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(source) or None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _save(posterior: Posterior, path: Path | None) -> None:
    # A sharded posterior is written by all ranks together.
    if path is not None and (posterior.is_sharded or is_first_rank()):
        path.parent.mkdir(parents=True, exist_ok=True)
        posterior.save(path)
