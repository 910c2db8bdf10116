"""A state read in slices is the state read whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayesadam.errors import StateError
from bayesadam.readers import check_entries, match_optimizers, pieces, read_entry
from cases import train

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "centred": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
}


def entries(optimizer: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    train(model, chosen)
    return match_optimizers(model, chosen)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_slices_together_are_the_whole(optimizer, size):
    for entry in entries(optimizer).entries:
        found = list(pieces(entry, size))
        whole = optimizer == "adafactor" or entry.parameter.numel() <= size
        assert len(found) == (1 if whole else -(-entry.parameter.numel() // size))
        extremes, v = read_entry(entry)
        assert torch.equal(torch.cat([read_entry(piece)[1].reshape(-1) for piece in found]), v.reshape(-1))
        assert torch.equal(torch.cat([piece.parameter.reshape(-1) for piece in found]), entry.parameter.reshape(-1))
        lows, highs = torch.stack([read_entry(piece)[0] for piece in found]).unbind(dim=1)
        assert torch.equal(torch.stack([lows.min(), highs.max()]), extremes)


def test_a_bad_value_in_any_slice_is_refused():
    match = entries("adam")
    check_entries(match, 4)
    match.entries[0].state["exp_avg_sq"].view(-1)[17] = float("nan")
    with pytest.raises(StateError, match=r"'0\.weight'"):
        check_entries(match, 4)
