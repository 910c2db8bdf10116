"""`PosteriorCallback` for the Trainer of Hugging Face's transformers."""

from functools import partial
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
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        best = Path((args.load_best_model_at_end and state.best_model_checkpoint) or "")
        read = partial(Posterior.from_optimizer, model, optimizer)
        if best.name not in ("", f"checkpoint-{state.global_step}"):
            read = partial(_read_saved, model, optimizer, best)
        path = self.path or Path(args.output_dir) / FILE_NAME
        self._finish(read, path, lambda numbers: state.log_history.append({**numbers, "step": state.global_step}))


def _read_saved(model: Any, optimizer: Any, checkpoint: Path, **options: Any) -> Posterior:
    """The posterior by the state that the optimiser had at a checkpoint."""
    # Inside Accelerate's wrapper.
    live = getattr(optimizer, "optimizer", optimizer)
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
    listed = [names[id(parameter)] for group in live.param_groups for parameter in group["params"]]
    reader = options.pop("reader", None) or reader_of(live) or TRACKED
    state = load_tree(checkpoint / "optimizer.pt")
    return Posterior.from_state_dict(model, state, param_names=listed, optimizer=reader, **options)
