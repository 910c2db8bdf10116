"""`with_inputs` finds A = E[a aᵀ] of every layer; what follows from it, `test_structures` holds to dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from floats import assert_close
from weights.cases_structures import Net, curvature, posterior_of


def second_moments(a: Tensor) -> Tensor:
    """E[a aᵀ] over examples and positions, (..., width), with the constant 1 of the bias."""
    rows = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1).flatten(0, -2)
    return rows.T @ rows / len(rows)


def test_it_is_the_mean_of_the_layers_inputs_over_examples_and_positions():
    q, x = posterior_of("diagonal"), torch.randn(40, 2, 5).double()
    model: Net = q.model
    hidden = []
    model.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach()))
    known = q.with_inputs(x)
    model(x)
    assert {"conv.weight", "head.weight"} <= set(known.curvature.inputs)
    patches = x.unfold(2, 2, 1).transpose(1, 2).flatten(2)
    for name, a in (("conv.weight", second_moments(patches)), ("head.weight", second_moments(hidden[-1]))):
        side = known.curvature.inputs[name]
        assert side.bias == name.replace("weight", "bias")
        assert_close(side.basis @ side.spectrum.diag() @ side.basis.T, a, rtol=1e-9)
        rows = q.curvature.second_moment[name].flatten(1).sum(dim=1) + q.curvature.second_moment[side.bias]
        assert_close(known.curvature.second_moment[name].sum(dim=1), rows, rtol=1e-9)
    # The trace of the curvature is that of the diagonal: inputs turn it, and add nothing.
    assert_close(curvature(known, 1.0).trace(), curvature(q, 1.0).trace(), rtol=1e-9)
    parts = q.with_inputs([(x[:13], torch.zeros(13)), (x[13:], torch.zeros(27))])
    assert_close(parts.variance, known.variance, rtol=1e-9)


def test_one_input_direction_leaves_the_others_at_the_prior():
    """Where inputs never varied the data say nothing: a layer that saw x₀ alone knows W x₀, and no more."""
    model = nn.Linear(3, 1, bias=False).double()
    v = {"weight": torch.tensor([[0.4, 0.0, 0.0]]).double()}
    q = ba.Posterior.from_second_moment(model, v, 100).with_inputs(torch.eye(3).double()[:1].expand(30, 3) * 2)
    assert_close(q.variance["weight"][0], torch.tensor([1 / (100 * 0.1**0.5 * 4 + 1), 1, 1]).double(), rtol=1e-6)


def test_what_cannot_be_is_told():
    q, x = posterior_of("diagonal"), torch.randn(6, 2, 5).double()
    with pytest.raises(SettingError, match="this is inputs"):
        q.with_inputs(x).with_inputs(x)
    with pytest.raises(MatchError, match="not finite"):
        q.with_inputs(x * float("nan"))
    uneven = q.replace(prior_precision={n: torch.rand_like(t) for n, t in q.mode.items()})
    with pytest.raises(SettingError, match="one prior precision"):
        uneven.with_inputs(x)
