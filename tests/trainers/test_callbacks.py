"""The trainers' callbacks: the posterior of the live optimisers at the end, saved, logged, tracked and resumed.

What they share is tested on a trainer of three lines; the real ones, whose imports take longer than all else here, are
among the slow tests.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, FileError, MatchError, SettingError
from bayesadam.readers import read_checkpoint, read_optimizer
from bayesadam.readers.tracking import COUNT
from bayesadam.trainers.keeper import PosteriorKeeper, count_examples
from floats import approx, assert_close

N, BATCH = 48, 8
quiet = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers", "ignore:The number of training batches"
)


class Network(nn.Module):
    """As a Trainer wants it: returns its loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(18, 20), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)],
    "muon": muon,
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)],
}


def rows() -> list[dict[str, Tensor]]:
    x = torch.randn(N, 18, generator=torch.Generator().manual_seed(0))
    return [{"x": each, "labels": (each[0] > 0).long() + (each[1] > 0).long()} for each in x]


def loader(data: Any = None) -> DataLoader:
    return DataLoader(rows() if data is None else data, batch_size=BATCH)


def same(found: ba.Posterior, expected: ba.Posterior) -> None:
    assert list(found.mode) == list(expected.mode)
    for name in expected.mode:
        assert torch.equal(found.mode[name], expected.mode[name])
        assert torch.equal(found.variance[name], expected.variance[name])


def fit(
    keeper: PosteriorKeeper, name: str, path: Path | None, data: Any = None
) -> tuple[Network, list[Optimizer], dict]:
    """A trainer with the two events that every trainer has."""
    model, numbers = Network(), {}
    optimizers = OPTIMIZERS[name](model)
    keeper._begin(loader(data), optimizers)
    for batch in loader():
        model.zero_grad()
        model(**batch)["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
    keeper._finish(lambda **options: ba.Posterior.from_optimizer(model, optimizers, **options), path, numbers.update)
    return model, optimizers, numbers


def test_the_posterior_is_kept_saved_and_logged(tmp_path):
    keeper = PosteriorKeeper(likelihood="classification", prior_precision=2.0)
    with pytest.raises(MatchError, match="no posterior yet"):
        _ = keeper.posterior
    model, optimizers, numbers = fit(keeper, "adamw", tmp_path / "deep" / "p.safetensors")
    expected = ba.Posterior.from_optimizer(model, optimizers, N, likelihood="classification", prior_precision=2.0)
    same(keeper.posterior, expected)
    same(ba.Posterior.load(tmp_path / "deep" / "p.safetensors", model), expected)
    assert keeper.posterior.likelihood == "classification"
    snr = torch.cat([values.flatten() for values in expected.snr().values()])
    assert numbers["posterior/snr_median"] == approx(float(snr.median()))
    assert numbers["posterior/snr_below_1"] == approx(float((snr < 1).double().mean()))


@pytest.mark.parametrize("track", ["factored", {"what": "diagonal", "every": 2, "batch_size": BATCH}])
def test_what_keeps_no_moment_is_tracked(track):
    keeper = PosteriorKeeper(track=track)
    model, optimizers, _ = fit(keeper, "muon", None)
    assert set(read_optimizer(model, optimizers).reader.values()) == {"tracked", "adamw"}
    assert keeper.posterior.origin.tracked.startswith("2 parameters, by ")
    # The hooks are gone.
    ba.track(optimizers)


def test_a_failure_at_the_end_leaves_the_run_whole(tmp_path):
    keeper = PosteriorKeeper()
    with pytest.warns(BayesAdamWarning, match=r"no posterior: MatchError: .*keeps no second moment"):
        fit(keeper, "momentum", tmp_path / "p.safetensors")
    with pytest.raises(MatchError, match="keeps no second moment"):
        _ = keeper.posterior


def test_what_would_fail_at_the_end_is_refused_at_the_start():
    with pytest.raises(SettingError, match=r"those of Posterior\.from_optimizer"):
        PosteriorKeeper(calibrate=True)
    wrong: Any = PosteriorKeeper(track="8")  # type: ignore[arg-type]
    wrong = ((PosteriorKeeper(power=1), "batch_size"), (PosteriorKeeper(-1), "n_data"), (wrong, "what must be one of"))
    for keeper, message in wrong:
        with pytest.raises(SettingError, match=message):
            fit(keeper, "adamw", None)
    with pytest.raises(SettingError, match=r"pass PosteriorCallback\(n_data=\.\.\.\)"):
        fit(PosteriorKeeper(), "adamw", None, Endless())


def test_counting_examples():
    assert count_examples(loader()) == N
    assert count_examples(DataLoader(rows(), sampler=SubsetRandomSampler(range(5)))) == 5
    assert count_examples(loader(Endless())) is None
    assert count_examples([loader(), loader()]) is None


def lightning_run(folder: Path, name: str = "adamw", epochs: int = 2, resumed: str | None = None, **given: Any) -> Any:
    library = given.pop("library", None) or pytest.importorskip("lightning.pytorch")
    from bayesadam.trainers.lightning import PosteriorCallback

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.automatic_optimization = Network(), name != "muon"

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

    settings = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"default_root_dir": folder, "max_epochs": epochs, "log_every_n_steps": 1} | given.pop("settings", {})
    callback = PosteriorCallback(**given)
    trainer = library.Trainer(callbacks=[callback], **settings)
    trainer.fit(Module(), loader(), ckpt_path=resumed)
    return trainer, callback


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package, tmp_path):
    library = pytest.importorskip(package)
    logger = library.loggers.CSVLogger(tmp_path)
    trainer, callback = lightning_run(tmp_path, library=library, settings={"logger": logger})
    module = trainer.lightning_module
    expected = ba.Posterior.from_optimizer(module, trainer.optimizers, N)
    same(callback.posterior, expected)
    same(ba.Posterior.load(Path(trainer.log_dir) / "posterior.safetensors", module), expected)
    assert "posterior/snr_median" in (Path(logger.log_dir) / "metrics.csv").read_text()
    # A checkpoint of it, alone and with the network inside the module.
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    read = read_checkpoint(tmp_path / "last.ckpt")
    assert (read.recorded.n_data, read.recorded.step) == (N, 2 * N // BATCH)
    inner = ba.Posterior.from_checkpoint(tmp_path / "last.ckpt", Network())
    assert_close(inner.variance["layers.0.weight"], expected.variance["network.layers.0.weight"])


@quiet
@pytest.mark.slow
def test_lightning_writes_nothing_in_a_dry_run_and_asks_which_of_two_optimisers(tmp_path):
    _, callback = lightning_run(tmp_path, settings={"fast_dev_run": True, "logger": False})
    assert callback.posterior.n_data == N
    assert not list(tmp_path.rglob("posterior.safetensors"))
    trainer, _ = lightning_run(tmp_path, "muon", track="factored", settings={"logger": False})
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(FileError, match=r"optimizer_key='optimizer_states\.0'"):
        read_checkpoint(tmp_path / "last.ckpt")


def huggingface_run(folder: Path, name: str = "adamw", resumed: Any = None, **given: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bayesadam.trainers.huggingface import PosteriorCallback

    settings = {"per_device_train_batch_size": BATCH, "max_steps": 12, "logging_strategy": "no", "use_cpu": True}
    settings |= {"report_to": [], "disable_tqdm": True, "save_steps": 6}
    arguments = transformers.TrainingArguments(str(folder), **{**settings, **given.pop("settings", {})})
    model = Network()
    (optimizer,) = OPTIMIZERS[name](model)
    callback = PosteriorCallback(**given)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(), callbacks=[callback], optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=resumed)
    return trainer, callback


@pytest.mark.slow
def test_transformers(tmp_path):
    trainer, callback = huggingface_run(tmp_path)
    expected = ba.Posterior.from_optimizer(trainer.model, trainer.optimizer, N)
    same(callback.posterior, expected)
    same(ba.Posterior.load(tmp_path / "posterior.safetensors", trainer.model), expected)
    (logged,) = [line for line in trainer.state.log_history if "posterior/snr_median" in line]
    assert logged["step"] == 12
    written = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert written["stateful_callbacks"]["bayesadam"] == {"n_data": N}
    found = ba.Posterior.from_checkpoint(tmp_path / "checkpoint-12", Network())
    assert_close(dict(found.variance), dict(expected.variance))


@pytest.mark.slow
def test_the_best_model_comes_with_the_state_that_its_optimiser_had(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 6, "metric_for_best_model": "loss"}
    # The first is the best: the loss is to be large.
    trainer, callback = huggingface_run(tmp_path, settings={**best, "greater_is_better": True})
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert set(callback.posterior.origin.steps) == {6}
    saved = ba.Posterior.from_checkpoint(tmp_path / "checkpoint-6", Network(), n_data=N)
    assert_close(dict(callback.posterior.variance), dict(saved.variance))
    with pytest.raises(SettingError, match="save_only_model=False"):
        huggingface_run(tmp_path / "b", settings={**best, "save_only_model": True})


@pytest.mark.slow
def test_transformers_resumes_what_is_tracked(tmp_path):
    given = {"name": "momentum", "track": {"what": "factored", "every": 2}}
    whole, _ = huggingface_run(tmp_path, **given)
    second, _ = huggingface_run(tmp_path, resumed=str(tmp_path / "checkpoint-6"), **given)
    found, expected = (trainer.optimizer.state_dict() for trainer in (second, whole))
    assert found["param_groups"] == expected["param_groups"]
    for key, state in expected["state"].items():
        assert state[COUNT] == 6
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][key][name]), torch.as_tensor(value)), name
