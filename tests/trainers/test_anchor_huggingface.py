"""The anchor of the callback for transformers' Trainer: attached for the training, in its checkpoints, and gone
afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import bayesadam as ba  # noqa: E402
from bayesadam.trainers.huggingface import PosteriorCallback  # noqa: E402
from cases import mlp  # noqa: E402
from floats import assert_close  # noqa: E402

N = 40


class Classifier(nn.Module):
    """What the Trainer needs of a model: a call that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(3, 4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": x, "labels": (x[seed] > 0).long()} for x in torch.randn(N, 3, generator=generator)]


def run(folder: Path, model: nn.Module, seed: int, steps: int, resume: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "max_steps": steps, "learning_rate": 2e-2,
        "lr_scheduler_type": "constant", "report_to": "none", "save_steps": 6, "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "remove_unused_columns": False, "logging_strategy": "no",
    }  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(**settings), train_dataset=rows(seed)
    )
    callback = PosteriorCallback(**options)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


def test_an_anchor_holds_and_survives_a_checkpoint(tmp_path):
    model = Classifier()
    _, callback = run(tmp_path / "first", model, 0, 20, prior_precision=1.0, power=1.0, batch_size=8)
    before = callback.posterior
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends = {}
    for name, strength in (("free", None), ("held", 100.0)):
        model.load_state_dict(start)
        anchored = {} if strength is None else {"anchor": before, "anchor_strength": strength}
        trainer, callback = run(tmp_path / name, model, 1, 14, **anchored)
        assert not getattr(trainer.optimizer, "optimizer", trainer.optimizer)._optimizer_step_post_hooks
        ends[name] = {key: value.clone() for key, value in model.state_dict().items()}
    assert (before + callback.posterior).n_data == 2 * N
    away = {name: sum(float((end[key] - start[key]).square().sum()) for key in start) for name, end in ends.items()}
    assert away["held"] < 0.7 * away["free"]
    assert not (tmp_path / "free" / "checkpoint-6" / "anchor.pt").exists()
    # From step 6, of which all are pending; the strength is that of the checkpoint.
    model.load_state_dict(start)
    run(tmp_path / "held", model, 1, 14, str(tmp_path / "held" / "checkpoint-6"), anchor=before, anchor_strength=1e-3)
    for key, value in model.state_dict().items():
        assert_close(value, ends["held"][key], rtol=1e-5, atol=1e-6)
    assert ba.Posterior.from_checkpoint(tmp_path / "held" / "checkpoint-6", model, N).n_data == N
