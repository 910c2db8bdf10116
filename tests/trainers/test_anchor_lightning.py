"""The anchor of Lightning's callback: attached for the training, in its checkpoints, and gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

import bayesadam as ba  # noqa: E402
from bayesadam.anchoring import anchor  # noqa: E402
from bayesadam.errors import MatchError  # noqa: E402
from bayesadam.trainers.lightning import PosteriorCallback  # noqa: E402
from cases import mlp  # noqa: E402
from floats import assert_close  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers", "ignore:The number of training batches"
)
N = 48


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(2, 6, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def loader(seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (N,), generator=generator)), batch_size=8)


def fitted(folder: Path, module: Any, seed: int, epochs: int, checkpoint: Any = None, **options: Any) -> Any:
    callback = PosteriorCallback(**options)
    kept = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    run = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback, kept],
    )  # fmt: skip
    run.fit(module, loader(seed), ckpt_path=checkpoint)
    return run, callback


def first(folder: Path) -> tuple[Module, ba.Posterior]:
    module = Module()
    _, callback = fitted(folder, module, 0, 2, prior_precision=1.0, power=1.0, batch_size=8)
    return module, callback.posterior


def test_the_callback_anchors_as_a_loop_by_hand_does(tmp_path):
    module, before = first(tmp_path)
    twin = Module()
    twin.load_state_dict(module.state_dict())
    run, callback = fitted(tmp_path, module, 1, 3, anchor=before, anchor_strength=50.0)
    assert not run.optimizers[0]._optimizer_step_post_hooks
    optimizer = twin.configure_optimizers()
    with anchor(optimizer, before, strength=50.0, n_data=N, model=twin):
        for _ in range(3):
            for batch in loader(1):
                optimizer.zero_grad()
                twin.training_step(batch, 0).backward()
                optimizer.step()
    for name, value in module.state_dict().items():
        assert_close(value, twin.state_dict()[name], rtol=1e-6, atol=1e-7)
    # What was read is of the new data alone.
    assert callback.posterior.n_data == N
    assert (before + callback.posterior).n_data == 2 * N


def test_a_resumed_run_goes_on_with_the_anchor_of_its_checkpoint(tmp_path):
    module, before = first(tmp_path / "first")
    start = {name: value.clone() for name, value in module.state_dict().items()}
    results = []
    for stops in ((3,), (1, 3)):
        checkpoint = None
        for number, epochs in enumerate(stops):
            folder = tmp_path / f"{len(stops)}-{number}"
            module.load_state_dict(start)
            # 6 steps an epoch, and a pull after every 10: some steps are pending where it stops.
            strength = 30.0 if number == 0 else 1.0
            fitted(folder, module, 1, epochs, checkpoint, anchor=before, anchor_strength=strength)
            checkpoint = str(folder / "last.ckpt")
        results.append({name: value.clone() for name, value in module.state_dict().items()})
    for name, value in results[0].items():
        assert_close(value, results[1][name], rtol=1e-6, atol=1e-7)
    # The weights and the moments in it are found in spite of the posterior beside them.
    assert ba.Posterior.from_checkpoint(checkpoint, module).n_data == N


def test_an_anchor_that_fits_nothing_stops_before_the_first_step(tmp_path):
    _, before = first(tmp_path)
    other = Module()
    other.net = mlp(2, 7, 3)
    with pytest.raises(MatchError, match=r"'net\.2\.weight' has shape"):
        fitted(tmp_path, other, 1, 1, anchor=before)
