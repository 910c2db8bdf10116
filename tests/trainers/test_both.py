"""One callback for both trainers: the same arguments, attributes, file and numbers, whatever a batch looks like."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesadam as ba
from bayesadam.errors import SettingError
from bayesadam.trainers.keeper import PosteriorKeeper
from cases import mlp
from floats import approx

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
N, EPOCHS, BATCH = 40, 4, 8


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return [{"x": each, "labels": (each[0] + 0.3 * each[1] > 0).long()} for each in x]


def loader(count: int, seed: int, *, pairs: bool = False) -> DataLoader:
    found: Any = rows(count, seed)
    return DataLoader([(row["x"], row["labels"]) for row in found] if pairs else found, batch_size=BATCH)


class Network(nn.Module):
    """Takes its input by keyword or alone, and returns its loss where labels are given, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(3, 6, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(x)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def lightning_run(folder: Path, model: Network, **options: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    from bayesadam.trainers.lightning import PosteriorCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, x: Tensor) -> Any:
            return self.network(x)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.network(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)

    logged: dict[str, float] = {}

    class Logger(pl.loggers.logger.DummyLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.update(metrics)

    callback = PosteriorCallback(**options)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback],
        logger=Logger(),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Module(), loader(N, 0), loader(30, 1))
    return callback, logged


def huggingface_run(folder: Path, model: Network, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bayesadam.trainers.huggingface import PosteriorCallback

    callback = PosteriorCallback(**options)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "use_cpu": True,
        "learning_rate": 0.02, "weight_decay": 0.1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False, "remove_unused_columns": False, "label_names": ["labels"],
    }  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=rows(N, 0),
        eval_dataset=rows(30, 1),
        callbacks=[callback],
    )
    trainer.train()
    return callback, {key: value for line in trainer.state.log_history for key, value in line.items()}


TRAINERS = {"lightning": lightning_run, "huggingface": huggingface_run}


def callback_of(name: str) -> Any:
    return pytest.importorskip(f"bayesadam.trainers.{name}").PosteriorCallback


@pytest.mark.parametrize("held_out", ["the trainer's", "mappings", "pairs", "arrays"])
@pytest.mark.parametrize("name", TRAINERS)
def test_the_same_call_serves_both_trainers(name, held_out, tmp_path):
    """The README's line, word for word."""
    data: Any = {
        "the trainer's": None,
        "mappings": loader(30, 1),
        "pairs": loader(30, 1, pairs=True),
        "arrays": [(x.numpy(), y.numpy()) for x, y in loader(30, 1, pairs=True)],
    }[held_out]
    model = Network()
    path = tmp_path / "posterior.safetensors"
    callback, logged = TRAINERS[name](
        tmp_path, model, calibrate=True, likelihood="classification", held_out=data, path=path
    )
    posterior = callback.posterior
    assert (callback.n_data, posterior.n_data, callback.likelihood, callback.path) == (N, N, "classification", path)
    assert posterior.calibration is not None
    assert posterior.calibration.n_fitted == 30
    held_x, held_y = (torch.cat(part) for part in zip(*loader(30, 1, pairs=True), strict=True))
    found = posterior.predict(held_x, likelihood="classification")
    with torch.no_grad():
        own = float(nn.functional.cross_entropy(model(held_x), held_y))
    assert logged["posterior/network_nll"] == approx(own, rel=1e-4)
    assert logged["posterior/nll"] in posterior.calibration.nll.values()
    assert torch.equal(
        ba.Posterior.load(path, posterior.model).predict(held_x, likelihood="classification").mean, found.mean
    )


@pytest.mark.parametrize("name", TRAINERS)
def test_the_signature_is_one(name):
    kind = callback_of(name)
    assert inspect.signature(kind) == inspect.signature(PosteriorKeeper)
    with pytest.raises(SettingError, match="unexpected keyword argument 'every_n_evaluations'"):
        kind(every_n_evaluations=2)


@pytest.mark.parametrize("name", TRAINERS)
def test_attributes_are_one(name):
    common = set(vars(PosteriorKeeper(n_data=5)))
    own = {key for key in vars(callback_of(name)(n_data=5)) if not key.startswith("_")}
    assert own - {"trainer"} == {key for key in common if not key.startswith("_")}
