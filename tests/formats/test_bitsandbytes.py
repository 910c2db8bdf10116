"""A saved 8-bit Adam of bitsandbytes gives the posterior of the live one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bayesadam as ba
from bayesadam.readers import read_checkpoint
from cases import mlp, train
from packages import lazy

bitsandbytes = lazy("bitsandbytes")


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "PagedAdamW8bit"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_the_file_as_from_the_optimiser(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(64, 64, 1)
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), weight_decay=0.01)
    train(model, optimizer, steps=5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    # The file has what it should: blocks of bytes for the large tensor, 32 bits for the small ones.
    states = read_checkpoint(tmp_path / "c.pt").optimizer["state"]
    kept = [{**state, **state.get("__bnb_optimizer_quant_state__", {})}["state2"].dtype for state in states.values()]
    assert kept == [torch.uint8, torch.float32, torch.float32, torch.float32]
    expected = ba.Posterior.from_optimizer(model, optimizer, n_data=100)
    torch.manual_seed(1)
    found = ba.Posterior.from_checkpoint(tmp_path / "c.pt", mlp(64, 64, 1), n_data=100)
    assert list(found.mean) == list(expected.mean)
    for parameter, mean in expected.mean.items():
        assert torch.equal(found.mean[parameter], mean)
        assert torch.equal(found.variance[parameter], expected.variance[parameter])
