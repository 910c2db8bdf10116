"""`PosteriorCallback` for the Trainer of Hugging Face's transformers."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayesadam._alone import unwrap
from bayesadam._extras import require
from bayesadam.errors import SettingError
from bayesadam.readers import reader_of
from bayesadam.readers.formats.torch_files import load_tree
from bayesadam.readers.registry import TRACKED
from bayesadam.trainers.keeper import FILE_NAME, PosteriorKeeper
from bayesadam.weights.posterior import Posterior

transformers: Any = require("transformers")


class PosteriorCallback(PosteriorKeeper, transformers.TrainerCallback):  # type: ignore[misc]
    """Reads the posterior off the trainer's optimiser when training ends, logs it and saves it.

        callback = PosteriorCallback(calibrate=True, likelihood="classification")
        trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=validation, callbacks=[callback])
        trainer.train()
        callback.posterior.predict({"input_ids": …, "attention_mask": …}, likelihood="classification")

    The numbers go through `trainer.log`, and so to the log history, TensorBoard and whatever else `report_to` names,
    under `posterior/`: `snr_median`, `snr_below_1`, and those of the calibration, `nll`, `network_nll`, `scale`.
    The file is `posterior.safetensors` in `args.output_dir` unless `path` says otherwise. N goes into the
    `trainer_state.json` of every checkpoint. Where `load_best_model_at_end` restored the weights of an earlier step,
    the optimiser's state is read from that checkpoint.

    The labels of a language model are aligned as in its own loss: shifted to the next token where the loss does so, and
    without those of −100. Pass `n_data` there, for the loss averages over tokens. The arguments are those of
    `PosteriorKeeper`.
    """

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find N before the first step; a state to resume from is loaded by now."""
        if args.load_best_model_at_end and args.save_only_model:
            raise SettingError("load_best_model_at_end needs the best model's optimiser: set save_only_model=False")
        self.trainer = _calling_trainer()
        has_validation = self.trainer.eval_dataset is not None
        self._begin(kwargs["train_dataloader"], kwargs["optimizer"], has_validation=has_validation)
        state.stateful_callbacks["bayesadam"] = {"n_data": self.n_data}
        # Before the reporting callbacks, which close their files when training ends.
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read, calibrate, log, save."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        best = Path((args.load_best_model_at_end and state.best_model_checkpoint) or "")
        is_live = best.name in ("", f"checkpoint-{state.global_step}")

        def read() -> Posterior:
            if is_live:
                return Posterior.from_optimizer(model, optimizer, **self._settings())
            return self._read_saved(model, optimizer, best)

        self._finish(read, self._validation, self.path or Path(args.output_dir) / FILE_NAME, self.trainer.log)

    def _validation(self) -> Any:
        sets = self.trainer.eval_dataset
        # Of several the first, by its name.
        return self.trainer.get_eval_dataloader(next(iter(sets)) if isinstance(sets, Mapping) else None)

    def _read_saved(self, model: Any, optimizer: Any, checkpoint: Path) -> Posterior:
        """The posterior by the state that the optimiser had at a checkpoint."""
        # Inside Accelerate's wrapper.
        live = getattr(optimizer, "optimizer", optimizer)
        names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
        listed = [names[id(parameter)] for group in live.param_groups for parameter in group["params"]]
        options: Any = {**self._settings(), "param_names": listed}
        options["optimizer"] = options.pop("reader", None) or reader_of(live) or TRACKED
        return Posterior.from_state_dict(model, load_tree(checkpoint / "optimizer.pt"), **options)


def _calling_trainer() -> Any:
    """The trainer whose event this is: it hands its callbacks neither its loggers nor its data, but it calls them."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(caller := frame.f_locals.get("self"), transformers.Trainer):
            return caller
    raise SettingError("PosteriorCallback is for the Trainer of transformers, and none has called it")
