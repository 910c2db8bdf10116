"""Lightning: its checkpoints written by a real Trainer, and the callback beside its own optimisers and loggers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

import bayesadam as ba  # noqa: E402
from bayesadam.errors import NoPosteriorWarning, SettingError, StateError  # noqa: E402
from bayesadam.readers import read_checkpoint, read_curvature  # noqa: E402
from bayesadam.trainers.keeper import count_examples  # noqa: E402
from bayesadam.trainers.lightning import PosteriorCallback  # noqa: E402
from cases import mlp  # noqa: E402
from floats import approx  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches",
)
N, EPOCHS = 48, 3


class Classifier(pl.LightningModule):
    """A network under a name of its own, as users write them, with a buffer and an argument in the checkpoint."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(2, width, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        self.seen += 1
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters()), torch.optim.RMSprop(self.net[2].parameters())


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=generator)
    angle = 2 * math.pi * y / 3
    x = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.7 * torch.randn(count, 2, generator=generator)
    return TensorDataset(x, y)


def loaders() -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(0)
    return (
        DataLoader(data(N, 0), batch_size=8, shuffle=True, generator=generator),
        DataLoader(data(60, 1), batch_size=16),
    )


def trainer(folder: Path, *callbacks: Any, library: Any = pl, **options: Any) -> Any:
    settings = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": library.loggers.TensorBoardLogger(folder),
        "log_every_n_steps": 1,
    }
    return library.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**settings, **options})


def fitted(folder: Path, *callbacks: Any, module: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Classifier() if module is None else module
    run = trainer(folder, *callbacks, **options)
    run.fit(module, *loaders())
    return run, module


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def equal(a: ba.Posterior, b: ba.Posterior) -> bool:
    return list(a.mode) == list(b.mode) and all(
        torch.equal(a.mode[name], b.mode[name]) and torch.equal(a.variance[name], b.variance[name]) for name in a.mode
    )


# --- the callback ---------------------------------------------------------------------------------------------------


def test_the_posterior_is_that_of_the_live_optimiser_saved_and_logged(tmp_path):
    callback = PosteriorCallback()
    run, module = fitted(tmp_path, callback)
    expected = ba.Posterior.from_optimizer(module, run.optimizers, N)
    assert callback.posterior.n_data == callback.n_data == N
    assert equal(callback.posterior, expected)
    assert equal(ba.Posterior.load(Path(run.log_dir) / "posterior.safetensors", module), expected)
    shown = scalars(run.log_dir)
    snr = expected.snr()
    every = torch.cat([values.flatten() for values in snr.values()])
    last = N // 8 * EPOCHS
    for tag, value in {
        "snr_median": every.median(),
        "snr_below_1": (every < 1).double().mean(),
    }.items():
        assert shown[f"posterior/{tag}"] == [(last, approx(float(value), rel=1e-5))]


def test_several_optimisers(tmp_path):
    callback = PosteriorCallback()
    run, module = fitted(tmp_path, callback, module=TwoOptimizers())
    assert set(callback.posterior.mode) == {name for name, _ in module.named_parameters()}
    assert equal(callback.posterior, ba.Posterior.from_optimizer(module, run.optimizers, N))


def test_resumed_training_gives_the_posterior_of_all_of_it(tmp_path):
    first = PosteriorCallback()
    run, _ = fitted(tmp_path, first, max_epochs=2)
    with pytest.raises(StateError, match="when training ends"):
        _ = PosteriorCallback().posterior
    resumed, module = PosteriorCallback(), Classifier()
    again = trainer(tmp_path / "again", resumed, max_epochs=4)
    again.fit(module, *loaders(), ckpt_path=run.checkpoint_callback.best_model_path)
    assert equal(resumed.posterior, ba.Posterior.from_optimizer(module, again.optimizers, N))
    (optimizer,) = again.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {4 * N // 8}


def test_a_dry_run_writes_nothing(tmp_path):
    callback = PosteriorCallback(path=tmp_path / "dry.safetensors")
    fitted(tmp_path, callback, fast_dev_run=True)
    assert callback.posterior.n_data == N
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_the_older_package_serves_too(tmp_path):
    older = pytest.importorskip("pytorch_lightning")
    callback = PosteriorCallback()

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2, 4, 3)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    module, run = Older(), trainer(tmp_path, callback, library=older, max_epochs=1)
    run.fit(module, loaders()[0])
    assert equal(callback.posterior, ba.Posterior.from_optimizer(module, run.optimizers, N))


class Told(pl.Callback):
    """Every rank writes down what its posterior is; after the callback in the trainer's list."""

    def __init__(self, folder: Path, watched: PosteriorCallback) -> None:
        self.folder, self.watched = folder, watched

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watched.posterior.save(self.folder / f"rank{trainer.global_rank}.safetensors")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used CUDA cannot be forked")
def test_two_ranks_have_one_posterior_and_one_file(tmp_path):
    callback = PosteriorCallback(calibrate=True, likelihood="classification")
    _, module = fitted(
        tmp_path,
        callback,
        Told(tmp_path, callback),
        strategy="ddp_fork",
        devices=2,
        max_epochs=2,
        use_distributed_sampler=True,
    )
    first, second = (ba.Posterior.load(tmp_path / f"rank{rank}.safetensors", module) for rank in (0, 1))
    assert first.n_data == N
    assert first.temperature == second.temperature != 1.0
    assert equal(first, second)
    (path,) = tmp_path.glob("lightning_logs/**/posterior.safetensors")
    assert equal(first, ba.Posterior.load(path, module))
    assert [step for step, _ in scalars(path.parent)["posterior/snr_median"]] == [2 * N // 16]


# --- what is refused, and when --------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.randn(2), torch.tensor(0)


def test_n_that_cannot_be_told_is_asked_for_before_the_first_step(tmp_path):
    for options, loader in (
        ({"limit_train_batches": 2}, DataLoader(Endless(), batch_size=4)),
        ({"overfit_batches": 1}, loaders()[0]),
    ):
        module = Classifier()
        with pytest.raises(SettingError, match=r"PosteriorCallback\(n_data="):
            trainer(tmp_path, PosteriorCallback(), **options).fit(module, loader)
        assert module.seen == 0
    callback = PosteriorCallback(n_data=500)
    trainer(tmp_path, callback, limit_train_batches=2, max_epochs=1).fit(
        Classifier(), DataLoader(Endless(), batch_size=4)
    )
    assert callback.posterior.n_data == 500


def test_what_would_fail_at_the_end_is_refused_at_the_start(tmp_path):
    with pytest.raises(SettingError, match="needs likelihood="):
        PosteriorCallback(calibrate=True)
    with pytest.raises(SettingError, match=r"'prior'.*Posterior\.from_optimizer"):
        PosteriorCallback(prior=1.0)
    module = Classifier()
    callback = PosteriorCallback(calibrate=True, likelihood="classification")
    with pytest.raises(SettingError, match="held_out="):
        trainer(tmp_path, callback).fit(module, loaders()[0])
    with pytest.raises(SettingError, match="power=1 needs batch_size"):
        trainer(tmp_path, PosteriorCallback(n_data=1000, power=1)).fit(module, loaders()[0])
    assert module.seen == 0


def test_a_failure_at_the_end_leaves_the_run_whole(tmp_path):
    def forward(model: nn.Module, x: Any) -> Tensor:
        raise RuntimeError("no such luck")

    callback = PosteriorCallback(calibrate=True, likelihood="classification", forward=forward)
    with pytest.warns(NoPosteriorWarning, match=r"RuntimeError: no such luck; as it was before calibration, it is in"):
        run, module = fitted(tmp_path, callback, max_epochs=1)
    assert run.state.finished
    assert Path(run.checkpoint_callback.best_model_path).is_file()
    with pytest.raises(RuntimeError, match="no such luck"):
        _ = callback.posterior
    raw = ba.Posterior.from_optimizer(module, run.optimizers, N)
    assert equal(ba.Posterior.load(Path(run.log_dir) / "posterior.safetensors", module), raw)


def test_counting_examples():
    dataset = data(10, 0)
    loader = DataLoader(dataset, batch_size=4, drop_last=True)
    assert count_examples(loader) == 10
    assert count_examples(DataLoader(dataset, sampler=SubsetRandomSampler(range(3)))) == 3
    for unknown in (None, [loader, loader], DataLoader(Endless()), [torch.zeros(3)], DataLoader(data(0, 0))):
        assert count_examples(unknown) is None


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A trainer that is done, its module, and the last checkpoint."""
    folder = tmp_path_factory.mktemp("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        done, module = fitted(folder, PosteriorCallback())
    return done, module, Path(done.checkpoint_callback.best_model_path)


def test_a_checkpoint_is_read_with_its_record(run):
    done, module, path = run
    found = read_checkpoint(path)
    assert found.recorded.step == done.global_step == N // 8 * EPOCHS
    assert found.recorded.epoch == EPOCHS - 1
    assert found.recorded.n_data == N
    assert set(found.weights) == set(module.state_dict())
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in module.state_dict().items())
    assert ba.readers.identify_reader(found.optimizer, found.recorded.optimizer)


def test_the_posterior_of_a_checkpoint_is_that_of_the_live_optimiser(run):
    done, module, path = run
    live = ba.Posterior.from_optimizer(module, done.optimizers, N)
    fresh = Classifier()
    # N is in the file, by the callback.
    assert equal(ba.Posterior.from_checkpoint(path, fresh), live)
    assert torch.equal(fresh.net[0].weight, module.net[0].weight)
    assert fresh.seen == module.seen
    # Without the model, too.
    curvature = read_curvature(read_checkpoint(path))
    assert all(torch.equal(curvature.second_moment[name], v) for name, v in live.structure.second_moment.items())
