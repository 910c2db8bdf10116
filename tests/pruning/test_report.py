"""The report counts what the masks remove and what the posterior expects it to cost."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from bayesadam.errors import MatchError
from bayesadam.pruning import prune, pruning_masks, pruning_report
from cases import mlp
from floats import approx
from pruning.cases_pruning import posterior_of


def test_rows_count_weights() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 2).bfloat16())
    mask = torch.zeros(8, 10, dtype=torch.bool)
    mask[0] = True
    report = pruning_report(model, {"0.weight": mask})
    row = report.rows[0]
    assert (row.name, row.weights, row.kept, row.sparsity) == ("0.weight", 80, 10, 0.875)
    assert [r.name for r in report.rows] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    # Without a mask nothing is removed.
    assert report.rows[2].kept == 16
    assert (report.total.weights, report.total.kept) == (80 + 8 + 16 + 2, 36)
    assert report.total.sparsity == approx(70 / 106)
    assert report.expected_loss_change is None


@pytest.mark.parametrize(("power", "batch_size"), [(0.5, None), (1.0, 16)])
def test_the_expected_loss_is_the_quadratic_of_what_is_removed(power: float, batch_size: int | None) -> None:
    posterior = posterior_of(mlp(4, 5, 2), delta=7.0, power=power, batch_size=batch_size, scale=3.0)
    masks = pruning_masks(posterior, 0.5)
    expected = 0.0
    for name, theta in posterior.mode.items():
        for t, v, kept in zip(
            theta.flatten().tolist(),
            posterior.structure.second_moment[name].flatten().tolist(),
            masks[name].flatten().tolist(),
            strict=True,
        ):
            # The prior is left out, N divided out.
            expected += 0.0 if kept else 0.5 * t * t * 3.0 * (v**0.5 if power == 0.5 else 16 * v)
    report = pruning_report(posterior, masks)
    assert expected > 0
    assert report.expected_loss_change == approx(expected, rel=1e-5)
    prune(posterior.model, masks)
    assert pruning_report(posterior, masks) == report


def test_the_expected_loss_is_exact_for_a_quadratic_loss() -> None:
    # Mean of ½ (x θ)² over data with x one-hot: curvature 1/2 in each weight.
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    posterior = posterior_of(model, {"weight": torch.full((1, 2), 0.5)}, power=1.0, batch_size=1)
    report = pruning_report(posterior, {"weight": torch.tensor([[False, True]])})
    assert report.expected_loss_change == approx(0.5 * 9 * 0.5)


def test_weights_outside_the_posterior_have_no_expected_cost() -> None:
    model = mlp(3, 2)
    posterior = posterior_of(model, names=["0.weight"])
    assert pruning_report(posterior, {"0.bias": torch.zeros(2, dtype=torch.bool)}).expected_loss_change is None
    assert pruning_report(posterior, {"0.bias": torch.ones(2, dtype=torch.bool)}).expected_loss_change == 0.0


def test_it_prints_as_a_table_and_saves_as_data() -> None:
    posterior = posterior_of(mlp(1000, 5, 2))
    report = pruning_report(posterior, pruning_masks(posterior, 0.9))
    lines = str(report).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[0].split() == ["parameter", "weights", "kept", "removed"]
    assert lines[1].split()[:2] == ["0.weight", "5,000"]
    assert lines[5].split()[0] == "total"
    assert "90.0%" in lines[5]
    assert lines[-1].startswith("expected rise of the mean loss")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["kept"] == report.total.kept
    assert data["rows"][0]["sparsity"] == report.rows[0].sparsity


def test_empty_models_and_wrong_masks() -> None:
    report = pruning_report(nn.Tanh(), {})
    assert (report.total.weights, report.total.sparsity) == (0, 0.0)
    assert "total" in str(report)
    with pytest.raises(MatchError, match="is of no parameter"):
        pruning_report(nn.Tanh(), {"w": torch.ones(1, dtype=torch.bool)})
