"""Novelty against dense matrices in float64, and what must not change it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from cases import mlp, orthonormal, soap
from floats import assert_close

# Eight gradients are few: that is told of a posterior at its own settings, and not what is asked here.
pytestmark = pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")
N, BATCH = 20_000, 10
STRUCTURES = ["diagonal", "kronecker", "soap"]


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


RIDGE = 0.01
# The exponent of the mean over layers: 4 where the input side of every layer is a diagonal.
DIAGONAL, ROTATED = 4.0, 1.0


def input_sides(posterior: ba.Posterior) -> dict[str, tuple[np.ndarray, bool]]:
    """A of each layer, the trace of V over outputs and kernel positions, and whether a rotation gives more than its
    diagonal."""
    whole, found, start = dense_curvature(posterior), {}, 0
    for name, mode in posterior.mode.items():
        block = whole[start : start + mode.numel(), start : start + mode.numel()]
        start += mode.numel()
        if mode.dim() == 1:
            continue
        rows, columns = mode.shape[:2]
        side = torch.einsum("ickidk->cd", block.reshape(rows, columns, -1, rows, columns, mode[0, 0].numel()))
        basis = posterior.structure.bases.get(name)
        rotated = basis is not None and basis.right is not None
        found[name] = (side if rotated else side.diagonal().diag()).numpy(), rotated
    return found


def relative(posterior: ba.Posterior, inputs: Mapping[str, Tensor]) -> np.ndarray:
    """r, (b,), of the layers' inputs, (b, ..., width) by weight, relative to the batch."""
    logs, p = [], DIAGONAL
    for name, (side, rotated) in input_sides(posterior).items():
        a = inputs[name].flatten(1, -2).mean(dim=1).numpy() if inputs[name].dim() > 2 else inputs[name].numpy()
        inverse = np.linalg.inv(side + RIDGE * np.diagonal(side).mean() * np.eye(len(side)))
        logs.append(np.log(np.einsum("bi,ij,bj->b", a, inverse, a)))
        p = ROTATED if rotated else p
    each = np.stack([log - np.median(log) for log in logs])
    log_r = np.log(np.exp(p * each).mean(axis=0)) / p
    return np.exp(log_r - np.median(log_r))


def steepness(r: np.ndarray) -> np.ndarray:
    """u = √(1 + (10 π/4) r^1.5)."""
    return np.sqrt(1 + 10 * math.pi / 4 * r**1.5)


@torch.no_grad()
def dense(posterior: ba.Posterior, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """f, (b, ..., o), and r, (b,), of a network of layers in a row."""
    inputs, names = {}, iter([name for name, mode in posterior.mode.items() if mode.dim() > 1])
    for layer in posterior.model:
        if isinstance(layer, nn.Linear):
            inputs[next(names)] = x
        x = layer(x)
    return x.numpy(), relative(posterior, inputs)


def entropy(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    return -(p * np.log(p)).sum(axis=-1)


def expected_of_classes(posterior: ba.Posterior, x: Tensor) -> np.ndarray:
    f, r = dense(posterior, x)
    u = steepness(r)
    return entropy(f / u[:, None])


def assert_novelty(found: Tensor, expected: np.ndarray, rtol: float = 1e-8) -> None:
    assert found.shape == expected.shape
    assert_close(found.numpy(), expected, rtol=rtol, atol=1e-12)
    # A constant would pass no test of detection.
    assert float(found.std()) > 1e-3


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_the_entropy_at_the_temperature_of_leverage(structure):
    posterior, x = trained(structure), 2 * normal(6, 3, seed=100)
    assert_novelty(posterior.novelty(x, likelihood="classification"), expected_of_classes(posterior, x))


CHANGES: list[dict[str, Any]] = [
    {"scale": 1e8},
    {"prior_precision": 1e6},
    {"prior_precision": 1e-6},
    {"power": 0.7},
    {"power": 1.0},
    {"n_data": 7.0 * N},
    {"batch_size": 1},
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


def test_weights_without_curvature_or_prior_are_no_hindrance():
    """Constant inputs and no weight decay: v = 0 and δ = 0, but leverage has a ridge of its own."""
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
    assert_novelty(posterior.novelty(x, likelihood="classification"), expected_of_classes(posterior, x))


def test_an_unknown_batch_size_serves():
    known, unknown, x = trained(), trained(batch_size=None), normal(40, 3, seed=100)
    assert torch.equal(unknown.novelty(x, likelihood="classification"), known.novelty(x, likelihood="classification"))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("covariance", [False, True])
def test_a_prediction_has_the_same(structure, covariance):
    posterior, x = trained(structure), normal(5, 3, seed=100)
    found = posterior.predict(x, likelihood="classification", covariance=covariance)
    assert torch.equal(found.novelty, posterior.novelty(x, likelihood="classification"))


def test_a_forward_of_the_user_s_own():
    posterior, x = trained(), normal(5, 3, seed=100)
    found = posterior.novelty(
        {"a": x}, likelihood="classification", forward=lambda model, batch: {"logits": model(batch["a"])}
    )
    assert_close(found, posterior.novelty(x, likelihood="classification"))


@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
def test_sampling_predictives_have_the_mean_of_their_draws(predictive):
    posterior, x = trained(prior_precision=1e4), normal(4, 3)
    found = posterior.predict(x, likelihood="classification", predictive=predictive)
    assert_novelty(found.novelty, entropy(found.mean.numpy() / steepness(dense(posterior, x)[1])[:, None]))


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_of_sequences_it_is_entropy_and_leverage_place_by_place(structure):
    posterior = trained(structure, mlp(3, 4, 3), 5, 3)
    x = 2 * normal(6, 5, 3, seed=100)
    f, r = dense(posterior, x)
    expected = entropy(f) + 0.3 * np.log(r)[:, None]
    assert_novelty(posterior.novelty(x, likelihood="classification"), expected.mean(axis=1))
    assert_close(posterior.predict(x, likelihood="classification", outputs="all").token_novelty, expected, rtol=1e-5)


def test_one_place_has_no_tokens():
    posterior = trained("diagonal", mlp(3, 4, 3))
    with pytest.raises(ba.errors.SettingError, match="token_novelty is of outputs"):
        _ = posterior.predict(normal(6, 3), likelihood="classification").token_novelty


# --- other likelihoods ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_of_binary_outputs_it_is_the_average_entropy(structure):
    posterior = trained(structure, mlp(3, 4, 2), loss="binary")
    x = 2 * normal(6, 3, seed=100)
    f, r = dense(posterior, x)
    u = steepness(r)
    logits = f / u[:, None]
    expected = entropy(np.stack([logits, np.zeros_like(logits)], axis=-1)).mean(axis=1)
    assert_novelty(posterior.novelty(x, likelihood="binary"), expected)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("likelihood", ["regression", "poisson", "heteroscedastic"])
def test_of_numbers_it_is_the_relative_leverage(structure, likelihood):
    posterior = trained(structure, mlp(3, 4, 2), loss=likelihood)
    x = 2 * normal(6, 3, seed=100)
    expected = dense(posterior, x)[1]
    assert_novelty(posterior.novelty(x, likelihood=likelihood), expected)
    assert_close(posterior.predict(x, likelihood=likelihood).novelty, expected)


# --- mixtures ---------------------------------------------------------------------------------------------------------


def members(*sizes: int, loss: str = "classification") -> list[ba.Posterior]:
    found = []
    for structure in ("diagonal", "kronecker"):
        torch.manual_seed(len(structure))
        model = mlp(*sizes).double()
        found.append(trained(structure, copy.deepcopy(model), loss=loss))
    return found


WEIGHTS = (0.7, 0.3)


def test_of_a_mixture_it_is_the_average():
    posteriors, x = members(3, 4, 3), 2 * normal(6, 3, seed=100)
    mixture = ba.Mixture(posteriors, WEIGHTS)
    average = sum(w * expected_of_classes(p, x) for w, p in zip(WEIGHTS, posteriors, strict=True))
    assert_novelty(mixture.novelty(x, likelihood="classification"), average)
    assert torch.equal(
        mixture.predict(x, likelihood="classification").novelty, mixture.novelty(x, likelihood="classification")
    )
    assert torch.equal(
        mixture.replace(scale=1e6, temperature=2.0).novelty(x, likelihood="classification"),
        mixture.novelty(x, likelihood="classification"),
    )


def test_of_a_mixture_of_regressions_too():
    posteriors, x = members(3, 4, 2, loss="regression"), 2 * normal(6, 3, seed=100)
    average = sum(w * dense(p, x)[1] for w, p in zip(WEIGHTS, posteriors, strict=True))
    assert_novelty(ba.Mixture(posteriors, WEIGHTS).novelty(x, likelihood="regression"), average)


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


def layers_written_out(model: Normed, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """f and the inputs of all layers, activations written out."""
    with torch.no_grad():
        first = model.places(model.conv(x)).tanh().flatten(1)
        second = model.features(model.inner(first)).tanh()
        inputs = {"conv.weight": x.flatten(2).mT, "inner.weight": first, "head.weight": second}
        return model.head(second), inputs


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_stay_as_they_are(training):
    posterior, x = normed(), 2 * normal(6, 2, 3, 3, seed=100)
    model = posterior.model.eval()
    f, inputs = layers_written_out(model, x)
    u = steepness(relative(posterior, inputs))
    assert u.max() > 2 * u.min()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train(training)
    found = posterior.predict(x, likelihood="classification")
    assert_novelty(found.novelty, entropy(f.numpy() / u[:, None]))
    assert torch.equal(found.novelty, posterior.novelty(x, likelihood="classification"))
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


def test_an_example_s_novelty_is_its_own():
    posterior, x, familiar = normed(), normal(5, 2, 3, 3, seed=100), normal(10, 2, 3, 3, seed=101)
    options: Any = {"likelihood": "classification", "reference": familiar}
    one_by_one = torch.cat([posterior.novelty(x[i : i + 1], **options) for i in range(5)])
    assert_close(posterior.novelty(x, **options), one_by_one, rtol=1e-6, atol=1e-8)


def test_other_norms_change_nothing():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    posterior, x = trained("diagonal", plain), 2 * normal(6, 3, seed=100)
    assert_novelty(posterior.novelty(x, likelihood="classification"), expected_of_classes(posterior, x))
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
