"""`PosteriorCallback` for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesadam._alone import unwrap
from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._shards import is_first_rank
from bayesadam.checkpoint.files import load_tree
from bayesadam.curvature.registry import reader_of
from bayesadam.errors import SettingError, StateError
from bayesadam.posterior import Posterior
from bayesadam.trainers.keeper import FILE_NAME, PosteriorKeeper

if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = require("transformers").TrainerCallback

ANCHOR_FILE = "anchor.pt"


class PosteriorCallback(PosteriorKeeper, TrainerCallback):
    """Reads the posterior off the trainer's optimiser when training ends, logs it and saves it.

        trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=validation)
        callback = PosteriorCallback(trainer, calibrate=True, likelihood="classification")
        trainer.add_callback(callback)
        trainer.train()
        callback.posterior.predict({"input_ids": …, "attention_mask": …}, likelihood="classification")

    The numbers go through `trainer.log`, and so to the log history, TensorBoard and whatever else `report_to` names,
    under `posterior/`: `snr_median`, `snr_below_1`, and those of the calibration, `nll`, `ece`, `scale`, … The file is
    `posterior.safetensors` in `args.output_dir` unless `path` says otherwise. N goes into the `trainer_state.json` of
    every checkpoint. Where `load_best_model_at_end` restored the weights of an earlier step, the optimiser's state is read
    from that checkpoint.

    The labels of a language model are aligned as in its own loss: shifted to the next token where the loss does so, and
    without those of −100. Pass `n_data` there, for the loss averages over tokens.

    Args:
        trainer: the trainer, for its loggers and data, which a callback does not get otherwise.
        n_data: N; None takes the length of the training data set.
        every_n_evaluations: log the signal-to-noise ratio during training too, without calibrating or saving.
        **options: see `PosteriorKeeper`.
    """

    def __init__(
        self, trainer: Any, n_data: float | None = None, *, every_n_evaluations: int | None = None, **options: Any
    ) -> None:
        super().__init__(n_data, **options)
        if every_n_evaluations is not None and every_n_evaluations < 1:
            raise SettingError(f"every_n_evaluations must be at least 1, got {every_n_evaluations!r}")
        self.trainer = trainer
        self.every_n_evaluations = every_n_evaluations
        self._evaluations = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find N, and attach the anchor, before the first step."""
        if args.load_best_model_at_end and args.save_only_model:
            raise SettingError(
                "load_best_model_at_end with save_only_model leaves the best model without its optimiser's state, and so "
                "without a posterior: set save_only_model=False"
            )
        self._begin(kwargs["train_dataloader"], has_validation=self.trainer.eval_dataset is not None)
        self._evaluations = 0
        state.stateful_callbacks["bayesadam"] = {"n_data": self.n_data}
        # Before the reporting callbacks, which close their files when training ends.
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        saved = _anchor_file(args, state)
        is_resumed = self.anchor is not None and state.global_step > 0 and saved.is_file()
        self._hold(kwargs["model"], kwargs["optimizer"], load_tree(saved) if is_resumed else None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the anchor's state in the checkpoint that was just written."""
        if self._held is not None and is_first_rank():
            with replacing(_anchor_file(args, state)) as temporary:
                torch.save(self._held.state_dict(), temporary)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the signal-to-noise ratio every few evaluations."""
        # An evaluation may come before the first step, or without any training.
        if not self.every_n_evaluations or not self.trainer.is_in_train or not state.global_step:
            return
        self._evaluations += 1
        if self._evaluations % self.every_n_evaluations == 0:
            self._log(self.trainer.log, self._read(kwargs["model"], kwargs["optimizer"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the anchor; read, calibrate, log, save."""
        self._let_go()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        best = Path((args.load_best_model_at_end and state.best_model_checkpoint) or "")
        is_live = best.name in ("", f"checkpoint-{state.global_step}")
        self._finish(
            lambda: self._read(model, optimizer) if is_live else self._read_saved(model, optimizer, best),
            self._validation,
            self.path or Path(args.output_dir) / FILE_NAME,
            self.trainer.log,
        )

    def _validation(self) -> Any:
        sets = self.trainer.eval_dataset
        # Of several the first, by its name.
        return self.trainer.get_eval_dataloader(next(iter(sets)) if isinstance(sets, Mapping) else None)

    def _read_saved(self, model: Any, optimizer: Any, checkpoint: Path) -> Posterior:
        """The posterior by the state that the optimiser had at a checkpoint."""
        # Inside Accelerate's wrapper.
        live = getattr(optimizer, "optimizer", optimizer)
        options = dict(self.options)
        reader = options.pop("reader", None) or reader_of(live)
        if reader is None:
            raise StateError(f"no reader is registered for {type(live).__name__}; pass reader=")
        names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
        return Posterior.from_state_dict(
            model,
            load_tree(checkpoint / "optimizer.pt"),
            self._known_n_data(),
            optimizer=reader,
            param_names=[names[id(parameter)] for group in live.param_groups for parameter in group["params"]],
            **options,
        )


def _anchor_file(args: Any, state: Any) -> Path:
    """Where the checkpoint of the present step has the anchor's state."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / ANCHOR_FILE
