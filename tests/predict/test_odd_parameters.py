"""Sparse gradients, padding rows and posteriors of another type, in every structure and method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesadam as ba
from bayesadam.predict import linearised_draws, sampled
from cases import seeded
from floats import assert_close
from predict.cases_networks import Lambda, error_of, jacobian, posterior_of

every_structure = pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:the posterior has .* gradients behind it"),
]
IDS = torch.randint(7, (5, 4), generator=seeded(5)).index_fill(0, torch.tensor(0), 0)


def words(*, sparse: bool = False, bag: bool = False) -> nn.Module:
    """An embedding with a row for padding, a linear layer, and two numbers that no layer explains."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        z = self.words(ids) if bag else self.words(ids).sum(dim=1)
        return self.factor * self.head(z.tanh()) + self.offset.exp()

    options: dict[str, Any] = {"padding_idx": 0, "sparse": sparse}
    table = nn.EmbeddingBag(7, 3, mode="sum", **options) if bag else nn.Embedding(7, 3, **options)
    nn.init.normal_(table.weight)
    numbers = {"factor": nn.Parameter(torch.tensor(1.3)), "offset": nn.Parameter(torch.tensor(0.2))}
    return Lambda(forward, words=table, head=nn.Linear(3, 2), **numbers).double()


def check(posterior: ba.Posterior, *, rtol: float = 1e-6) -> None:
    """Moments against the matrices, and draws against their weights."""
    assert error_of(posterior, IDS) <= rtol
    mean = {name: mu.to(posterior.model.get_parameter(name)) for name, mu in posterior.mean.items()}
    leaves = {name: mu.clone().requires_grad_() for name, mu in mean.items()}
    output = functional_call(posterior.model, leaves, (IDS,))
    j = jacobian(leaves, output).double()
    for draw in (sampled, linearised_draws):
        generator = seeded(7)
        for drawn in draw(posterior, IDS, 3, generator=seeded(7)).draws:
            theta = posterior.sample(generator=generator)
            assert torch.equal(theta["words.weight"][0], mean["words.weight"][0])
            step = torch.cat([(theta[name].double() - mean[name].double()).reshape(-1) for name in mean])
            outcome = functional_call(posterior.model, theta, (IDS,)) if draw is sampled else output + j @ step
            assert_close(drawn, outcome, rtol=10 * rtol, atol=10 * rtol)


@every_structure
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
def test_scalars_sparse_gradients_and_padding(structure: str, sparse: bool, bag: bool):
    check(posterior_of(structure, words(sparse=sparse, bag=bag), IDS))


@every_structure
def test_the_likelihood_form(structure: str):
    posterior = posterior_of(structure, words(), IDS).replace(form="likelihood")
    posterior.model.load_state_dict(posterior.mean)
    assert torch.equal(posterior.mean["words.weight"][0], posterior.mode["words.weight"][0])
    assert not torch.equal(posterior.mean["words.weight"][1], posterior.mode["words.weight"][1])
    check(posterior)


@every_structure
@pytest.mark.parametrize(
    ("own", "other"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=["wider", "narrower"]
)
def test_a_posterior_in_another_type_than_its_model(structure: str, own: torch.dtype, other: torch.dtype):
    check(posterior_of(structure, words().to(own), IDS).to(dtype=other), rtol=1e-3)


@every_structure
def test_padding_stays_where_it_is_in_draws_and_the_others_are_drawn_as_before(structure: str):
    posterior = posterior_of(structure, words(), IDS)
    kept = posterior.mode["words.weight"][0]
    drawn = posterior.sample(3, generator=seeded())["words.weight"]
    posterior.model.words.padding_idx = None
    unpadded = replace(posterior, padding=None)
    expected = unpadded.sample(3, generator=seeded())["words.weight"]
    assert not torch.equal(expected[:, 0], drawn[:, 0])
    assert torch.equal(expected[:, 1:], drawn[:, 1:])
    assert torch.equal(drawn[:, 0], kept.expand(3, 3))
    posterior.model.words.padding_idx = 0
    with posterior.sampled() as model:
        assert torch.equal(model.words.weight[0], kept)
        assert not torch.equal(model.words.weight[1], posterior.mode["words.weight"][1])


def test_a_table_that_is_also_the_head_has_no_padding_row():
    table, head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    posterior = posterior_of("diagonal", nn.Sequential(table, head), None)
    assert not torch.equal(posterior.sample()["0.weight"][1], table.weight[1])
