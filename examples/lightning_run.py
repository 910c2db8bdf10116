"""A regression trained by Lightning, with intervals at its end: `python examples/lightning_run.py`."""

import logging
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam.trainers.lightning import PosteriorCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
x = torch.rand(900, 3) * 4 - 2
y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:] + 0.2 * torch.randn(900, 1)
train = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=50, shuffle=True)
held_out = DataLoader(TensorDataset(x[500:700], y[500:700]), batch_size=100)
x_test, y_test = x[700:], y[700:]


class Module(LightningModule):
    """Nothing in it knows of a posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("validation_mse", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=1e-3)


with tempfile.TemporaryDirectory() as folder:
    callback = PosteriorCallback(likelihood="regression", path=Path(folder) / "posterior.safetensors")
    trainer = Trainer(
        max_epochs=30, accelerator="cpu", callbacks=[callback], default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, train, held_out)
    posterior = ba.Posterior.load(Path(folder) / "posterior.safetensors", module)

posterior = posterior.tune(held_out)
net = ba.calibrate(posterior, held_out)
p, q = posterior.predict(x_test), net(x_test)
low, high = q.interval(0.9)
print(f"noise: estimated standard deviation {posterior.noise_variance.sqrt().item():.3f}, made with 0.200")
print(f"RMSE {ba.scores.rmse(p.mean, y_test):.3f}, NLL {-p.log_prob(y_test).mean():.3f}")
print(f"90 % intervals hold {((y_test > low) & (y_test < high)).float().mean():.3f} of the test targets")
far = posterior.predict(x_test * 3)
print(
    f"standard deviation of the function: {p.f_variance.sqrt().mean():.3f} in the data, "
    f"{far.f_variance.sqrt().mean():.3f} outside"
)
