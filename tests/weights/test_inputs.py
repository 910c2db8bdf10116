"""The input side against dense matrices in float64: every row of [W b] has the precision w g_iᵖ A + δ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict import linearised
from floats import assert_close


class Attending(nn.Module):
    """Attention, whose three projections are rows of one matrix, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))


class Twice(nn.Module):
    """One layer that is used twice, and one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.inner(x).tanh()).tanh())


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2)
    )


CASES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (3,)),
    "convolution": (convolutional, (2, 6, 6)),
    "attention": (Attending, (5, 4)),
    "twice": (Twice, (3,)),
}


def made(name: str, *, power: float = 0.5, **settings) -> tuple[ba.Posterior, ba.Posterior, Tensor]:
    """The posterior of a case in float64 with and without inputs, and other inputs."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    model = build().double().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.randn(16, *shape).double()) - 1).square().mean().backward()
        optimizer.step()
    how = {"n_data": 50, "batch_size": 16, "likelihood": "regression", "prior_precision": 0.7, "power": power}
    plain = ba.Posterior.from_optimizer(model, optimizer, **{**how, **settings}).to(dtype=torch.float64)
    return plain, plain.with_inputs(torch.randn(40, *shape).double()), torch.randn(6, *shape).double()


def dense(plain: ba.Posterior, known: ba.Posterior) -> tuple[list[str], Tensor]:
    """The covariance of all weights together, by the definition, and their names in order."""
    names, blocks = [], []
    v, w, p = plain.structure.second_moment, plain.settings.weight, plain.power
    for name, side in known.structure.inputs.items():
        a = side.basis @ side.spectrum.diag() @ side.basis.T
        g = v[name].flatten(1).sum(dim=1)
        g = (g if side.bias is None else g + v[side.bias]) / a.trace()
        eye = torch.eye(len(a)).double()
        blocks.append(torch.block_diag(*[torch.linalg.inv(w * gi**p * a + 0.7 * eye) for gi in g]))
        names.append(name)
    joined = {side.bias for side in known.structure.inputs.values()}
    for name in v:
        if name not in known.structure.inputs and name not in joined:
            blocks.append((1 / (w * v[name] ** p + 0.7)).flatten().diag())
            names.append(name)
    return names, torch.block_diag(*blocks)


def flat(known: ba.Posterior, names: list[str], named: dict[str, Tensor]) -> Tensor:
    """(..., all weights) in the order of `dense`: a bias follows its row."""
    parts = []
    for name in names:
        side = known.structure.inputs.get(name)
        lead = named[name].dim() - known.mode[name].dim()
        matrix = named[name].unsqueeze(-1).flatten(lead + 1) if side else named[name].flatten(lead)
        if side is not None and side.bias is not None:
            matrix = torch.cat([matrix, named[side.bias].unsqueeze(-1)], dim=-1)
        parts.append(matrix.flatten(lead))
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_the_dense_gaussians(name, power):
    plain, known, x = made(name, power=power)
    assert known.structure.kind == "inputs"
    names, covariance = dense(plain, known)
    mean = {n: p.detach() for n, p in known.model.named_parameters()}
    assert_close(flat(known, names, known.variance), covariance.diagonal(), rtol=1e-9)
    rows = jacrev(lambda p: functional_call(known.model, p, (x,)))(mean)
    j = flat(known, names, rows)
    truth = torch.einsum("bcp,pq,bdq->bcd", j, covariance, j)
    found = linearised(known, x, joint=True)
    assert_close(found.covariance, truth, rtol=1e-8, atol=1e-12)
    assert_close(found.variance, truth.diagonal(dim1=1, dim2=2), rtol=1e-8)
    assert_close(linearised(known, x).variance, truth.diagonal(dim1=1, dim2=2), rtol=1e-8)
    whole = j.flatten(0, 1) @ covariance @ j.flatten(0, 1).T
    assert_close(found.joint, whole, rtol=1e-8, atol=1e-12)
    exact = torch.distributions.MultivariateNormal(flat(known, names, mean), covariance)
    draws = known.sample(3, generator=torch.Generator().manual_seed(1))
    assert_close(known.log_prob(draws), exact.log_prob(flat(known, names, draws)), rtol=1e-9)


def test_draws_have_the_covariance():
    plain, known, _ = made("perceptron")
    names, covariance = dense(plain, known)
    draws = flat(known, names, known.sample(40_000, generator=torch.Generator().manual_seed(0)))
    scale = covariance.diagonal().sqrt()
    assert_close(draws.T.cov() / scale / scale[:, None], covariance / scale / scale[:, None], rtol=0, atol=0.04)


def test_one_input_direction_leaves_the_others_at_the_prior():
    """Where inputs never varied the data say nothing: a layer that saw x₀ alone knows W x₀, and no more."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([[1.0, 0.0, 0.0]]).double()).square().sum().backward()
    optimizer.step()
    q = ba.Posterior.from_optimizer(model, optimizer, 100, likelihood="regression", prior_precision=1.0)
    q = q.to(dtype=torch.float64).with_inputs(torch.tensor([[2.0, 0.0, 0.0]]).double().expand(30, 3))
    inside, outside = linearised(q, torch.eye(3).double()[:2]).variance.flatten().tolist()
    assert outside == pytest.approx(1.0)
    g = float(q.structure.second_moment["weight"].sum()) / 4
    assert inside == pytest.approx(1 / (100 * g**0.5 * 4 + 1))


def test_saved_and_loaded(tmp_path):
    for name in CASES:
        _, known, x = made(name)
        known.save(tmp_path / "q.safetensors")
        loaded = ba.Posterior.load(tmp_path / "q.safetensors", known.model)
        assert loaded.structure.kind == "inputs"
        assert_close(linearised(loaded, x).variance, linearised(known, x).variance, rtol=1e-9)
        opened = ba.GaussianWeights.open(tmp_path / "q.safetensors")
        assert_close(opened.variance, known.variance, rtol=1e-9)


def test_settings_may_change_afterwards():
    """The curvature is g^p A at any power."""
    plain, known, _ = made("perceptron", power=0.5)
    names, covariance = dense(plain.replace(power=1.0), known)
    assert_close(flat(known, names, known.replace(power=1.0).variance), covariance.diagonal(), rtol=1e-9)


def test_loaders_give_what_one_batch_gives():
    plain, _, _ = made("convolution")
    torch.manual_seed(0)
    inputs = torch.randn(40, 2, 6, 6).double()
    one = plain.with_inputs(inputs)
    parts = plain.with_inputs([(inputs[:13], torch.zeros(13)), (inputs[13:], torch.zeros(27))])
    assert_close(one.variance, parts.variance, rtol=1e-9)


def test_what_cannot_be_is_told():
    plain, known, x = made("perceptron")
    with pytest.raises(SettingError, match="this is inputs"):
        known.with_inputs(x)
    with pytest.raises(MatchError, match="not finite"):
        plain.with_inputs(x * float("nan"))
    uneven = plain.replace(prior_precision={n: torch.rand_like(t) for n, t in plain.mode.items()})
    with pytest.raises(SettingError, match="one prior precision"):
        uneven.with_inputs(x)
    with pytest.raises(SettingError, match="add them first"):
        known + known
