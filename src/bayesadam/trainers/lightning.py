"""`PosteriorCallback` for Lightning's Trainer, `lightning.pytorch` and `pytorch_lightning` alike."""

from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam.errors import MissingExtraError
from bayesadam.posterior import Posterior
from bayesadam.trainers.keeper import FILE_NAME, Log, PosteriorKeeper, fixed_batch_size

try:
    Callback: Any = require("lightning.pytorch").Callback
except MissingExtraError:
    # The older name of the same package; a callback of one serves the trainer of the other.
    Callback = require("pytorch_lightning").Callback


class PosteriorCallback(PosteriorKeeper, Callback):  # type: ignore[misc]
    """Reads the posterior off the trainer's optimisers when training ends, logs it and saves it.

        callback = PosteriorCallback(calibrate=True, likelihood="classification")
        trainer = Trainer(max_epochs=10, callbacks=[callback])
        trainer.fit(module, train_loader, val_loader)
        callback.posterior.predict(x, likelihood="classification")

    The numbers go to every logger of the trainer, under `posterior/`: `snr_median`, `snr_below_1`, and those of the
    calibration, `nll`, `ece`, `scale`, … and what it took, `calibrate_seconds`. The file is `posterior.safetensors` in
    `trainer.log_dir` unless `path` says otherwise. Every checkpoint gets `n_data`, so that `Posterior.from_checkpoint`
    knows N. A dry run, `fast_dev_run`, writes nothing. The arguments are those of `PosteriorKeeper`.
    """

    _anchor_state: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find N and B, and attach the anchor, before the first step."""
        # A few batches over and over are not the data set.
        loaders = None if trainer.overfit_batches else trainer.train_dataloader
        size = _batch_size(trainer, pl_module, loaders)
        self._begin(loaders, has_validation=bool(trainer.val_dataloaders), batch_size=size)
        self._hold(pl_module, trainer.optimizers, self._anchor_state)
        self._anchor_state = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the signal-to-noise ratio every few epochs."""
        self._end_epoch(trainer.current_epoch + 1, pl_module, trainer.optimizers, _logger(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the anchor; read, calibrate, log, save."""
        self._let_go()
        path = self.path or Path(trainer.log_dir or trainer.default_root_dir) / FILE_NAME
        self._finish(
            lambda: self._read(pl_module, trainer.optimizers),
            lambda: loaders[0] if isinstance(loaders := trainer.val_dataloaders, list | tuple) else loaders,
            None if trainer.fast_dev_run else path,
            _logger(trainer),
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Follow the model, which the trainer moves off the accelerator at the end."""
        if isinstance(self._posterior, Posterior):
            self._posterior = self._posterior.to(pl_module.device)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the anchor."""
        self._let_go()

    def state_dict(self) -> dict[str, Any]:
        """The anchor's state, for the trainer's checkpoints."""
        return {} if self._held is None else {"anchor": self._held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts."""
        self._anchor_state = state_dict.get("anchor")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save N with the weights."""
        if self.n_data is not None:
            checkpoint["n_data"] = self.n_data


def _logger(trainer: Any) -> Log:
    def log(numbers: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    return log


def _batch_size(trainer: Any, module: Any, loaders: Any) -> int | None:
    """The examples behind one step, over all processes; None where the user steps, or a callback changes how often."""
    size = fixed_batch_size(loaders)
    changes = any(hasattr(callback, "get_accumulate_grad_batches") for callback in trainer.callbacks)
    if size is None or changes or not module.automatic_optimization:
        return None
    processes = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    return int(size * processes * trainer.accumulate_grad_batches)
