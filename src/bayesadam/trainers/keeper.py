"""What the callbacks share: their settings, how N and B are found, and the posterior read, calibrated, logged and
saved.
"""

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

    Wrong settings are refused when training starts. A failure at the end does not end the run: it is a
    `NoPosteriorWarning`, and `posterior` raises the reason. If calibration failed, the file holds the posterior as it
    was read.

    In distributed training every rank reads its own optimiser. The first one calibrates, logs and writes; the others
    get its settings.

    Args:
        n_data: N, the number of training examples: what the loss is an average over. None takes the length of the
            training data set. A language model's loss averages over tokens; N sequences of T tokens are N T there.
        path: where the posterior is saved; None is `posterior.safetensors` in the trainer's own folder.
        calibrate: calibrate on the held-out data before saving, and log how it scores there.
        likelihood: of the calibration.
        held_out: data to calibrate on, as `ba.calibrate` takes it; None takes the trainer's validation data.
        forward: as in `predict`, where the model's call is unusual.
        per_parameter: log the signal-to-noise ratio of every parameter too.
        every_n_epochs: log the signal-to-noise ratio during training too, without calibrating or saving.
        anchor: a posterior of earlier training, near which this one is to stay (`ba.anchor`), with this training's N.
            What the callback reads is of the new data alone; `anchor + callback.posterior` is of both.
        anchor_strength: λ of that penalty.
        **options: those of `Posterior.from_optimizer`, such as `prior_precision`. `batch_size`, B, is set to what the
            trainer takes for one step, over all processes and accumulated batches, where that is certain: batches have
            a fixed size of at most N, their number is the same at every step, and N is the length of the data set.
            Elsewhere it is None.
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
        per_parameter: bool = False,
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
        self.per_parameter, self.every_n_epochs, self.options = per_parameter, every_n_epochs, options
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
            raise SettingError(
                "the trainer's data do not give the number of training examples: a data set without a length, "
                "or several "
                "of them. Pass it: PosteriorCallback(n_data=...)"
            )
        if self.calibrate and self.held_out is None and not has_validation:
            raise SettingError(
                "calibrate=True needs held-out data: give the trainer validation data, or pass held_out=, a loader of "
                "(inputs, targets)"
            )
        # An N that was given may count something else than the loader's examples, such as tokens.
        found = batch_size if self.n_data == counted and (batch_size or 0) <= self.n_data else None
        self.batch_size = self.options.get("batch_size", found)
        known = {key: self.options[key] for key in ("power", "form") if key in self.options}
        Settings(self.n_data, {}, batch_size=self.batch_size, **known)

    def _hold(self, model: Any, optimizers: Any, state: Mapping[str, Any] | None = None) -> None:
        """Anchor the optimisers where that was asked for, as `state` from a checkpoint says if there is one."""
        self._let_go()
        if self.anchor is None:
            return
        self._held = Anchor(optimizers, self.anchor, strength=self.anchor_strength, n_data=self.n_data, model=model)
        if state is not None:
            self._held.load_state_dict(state)

    def _let_go(self) -> None:
        """Remove the anchor: training is over, or never ended."""
        if self._held is not None:
            self._held.remove()
        self._held = None

    def _read(self, model: Any, optimizers: Any) -> Posterior:
        return Posterior.from_optimizer(model, optimizers, self._known_n_data(), **self._settings())

    def _settings(self) -> dict[str, Any]:
        """The options, with B."""
        return {**self.options, "batch_size": self.batch_size}

    def _end_epoch(self, epochs: int, read: Callable[[], Posterior], log: Log) -> None:
        """Log the signal-to-noise ratio after so many epochs, where that was asked for."""
        if self.every_n_epochs and epochs % self.every_n_epochs == 0:
            self._log(log, read())

    def _known_n_data(self) -> float:
        if self.n_data is None:
            raise StateError("N is not known before training begins")
        return self.n_data

    def _log(self, log: Log, posterior: Posterior, calibration: Mapping[str, float] | None = None) -> None:
        """Pass the numbers of the posterior, and those of its calibration, to the trainer's logger."""
        numbers = {**snr_numbers(posterior, per_parameter=self.per_parameter), **(calibration or {})}
        if is_first_rank():
            log({f"posterior/{name}": value for name, value in numbers.items()})

    def _finish(
        self, read: Callable[[], Posterior], validation: Callable[[], Any], path: Path | None, log: Log
    ) -> None:
        """Read, calibrate, log and save, unless `path` is None; a failure is a warning, raised when the posterior is
        asked for.
        """
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
        changes |= {"noise_variance": tuned.noise_variance}
        changes |= {"temperature": tuned.temperature, "averaged": tuned.averaged}
        # One number for all parameters, by either method of calibration, or the prior's own numbers times one.
        delta = torch.as_tensor(next(iter(precision.values()))).mean()
        numbers |= {"scale": scale, "prior_precision": float(delta), "calibrate_seconds": time.perf_counter() - started}
        return changes, tuned.calibration, numbers


def count_examples(loaders: Any) -> int | None:
    """The number of examples behind a loader; None where the data set has no length, or there are several loaders.

    >>> from torch.utils.data import DataLoader
    >>> count_examples(DataLoader(range(10), batch_size=4))
    10
    """
    loader = _single(loaders)
    sampler = getattr(loader, "sampler", None)
    source = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(source) or None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def fixed_batch_size(loaders: Any) -> int | None:
    """The examples in each batch of a loader; None where a sampler of the user's own makes the batches, or there are
    several.

    >>> from torch.utils.data import DataLoader
    >>> fixed_batch_size(DataLoader(range(10), batch_size=4))
    4
    """
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


def snr_numbers(posterior: Posterior, *, per_parameter: bool = False) -> dict[str, float]:
    """The median of |μ|/σ and the share of weights whose |μ|/σ is below 1, of each parameter too with
    `per_parameter`.
    """
    snr = {name: whole(values).flatten() for name, values in posterior.snr().items()}
    parts = {"": torch.cat([values.to(next(iter(snr.values()))) for values in snr.values()])}
    if per_parameter:
        parts |= {f"/{name}": values for name, values in snr.items() if values.numel()}
    numbers: dict[str, float] = {}
    for suffix, values in parts.items():
        numbers[f"snr_median{suffix}"] = float(values.median())
        numbers[f"snr_below_1{suffix}"] = float((values < 1).double().mean())
    return numbers


def held_out_numbers(
    posterior: Posterior,
    batches: Sequence[tuple[Any, Tensor]],
    *,
    likelihood: LikelihoodName,
    forward: Forward | None = None,
) -> dict[str, float]:
    """Scores of the linearised predictive on held-out data, and of the network without a posterior as `network_…`.

    Classification has NLL and ECE of both, over the targets that are not −100. Regression has the predictive's NLL and
    coverage of 95 % intervals, and the RMSE, which both share.
    """
    record = LIKELIHOODS[likelihood]
    means, variances, targets = [], [], []
    device = next(iter(posterior.parameters().values())).device
    for inputs, given in batches:
        found = posterior.predict(to_device(inputs, device), likelihood=likelihood, forward=forward, novelty=False)
        y = record.matched(given.to(found.mean.device), found.mean)
        keep = record.counted(found.mean, y)
        means.append(found.mean[keep])
        variances.append(found.variance[keep])
        targets.append(y[keep])
    own: Any = {"noise_variance": posterior.noise_variance}
    own |= {"temperature": posterior.temperature, "averaged": posterior.averaged}
    joined = record.predictive([Component(torch.cat(means), torch.cat(variances), **own)])
    y = torch.cat(targets)
    if isinstance(joined, NumericPredictive):
        return {"nll": nll(joined, y), "coverage95": coverage(joined, y), "rmse": rmse(joined.predicted_mean, y)}
    assert isinstance(joined, LogitPredictive)
    numbers = {}
    network = joined.changed(temperature=1.0, averaged=False)
    for prefix, predictive in {"": joined, "network_": network}.items():
        numbers[f"{prefix}nll"] = nll(predictive, y)
        numbers[f"{prefix}ece"] = ece(predictive.class_probs.flatten(0, -2), y.flatten().long())
    return numbers
