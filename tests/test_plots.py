"""Pictures: what is drawn where, against numbers found another way; no window, and matplotlib only when it is asked
for.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import bayesadam as ba
from bayesadam import scores
from bayesadam.errors import MatchError, MissingExtraError, SettingError
from bayesadam.likelihoods import Component, likelihood
from cases import mlp
from floats import approx, assert_close

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")
G = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def numbers(n: int = 12, outputs: int = 1, noise: float | None = 0.25, name: str = "regression") -> Any:
    mean, variance = torch.randn(n, outputs, generator=G), 0.1 + torch.rand(n, outputs, generator=G)
    given = None if noise is None else torch.tensor(noise)
    return likelihood(name).predictive([Component(mean, variance, noise_variance=given)])


def classes(n: int = 300, k: int = 4) -> tuple[Any, torch.Tensor]:
    logits = 2 * torch.randn(n, k, generator=G)
    y = torch.multinomial((logits / 2).softmax(dim=-1), 1, generator=G).squeeze(1)
    return likelihood("classification").predictive([Component(logits, torch.rand(n, k, generator=G))]), y


def posterior() -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp(2, 8, 3)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return ba.Posterior.from_moments(model, mean, {name: 0.01 + p.square() for name, p in mean.items()}, 10)


def polygons(ax: Any) -> list[np.ndarray]:
    return [path.vertices for each in ax.collections for path in each.get_paths()]


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_bands_reach_from_quantile_to_quantile():
    p, x = numbers(), torch.randn(12, 1, generator=G)
    ax = p.plot(x, targets=p.mean + 0.1, level=0.9)
    assert labels(ax) == ["90 % of observations", "90 % of the function", "mean", "targets"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y")
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95))
    for vertices, variance in zip(polygons(ax), (p.variance + 0.25, p.variance), strict=True):
        for number in range(12):
            column = vertices[np.isclose(vertices[:, 0], float(x[number]))][:, 1]
            expected = [float(p.mean[number] + sign * z * variance[number].sqrt()) for sign in (-1, 1)]
            assert_close([column.min(), column.max()], expected, rtol=1e-4)
    line, dots = ax.lines
    order = x.flatten().argsort()
    assert_close(line.get_ydata(), p.mean.flatten()[order].numpy())
    assert_close(dots.get_ydata(), (p.mean + 0.1).flatten().numpy(), rtol=1e-6)


def test_without_x_the_examples_are_in_the_order_of_their_means():
    p = numbers(n=5, outputs=2)
    ax = p.plot(targets=p.mean.numpy())
    assert ax.get_xlabel() == "examples by mean"
    assert labels(ax) == ["95 % of observations", "95 % of the function", "output 0", "targets", "output 1"]
    order = p.mean[:, 0].argsort()
    assert_close(ax.lines[0].get_ydata(), p.mean[order, 0].numpy())
    assert_close(ax.lines[2].get_ydata(), p.mean[order, 1].numpy())


def test_an_unknown_noise_leaves_the_function_alone_and_says_nothing():
    ax = numbers(noise=None).plot(torch.arange(12))
    assert labels(ax) == ["95 % of the function", "mean"]


@pytest.mark.parametrize("name", ["heteroscedastic", "poisson"])
def test_other_numbers_have_bands_too(name):
    p = numbers(outputs=2 if name == "heteroscedastic" else 1, name=name)
    ax = p.plot(np.arange(12.0))
    low, high = p.interval(0.95)
    found = polygons(ax)[0][:, 1]
    assert_close([found.min(), found.max()], [float(low.min()), float(high.max())], rtol=1e-4)


def test_mixtures_are_drawn_like_their_kind():
    members = [numbers().components[0] for _ in range(2)]
    ax = likelihood("regression").predictive(members, [0.5, 0.5]).plot(torch.arange(12))
    assert labels(ax)[0] == "95 % of observations"


def test_a_reliability_diagram_shows_the_calibration_error():
    p, y = classes()
    ax = p.plot(targets=y)
    assert ax.get_title(loc="left") == f"expected calibration error {scores.ece(p.probs, y):.3f}"
    confidence, answer = p.probs.max(dim=-1)
    (dots,) = [each for each in ax.collections if hasattr(each, "get_sizes") and len(each.get_offsets()) > 1]
    for sure, share in np.asarray(dots.get_offsets()):
        inside = ((confidence * 15).ceil() == np.ceil(sure * 15)).numpy()
        assert share == approx((answer == y).numpy()[inside].mean())
        assert sure == approx(confidence.numpy()[inside].mean(), rel=1e-5)


def test_probabilities_are_lines_over_x_or_over_the_examples():
    p, _ = classes(n=20, k=3)
    assert p.plot().get_xlabel() == "examples by probability of class 0"
    ax = p.plot(torch.arange(20.0))
    assert labels(ax) == ["class 0", "class 1", "class 2"]
    assert_close(ax.lines[1].get_ydata(), p.probs[:, 1].numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["regression", "classification"])
def test_novelty_of_two_kinds_of_inputs(name):
    q = posterior()
    inside, outside = (q.predict(size * torch.randn(50, 2, generator=G), likelihood=name) for size in (1, 5))
    ax = inside.plot(other=outside)
    assert ax.get_title(loc="right") == f"AUROC {scores.auroc(inside.novelty, outside.novelty):.3f}"
    assert ax.get_xlabel() == "novelty"
    assert labels(ax) == ["these, 50 examples", "other, 50 examples"]
    assert labels(inside.plot(kind="novelty")) == ["these, 50 examples"]


@pytest.mark.parametrize("make", [posterior, lambda: ba.Mixture([posterior(), posterior()])])
def test_signal_to_noise_ratios_by_layer(make):
    q = make()
    ax = q.plot()
    assert ax.get_xscale() == "log"
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "2"]
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    snr = q.snr()
    expected = [torch.cat([snr[f"{k}.weight"].flatten(), snr[f"{k}.bias"]]).double().numpy() for k in (0, 2)]
    assert_close(medians, [np.median(each) for each in expected], rtol=1e-5)


def test_the_users_axes_are_used_and_returned():
    _, ax = plt.subplots()
    for draw in (numbers().plot, classes()[0].plot, posterior().plot):
        assert draw(ax=ax) is ax
    assert len(plt.get_fignums()) == 1


def test_what_cannot_be_drawn_is_refused():
    p, y = classes(n=6)
    with pytest.raises(SettingError, match=r"kind must be one of \('probabilities', .*, 'risk-coverage'\)"):
        p.plot(kind="bands")
    with pytest.raises(SettingError, match="needs targets="):
        p.plot(kind="reliability")
    with pytest.raises(MatchError, match=r"the targets have shape \(5,\)"):
        p.plot(targets=y[:5])
    with pytest.raises(MatchError, match="x has 24 numbers and the prediction 12 examples"):
        numbers().plot(torch.zeros(12, 2))
    with pytest.raises(SettingError, match="too many for one picture"):
        numbers(outputs=9).plot()


def test_matplotlib_is_asked_for_only_by_a_picture(monkeypatch):
    # That an import does not ask for it, tests/test_imports.py knows.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (numbers().plot, posterior().plot):
        with pytest.raises(MissingExtraError, match="pip install 'bayesadam'"):
            draw()
