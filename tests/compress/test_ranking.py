"""Masks against a full sort, for every ranking, scope and pattern."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import Mixture, Posterior
from bayesadam.compress import RANKINGS, masks, weight_scores
from bayesadam.compress import ranking as ranking_module
from bayesadam.compress.sensitivity import sensitivities
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from bayesadam.predict.matrices import matrices_of
from bayesadam.predict.network import Call
from bayesadam.readers.formats.lazy import Lazy
from cases import mlp, trained
from compress.cases_compress import normalised, posterior_of, removed, sorted_masks
from floats import assert_close

REFERENCES = {
    "snr": lambda t, v: np.abs(t) * np.sqrt(100.0) * v**0.25,
    "magnitude": lambda t, v: np.abs(t),
    "saliency": lambda t, v: 0.5 * t**2 * v,
    "between": lambda t, v: np.abs(t) * v**0.375,
}


SCORES = {name: p.detach() for name, p in mlp(7, 9, 3).named_parameters()}
NAN = torch.full((9, 7), math.nan)


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(7, 9, 3).to(dtype)


def assert_same(found: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    for name, mask in found.items():
        assert mask.dtype == torch.bool
        np.testing.assert_array_equal(mask.cpu().numpy(), expected[name], err_msg=name)


# --- rankings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranking", RANKINGS)
def test_scores_are_the_formulas(ranking: str) -> None:
    posterior = posterior_of(net(), delta=3.0)
    scores = weight_scores(posterior, ranking)
    assert list(scores) == list(posterior.mode)
    for name, score in scores.items():
        theta, v = posterior.mode[name].numpy(), posterior.curvature.second_moment[name].numpy()
        assert_close(score.numpy(), REFERENCES[ranking](theta, v), rtol=1e-12)


@pytest.mark.parametrize(("power", "batch_size"), [(0.5, None), (1.0, 8)])
def test_without_a_prior_the_ratio_is_the_posteriors_own(power: float, batch_size: int | None) -> None:
    posterior = posterior_of(net(), delta=0.0, power=power, batch_size=batch_size, scale=2.0)
    scores = weight_scores(posterior)
    for name, expected in posterior.snr().items():
        assert_close(scores[name], expected)


def test_a_dead_weight_goes_first_whatever_the_prior() -> None:
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[5.0, 0.1, 0.2]]))
    posterior = posterior_of(model, {"weight": torch.tensor([[0.0, 0.01, 0.01]])}, delta=1e3)
    assert masks(posterior, 1 / 3)["weight"].tolist() == [[False, True, True]]
    assert masks(posterior, 1 / 3, ranking=posterior.snr())["weight"].tolist() == [[True, False, True]]


def test_whole_numbers_rank_exactly() -> None:
    # Beyond 2²⁴, where float32 would see ties.
    model = nn.Linear(4, 1, bias=False)
    scores = {"weight": torch.tensor([[3, 1, 2, 0]]) + 2**30}
    assert masks(posterior_of(model), 0.5, ranking=scores)["weight"].tolist() == [[True, False, True, False]]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ranking": "entropy"}, "must be one of 'snr'"),
        ({"ranking": SCORES | {"0.weight": torch.ones(63)}}, "'0.weight' must have shape"),
        (
            {"ranking": SCORES | {"0.weight": NAN}},
            r"63 of the 63 scores of '0\.weight' are NaN",
        ),
        ({"ranking": {"0.weigth": torch.ones(9, 7)}}, r"'0\.weigth', '0\.weight', .* are unknown or missing"),
        ({"fraction": 1.0001}, "fraction must be a number from 0 to 1"),
        ({"fraction": math.nan}, "fraction must be a number from 0 to 1"),
        ({"fraction": None}, "fraction must be a number from 0 to 1"),
        ({"scope": "row"}, "scope must be one of 'global', 'layer', 'bounded', got 'row'"),
        ({"exclude": ("0.wieght",)}, r"'0\.wieght' matches no parameter: did you mean '0\.weight' or '2\.weight'\?"),
        ({"exclude": "0"}, r"did you mean '0\.\*'\?"),
        ({"exclude": "nothing"}, r"'nothing' matches no parameter: they are 0\.bias, 0\.weight"),
        ({"exclude": nn.Linear(1, 1)}, r"exclude takes names or patterns, such as 'head\.\*', .* not a Linear"),
        ({"exclude": ("0.weight", nn.Linear(1, 1))}, r"exclude takes names or patterns.* not a Linear"),
        ({"pattern": "2:4"}, "implies the fraction"),
        ({"fraction": None, "pattern": "5:4"}, "pattern must be 'N:M'"),
        ({"fraction": None, "pattern": "a:b"}, "pattern must be 'N:M'"),
        ({"fraction": None, "pattern": "2:4"}, r"its 7 inputs are not a multiple of 4.*exclude='0\.weight'"),
    ],
)
def test_what_gives_no_masks_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises((MatchError, SettingError), match=words):
        masks(posterior_of(net()), **{"fraction": 0.5, **asked})


def test_a_mixture_is_no_network_to_prune() -> None:
    members = [Posterior.from_optimizer(*trained(seed=seed), 10, prior_precision=1.0) for seed in (0, 1)]
    with pytest.raises(SettingError, match="Mixture has 2: go through them"):
        masks(Mixture(members), 0.5)  # type: ignore[arg-type]


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("tied", [True, False])
def test_masks_are_those_of_a_full_sort(seed: int, scope: Any, tied: bool) -> None:
    """Of few values, most of them tied, of both signs and with both zeros; or of distinct ones of any size."""
    rng = np.random.default_rng(seed)
    dtype = (torch.float32, torch.float64)[seed % 2]
    posterior = posterior_of(net(seed, dtype))
    fraction = (0.0, 0.013, 0.5, 0.77, 0.99, 1.0)[seed]
    shapes = {name: mu.shape for name, mu in posterior.mode.items()}
    if tied:
        values = {n: rng.choice([-np.inf, -2.5, -0.0, 0.0, 1e-40, 0.1, np.inf], shape) for n, shape in shapes.items()}
    else:
        sizes = {n: 10.0 ** rng.integers(-30, 30, shape) for n, shape in shapes.items()}
        values = {n: rng.standard_normal(shape) * sizes[n] for n, shape in shapes.items()}
    given = {name: torch.from_numpy(value).to(dtype) for name, value in values.items()}
    scores = {name: score.numpy() for name, score in given.items()}
    found = masks(posterior, fraction, ranking=given, scope=scope)
    if scope == "global":
        assert_same(found, sorted_masks(scores, round(fraction * posterior.n_weights)))
    else:
        for name, score in scores.items():
            assert_same({name: found[name]}, sorted_masks({name: score}, round(fraction * score.size)))


@pytest.mark.parametrize("scope", ["global", "layer", "bounded"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_of_scores_on_the_disk_masks_are_made_when_accessed(
    scope: Any, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many ties, which reach over the parts that are looked at.
    monkeypatch.setattr(ranking_module, "_PART", 5)
    scores = {name: torch.randint(3, shape).float() for name, shape in (("a", (9, 7)), ("b", (4,)), ("c", (3, 9)))}
    read: list[str] = []
    lazy = Lazy(
        {name: score.to("meta") for name, score in scores.items()}, lambda name: (read.append(name), scores[name])[1]
    )
    found, expected = ranking_module.remaining(lazy, scope, fraction), ranking_module.remaining(scores, scope, fraction)
    assert isinstance(found, Lazy)
    assert all(torch.equal(found[name], mask) for name, mask in expected.items())
    assert read == list(scores)
    if scope == "global":
        assert_same(dict(expected), sorted_masks({n: s.numpy() for n, s in scores.items()}, round(fraction * 94)))


def test_scores_of_two_types_are_compared_in_the_wider() -> None:
    near_one = 1.0 + 1e-12
    scores = {"0.weight": torch.tensor([[near_one, near_one]], dtype=torch.float64), "0.bias": torch.tensor([1.0])}
    found = masks(posterior_of(mlp(2, 1)), 1 / 3, ranking=scores)
    assert found["0.bias"].tolist() == [False]
    assert found["0.weight"].all()


def test_empty_posteriors_and_parameters() -> None:
    assert masks(posterior_of(nn.Tanh()), 0.5) == {}
    model = mlp(2, 3)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1e-9)))
    found = masks(posterior_of(model, {n: torch.ones_like(p) for n, p in model.named_parameters()}), 0.1)
    assert found["empty"].shape == (0, 4)
    assert not found["scalar"]
    assert removed(found) == 1


@pytest.mark.cuda
def test_masks_are_on_the_parameters_device() -> None:
    model = net(dtype=torch.float32)
    expected = masks(posterior_of(model), 0.6)
    cuda = posterior_of(model).to("cuda")
    model.to("cuda")
    found = masks(cuda, 0.6)
    assert all(mask.is_cuda and torch.equal(mask.cpu(), expected[name]) for name, mask in found.items())


# --- what is left whole -----------------------------------------------------------------------------------------------


def text() -> nn.Module:
    layers = {"embed": nn.Embedding(10, 8), "norm": nn.LayerNorm(8), "body": nn.Linear(8, 8)}
    model = nn.ModuleDict({**layers, "batch": nn.BatchNorm1d(8), "head": nn.Linear(8, 10)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize(
    ("exclude", "whole"),
    [
        ("body.weight", {"body.weight"}),
        (["*.bias"], {"norm.bias", "body.bias", "batch.bias", "head.bias"}),
        (("biases",), {"norm.bias", "body.bias", "batch.bias", "head.bias"}),
        (("norms",), {"norm.weight", "norm.bias", "batch.weight", "batch.bias"}),
        (("*norm*", "embeddings"), {"norm.weight", "norm.bias", "embed.weight"}),
        # The second name of a tied parameter.
        (("head.*",), {"head.bias", "embed.weight"}),
    ],
)
def test_excluded_parameters_are_whole_and_do_not_count(exclude: Any, whole: set[str]) -> None:
    posterior = posterior_of(text())
    found = masks(posterior, 0.5, exclude=exclude)
    eligible = sum(theta.numel() for name, theta in posterior.mode.items() if name not in whole)
    assert found.keys() == posterior.mode.keys()
    assert all(found[name].all() for name in whole)
    assert removed(found) == round(0.5 * eligible)


def test_kinds_the_model_lacks_and_parameters_outside_the_posterior_are_passed_over() -> None:
    posterior = posterior_of(net(), names=["0.weight", "2.weight"])
    found = masks(posterior, 1.0, exclude=("norms", "embeddings", "0.bias"))
    assert found.keys() == {"0.weight", "2.weight"}
    assert removed(found) == posterior.n_weights


def test_biases_before_a_batch_norm_are_left_whole_with_a_warning() -> None:
    model, optimizer, _ = normalised()
    posterior = Posterior.from_optimizer(model, optimizer, 200, prior_precision=1.0)
    # As the paper has it they have the least signal-to-noise ratio of all, and removing them is another network.
    with pytest.warns(BayesAdamWarning, match=r"left whole: 0\.bias"):
        found = masks(posterior, 0.1)
    assert found["0.bias"].all()
    assert removed(found) == round(0.1 * (posterior.n_weights - 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks(posterior, 0.1, exclude="biases")
        masks(posterior_of(net()), 0.1)


# --- N:M --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "size"), [(2, 4), (1, 2), (3, 3)])
@pytest.mark.parametrize("make", [lambda: nn.Linear(24, 5), lambda: nn.Conv2d(24, 5, 3)])
def test_each_group_along_the_input_keeps_its_best(make: Any, keep: int, size: int) -> None:
    model = make()
    with torch.no_grad():
        # Ties within groups.
        model.weight.copy_((model.weight * 20).round())
    posterior = posterior_of(model)
    found = masks(posterior, pattern=f"{keep}:{size}")
    assert found["bias"].all()
    scores = np.moveaxis(weight_scores(posterior)["weight"].numpy(), 1, -1).reshape(-1, size)
    rows = found["weight"].movedim(1, -1).reshape(-1, size).numpy()
    for row, of_group in zip(rows, scores, strict=True):
        np.testing.assert_array_equal(row, sorted_masks({"g": of_group}, size - keep)["g"])


def test_a_layer_whose_size_is_no_multiple_may_stay_whole() -> None:
    assert removed(masks(posterior_of(net()), pattern="1:3", exclude=("0.weight",))) == 18


# --- how much outputs depend on units ---------------------------------------------------------------------------------


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
