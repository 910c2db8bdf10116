"""Folders that PEFT and the Trainer wrote are merged as the live posteriors are, and PEFT loads what comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.cli import app
from bayesadam.merging import merge
from cases import three_steps
from floats import close
from packages import lazy

transformers = lazy("transformers")
peft = lazy("peft")

N = 24


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tuned(folder: Path, seed: int, rank: int) -> tuple[Path, Any, torch.optim.Optimizer]:
    """An adapter trained for three steps, and the folder of its last checkpoint."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="gaussian"
    )
    model = peft.get_peft_model(base(), config)
    tokens = torch.randint(0, 11, (N, 6), generator=torch.Generator().manual_seed(seed))
    trainer = transformers.Trainer(
        model, three_steps(folder), train_dataset=[{"input_ids": x, "labels": x} for x in tokens]
    )
    trainer.train()
    base().config.save_pretrained(folder)
    return folder / "checkpoint-3", model, trainer.optimizer


def changes(model: Any) -> dict[str, torch.Tensor]:
    """What the adapter adds to every weight."""
    return {
        name: module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@pytest.mark.filterwarnings("default:.*was trained for 3 steps")
@pytest.mark.parametrize("ranks", [pytest.param((2, 2), marks=pytest.mark.slow), (2, 3)])
def test_folders_give_what_live_posteriors_give(tmp_path, ranks):
    found = [tuned(tmp_path / f"run{seed}", seed, rank) for seed, rank in enumerate(ranks)]
    live = merge([ba.Posterior.from_optimizer(m, o, N, prior_precision=1.0) for _, m, o in found])
    expected = found[-1][1]
    expected.load_state_dict(live)

    out = tmp_path / "merged"
    shutil.copytree(found[-1][0], out, ignore=shutil.ignore_patterns("optimizer.pt", "adapter_model.*"))
    paths = [str(path) for path, _, _ in found]
    with pytest.warns(ba.errors.BayesAdamWarning, match="trained for 3 steps"):
        done = CliRunner().invoke(app, ["merge", *paths, "-o", str(out / "adapter_model.safetensors")])
    assert done.exit_code == 0, done.output
    assert "model 2" in done.output

    loaded = changes(peft.PeftModel.from_pretrained(base(), out))
    assert loaded
    for name, change in changes(expected).items():
        assert bool(change.any())
        assert close(loaded[name], change, atol=1e-6), name
