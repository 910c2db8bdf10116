"""`calibrate`: what it fits, what its guarantees hold, and what it refuses or warns of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibrated.doubtful import balance
from bayesadam.errors import BayesAdamWarning, CalibrationError, MatchError, SettingError
from bayesadam.likelihoods import Component, Moments, likelihood
from bayesadam.predict.leverage import Ratios
from calibrated.cases_calibrated import NAMES, RISKS, blobs, data, fitted, same_answers, seeded, trained, waves
from floats import approx, assert_close
from predict.cases_networks import Lambda, Then

CLASSES = ("binary", "classification")


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_model_gets_the_same(name):
    """Answers rest neither on the optimiser's state nor on N."""
    q, held_out = trained(name), data(name, 200, 200)
    own, plain = ba.calibrate(q, held_out), ba.calibrate(q.model, held_out, likelihood=name)
    x = data(name, 30, 300)[0]
    assert same_answers(own(x), plain(x))
    assert (own.posterior, plain.posterior) == (q, None)


def test_the_temperature_is_the_likeliest():
    q, held_out = trained("classification"), blobs(300, 200)
    net = ba.calibrate(q, held_out)
    kind, f = likelihood("classification"), q.model(held_out[0]).detach()
    # Of held-out examples each is left out of its own leverage, so that theirs cannot be had from the network.
    best = net.report.nll["best temperature alone"][0]
    for temperature in (0.5, 0.8, 1.0, 1.3, 2.0):
        alone = -kind.log_prob([Component(Moments(f), temperature=temperature)], held_out[1]).mean()
        assert best <= float(alone) + 1e-3
    assert net.report.nll["network alone"][0] == approx(float(F.cross_entropy(f, held_out[1])), rel=1e-5)


def ratios(net: ba.Calibrated, x: Tensor) -> Ratios:
    """r of each example."""
    leverage, (f, pooled) = net.fit.leverage, net.tapped(x)
    return leverage.ratios(leverage.log_h(pooled, f))


def test_probabilities_grow_humble_with_leverage():
    q, x = trained("classification"), torch.cat([blobs(50, 300)[0], 10 * torch.randn(50, 2, generator=seeded())])
    net = ba.calibrate(q, blobs(300, 200))
    p, logits = net(x), q.model(x).detach()
    r = ratios(net, x)
    growth = ((1 + r.gentle) / 2) ** net.fit.exponent
    assert_close(p.probs, (logits / (net.fit.temperature * growth[:, None])).softmax(dim=1))
    assert_close(p.distribution.probs, p.probs)
    assert float(p.leverage[50:].median()) > 2 * float(p.leverage[:50].median())
    at = logits / (1 + 10 * math.pi / 4 * r.near**1.5).sqrt()[:, None]
    assert_close(p.novelty, torch.distributions.Categorical(logits=at).entropy())


def test_numbers_widen_with_leverage():
    net = ba.calibrate(trained("regression"), waves(300, 200))
    x = torch.tensor([[0.0], [40.0], [400.0]])
    with pytest.warns(ba.errors.BayesAdamWarning):
        p = net(x)
    gentle = ratios(net, x).gentle
    assert_close(p.f_variance, gentle[:, None] * net.spread)
    assert_close(p.stddev, (p.f_variance + net.noise_variance).sqrt())
    assert_close(p.distribution.stddev, p.stddev)
    assert bool((p.stddev.diff(dim=0) > 0).all())
    assert torch.equal(p.novelty, p.leverage)


@pytest.mark.parametrize("name", NAMES)
def test_guarantees_hold(name):
    """p-values, sets and intervals on fresh data, within four standard errors of both samples."""
    n, m, level = 500, 2000, 0.9
    net, (x, y) = ba.calibrate(trained(name), data(name, n, 200)), data(name, m, 301)
    p = net(x)
    for alpha in (0.05, 0.3):
        error = math.sqrt(alpha * (1 - alpha) * (1 / n + 1 / m))
        assert abs(float((p.p_value <= alpha).double().mean()) - alpha) < 4 * error
    if name in CLASSES:
        kept = p.set(level)
        of_truth = kept.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
    else:
        low, high = p.interval(level)
        of_truth = (low <= y) & (y <= high)
    error = math.sqrt(level * (1 - level) * (1 / n + 1 / m))
    assert (of_truth.double().mean(dim=0) > level - 4 * error).all()
    if name not in ("poisson", "binary"):
        assert (of_truth.double().mean(dim=0) < level + 4 * error + 0.01).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_answered(name):
    settings, (x, y) = RISKS[name], data(name, 2000, 300)
    net = ba.calibrate(trained(name), data(name, 900, 200), **settings)
    p, rule = net(x), net.report.abstention
    assert (rule.n, rule.confidence) == (600, 0.95)
    assert rule.errors / rule.answered <= rule.risk
    if name == "classification":
        doubt, wrong = 1 - p.probs.max(dim=1).values, p.probs.argmax(dim=1) != y
    elif name == "binary":
        doubt = 1 - p.probs.maximum(1 - p.probs).prod(dim=1)
        wrong = ((p.probs > 0.5) != (y > 0.5)).any(dim=1)
    else:
        doubt, wrong = p.stddev.max(dim=1).values, ((p.mean - y).abs() > rule.tolerance).any(dim=1)
    assert_close(p.doubt, doubt)
    assert torch.equal(p.answered, (p.doubt <= rule.threshold) & p.in_range)
    assert float(p.answered.double().mean()) == approx(rule.coverage, abs=0.1)
    # Three standard errors of a rate at the risk.
    assert float(wrong[p.answered].double().mean()) <= rule.risk + 3 * math.sqrt(rule.risk / int(p.answered.sum()))
    assert f"{rule.errors} of {rule.answered} wrong" in str(net.report)


def test_batches_of_a_loader_are_one_data_set():
    q, (x, y) = trained("classification"), blobs(200, 200)
    whole, parts = ba.calibrate(q, (x, y)), ba.calibrate(q, [(x[:70], y[:70]), (x[70:], y[70:])])
    assert_close(parts(x[:20]).probs, whole(x[:20]).probs)
    named = ba.calibrate(q, {"input": x, "labels": y})
    assert_close(named({"input": x[:20]}).novelty, whole(x[:20]).novelty)


def few_counts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Poisson counts of rates about 1.4."""
    x = torch.randn(n, 5, generator=seeded(seed))
    return x, torch.poisson((0.3 + 0.3 * x[:, :1]).exp(), generator=seeded(seed + 1))


@pytest.mark.filterwarnings("ignore:these are other data:bayesadam.errors.BayesAdamWarning")
def test_standard_deviations_and_intervals_of_counts_can_be_believed():
    """Of honest counts and a network that was trained for too long, on inputs like the held-out and far from them."""
    x, y = few_counts(300, 0)
    q = fitted("poisson", x, y, width=20, steps=150)
    net, tuned = ba.calibrate(q, few_counts(300, 2)), q.with_inputs(x).tune(few_counts(300, 2))
    near, _ = few_counts(1000, 4)
    for inputs, most in ((near, 10.0), (4 * near, 60.0)):
        p = net(inputs)
        assert_close(p.mean, q.model(inputs).exp().detach())
        assert float(p.stddev.max()) < most
        assert float(tuned.predict(inputs).stddev.max()) < most
        low, high = p.interval(0.9)
        assert bool(((low == low.round()) & (high == high.round()) & (low >= 0) & (low <= high)).all())
        assert float(high.max()) < 3 * most


def test_outputs_of_another_shape_are_refused():
    net = ba.calibrate(trained("classification"), blobs(100, 200))
    net.model[2] = nn.Linear(16, 4)
    with pytest.raises(MatchError, match="another shape"):
        net(blobs(5, 1)[0])


# --- texts ----------------------------------------------------------------------------------------------------------


def tagger() -> nn.Module:
    """A class for each token; padding is left out of the attention's mean."""
    layers = {"table": nn.Embedding(20, 6), "inner": nn.Linear(6, 6), "head": nn.Linear(6, 4)}

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.inner(self.table(input_ids)).tanh())

    return Lambda(forward, **layers)


def tokens(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(20, (n, 5), generator=seeded(seed))
    mask = (torch.arange(5) < torch.randint(2, 6, (n, 1), generator=seeded(seed + 1))).long()
    labels = torch.where(mask.bool(), ids % 4, -100)
    return {"input_ids": ids, "attention_mask": mask}, labels


def test_tokens():
    (inputs, labels), model = tokens(60, 0), tagger()
    net = ba.calibrate(model, (inputs, labels), likelihood="classification")
    p = net(inputs)
    assert (p.probs.shape, p.novelty.shape) == ((60, 5, 4), (60,))
    entropy = torch.distributions.Categorical(logits=p.f_mean).entropy()
    assert_close(p.novelty, entropy.mean(dim=1) + 0.3 * p.leverage.log())
    assert net.layers == ["inner", "head"]
    assert p.set(0.9).shape == (60, 5, 4)
    with pytest.raises(MatchError, match="attention_mask"):
        net({"input_ids": inputs["input_ids"]})
    with pytest.raises(MatchError, match="many positions"):
        ba.calibrate(model, (inputs, labels), likelihood="classification", risk=0.1)
    with pytest.raises(MatchError, match="for the next token"):
        ba.calibrate(model, (inputs, inputs["input_ids"]), likelihood="classification")


def test_classes_left_out_do_not_count():
    q, (x, y) = trained("classification"), blobs(200, 200)
    some = torch.where(torch.arange(200) < 40, -100, y)
    net = ba.calibrate(q, (x, some))
    kept = likelihood("classification").log_prob([Component(Moments(q.model(x[40:]).detach()))], y[40:])
    assert net.report.nll["network alone"][0] == approx(-float(kept.mean()), rel=1e-5)
    with pytest.raises(CalibrationError, match="none left out"):
        net(x).set(0.9)
    with pytest.raises(MatchError, match="leave out those of -100"):
        ba.calibrate(q, (x, some), risk=0.1)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("classification", {"risk": 0.0}, "risk must lie"),
        ("classification", {"risk": 0.1, "confidence": 1.0}, "confidence must lie"),
        ("classification", {"risk": 0.1, "tolerance": 1.0}, "for numbers"),
        ("regression", {"risk": 0.1}, "needs tolerance="),
        ("regression", {"risk": 0.1, "tolerance": -1.0}, "needs tolerance="),
        ("regression", {"tolerance": 1.0}, "needs risk="),
        ("classification", {"likelihood": "binary"}, "posterior is for likelihood='classification'"),
    ],
)
def test_settings_that_mean_nothing(name, settings, message):
    with pytest.raises(SettingError, match=message):
        ba.calibrate(trained(name), data(name, 100, 200), **settings)


def test_what_is_no_held_out_data():
    q, (x, y) = trained("classification"), blobs(50, 200)
    numbers = waves(30, 0)[0], torch.full((30, 2), math.nan)
    for model, held_out, error, match in (
        (q.model, (x, y), SettingError, "no likelihood yet"),
        ((x, y), q, SettingError, "takes a Posterior or a torch module"),
        (q, iter(()), MatchError, "no held-out data"),
        (q, (x, torch.full_like(y, -100)), MatchError, "nothing to score"),
        (q, (x * math.nan, y), CalibrationError, "not finite"),
        (trained("regression"), numbers, MatchError, "NaN or infinite"),
        (q, (x, y[:, None]), MatchError, "class indices of shape"),
    ):
        with pytest.raises(error, match=match):
            ba.calibrate(model, held_out)


WARNINGS = {
    "too few": (lambda: (trained("classification"), blobs(10, 200)), "too few to calibrate on"),
    "another scale": (lambda: (trained("regression"), (waves(100, 1)[0], waves(100, 1)[1] / 30)), "scale the targets"),
    "other labels": (
        lambda: (Then(nn.Linear(2, 3), lambda z: 100 * z), blobs(100, 1)),
        "worse on the held-out data than a guess",
    ),
    "probabilities": (lambda: (nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1)), blobs(100, 1)), "takes logits"),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_what_is_warned_of(case):
    make, message = WARNINGS[case]
    model, held_out = make()
    kind = None if isinstance(model, ba.Posterior) else "classification"
    with pytest.warns(BayesAdamWarning, match=message):
        ba.calibrate(model, held_out, likelihood=kind)


def test_training_data_are_told():
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(BayesAdamWarning, match="look like the training data"):
        ba.calibrate(model, (x, y), likelihood="classification")


def test_too_few_examples_answer_nothing():
    with pytest.warns(BayesAdamWarning, match="takes 300 examples at the least"):
        net = ba.calibrate(trained("classification"), blobs(200, 200), risk=0.01)
    assert not net(blobs(50, 300)[0]).answered.any()
    assert "do not show" in str(net.report)


def test_too_many_errors_name_a_risk_that_would_do():
    x, y = blobs(600, 200)
    y = torch.where(torch.rand(600, generator=seeded(5)) < 0.2, (y + 1) % 3, y)
    with pytest.warns(BayesAdamWarning, match=r"a risk of about 0\.\d+") as said:
        ba.calibrate(trained("classification"), (x, y), risk=0.05)
    risk = float(str(said[0].message).rsplit("about ", 1)[1])
    assert ba.calibrate(trained("classification"), (x, y), risk=risk).report.abstention.answered > 0


def test_data_that_were_not_trained_on_have_uniform_probabilities():
    # Slopes of mean 0 that do not know the inputs: P(χ² ≤ s) is uniform, so that one in 10⁴ would warn.
    kind, generator = likelihood("regression"), torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        y, a = torch.randn(200, 3, generator=generator), torch.randn(200, 10, generator=generator)
        found.append(balance(kind, torch.zeros(200, 3), y, a))
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    assert_close(torch.quantile(torch.tensor(found), levels), levels, rtol=0, atol=0.08)
    # Least squares leaves nothing of the slopes' sum.
    a = torch.cat([a, torch.ones(200, 1)], dim=1)
    assert balance(kind, a @ torch.linalg.lstsq(a, y).solution, y, a[:, :-1]) < 1e-12


@pytest.mark.parametrize("jitter", [0.0, 1e-5])
def test_inputs_of_few_values_are_scored_as_held_out_ones_were(jitter):
    """Two binary inputs: over calibrations p-values, sets, intervals and a monitor keep their levels, ties or not."""
    source = torch.Generator().manual_seed(0)

    def drawn(n):
        x = (torch.rand(n, 2, generator=source) < torch.tensor([0.3, 0.6])).float()
        numbers = (2 * x.sum(dim=1) + torch.randn(n, generator=source)).round()[:, None]
        classes = (torch.rand(n, generator=source) < (x.sum(dim=1) - 1).sigmoid()).long()
        return x + jitter * torch.randn(n, 2, generator=source), classes, numbers

    shares, alarms = {"set": [], "interval": [], "flags": []}, 0
    for _ in range(8):
        (x, classes, numbers), (new, new_classes, new_numbers) = drawn(400), drawn(1000)
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, k)) for k in (2, 1)]
        net = ba.calibrate(models[0], (x, classes), likelihood="classification")
        low, high = ba.calibrate(models[1], (x, numbers), likelihood="regression")(new).interval(0.9)
        p = net(new)
        shares["set"].append(p.set(0.9).gather(1, new_classes[:, None]).double().mean())
        shares["interval"].append(((low <= new_numbers) & (new_numbers <= high)).double().mean())
        shares["flags"].append((p.p_value <= 0.05).double().mean())
        alarms += ba.Monitor(reference=net.novelties, alarm=0.01).update(p.novelty)
    held = {name: torch.stack(each) for name, each in shares.items()}
    error = {name: 3 * float(each.std()) / len(each) ** 0.5 for name, each in held.items()}
    assert held["set"].mean() >= 0.9 - error["set"]
    assert held["interval"].mean() >= 0.9 - error["interval"]
    assert held["flags"].mean() <= 0.05 + error["flags"]
    assert alarms <= 1


def test_sets_of_few_distinct_inputs_hold_every_level():
    """A held-out score and the next of its kind tie, in batches of any size."""
    levels = torch.arange(0.5, 0.99, 0.02).tolist()
    model, share = nn.Linear(3, 2), torch.zeros(len(levels))
    for _ in range(30):
        x = torch.randint(2, (1200, 3)).float()
        y = (x.sum(1) + torch.randn(1200) > 1.5).long()
        net = ba.calibrate(model, (x[:200], y[:200]), likelihood="classification")
        p = net(x[200:])
        share += torch.stack([p.set(level).gather(1, y[200:, None]).float().mean() for level in levels]) / 30
    assert float((share - torch.tensor(levels)).min()) > -0.01
    alone = torch.cat([net(row).p_value for row in x[:8].split(1)])
    assert torch.equal(alone, net(x[:8]).p_value)


@pytest.mark.filterwarnings("ignore:the inputs lie")
def test_rows_far_out_towards_a_class_are_flagged(tmp_path):
    """They have no entropy, and familiar rows keep their rate of alarms, also where values tie."""
    model = nn.Linear(6, 3)
    x = torch.randn(20_400, 6, generator=seeded(0)).mul(2).round().div(2)
    y = (3 * model(x).detach()).softmax(dim=1).multinomial(1, generator=seeded(1)).flatten()
    net = ba.calibrate(model, (x[:400], y[:400]), likelihood="classification")
    net.save(tmp_path / "net.safetensors")
    far = 6 * x[400:600][x[400:600].norm(dim=1) > 2]
    for each in (net, ba.load(tmp_path / "net.safetensors", model)):
        assert each.leverages is not None
        assert bool((each(far).p_value <= 0.05).all())
        for level in (0.01, 0.05, 0.2):
            assert float((each(x[400:]).p_value <= level).double().mean()) < level + 3 * (level / 267) ** 0.5
    small = ba.calibrate(model, (x[:90], y[:90]), likelihood="classification")
    assert small.leverages is None
