"""Weights of one moment of training with the optimiser's state of another, and batches counted for examples."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning
from bayesadam.inspecting import diagnose_checkpoint
from cases import mlp, train

# --- weights of one epoch with the state of another -------------------------------------------------------------------


def saved(folder: Path, steps: int = 30) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(3, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    train(model, optimizer, steps=steps)
    folder.mkdir(parents=True, exist_ok=True)
    return model, optimizer


def read(path: Path, optimizer_path: Path | None, model: nn.Module) -> ba.Posterior:
    return ba.Posterior.from_checkpoint(path, model, 100, optimizer_path=optimizer_path)


@pytest.mark.parametrize("epoch", [3, 4])
def test_two_files_by_what_they_say(epoch, tmp_path):
    model, optimizer = saved(tmp_path)
    torch.save({"model": model.state_dict(), "epoch": 4}, tmp_path / "best.pt")
    torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, tmp_path / "last.pt")
    if epoch == 4:
        read(tmp_path / "best.pt", tmp_path / "last.pt", model)
        return
    with pytest.warns(BayesAdamWarning, match="another moment.*best.pt says epoch 4, .*last.pt epoch 3"):
        read(tmp_path / "best.pt", tmp_path / "last.pt", model)
    with pytest.warns(BayesAdamWarning, match="another moment"):
        ba.GaussianWeights.open(tmp_path / "best.pt", 100, optimizer_path=tmp_path / "last.pt")


@pytest.mark.parametrize(("counted", "apart"), [(30, False), (45, False), (60, True), (20, True)])
def test_the_folder_of_a_trainer_by_its_steps(counted, apart, tmp_path):
    model, optimizer = saved(tmp_path)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": counted, "epoch": 1.0}))
    if not apart:
        read(tmp_path, None, model)
        return
    with pytest.warns(BayesAdamWarning, match=f"counts {counted} steps, the optimiser 30"):
        read(tmp_path, None, model)
    assert "other-epoch" in diagnose_checkpoint(tmp_path).codes()


# --- what counts examples, and what comes first ---------------------------------------------------------------------


def test_the_number_of_batches_for_that_of_examples_is_told(tmp_path):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=3 * 117)
    file = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    told = r"^give n_data= the number of training examples.* the 351 steps .* 3 times 117$"
    with pytest.warns(BayesAdamWarning, match=told):
        ba.Posterior.from_optimizer(model, optimizer, n_data=117, likelihood="classification")
    with pytest.warns(BayesAdamWarning, match=told):
        ba.Posterior.from_optimizer(model, optimizer, n_data=117, batch_size=8, likelihood="classification")
    with pytest.warns(BayesAdamWarning, match=told):
        ba.GaussianWeights.open(file, n_data=117)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n, batch_size in ((936, None), (118, None), (117, 1), (13, None)):
            ba.Posterior.from_optimizer(model, optimizer, n, batch_size=batch_size, likelihood="classification")
