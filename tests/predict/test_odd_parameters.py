"""Scalars, sparse gradients, padding rows and posteriors of another type, in every structure and method, against
dense matrices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesadam as ba
from bayesadam.predict import linearised, linearised_draws, sampled
from cases import dense_moment
from floats import assert_close
from predict.cases_networks import jacobian

N, BATCH, WORDS = 200, 16, 7
STRUCTURES = ["diagonal", "kronecker"]
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:the posterior has .* gradients behind it"),
]


class Words(nn.Module):
    """An embedding with a row for padding, a linear layer, and two numbers that no layer explains."""

    def __init__(self, *, sparse: bool, bag: bool) -> None:
        super().__init__()
        self.bag = bag
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(WORDS, 3, padding_idx=0, sparse=sparse, **({"mode": "sum"} if bag else {}))
        self.head = nn.Linear(3, 2)
        self.factor = nn.Parameter(torch.tensor(1.3))
        self.offset = nn.Parameter(torch.tensor(0.2))

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        return self.factor * self.head((words if self.bag else words.sum(dim=1)).tanh()) + self.offset.exp()


def batch(generator: torch.Generator, size: int = BATCH) -> Tensor:
    return torch.randint(WORDS, (size, 4), generator=generator)


def trained(
    structure: str, *, sparse: bool = False, bag: bool = False, dtype: torch.dtype = torch.float64
) -> ba.Posterior:
    torch.manual_seed(0)
    model = Words(sparse=sparse, bag=bag).to(dtype)
    with torch.no_grad():
        model.words.weight[0] = torch.tensor([0.3, -0.1, 0.2])
    others = [p for name, p in model.named_parameters() if name != "words.weight"]
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    optimizers = [kind([model.words.weight], lr=1e-2), torch.optim.Adam(others, lr=1e-2)]
    recorder = ba.Recorder(optimizers, keep=12)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        model.zero_grad()
        (model(batch(generator)) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    model.zero_grad()
    how = {"prior_precision": 0.7, "power": 1, "batch_size": BATCH}
    if structure == "diagonal":
        return ba.Posterior.from_optimizer(model, optimizers, N, **how)
    return ba.Posterior.from_recorder(model, recorder, N, **how)


def learned(posterior: ba.Posterior) -> Tensor:
    """Which weights are not padding."""
    masks = {name: torch.ones(theta.shape, dtype=torch.bool) for name, theta in posterior.mode.items()}
    masks["words.weight"][0] = False
    return torch.cat([mask.flatten() for mask in masks.values()])


def covariance(posterior: ba.Posterior) -> Tensor:
    """(w V + δ)⁻¹ of the weights that are not padding, dense and in float64."""
    moment, keep = dense_moment(posterior.curvature), learned(posterior)
    delta = torch.cat(
        [torch.full((t.numel(),), float(posterior.prior_precision[n])) for n, t in posterior.mode.items()]
    )
    return torch.linalg.inv((posterior.settings.weight * moment + torch.diag(delta.double()))[keep][:, keep])


def check(posterior: ba.Posterior, *, rtol: float = 1e-6) -> None:
    """Every method against the matrices, padding rows left out."""
    ids = batch(torch.Generator().manual_seed(5), 5)
    ids[0] = 0
    mean = {name: mu.to(posterior.model.get_parameter(name)) for name, mu in posterior.mean.items()}
    plain = Words(sparse=False, bag=posterior.model.bag).double()
    plain.load_state_dict(posterior.mean)
    j = jacobian(plain, list(mean), plain(ids))[..., learned(posterior)]
    expected = j @ covariance(posterior) @ j.mT
    for whole in (False, True):
        found = linearised(posterior, ids, covariance=whole)
        assert_close(found.mean, functional_call(posterior.model, mean, (ids,)), rtol=rtol, atol=rtol)
        assert_close(found.variance.double(), expected.diagonal(dim1=1, dim2=2), rtol=rtol)
        if whole:
            assert_close(found.covariance.double(), expected, rtol=rtol)
    for draw in (sampled, linearised_draws):
        found = draw(posterior, ids, 3, generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(7)
        for drawn in found.draws:
            theta = posterior.sample(generator=generator)
            assert torch.equal(theta["words.weight"][0], mean["words.weight"][0])
            if draw is sampled:
                outcome = functional_call(posterior.model, theta, (ids,))
            else:
                step = torch.cat([(theta[name].double() - mean[name].double()).reshape(-1) for name in mean])
                outcome = found.mean + (j @ step[learned(posterior)]).to(found.mean)
            assert_close(drawn, outcome, rtol=10 * rtol, atol=10 * rtol)


@every_structure
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
def test_scalars_sparse_gradients_and_padding(structure: str, sparse: bool, bag: bool):
    check(trained(structure, sparse=sparse, bag=bag))


@every_structure
def test_the_likelihood_form(structure: str):
    posterior = trained(structure).replace(form="likelihood")
    assert torch.equal(posterior.mean["words.weight"][0], posterior.mode["words.weight"][0])
    check(posterior)


@every_structure
@pytest.mark.parametrize(
    ("own", "other"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=["wider", "narrower"]
)
def test_a_posterior_in_another_type_than_its_model(structure: str, own: torch.dtype, other: torch.dtype):
    check(trained(structure, dtype=own).to(dtype=other), rtol=1e-3)


# --- padding rows ---------------------------------------------------------------------------------------------------


@every_structure
def test_padding_stays_where_it_is_in_draws_and_the_others_are_drawn_as_before(structure: str):
    posterior = trained(structure)
    kept = posterior.mode["words.weight"][0]
    drawn = posterior.sample(3, generator=torch.Generator().manual_seed(0))["words.weight"]
    posterior.model.words.padding_idx = None
    unpadded = replace(posterior, padding=None)
    expected = unpadded.sample(3, generator=torch.Generator().manual_seed(0))["words.weight"]
    assert not torch.equal(expected[:, 0], drawn[:, 0])
    assert torch.equal(expected[:, 1:], drawn[:, 1:])
    assert torch.equal(drawn[:, 0], kept.expand(3, 3))
    posterior.model.words.padding_idx = 0
    with posterior.sampled() as model:
        assert torch.equal(model.words.weight[0], kept)
        assert not torch.equal(model.words.weight[1], posterior.mode["words.weight"][1])


def test_a_table_that_is_also_the_head_has_no_padding_row():
    words, head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5, bias=False)
    head.weight = words.weight
    model = nn.Sequential(words, head)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([[0, 2]])).square().sum().backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 10, prior_precision=1.0)
    assert not torch.equal(posterior.sample()["0.weight"][1], words.weight[1])
