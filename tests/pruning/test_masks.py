"""Masks against a full sort, for every ranking, scope and pattern."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bayesadam import Mixture, Posterior
from bayesadam.errors import MatchError, SettingError
from bayesadam.pruning import (
    RANKINGS,
    neuron_masks,
    path_scores,
    pruning_masks,
    pruning_report,
    weight_scores,
)
from cases import mlp, trained
from floats import assert_close
from pruning.cases_pruning import posterior_of, removed, sorted_masks

REFERENCES = {
    "snr": lambda t, v: np.abs(t) * np.sqrt(100.0) * v**0.25,
    "snr-posterior": lambda t, v: np.abs(t) * np.sqrt(100.0 * v**0.5 + 3.0),
    "magnitude": lambda t, v: np.abs(t),
    "saliency": lambda t, v: 0.5 * t**2 * v,
}


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(7, 9, 3).to(dtype)


def assert_same(masks: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        np.testing.assert_array_equal(mask.cpu().numpy(), expected[name], err_msg=name)


# --- rankings ---------------------------------------------------------------------------------------------------------


def test_every_ranking_has_a_reference() -> None:
    assert RANKINGS.keys() == REFERENCES.keys()


@pytest.mark.parametrize("ranking", REFERENCES)
def test_scores_are_the_formulas(ranking: str) -> None:
    posterior = posterior_of(net(), delta=3.0)
    scores = weight_scores(posterior, ranking)
    assert list(scores) == list(posterior.mode)
    for name, score in scores.items():
        theta, v = posterior.mode[name].numpy(), posterior.structure.second_moment[name].numpy()
        assert_close(score.numpy(), REFERENCES[ranking](theta, v), rtol=1e-12)


@pytest.mark.parametrize("form", ["map", "likelihood"])
@pytest.mark.parametrize(("power", "batch_size"), [(0.5, None), (1.0, 8)])
def test_the_posteriors_snr_is_its_own(form: str, power: float, batch_size: int | None) -> None:
    posterior = posterior_of(net(), delta=3.0, form=form, power=power, batch_size=batch_size, scale=2.0)
    scores = weight_scores(posterior, "snr-posterior")
    for name, expected in posterior.snr().items():
        assert_close(scores[name], expected)


def test_without_a_prior_both_signals_to_noise_agree() -> None:
    # A Gaussian of another's making keeps its variance as power 1: its signal to noise is |mean|/stddev all the same.
    model = net()
    variance = {name: torch.rand_like(p) + 0.1 for name, p in model.named_parameters()}
    mean = {name: p.detach() for name, p in model.named_parameters()}
    scores = weight_scores(Posterior.from_moments(model, mean, variance, n_data=50))
    for name, score in scores.items():
        assert_close(score, mean[name].abs() / variance[name].sqrt())


@pytest.mark.parametrize(("q", "name"), [(0.0, "magnitude"), (0.5, "snr"), (1.0, "saliency")])
def test_a_power_orders_as_the_ranking_it_stands_for(q: float, name: str) -> None:
    posterior = posterior_of(net())
    masks = pruning_masks(posterior, 0.6, ranking=lambda theta, v: theta.abs() * v.pow(q / 2))
    assert all(torch.equal(mask, masks[key]) for key, mask in pruning_masks(posterior, 0.6, ranking=name).items())


def test_a_dead_weight_goes_first_whatever_the_prior() -> None:
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[5.0, 0.1, 0.2]]))
    posterior = posterior_of(model, {"weight": torch.tensor([[0.0, 0.01, 0.01]])}, delta=1e3)
    assert pruning_masks(posterior, 1 / 3)["weight"].tolist() == [[False, True, True]]
    assert pruning_masks(posterior, 1 / 3, ranking="snr-posterior")["weight"].tolist() == [[True, False, True]]


def test_a_function_and_ready_scores_rank_too() -> None:
    posterior = posterior_of(net())
    by_function = pruning_masks(posterior, 0.4, ranking=lambda theta, v: theta.abs() * v)
    ready = {name: theta.abs() * posterior.structure.second_moment[name] for name, theta in posterior.mode.items()}
    by_scores = pruning_masks(posterior, 0.4, ranking=ready)
    expected = sorted_masks({n: s.numpy() for n, s in ready.items()}, round(0.4 * posterior.n_weights))
    assert_same(by_function, expected)
    assert_same(by_scores, expected)


def test_whole_numbers_rank_exactly() -> None:
    # Beyond 2²⁴, where float32 would see ties.
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 0.9, 0.2, 0.8]]))
    scores = {"weight": torch.tensor([[3, 1, 2, 0]]) + 2**30}
    assert pruning_masks(posterior_of(model), 0.5, ranking=scores)["weight"].tolist() == [[True, False, True, False]]


@pytest.mark.parametrize(
    ("ranking", "words"),
    [
        ("entropy", "must be one of 'snr'"),
        (3, "must be one of 'snr'"),
        (lambda theta, v: theta.flatten(), "'0.weight' must have shape"),
        (lambda theta, v: theta * math.nan, r"63 of the 63 scores of '0\.weight' are NaN"),
        ({"0.weight": torch.ones(9, 7)}, r"'0\.bias', '2\.weight', '2\.bias'\] are unknown or missing"),
        ({"0.weigth": torch.ones(9, 7)}, r"'0\.weigth', '0\.weight', .* are unknown or missing"),
    ],
    ids=["unknown", "number", "shape", "nan", "missing", "misspelt"],
)
def test_a_ranking_that_gives_no_order_is_refused(ranking: Any, words: str) -> None:
    with pytest.raises((MatchError, SettingError), match=words):
        pruning_masks(posterior_of(net()), 0.5, ranking=ranking)


def test_nan_weights_are_named() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[1, 1] = math.nan
    with pytest.raises(MatchError, match=r"1 of the 27 scores of '2\.weight' are NaN"):
        pruning_masks(posterior_of(model), 0.5)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_masks_are_those_of_a_full_sort(seed: int, scope: str) -> None:
    rng = np.random.default_rng(seed)
    dtype = (torch.float32, torch.float64)[seed % 2]
    model = net(seed, dtype)
    fraction = float(rng.choice([0.0, 0.013, 0.25, 0.5, 0.77, 0.99, 1.0]))
    # Few values, so that most scores and many magnitudes are tied; both signs, and both zeros.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.integers(-3, 4, parameter.shape) * 0.5))
    scores = {
        n: rng.choice([-np.inf, -2.5, -0.0, 0.0, 1e-40, 0.1, np.inf], p.shape) for n, p in model.named_parameters()
    }
    posterior = posterior_of(model)
    given = {name: torch.from_numpy(score).to(dtype) for name, score in scores.items()}
    scores = {name: score.numpy() for name, score in given.items()}
    masks = pruning_masks(posterior, fraction, ranking=given, scope=scope)
    if scope == "global":
        assert_same(masks, sorted_masks(scores, round(fraction * posterior.n_weights)))
    else:
        for name, score in scores.items():
            assert_same({name: masks[name]}, sorted_masks({name: score}, round(fraction * score.size)))


@pytest.mark.parametrize("seed", range(6))
def test_distinct_scores_of_any_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = mlp(40, 30, 5).to((torch.float32, torch.float64)[seed % 2])
    posterior = posterior_of(model)
    scores = {
        name: torch.from_numpy(rng.standard_normal(p.shape) * 10.0 ** rng.integers(-30, 30, p.shape)).to(p.dtype)
        for name, p in model.named_parameters()
    }
    for fraction in rng.random(5):
        masks = pruning_masks(posterior, fraction, ranking=scores)
        count = round(fraction * posterior.n_weights)
        assert_same(masks, sorted_masks({n: s.numpy() for n, s in scores.items()}, count))
        assert removed(masks) == count


def test_scores_of_two_types_are_compared_in_the_wider() -> None:
    model = mlp(2, 1)
    posterior = posterior_of(model)
    near_one = 1.0 + 1e-12
    scores = {"0.weight": torch.tensor([[near_one, near_one]], dtype=torch.float64), "0.bias": torch.tensor([1.0])}
    masks = pruning_masks(posterior, 1 / 3, ranking=scores)
    assert masks["0.bias"].tolist() == [False]
    assert masks["0.weight"].all()


def test_all_scores_equal_cuts_the_first() -> None:
    equal = {"weight": torch.zeros(1, 6)}
    for count in range(7):
        mask = pruning_masks(posterior_of(nn.Linear(6, 1, bias=False)), count / 6, ranking=equal)["weight"]
        assert mask.tolist() == [[False] * count + [True] * (6 - count)]


@pytest.mark.parametrize("ranking", ["snr", "magnitude"])
def test_the_ends_remove_nothing_and_everything(ranking: str) -> None:
    posterior = posterior_of(net())
    assert removed(pruning_masks(posterior, 0, ranking=ranking)) == 0
    assert removed(pruning_masks(posterior, 1, ranking=ranking)) == posterior.n_weights


@pytest.mark.parametrize("fraction", [-0.1, 1.0001, math.nan, math.inf, "half", True, None])
def test_a_fraction_outside_its_range_is_refused(fraction: Any) -> None:
    with pytest.raises(SettingError, match="fraction must be a number from 0 to 1"):
        pruning_masks(posterior_of(net()), fraction)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(SettingError, match="scope must be one of 'global', 'layer', got 'row'"):
        pruning_masks(posterior_of(net()), 0.5, scope="row")  # type: ignore[arg-type]


def test_empty_posteriors_and_parameters() -> None:
    assert pruning_masks(posterior_of(nn.Tanh()), 0.5) == {}
    model = mlp(2, 3)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1e-9)))
    masks = pruning_masks(posterior_of(model, {n: torch.ones_like(p) for n, p in model.named_parameters()}), 0.1)
    assert masks["empty"].shape == (0, 4)
    assert not masks["scalar"]
    assert removed(masks) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_have_masks_of_their_shapes(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    model.register_buffer("steps", torch.arange(3))
    masks = pruning_masks(posterior_of(model), 0.5)
    assert {name: mask.shape for name, mask in masks.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert removed(masks) == round(0.5 * sum(p.numel() for p in model.parameters()))


def test_the_model_and_the_posterior_are_not_touched() -> None:
    posterior = posterior_of(net())
    before = {
        name: (theta.clone(), posterior.structure.second_moment[name].clone()) for name, theta in posterior.mode.items()
    }
    weights = {name: p.detach().clone() for name, p in posterior.model.named_parameters()}
    for ranking in RANKINGS:
        pruning_masks(posterior, 0.7, ranking=ranking)
    for name, (theta, v) in before.items():
        assert torch.equal(posterior.mode[name], theta)
        assert torch.equal(posterior.structure.second_moment[name], v)
        assert torch.equal(posterior.parameters()[name], weights[name])


# --- what is left whole -----------------------------------------------------------------------------------------------


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.body = nn.Linear(8, 8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embed.weight


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
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_excluded_parameters_are_whole_and_do_not_count(exclude: Any, whole: set[str]) -> None:
    posterior = posterior_of(Text())
    masks = pruning_masks(posterior, 0.5, exclude=exclude)
    eligible = sum(theta.numel() for name, theta in posterior.mode.items() if name not in whole)
    assert masks.keys() == posterior.mode.keys()
    assert all(masks[name].all() for name in whole)
    assert removed(masks) == round(0.5 * eligible)


def test_a_kind_the_model_lacks_is_passed_over() -> None:
    posterior = posterior_of(net())
    assert removed(pruning_masks(posterior, 1.0, exclude=("norms", "embeddings"))) == posterior.n_weights


def test_a_pattern_without_a_match_lists_what_is_near() -> None:
    with pytest.raises(MatchError, match=r"'0\.wieght' matches no parameter; they are 0\.bias, 0\.weight"):
        pruning_masks(posterior_of(net()), 0.5, exclude=("0.wieght",))


def test_what_is_outside_the_posterior_is_never_pruned() -> None:
    model = net()
    posterior = posterior_of(model, names=["0.weight", "2.weight"])
    masks = pruning_masks(posterior, 1.0, exclude="0.bias")
    assert masks.keys() == {"0.weight", "2.weight"}


# --- N:M --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "size"), [(2, 4), (1, 4), (1, 2), (4, 8), (3, 3)])
@pytest.mark.parametrize("make", [lambda: nn.Linear(24, 5), lambda: nn.Conv2d(24, 5, 3)])
def test_each_group_along_the_input_keeps_its_best(make: Any, keep: int, size: int) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        # Ties within groups.
        model.weight.copy_((model.weight * 20).round())
    posterior = posterior_of(model)
    masks = pruning_masks(posterior, ranking="snr", pattern=f"{keep}:{size}")
    assert masks["bias"].all()
    scores = np.moveaxis(weight_scores(posterior)["weight"].numpy(), 1, -1).reshape(-1, size)
    found = masks["weight"].movedim(1, -1).reshape(-1, size).numpy()
    for row in range(len(scores)):
        expected = sorted_masks({"g": scores[row]}, size - keep)["g"]
        np.testing.assert_array_equal(found[row], expected)


def test_a_size_that_is_no_multiple_names_the_way_out() -> None:
    posterior = posterior_of(net())
    with pytest.raises(SettingError, match=r"'0\.weight' has shape \(9, 7\): its 7 inputs.*exclude=\('0\.weight',\)"):
        pruning_masks(posterior, pattern="2:4")
    with pytest.raises(SettingError, match=r"'2\.weight'"):
        pruning_masks(posterior, pattern="2:4", exclude=("0.weight",))
    masks = pruning_masks(posterior, pattern="1:3", exclude=("0.weight",))
    assert removed(masks) == 18


@pytest.mark.parametrize("pattern", ["2/4", "0:4", "5:4", "2:0", "a:b", ""])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(SettingError, match="pattern must be 'N:M'"):
        pruning_masks(posterior_of(net()), pattern=pattern)


def test_a_pattern_and_a_fraction_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="implies the fraction"):
        pruning_masks(posterior_of(net()), 0.5, pattern="2:4")


@pytest.mark.cuda
def test_masks_are_on_the_parameters_device() -> None:
    model = net(dtype=torch.float32)
    expected = pruning_masks(posterior_of(model), 0.6)
    cuda = posterior_of(model).to("cuda")
    model.to("cuda")
    masks = pruning_masks(cuda, 0.6)
    assert all(mask.is_cuda for mask in masks.values())
    assert all(torch.equal(mask.cpu(), expected[name]) for name, mask in masks.items())


@pytest.mark.parametrize(
    "ask",
    [
        lambda mixture: pruning_masks(mixture, 0.5),
        lambda mixture: neuron_masks(mixture, 0.5, example_input=torch.zeros(1, 3)),
        lambda mixture: path_scores(mixture, example_input=torch.zeros(1, 3)),
        lambda mixture: pruning_report(mixture, {}),
    ],
)
def test_a_mixture_is_no_network_to_prune(ask) -> None:
    members = [Posterior.from_optimizer(*trained(seed=seed), 10, prior_precision=1.0) for seed in (0, 1)]
    with pytest.raises(SettingError, match="Mixture has 2: go through them"):
        ask(Mixture(members))
