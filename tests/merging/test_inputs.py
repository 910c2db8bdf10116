"""Merging by the inputs of layers: RegMean's closed form, what falls back to the diagonals, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayesadam as ba
from bayesadam.merging import merge
from bayesadam.merging import merged as merging
from bayesadam.merging.methods import by_inputs
from cases import fit
from floats import assert_close

ALPHA = [1.0, 2.0, 0.5]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5, bias=False), nn.Linear(5, 2)
    ).double()


def fine_tuned(base: nn.Module, seed: int) -> ba.Posterior:
    model, draw = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.97))
    inputs = torch.randn(40, 16, 1, 4, 4, generator=draw).double()
    fit(model, optimizer, ((x, seed * x.mean(dim=(2, 3))) for x in inputs))
    return ba.Posterior.from_optimizer(model.eval(), optimizer, 640, "regression", prior_precision=1.0)


@pytest.fixture(scope="module")
def tuned():
    torch.manual_seed(0)
    base = network()
    return base, [fine_tuned(base, seed) for seed in range(3)], [torch.randn(80, 1, 4, 4).double() for _ in range(3)]


def layer_inputs(model: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    """The rows that a layer multiplies, with a 1 for its bias."""
    layer, a = model[number], model[:number](x).detach()
    rows = F.unfold(a, 2).mT.flatten(0, 1) if isinstance(layer, nn.Conv2d) else a
    return rows if layer.bias is None else torch.cat([rows, torch.ones(len(rows), 1).to(rows)], dim=1)


@pytest.mark.parametrize("number", [0, 4, 5])
def test_regmean_is_the_least_squares_fit_of_each_layer(tuned, number, monkeypatch):
    monkeypatch.setattr(merging, "INPUTS_SHARE", 1e-13)
    _, models, inputs = tuned
    merged = merge(models, inputs=inputs, weights=ALPHA)
    total, right = 0, 0
    for alpha, posterior, x in zip(ALPHA, models, inputs, strict=True):
        rows, layer = layer_inputs(posterior.model, x, number), posterior.model[number]
        moment = alpha * rows.T @ rows / len(rows)
        weight = layer.weight.detach().flatten(1)
        matrix = weight if layer.bias is None else torch.cat([weight, layer.bias.detach()[:, None]], dim=1)
        total, right = total + moment, right + matrix @ moment
    expected = torch.linalg.solve(total, right, left=False)
    found = merged[f"{number}.weight"].flatten(1)
    if models[0].model[number].bias is not None:
        found = torch.cat([found, merged[f"{number}.bias"][:, None]], dim=1)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_what_no_input_reaches_stays_where_it_was():
    a = torch.randn(2, 3, 6).double()
    a[:, :, 4:] = 0
    changes, moments = torch.randn(2, 4, 6).double(), a.mT @ a
    found = by_inputs(changes, moments, 0.1)
    total = moments.sum(0)
    whole = total + 0.1 * total.diagonal().mean() * torch.eye(6).double()
    expected = torch.linalg.solve(whole, (changes @ moments).sum(0), left=False)
    assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert not found[:, 4:].any()
    assert not by_inputs(changes, torch.zeros_like(moments), 0.1).any()


def test_norms_are_merged_by_their_diagonals_and_the_report_says_so(tuned):
    _, models, inputs = tuned
    merged, diagonal = merge(models, inputs=inputs), merge(models, method="fisher")
    assert torch.equal(merged["1.weight"], diagonal["1.weight"])
    assert torch.equal(merged["1.running_mean"], diagonal["1.running_mean"])
    notes = "2 tensors without known inputs were merged by their diagonals: 1.weight, 1.bias"
    assert merged.report.method == "inputs"
    assert notes in merged.report.notes
    assert sum(merged.report.layers["0"]) == pytest.approx(1)
    known = [posterior.with_inputs(x) for posterior, x in zip(models, inputs, strict=True)]
    again = merge(known, method="inputs", weights=[3, 3, 3])
    assert all(torch.allclose(again[name].double(), t.double(), rtol=1e-9) for name, t in merged.items())


def test_identical_models_merge_to_themselves(tuned):
    _, models, inputs = tuned
    merged = merge([models[0]] * 2, inputs=inputs[:2])
    assert all(torch.equal(merged[name], theta) for name, theta in models[0].mode.items())


def test_a_layer_that_one_model_did_not_train_is_the_other_s(tuned):
    base, models, inputs = tuned
    frozen = copy.deepcopy(base)
    frozen[5].requires_grad_(False)
    merged = merge([models[1], fine_tuned(frozen, 2)], inputs=inputs[:2])
    assert_close(merged["5.weight"], models[1].mode["5.weight"], rtol=1e-12)
    assert merged.report.layers["5"] == (1.0, 0.0)


SETTING, BASE = ba.errors.SettingError, {"a": torch.ones(1)}


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        (lambda x: {"inputs": x[:2]}, SETTING, "a batch or a loader for each of the 3 models"),
        (lambda x: {"inputs": x[0]}, SETTING, "inputs must be a list"),
        (lambda x: {"inputs": [*x[:2], x[2] * float("nan")]}, ba.errors.MatchError, r"model 3: .*not finite"),
        (lambda x: {"inputs": [x[0], x[1][:, :, :3], x[2]]}, RuntimeError, "shapes cannot be multiplied"),
        (lambda x: {"inputs": x, "method": "fisher"}, SETTING, "inputs= are for method='inputs', not 'fisher'"),
        (lambda x: {"inputs": x, "base": BASE}, SETTING, "'inputs' has none"),
        (lambda x: {"inputs": x, "base": BASE, "trim": 0.5}, SETTING, "without eigenbases or inputs"),
        (lambda x: {"method": "inputs"}, SETTING, "needs a few hundred inputs"),
        (lambda x: {"inputs": x[:2], "models": ["a.pt", "b.pt"]}, SETTING, "needs posteriors, which run their models"),
    ],
)
def test_what_cannot_be_merged_by_inputs_is_told(tuned, options, kind, said):
    with pytest.raises(kind, match=said):
        merge(**{"models": tuned[1], **options(tuned[2])})
