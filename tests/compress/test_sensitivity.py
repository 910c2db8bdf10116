"""How much outputs depend on units, by gradients without labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress.sensitivity import sensitivities
from bayesadam.errors import BayesAdamWarning
from bayesadam.predict.matrices import matrices_of
from bayesadam.predict.network import Call
from cases import mlp
from compress.cases_compress import posterior_of
from floats import assert_close


def of(model: nn.Module, batches: list[Tensor], forward=None) -> dict[str, Tensor]:
    listed = {matrix.name: matrix for matrices in matrices_of(model).values() for matrix in matrices}
    return sensitivities(Call(model, forward), batches, listed)


def test_it_is_the_square_of_gradients_of_outputs_with_random_signs() -> None:
    model, batches = mlp(5, 7, 3), [torch.randn(40, 5), torch.randn(8, 5)]
    first, second = model[0], model[2]
    draw, expected = torch.Generator().manual_seed(0), [torch.zeros(7), torch.zeros(3)]
    for x in [part for batch in batches for part in batch.split(32)]:
        signs = torch.randint(2, (len(x), 3), generator=draw).float() * 2 - 1
        h = model[1](first(x)).detach()
        slope = torch.autograd.functional.jvp(model[1], first(x), torch.ones_like(h))[1]
        for total, g in zip(expected, ((signs @ second.weight * slope).T @ x, signs.T @ h), strict=True):
            total += g.detach().square().sum(dim=1)
    found = of(model, batches)
    for name, want in zip(("0.weight", "2.weight"), expected, strict=True):
        assert_close(found[name].flatten(), want, rtol=1e-4)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_units_that_nothing_follows_do_not_matter() -> None:
    model = mlp(5, 7, 3)
    with torch.no_grad():
        model[2].weight[:, :4] = 0
    assert (of(model, [torch.randn(40, 5)])["0.weight"].flatten() > 0).tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m(x).argmax(dim=1),
        lambda m, x: m(x).detach(),
        lambda m, x: torch.from_numpy(m(x).numpy()),
    ],
)
def test_outputs_without_gradients_are_told(forward) -> None:
    with pytest.warns(BayesAdamWarning, match="ranked by the dense network alone"):
        assert of(mlp(5, 7, 3), [torch.randn(40, 5)], forward) == {}


def test_pruning_goes_on_without_them_and_rankings_without_moments_do_not_ask() -> None:
    dense, x = posterior_of(mlp(5, 7, 3)), torch.randn(40, 5)
    how = {"inputs": x, "forward": lambda m, x: m(x).detach()}
    with pytest.warns(BayesAdamWarning, match="ranked by the dense network alone") as told:
        small = ba.prune(dense, 0.5, **how)
    assert len(told) == 1
    for each in (small, ba.prune(dense, 0.5, ranking="magnitude", **how)):
        assert sum(int((each.model[i].weight == 0).sum()) for i in (0, 2)) == 28
