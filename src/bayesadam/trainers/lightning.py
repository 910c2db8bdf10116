"""`PosteriorCallback` for Lightning's Trainer, `lightning.pytorch` and `pytorch_lightning` alike."""

from functools import partial
from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam.errors import MissingExtraError
from bayesadam.trainers.keeper import FILE_NAME, PosteriorKeeper
from bayesadam.weights.posterior import Posterior

try:
    Callback: Any = require("lightning.pytorch").Callback
except MissingExtraError:
    # The older name of the same package; a callback of one serves the trainer of the other.
    Callback = require("pytorch_lightning").Callback


class PosteriorCallback(PosteriorKeeper, Callback):  # type: ignore[misc]
    """Reads the posterior off the trainer's optimisers when training ends, logs it and saves it.

        callback = PosteriorCallback(likelihood="classification")
        trainer = Trainer(max_epochs=10, callbacks=[callback])
        trainer.fit(module, train_loader)
        net = ba.calibrate(callback.posterior, held_out)

    `posterior/snr_median` and `posterior/snr_below_1` go to every logger of the trainer. The file is
    `posterior.safetensors` in `trainer.log_dir` unless `path` says otherwise. Every checkpoint gets `n_data`, so that
    `Posterior.from_checkpoint` knows N. A dry run, `fast_dev_run`, writes nothing. The arguments are those of
    `PosteriorKeeper`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find N before the first step; a state to resume from is loaded by now."""
        # A few batches over and over are not the data set.
        self._begin(None if trainer.overfit_batches else trainer.train_dataloader, trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read, save, log."""

        def log(numbers: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

        path = self.path or Path(trainer.log_dir or trainer.default_root_dir) / FILE_NAME
        read = partial(Posterior.from_optimizer, pl_module, trainer.optimizers)
        self._finish(read, None if trainer.fast_dev_run else path, log)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Follow the model, which the trainer moves off the accelerator at the end."""
        if isinstance(self._posterior, Posterior):
            self._posterior = self._posterior.to(pl_module.device)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save N with the weights."""
        if self.n_data is not None:
            checkpoint["n_data"] = self.n_data
