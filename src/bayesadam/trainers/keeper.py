"""What the callbacks share: settings, how N and B are found, and the posterior read, calibrated, logged and saved."""

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SubsetRandomSampler

from bayesadam._shards import is_first_rank, on_first_rank, whole
from bayesadam._warnings import warn
from bayesadam.anchoring import Anchor
from bayesadam.calibration import calibrate as calibrate_on
from bayesadam.calibration.held_out import aligned
from bayesadam.errors import NoPosteriorWarning, SettingError, StateError
from bayesadam.gaussian.settings import Settings
from bayesadam.likelihoods import LIKELIHOODS, Component, LikelihoodName, LogitPredictive, NumericPredictive
from bayesadam.posterior import Posterior
from bayesadam.posterior.report import CalibrationReport
from bayesadam.predict.call import Batch, Forward, batches_of, to_device
from bayesadam.scores import coverage, ece, nll, rmse

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
        every_n_epochs: log the signal-to-noise ratio during training too, without calibrating or saving.
        anchor: a posterior of earlier training, near which this one is to stay (`ba.anchor`), with this training's N.
            What the callback reads is of the new data alone; `anchor + callback.posterior` is of both.
        anchor_strength: λ of that penalty.
        **options: those of `Posterior.from_optimizer`, such as `prior_precision`. `batch_size`, B, is set to what the
            trainer takes for one step, over all processes and accumulated batches, where that is certain; elsewhere it
            is None.
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
        every_n_epochs: int | None = None,
        anchor: Posterior | None = None,
        anchor_strength: float = 1.0,
        **options: Any,
    ) -> None:
        if calibrate and likelihood not in LIKELIHOODS:
            raise SettingError(f"calibrate=True needs likelihood=, one of {tuple(LIKELIHOODS)}, got {likelihood!r}")
        if every_n_epochs is not None and every_n_epochs < 1:
            raise SettingError(f"every_n_epochs must be at least 1, got {every_n_epochs!r}")
        try:
            inspect.signature(Posterior.from_optimizer).bind(None, None, 1, **options)
        except TypeError as error:
            raise SettingError(f"{error}: the options are those of Posterior.from_optimizer") from None
        self.n_data = self._given_n_data = n_data
        self.path = None if path is None else Path(path)
        self.calibrate, self.likelihood, self.held_out, self.forward = calibrate, likelihood, held_out, forward
        self.every_n_epochs, self.options = every_n_epochs, options
        self.batch_size: int | None = options.get("batch_size")
        self.anchor, self.anchor_strength = anchor, anchor_strength
        self._posterior: Posterior | Exception | None = None
        self._held: Anchor | None = None

    @property
    def posterior(self) -> Posterior:
        """The posterior at the end of training; raises the reason where there is none."""
        if self._posterior is None:
            raise StateError("there is no posterior yet: it is read when training ends")
        if isinstance(self._posterior, Exception):
            raise self._posterior
        return self._posterior

    def _begin(self, loaders: Any, *, has_validation: bool, batch_size: int | None) -> None:
        """Find N and B, and refuse what would fail at the end; `batch_size` is B as the trainer knows it."""
        self._posterior = None
        counted = count_examples(loaders)
        self.n_data = self._given_n_data if self._given_n_data is not None else counted
        if self.n_data is None:
            raise SettingError("the training data have no one length: pass PosteriorCallback(n_data=...)")
        if self.calibrate and self.held_out is None and not has_validation:
            raise SettingError("calibrate=True needs held-out data: the trainer's validation data, or held_out=")
        # An N that was given may count something else than the loader's examples, such as tokens.
        found = batch_size if self.n_data == counted and (batch_size or 0) <= self.n_data else None
        self.batch_size = self.options.get("batch_size", found)
        known = {key: self.options[key] for key in ("power", "form") if key in self.options}
        Settings(self.n_data, {}, batch_size=self.batch_size, **known)

    def _hold(self, model: Any, optimizers: Any, state: Mapping[str, Any] | None = None) -> None:
        """Anchor the optimisers where that was asked for, as `state` from a checkpoint says if there is one."""
        self._let_go()
        if self.anchor is not None:
            self._held = Anchor(optimizers, self.anchor, strength=self.anchor_strength, n_data=self.n_data, model=model)
            if state is not None:
                self._held.load_state_dict(state)

    def _let_go(self) -> None:
        """Remove the anchor: training is over, or never ended."""
        if self._held is not None:
            self._held.remove()
        self._held = None

    def _read(self, model: Any, optimizers: Any) -> Posterior:
        return Posterior.from_optimizer(model, optimizers, **self._settings())

    def _settings(self) -> Any:
        return {**self.options, "batch_size": self.batch_size, "n_data": self.n_data}

    def _end_epoch(self, epochs: int, model: Any, optimizers: Any, log: Log) -> None:
        if self.every_n_epochs and epochs % self.every_n_epochs == 0:
            self._log(log, self._read(model, optimizers), {})

    def _log(self, log: Log, posterior: Posterior, calibration: Mapping[str, float]) -> None:
        """Pass the median of |μ|/σ, the share below 1, and the numbers of the calibration to the trainer's logger."""
        snr = torch.cat([whole(values).flatten().cpu() for values in posterior.snr().values()])
        numbers = {"snr_median": float(snr.median()), "snr_below_1": float((snr < 1).double().mean()), **calibration}
        if is_first_rank():
            log({f"posterior/{name}": value for name, value in numbers.items()})

    def _finish(
        self, read: Callable[[], Posterior], validation: Callable[[], Any], path: Path | None, log: Log
    ) -> None:
        """Read, calibrate, log and save, unless `path` is None; a failure is a warning."""
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
                changes, report, numbers = on_first_rank(lambda: self._calibration(posterior, data))
                posterior = replace(posterior.replace(**changes), calibration=report)
                _save(posterior, path)
            self._log(log, posterior, numbers)
            self._posterior = posterior
        # Hours of training must not be lost to whatever the user's loader or model raises here.
        except Exception as error:
            self._posterior = error
            said = f"training is over, but there is no posterior: {type(error).__name__}: {error}{saved}"
            warn(said, NoPosteriorWarning)

    def _calibration(
        self, posterior: Posterior, batches: list[Batch]
    ) -> tuple[dict[str, Any], CalibrationReport | None, dict[str, float]]:
        """The settings that calibration found, its report, and numbers for the logger."""
        assert self.likelihood is not None  # by __init__
        started = time.perf_counter()
        data = list(aligned(posterior, batches, likelihood=self.likelihood, forward=self.forward))
        tuned = calibrate_on(posterior, data, likelihood=self.likelihood, forward=self.forward)
        numbers = held_out_numbers(tuned, data, likelihood=self.likelihood, forward=self.forward)
        scale, precision = tuned.settings.scale, tuned.prior_precision
        changes = {"scale": scale, "prior_precision": precision, "covariant": tuned.settings.covariant}
        changes |= {name: getattr(tuned, name) for name in ("noise_variance", "temperature", "averaged", "leverage")}
        # One number for all parameters, by either method of calibration, or the prior's own numbers times one.
        delta = torch.as_tensor(next(iter(precision.values()))).mean()
        numbers |= {"scale": scale, "prior_precision": float(delta), "calibrate_seconds": time.perf_counter() - started}
        return changes, tuned.calibration, numbers


def count_examples(loaders: Any) -> int | None:
    """The number of examples behind a loader; None where the data set has no length, or there are several loaders."""
    loader = _single(loaders)
    sampler = getattr(loader, "sampler", None)
    source = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(source) or None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def fixed_batch_size(loaders: Any) -> int | None:
    """The examples in each batch of a loader; None for batches of the user's own sampler, or several loaders."""
    sampler = getattr(_single(loaders), "batch_sampler", None)
    # Accelerate's has the loader's own inside.
    sampler = getattr(sampler, "batch_sampler", sampler)
    return sampler.batch_size if type(sampler) is BatchSampler else None


def _single(loaders: Any) -> Any:
    """The loader; None where there are several."""
    if not isinstance(loaders, Mapping | list | tuple):
        return loaders
    listed = list(loaders.values() if isinstance(loaders, Mapping) else loaders)
    return _single(listed[0]) if len(listed) == 1 else None


def _save(posterior: Posterior, path: Path | None) -> None:
    # A sharded posterior is written by all ranks together.
    if path is not None and (posterior.is_sharded or is_first_rank()):
        path.parent.mkdir(parents=True, exist_ok=True)
        posterior.save(path)


def held_out_numbers(
    posterior: Posterior,
    batches: Sequence[tuple[Any, Tensor]],
    *,
    likelihood: LikelihoodName,
    forward: Forward | None = None,
) -> dict[str, float]:
    """Scores of the linearised predictive on held-out data, and of the network without a posterior as `network_…`."""
    record = LIKELIHOODS[likelihood]
    means, variances, growths, targets = [], [], [], []
    device = next(iter(posterior.parameters().values())).device
    for inputs, given in batches:
        found = posterior.predict(to_device(inputs, device), likelihood=likelihood, forward=forward)
        y = record.matched(given.to(found.mean.device), found.mean)
        keep = record.counted(found.mean, y)
        (c,) = found.components
        growth = torch.ones(len(y), device=y.device) if c.growth is None else c.growth
        means.append(c.mean[keep])
        variances.append(c.variance[keep])
        # A class has a row for each position, other targets for each example.
        growths.append(growth.view(-1, *[1] * (y.dim() - 1)).expand(y.shape)[keep] if record.coupled else growth)
        targets.append(y[keep])
    own: Any = {name: getattr(posterior, name) for name in ("noise_variance", "temperature", "averaged")}
    growth = torch.cat(growths) if record.tempered else None
    joined = record.predictive([Component(torch.cat(means), torch.cat(variances), growth=growth, **own)])
    y = torch.cat(targets)
    if isinstance(joined, NumericPredictive):
        return {"nll": nll(joined, y), "coverage95": coverage(joined, y), "rmse": rmse(joined.predicted_mean, y)}
    assert isinstance(joined, LogitPredictive)
    numbers = {}
    network = joined.changed(temperature=1.0, averaged=False, growth=None)
    for prefix, predictive in {"": joined, "network_": network}.items():
        numbers[f"{prefix}nll"] = nll(predictive, y)
        numbers[f"{prefix}ece"] = ece(predictive.class_probs.flatten(0, -2), y.flatten().long())
    return numbers
