"""`PosteriorCallback` for the Trainer of Hugging Face's transformers."""

from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam.errors import SettingError
from bayesadam.trainers.keeper import FILE_NAME, PosteriorKeeper
from bayesadam.weights.posterior import Posterior

transformers: Any = require("transformers")


class PosteriorCallback(PosteriorKeeper, transformers.TrainerCallback):  # type: ignore[misc]
    """Reads the posterior off the trainer's optimiser when training ends, logs it and saves it.

        callback = PosteriorCallback(likelihood="classification")
        trainer = Trainer(model=model, args=args, train_dataset=train, callbacks=[callback])
        trainer.train()
        net = ba.calibrate(callback.posterior, held_out)

    `posterior/snr_median` and `posterior/snr_below_1` go into the log history. The file is `posterior.safetensors` in
    `args.output_dir` unless `path` says otherwise. N goes into the `trainer_state.json` of every checkpoint. Where
    `load_best_model_at_end` restored the weights of an earlier step, the optimiser's state is read from that
    checkpoint. Pass `n_data` for a language model, whose loss averages over tokens. The arguments are those of
    `PosteriorKeeper`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find N before the first step; a state to resume from is loaded by now."""
        if args.load_best_model_at_end and args.save_only_model:
            raise SettingError("load_best_model_at_end needs the best model's optimiser: set save_only_model=False")
        self._begin(kwargs["train_dataloader"], kwargs["optimizer"])
        state.stateful_callbacks["bayesadam"] = {"n_data": self.n_data}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read, save, log."""
        model = kwargs["model"]
        best = Path((args.load_best_model_at_end and state.best_model_checkpoint) or "")

        def read(reader: Any = None, **options: Any) -> Posterior:
            if best.name in ("", f"checkpoint-{state.global_step}"):
                return Posterior.from_optimizer(model, kwargs["optimizer"], reader=reader, **options)
            # By the state that the optimiser had then.
            return Posterior.from_checkpoint(best, model, optimizer=reader, **options)

        path = self.path or Path(args.output_dir) / FILE_NAME
        self._finish(read, path, lambda numbers: state.log_history.append({**numbers, "step": state.global_step}))
