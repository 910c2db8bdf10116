"""Novelty against dense matrices in float64, and what must not change it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import SettingError
from bayesadam.predict.call import Call
from bayesadam.predict.prediction import running_deviation
from cases import mlp, orthonormal, soap
from floats import approx, assert_close

# Eight gradients are few: that is told of a posterior at its own settings, and not what is asked here.
pytestmark = pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")
N, BATCH = 20_000, 10
STRUCTURES = ["diagonal", "kronecker", "soap", "low-rank", "low-rank+diagonal"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loss: str, *shape: int) -> None:
    for step in range(40):
        x = normal(BATCH, *shape, seed=step)
        optimizer.zero_grad()
        out = model(x)
        LOSSES[loss](out, x if x.dim() == out.dim() else x.flatten(1)).backward()
        optimizer.step()


def cross_entropy(out: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), x[..., :3].argmax(dim=-1).flatten())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": cross_entropy,
    "binary": lambda out, x: F.binary_cross_entropy_with_logits(out, (x[:, :2] > 0).to(out)),
    "regression": lambda out, x: (out - x[:, :2]).square().mean(),
    "heteroscedastic": lambda out, x: (out - x[:, :1]).square().mean(),
    "poisson": lambda out, x: (out.exp() - (x[:, :2] > 0).to(out) * out).mean(),
}


def trained(
    structure: str = "diagonal",
    model: nn.Module | None = None,
    *shape: int,
    loss: str = "classification",
    **options: Any,
) -> ba.Posterior:
    """A posterior of any structure over a small network in float64."""
    torch.manual_seed(0)
    model = (mlp(3, 4, 3) if model is None else model).double()
    kind = soap if structure == "soap" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=5e-2)
    recorder = None
    if structure not in ("diagonal", "soap"):
        recorder = ba.Recorder(optimizer, keep=8, every=2)
    fit(model, optimizer, loss, *(shape or (3,)))
    options = {"prior_precision": 2.0, "batch_size": BATCH, **options}
    return ba.Posterior.from_optimizer(
        model,
        orthonormal(optimizer),
        N,
        structure="kronecker" if structure == "soap" else structure,
        recorder=recorder,
        **options,
    )


def dense_curvature(posterior: ba.Posterior) -> Tensor:
    """V over all weights, from the structure's tensors by its definition: no Woodbury, no rotation of Jacobians."""
    structure = posterior.structure
    if structure.kind.startswith("low-rank"):
        u = torch.cat([structure.rows[name].flatten(1) for name in posterior.mode], dim=1)
        rest = torch.cat([structure.rest[name].flatten() for name in posterior.mode])
        return u.T @ torch.diag(structure.values) @ u + torch.diag(rest)
    blocks = []
    for name in posterior.mode:
        v = structure.second_moment[name]
        basis = structure.bases.get(name)
        if basis is None:
            blocks.append(torch.diag(v.flatten()))
            continue
        rows, columns = (v.shape[0], v.numel() // v.shape[0]) if v.dim() > 1 else (1, len(v))
        left = torch.eye(rows).double() if basis.left is None else basis.left
        right = torch.eye(columns).double() if basis.right is None else basis.right
        both = torch.kron(left, right)
        blocks.append(both @ torch.diag(v.flatten()) @ both.T)
    return torch.block_diag(*blocks)


def share(posterior: ba.Posterior) -> float:
    """δ over the mean curvature: less in rotated coordinates."""
    return 1e-4 if posterior.structure.kind == "kronecker" else 1e-3


def dense_covariance(posterior: ba.Posterior) -> Tensor:
    """(w V + δ)⁻¹ with w = N B and δ = ε tr(w V)/P."""
    precision = N * BATCH * dense_curvature(posterior)
    delta = share(posterior) * float(precision.trace()) / len(precision)
    return torch.linalg.inv(precision + delta * torch.eye(len(precision)).double())


def dense_moments(posterior: ba.Posterior, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """f, (b, ...), and J Σ Jᵀ over all outputs, (b, o, o), by torch.func."""
    model = posterior.model.eval()
    names = list(posterior.mode)

    def outputs(params: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (one[None],))[0].flatten()

    params = {name: posterior.mode[name] for name in names}
    jacobian = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))(params, x)
    j = torch.cat([jacobian[name].flatten(2) for name in names], dim=2)
    covariance = j @ dense_covariance(posterior) @ j.mT
    with torch.no_grad():
        return model(x).numpy(), covariance.detach().numpy()


def pairwise(f: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """p_k ∝ 1/Σ_j exp(−(f_k − f_j)/√(1 + π/8 Var[f_k − f_j])), one example and class at a time."""
    found = np.zeros_like(f)
    for b, (logits, c) in enumerate(zip(f, covariance, strict=True)):
        for k in range(len(logits)):
            total = sum(
                math.exp(
                    -(logits[k] - logits[j]) / math.sqrt(1 + math.pi / 8 * (c[k, k] + c[j, j] - 2 * c[k, j]))
                )
                for j in range(len(logits))
            )  # fmt: skip
            found[b, k] = 1 / total
    return found / found.sum(axis=1, keepdims=True)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(axis=-1)


def assert_novelty(found: Tensor, expected: np.ndarray, rtol: float = 1e-8) -> None:
    assert found.shape == expected.shape
    assert_close(found.numpy(), expected, rtol=rtol, atol=1e-12)
    # A constant would pass no test of detection.
    assert float(found.std()) > 1e-3


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_the_entropy_of_the_pairwise_probabilities(structure):
    posterior, x = trained(structure), 2 * normal(6, 3, seed=100)
    assert_novelty(posterior.novelty(x, likelihood="classification"), entropy(pairwise(*dense_moments(posterior, x))))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_settings(structure):
    settings = trained(structure, power=0.5, prior_precision=0.3).for_novelty.settings
    posterior = trained(structure)
    assert (settings.power, settings.scale, settings.form, settings.n_data) == (1.0, 1.0, "map", N)
    expected = share(posterior) * N * BATCH * float(dense_curvature(posterior).diagonal().mean())
    for delta in settings.prior_precision.values():
        assert delta == approx(expected, rel=1e-10)


CHANGES: list[dict[str, Any]] = [
    {"scale": 1e8},
    {"prior_precision": 1e6},
    {"prior_precision": 1e-6},
    {"power": 0.7},
    {"power": 1.0},
    {"temperature": 3.0},
    {"averaged": False},
    {"noise_variance": 0.2},
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(f"{k}={v:g}" for k, v in change.items()))
def test_no_setting_changes_it(structure, change):
    posterior, x = trained(structure), normal(5, 3, seed=100)
    assert torch.equal(
        posterior.replace(**change).novelty(x, likelihood="classification"),
        posterior.novelty(x, likelihood="classification"),
    )


def test_a_prior_of_several_numbers_does_not_change_it():
    posterior, x = trained(), normal(5, 3, seed=100)
    for prior in (
        {name: float(i) + 1 for i, name in enumerate(posterior.mode)},
        {name: torch.rand_like(theta) + 0.1 for name, theta in posterior.mode.items()},
    ):
        assert torch.equal(
            posterior.replace(prior_precision=prior).novelty(x, likelihood="classification"),
            posterior.novelty(x, likelihood="classification"),
        )


def test_the_likelihood_form_does_not_change_it():
    posterior, x = trained(), normal(5, 3, seed=100)
    other = posterior.replace(form="likelihood", prior_precision=20.0)
    assert_close(other.novelty(x, likelihood="classification"), posterior.novelty(x, likelihood="classification"))


@pytest.mark.filterwarnings("ignore::bayesadam.errors.HeldOutWarning")
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
def test_calibration_does_not_change_it(structure):
    posterior, x = trained(structure), normal(5, 3, seed=100)
    found = ba.calibrate(posterior, (normal(40, 3, seed=7), torch.arange(40) % 3), likelihood="classification")
    assert found.settings.scale != posterior.settings.scale
    before = posterior.predict(x, likelihood="classification")
    after = found.predict(x, likelihood="classification")
    assert torch.equal(after.novelty, before.novelty)
    assert torch.equal(found.novelty(x, likelihood="classification"), before.novelty)


def test_weights_without_curvature_or_prior_are_no_hindrance():
    """Constant inputs and no weight decay: v = 0 and δ = 0, but novelty has a prior of its own."""
    torch.manual_seed(0)
    model = mlp(3, 4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    mask = torch.tensor([1.0, 1.0, 0.0]).double()
    for step in range(10):
        optimizer.zero_grad()
        x = normal(BATCH, 3, seed=step) * mask
        cross_entropy(model(x), x).backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, batch_size=BATCH)
    x = normal(5, 3, seed=100)
    assert_novelty(
        posterior.replace(prior_precision=1.0).novelty(x, likelihood="classification"),
        entropy(pairwise(*dense_moments(posterior, x))),
    )


def test_weights_without_curvature_or_prior_need_no_other_prior():
    torch.manual_seed(0)
    model = mlp(3, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(BATCH, 3) * torch.tensor([1.0, 1.0, 0.0])
        cross_entropy(model(x), x).backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, batch_size=BATCH)
    assert bool(torch.isfinite(posterior.novelty(torch.randn(5, 3), likelihood="classification")).all())


def test_an_unknown_batch_size_serves():
    known, unknown, x = trained(), trained(batch_size=None), normal(40, 3, seed=100)
    for name, delta in unknown.for_novelty.prior_precision.items():
        # 100 in place of 10: all variances a tenth, whatever the weight.
        assert delta == approx(10 * known.for_novelty.prior_precision[name], rel=1e-12)
        assert_close(unknown.for_novelty.variance[name], known.for_novelty.variance[name] / 10)
    f, covariance = dense_moments(known, x)
    assert_novelty(unknown.novelty(x, likelihood="classification"), entropy(pairwise(f, covariance / 10)))


def test_the_number_of_data_scales_all_variances_alike():
    posterior = trained()
    other = posterior.replace(n_data=7.0 * N)
    for name, variance in posterior.for_novelty.variance.items():
        assert_close(other.for_novelty.variance[name], variance / 7)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("covariance", [False, True])
def test_one_pass_is_two(structure, covariance):
    posterior, x = trained(structure), normal(5, 3, seed=100)
    options: Any = {"likelihood": "classification", "covariance": covariance}
    both = posterior.predict(x, **options)
    alone = posterior.predict(x, novelty=False, **options)
    assert torch.equal(both.novelty, posterior.novelty(x, likelihood="classification"))
    assert torch.equal(both.novelty, posterior.predict(x, novelty=True, **options).novelty)
    assert torch.equal(both.mean, alone.mean)
    assert_close(both.variance, alone.variance, rtol=1e-12)
    assert_close(both.probs, alone.probs, rtol=1e-12)
    if covariance:
        assert_close(both.covariance, alone.covariance, rtol=1e-11, atol=1e-14)
    else:
        assert both.covariance is None
        assert alone.covariance is None


def test_a_small_memory_budget_does_not_change_it():
    posterior, x = trained("kronecker"), normal(9, 3, seed=100)
    assert_close(
        posterior.novelty(x, likelihood="classification", memory_budget=20_000),
        posterior.novelty(x, likelihood="classification"),
    )


def test_a_forward_of_the_user_s_own():
    posterior, x = trained(), normal(5, 3, seed=100)
    found = posterior.novelty(
        {"a": x}, likelihood="classification", forward=lambda model, batch: {"logits": model(batch["a"])}
    )
    assert_close(found, posterior.novelty(x, likelihood="classification"))


def test_it_is_there_by_default_up_to_twenty_outputs():
    for classes, there in ((20, True), (21, False)):
        posterior = trained("diagonal", mlp(3, classes))
        found = posterior.predict(normal(4, 3), likelihood="classification")
        if there:
            assert found.novelty.shape == (4,)
            continue
        with pytest.raises(SettingError, match="novelty=True"):
            _ = found.novelty
        asked = posterior.predict(normal(4, 3), likelihood="classification", novelty=True)
        assert torch.equal(asked.novelty, posterior.novelty(normal(4, 3), likelihood="classification"))


@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
def test_sampling_predictives_have_none(predictive):
    posterior = trained(prior_precision=1e4)
    found = posterior.predict(normal(4, 3), likelihood="classification", predictive=predictive)
    with pytest.raises(SettingError, match="linearised"):
        _ = found.novelty
    with pytest.raises(SettingError, match=f"novelty=True needs predictive='linearised', got '{predictive}'"):
        posterior.predict(normal(4, 3), likelihood="classification", predictive=predictive, novelty=True)


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
def test_of_sequences_it_is_the_average_over_places(structure):
    posterior = trained(structure, mlp(3, 4, 3), 5, 3)
    x = 2 * normal(6, 5, 3, seed=100)
    f, whole = dense_moments(posterior, x)
    found = np.zeros((6, 5))
    for place in range(5):
        block = whole[:, 3 * place : 3 * place + 3, 3 * place : 3 * place + 3]
        found[:, place] = entropy(pairwise(f[:, place], block))
    assert_novelty(posterior.novelty(x, likelihood="classification"), found.mean(axis=1))


# --- other likelihoods ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
def test_of_binary_outputs_it_is_the_average_entropy(structure):
    posterior = trained(structure, mlp(3, 4, 2), loss="binary")
    x = 2 * normal(6, 3, seed=100)
    f, covariance = dense_moments(posterior, x)
    p = 1 / (1 + np.exp(-f / np.sqrt(1 + math.pi / 8 * np.diagonal(covariance, axis1=1, axis2=2))))
    assert_novelty(posterior.novelty(x, likelihood="binary"), entropy(np.stack([p, 1 - p], axis=-1)).mean(axis=1))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
@pytest.mark.parametrize("noise", [None, [0.2, 3.0]])
def test_of_a_regression_it_is_what_a_target_would_teach(structure, noise):
    posterior = trained(structure, mlp(3, 4, 2), loss="regression").replace(noise_variance=noise)
    x = 2 * normal(6, 3, seed=100)
    variance = np.diagonal(dense_moments(posterior, x)[1], axis1=1, axis2=2)
    expected = 0.5 * np.log(1 + variance / np.array(noise or [1.0, 1.0])).sum(axis=1)
    assert_novelty(posterior.novelty(x, likelihood="regression"), expected, rtol=1e-6)
    found = posterior.predict(x, likelihood="regression")
    assert_close(found.novelty, posterior.novelty(x, likelihood="regression"))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
def test_of_counts_the_rate_is_the_curvature(structure):
    posterior = trained(structure, mlp(3, 4, 2), loss="poisson")
    x = 2 * normal(6, 3, seed=100)
    f, covariance = dense_moments(posterior, x)
    expected = 0.5 * np.log(1 + np.exp(f) * np.diagonal(covariance, axis1=1, axis2=2)).sum(axis=1)
    assert_novelty(posterior.novelty(x, likelihood="poisson"), expected)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low-rank"])
def test_of_means_and_log_variances(structure):
    posterior = trained(structure, mlp(3, 4, 4), loss="heteroscedastic")
    x = 2 * normal(6, 3, seed=100)
    f, covariance = dense_moments(posterior, x)
    precision = np.concatenate([np.exp(-f[:, 2:]), np.full((6, 2), 0.5)], axis=1)
    expected = 0.5 * np.log(1 + precision * np.diagonal(covariance, axis1=1, axis2=2)).sum(axis=1)
    assert_novelty(posterior.novelty(x, likelihood="heteroscedastic"), expected)


@pytest.mark.parametrize("likelihood", ["regression", "poisson", "heteroscedastic", "binary"])
def test_a_prediction_is_not_changed_by_it(likelihood):
    posterior = trained("kronecker", mlp(3, 4, 2), loss=likelihood)
    x = normal(6, 3, seed=100)
    both = posterior.predict(x, likelihood=likelihood)
    alone = posterior.predict(x, likelihood=likelihood, novelty=False)
    assert torch.equal(both.mean, alone.mean)
    assert_close(both.variance, alone.variance, rtol=1e-12)
    assert both.covariance is None


# --- mixtures ---------------------------------------------------------------------------------------------------------


def members(*sizes: int, loss: str = "classification") -> list[ba.Posterior]:
    found = []
    for structure in ("diagonal", "kronecker", "low-rank"):
        torch.manual_seed(len(structure))
        model = mlp(*sizes).double()
        found.append(trained(structure, copy.deepcopy(model), loss=loss))
    return found


WEIGHTS = (0.5, 0.2, 0.3)


def test_of_a_mixture_it_is_the_entropy_of_the_average():
    posteriors, x = members(3, 4, 3), 2 * normal(6, 3, seed=100)
    mixture = ba.Mixture(posteriors, WEIGHTS)
    average = sum(w * pairwise(*dense_moments(p, x)) for w, p in zip(WEIGHTS, posteriors, strict=True))
    assert_novelty(mixture.novelty(x, likelihood="classification"), entropy(average))
    assert torch.equal(
        mixture.predict(x, likelihood="classification").novelty, mixture.novelty(x, likelihood="classification")
    )
    assert torch.equal(
        mixture.replace(scale=1e6, temperature=2.0).novelty(x, likelihood="classification"),
        mixture.novelty(x, likelihood="classification"),
    )


def test_of_a_mixture_of_regressions_members_that_differ_count():
    posteriors, x = members(3, 4, 2, loss="regression"), 2 * normal(6, 3, seed=100)
    noises = [np.array([0.1, 2.0]), np.array([0.4, 0.3]), np.array([1.0, 1.0])]
    posteriors = [p.replace(noise_variance=noise.tolist()) for p, noise in zip(posteriors, noises, strict=True)]
    means, covariances = zip(*(dense_moments(p, x) for p in posteriors), strict=True)
    centre = sum(w * f for w, f in zip(WEIGHTS, means, strict=True))
    total = sum(
        w * (np.diagonal(c, axis1=1, axis2=2) + (f - centre) ** 2)
        for w, f, c in zip(WEIGHTS, means, covariances, strict=True)
    )
    precision = sum(w / noise for w, noise in zip(WEIGHTS, noises, strict=True))
    expected = 0.5 * np.log(1 + total * precision).sum(axis=1)
    assert_novelty(ba.Mixture(posteriors, WEIGHTS).novelty(x, likelihood="regression"), expected, rtol=1e-6)


def test_a_mixture_without_it_says_so():
    mixture = ba.Mixture(members(3, 4, 3))
    found = mixture.predict(normal(4, 3), likelihood="classification", novelty=False)
    with pytest.raises(SettingError, match="no novelty"):
        _ = found.novelty


# --- batch norm -------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm over places, then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.places = nn.BatchNorm2d(3)
        self.inner = nn.Linear(12, 5)
        self.features = nn.BatchNorm1d(5, eps=1e-3)
        self.head = nn.Linear(5, 3)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.places(self.conv(x)).tanh()
        if self.broken:
            raise RuntimeError("broken")
        return self.head(self.features(self.inner(h.flatten(1))).tanh())


def normed() -> ba.Posterior:
    torch.manual_seed(0)
    return trained("kronecker", Normed(), 2, 3, 3)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())


def deviation(model: Normed, x: Tensor) -> np.ndarray:
    """d(x), layer by layer from activations written out."""
    with torch.no_grad():
        first = model.conv(x)
        second = model.inner(model.places(first).tanh().flatten(1))
    found = np.zeros(len(x))
    for i in range(len(x)):
        logs = 0.0
        for layer, activations in ((model.places, first[i].flatten(1).mean(dim=1)), (model.features, second[i])):
            mean, var = layer.running_mean.numpy(), layer.running_var.numpy()
            squares = [(a - m) ** 2 / (v + layer.eps) for a, m, v in zip(activations.numpy(), mean, var, strict=True)]
            logs += math.log(sum(squares) / len(squares))
        found[i] = math.exp(logs / 2)
    return found


@pytest.mark.parametrize("training", [False, True])
def test_variances_grow_with_the_distance_from_running_statistics(training):
    posterior, x = normed(), 2 * normal(6, 2, 3, 3, seed=100)
    model = posterior.model.eval()
    f, covariance = dense_moments(posterior, x)
    d = deviation(model, x)
    assert d.max() > 2 * d.min()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train(training)
    found = posterior.predict(x, likelihood="classification")
    # d is computed in float32.
    assert_novelty(found.novelty, entropy(pairwise(f, covariance * d[:, None, None])), rtol=1e-5)
    assert torch.equal(found.novelty, posterior.novelty(x, likelihood="classification"))
    # The prediction itself has nothing of it.
    alone = posterior.predict(x, likelihood="classification", novelty=False)
    assert_close(found.variance, alone.variance, rtol=1e-12)
    assert model.training == training
    assert hooks(model) == 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_no_hook_stays_where_the_model_raises():
    posterior, x = normed(), normal(4, 2, 3, 3)
    posterior.model.train()
    posterior.model.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        posterior.novelty(x, likelihood="classification")
    assert hooks(posterior.model) == 0
    assert posterior.model.training
    # The pass over the running statistics by itself, which comes last.
    seen = []

    def broken(model: Any, inputs: Tensor) -> Tensor:
        seen.append(hooks(model))
        return model(inputs)

    with pytest.raises(RuntimeError, match="broken"):
        running_deviation(Call(posterior.model, broken), posterior.mode, x)
    assert seen == [2]
    assert hooks(posterior.model) == 0


def test_a_model_without_running_statistics_is_not_run_for_them():
    def never(model: Any, inputs: Tensor) -> Tensor:
        raise AssertionError("not needed")

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert running_deviation(Call(model, never), {}, normal(4, 3)) is None


def test_an_example_s_novelty_is_its_own():
    posterior, x = normed(), normal(5, 2, 3, 3, seed=100)
    one_by_one = torch.cat([posterior.novelty(x[i : i + 1], likelihood="classification") for i in range(5)])
    assert_close(posterior.novelty(x, likelihood="classification"), one_by_one, rtol=1e-6, atol=1e-8)


def test_other_norms_change_nothing():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    posterior, x = trained("diagonal", plain), 2 * normal(6, 3, seed=100)
    assert_novelty(posterior.novelty(x, likelihood="classification"), entropy(pairwise(*dense_moments(posterior, x))))
    assert hooks(plain) == 0


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_saved_posterior_has_the_same(structure, tmp_path):
    posterior, x = trained(structure), normal(5, 3, seed=100)
    posterior.save(tmp_path / "posterior")
    model = copy.deepcopy(posterior.model)
    assert_close(
        ba.Posterior.load(tmp_path / "posterior", model).novelty(x, likelihood="classification"),
        posterior.novelty(x, likelihood="classification"),
        rtol=1e-12,
    )


def test_a_saved_mixture_has_the_same(tmp_path):
    mixture, x = ba.Mixture(members(3, 4, 3), WEIGHTS), normal(5, 3, seed=100)
    mixture.save(tmp_path / "mixture")
    found = ba.Mixture.load(tmp_path / "mixture", mlp(3, 4, 3).double())
    assert_close(
        found.novelty(x, likelihood="classification"), mixture.novelty(x, likelihood="classification"), rtol=1e-12
    )


@pytest.mark.parametrize("batch_size", [None, BATCH])
def test_a_checkpoint_has_the_same(batch_size, tmp_path):
    torch.manual_seed(0)
    model = Normed().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    fit(model, optimizer, "classification", 2, 3, 3)
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    options: Any = {"prior_precision": 1.0, "batch_size": batch_size}
    live = ba.Posterior.from_optimizer(model, optimizer, N, **options)
    torch.manual_seed(5)
    found = ba.Posterior.from_checkpoint(path, Normed().double(), N, **options)
    x = normal(5, 2, 3, 3, seed=100)
    assert torch.equal(found.novelty(x, likelihood="classification"), live.novelty(x, likelihood="classification"))
