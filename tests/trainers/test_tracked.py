"""What is tracked survives trainers: a run that was stopped and resumed ends with the bits of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import bayesadam as ba
from bayesadam.errors import SettingError
from bayesadam.readers.tracking import COUNT, TENSORS
from cases import quick_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers", "ignore:The number of training batches"
)
N, BATCH = 48, 8
WAYS: dict[str, Any] = {
    "8": {"every": 2},
    "32": {"every": 2, "bits": 32},
    "factored": {"what": "factored", "every": 2},
    "kronecker": {"what": "kronecker", "every": 2},
}


class Network(nn.Module):
    """As a Trainer wants it: returns its loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(18, 20), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)],
    "muon": muon,
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
}
CASES = [
    ("momentum", "8"),
    ("momentum", "32"),
    ("muon", "8"),
    ("muon", "factored"),
    ("adamw", "8"),
    ("adamw", "kronecker"),
]


def rows() -> list[dict[str, Tensor]]:
    x = torch.randn(N, 18, generator=torch.Generator().manual_seed(0))
    return [{"x": each, "labels": (each[0] > 0).long() + (each[1] > 0).long()} for each in x]


def loader() -> DataLoader:
    return DataLoader(rows(), batch_size=BATCH)  # type: ignore[arg-type]


def assert_same(ours: list[Optimizer], theirs: list[Optimizer], gradients: int) -> None:
    """All entries of both, and that many gradients were tracked."""
    for one, other in zip(ours, theirs, strict=True):
        found, expected = one.state_dict(), other.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            assert state[COUNT] == gradients
            assert found["state"][key].keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(found["state"][key][name]), torch.as_tensor(value)), name
                assert name not in TENSORS or found["state"][key][name].dtype == torch.uint8


# --- Lightning ------------------------------------------------------------------------------------------------------


def lightning_run(folder: Path, name: str, epochs: int, resumed: str | None = None, **options: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    from bayesadam.trainers.lightning import PosteriorCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.automatic_optimization = Network(), name != "muon"

        def forward(self, x: Tensor) -> Any:
            return self.network(x)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = self.network(**batch)["loss"]
            if not self.automatic_optimization:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.network)

    callback = PosteriorCallback(**options)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if name == "muon" else 0.1,
    )
    trainer.fit(Module(), loader(), ckpt_path=resumed, weights_only=True if resumed else None)
    return trainer, callback


@pytest.mark.parametrize(("name", "way"), CASES)
def test_lightning(name, way, tmp_path):
    options = {"track": WAYS[way], "prior_precision": 1.0}
    run, callback = lightning_run(tmp_path / "whole", name, 3, **options)
    first, _ = lightning_run(tmp_path / "first", name, 1, **options)
    second, resumed = lightning_run(tmp_path / "second", name, 3, first.checkpoint_callback.best_model_path, **options)
    assert_same(second.optimizers, run.optimizers, 9)
    assert resumed.posterior.origin.tracked == callback.posterior.origin.tracked
    assert resumed.posterior.origin.tracked.since == 0
    # Removed at the end: what was tracked stays.
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in second.optimizers)
    ba.track(second.optimizers)


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def huggingface_run(folder: Path, name: str, steps: int, resumed: str | None = None, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bayesadam.trainers.huggingface import PosteriorCallback

    callback = PosteriorCallback(**options)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": steps, "use_cpu": True,
        "report_to": "none", "save_strategy": "steps", "save_steps": 5, "disable_tqdm": True, "weight_decay": 0.0,
        "dataloader_pin_memory": False, "remove_unused_columns": False, "label_names": ["labels"], "max_grad_norm": 0.1,
        "lr_scheduler_type": "constant", "gradient_accumulation_steps": 2,
    }  # fmt: skip
    model = Network()
    if name == "muon":
        # One optimiser is all that a Trainer has.
        for layer in (model.layers[0], model.layers[2]):
            layer.bias.requires_grad_(False)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=rows(),
        callbacks=[callback],
        optimizers=(OPTIMIZERS[name](model)[0], None),
    )
    trainer.train(resume_from_checkpoint=resumed)
    return trainer, callback


@pytest.mark.parametrize("case", quick_of(CASES, ("momentum", "8"), ("muon", "factored")), ids="-".join)
def test_hugging_face(case, tmp_path):
    name, way = case
    options = {"track": WAYS[way], "prior_precision": 1.0}
    run, callback = huggingface_run(tmp_path / "whole", name, 9, **options)
    folder = str(tmp_path / "whole" / "checkpoint-5")
    second, resumed = huggingface_run(tmp_path / "second", name, 9, folder, **options)
    assert_same([second.optimizer.optimizer], [run.optimizer.optimizer], 5)
    assert resumed.posterior.origin.tracked == callback.posterior.origin.tracked
    assert not second.optimizer.optimizer._optimizer_step_pre_hooks
    saved = ba.Posterior.from_checkpoint(folder, Network(), N, prior_precision=1.0)
    assert saved.origin.tracked.gradients == (3, 3)


# --- Accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way"), CASES)
def test_accelerate(name, way, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def run(epochs: int, resumed: bool, after: bool = False) -> list[Optimizer]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Network()
        model, data, *optimizers = accelerator.prepare(model, loader(), *OPTIMIZERS[name](model))
        tracks = lambda: ba.track(optimizers, **WAYS[way])  # noqa: E731
        if not after:
            tracks()
        if resumed:
            accelerator.load_state(str(tmp_path / "saved"))
        if after:
            tracks()
        for batch in chain.from_iterable(data for _ in range(epochs)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        if epochs == 1:
            accelerator.save_state(str(tmp_path / "saved"))
        return [optimizer.optimizer for optimizer in optimizers]

    whole = run(3, resumed=False)
    run(1, resumed=False)
    for after in (False, True):
        assert_same(run(2, resumed=True, after=after), whole, 5)


# --- options --------------------------------------------------------------------------------------------------------


def test_a_word_will_do_and_what_is_wrong_is_refused_before_training(tmp_path):
    lightning = pytest.importorskip("bayesadam.trainers.lightning")
    _, callback = lightning_run(tmp_path, "momentum", 5, track="factored")
    assert callback.posterior.origin.tracked.every == 10
    # Of a short training each.
    assert callback.posterior.origin.tracked.gradients == (30, 30)
    for wrong, said in (("full", "what must be one of"), ({"evry": 3}, "evry"), ({"every": 0}, "every")):
        with pytest.raises(SettingError, match=said):
            lightning.PosteriorCallback(track=wrong)
    # B of the gradients that were tracked is that of the posterior.
    track = {"every": 1, "batch_size": BATCH}
    _, callback = lightning_run(tmp_path, "momentum", 1, track=track, power=1.0)
    assert callback.posterior.batch_size == BATCH


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

DEEPSPEED = """
import os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import deepspeed, torch
import torch.distributed as dist
from trainers.test_tracked import OPTIMIZERS, WAYS, Network, assert_same, loader
import bayesadam as ba

folder, name, way, stage = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo")
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": int(stage)}, "gradient_clipping": 0.1,
          "zero_allow_untested_optimizer": True}

def run(epochs, resumed=False):
    model = Network()
    for layer in (model.layers[0], model.layers[2]) if name == "muon" else ():
        layer.bias.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model)[0]
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    ba.track(optimizer, **WAYS[way])
    if resumed:
        engine.load_checkpoint(folder)
    for batch in (batch for _ in range(epochs) for batch in loader()):
        engine.backward(engine(**batch)["loss"])
        engine.step()
    if epochs == 1:
        engine.save_checkpoint(folder)
    return [optimizer]

whole = run(3)
run(1)
assert_same(run(2, resumed=True), whole, 9)
"""
