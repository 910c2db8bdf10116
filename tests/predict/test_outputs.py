"""Some outputs, at some places: against the dense Jacobian in float64, and sketches against what they estimate."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import LogitPredictive, NumericPredictive
from cases import mlp, soap
from floats import assert_close

CLASSES = 120


class Language(nn.Module):
    """Tokens to tokens, with places looked up once for all examples and a head tied to the embedding."""

    def __init__(self, words: int = CLASSES, width: int = 6, length: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(x + self.inner(x.cumsum(dim=1)).tanh())


class Vector(nn.Module):
    """A bare parameter that all examples share, and logits that are no layer's own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.last((self.first(x) + self.shift).tanh())


def words(n: int = 3) -> Tensor:
    return torch.randint(CLASSES, (n, 5), generator=torch.Generator().manual_seed(0))


def numbers(n: int = 4) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1)).double()


def posterior_over(model: nn.Module, inputs: Tensor, structure: str = "diagonal", **settings: Any) -> ba.Posterior:
    """Of a few steps on random targets."""
    model.double()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if structure == "kronecker":
        optimizer = soap(model.parameters(), lr=1e-2, precondition_every=2)
    recorder = ba.Recorder(optimizer, keep=20, every=1) if structure == "kronecker" else None
    draw = torch.Generator().manual_seed(2)
    for _ in range(20 if recorder else 5):
        optimizer.zero_grad()
        outputs = model(inputs)
        rows = outputs.reshape(-1, outputs.shape[-1])
        nn.functional.cross_entropy(rows, torch.randint(rows.shape[1], (len(rows),), generator=draw)).backward()
        optimizer.step()
    given: Any = {"prior_precision": 1.0, "power": 1.0, "batch_size": len(inputs), **settings}
    if recorder is not None:
        return ba.Posterior.from_recorder(model, recorder, 50, structure=structure, **given)
    return ba.Posterior.from_optimizer(model, optimizer, 50, structure=structure, **given)


def dense_covariance(posterior: ba.Posterior, x: Tensor) -> Tensor:
    """J Σ Jᵀ of one example, all outputs flattened."""
    mean = {name: t.detach() for name, t in posterior.mean.items()}
    jacobian = jacrev(lambda p: functional_call(posterior.model, p, (x[None],))[0].flatten())(mean)
    rows = torch.cat([jacobian[name].flatten(1) for name in mean], dim=1)
    return rows @ sigma(posterior) @ rows.T


@lru_cache(maxsize=1)
def sigma(posterior: ba.Posterior) -> Tensor:
    """Σ itself, as the inverse of the Hessian of −log q."""
    mean = posterior.mean
    shapes = {name: t.shape for name, t in mean.items()}

    def log_q(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        return posterior.log_prob({n: p.view(shapes[n]) for n, p in zip(shapes, parts, strict=True)})

    at = torch.cat([t.flatten() for t in mean.values()])
    return torch.linalg.inv(-torch.autograd.functional.hessian(log_q, at))


NETWORKS = {"plain": lambda: mlp(3, 4, CLASSES), "vector": Vector}


@pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("network", ["plain", pytest.param("vector", marks=pytest.mark.slow)])
def test_the_largest_outputs_have_the_dense_moments(network: str, structure: str) -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(NETWORKS[network](), x, structure)
    found = posterior.predict(x, likelihood="classification", outputs=ba.Top(4), covariance=True)
    assert isinstance(found, LogitPredictive)
    for example, chosen in enumerate(found.outputs):
        whole = dense_covariance(posterior, x[example])
        expected = whole[chosen][:, chosen]
        assert_close(found.covariance[example], expected, rtol=1e-6, atol=1e-9)
        assert_close(found.variance[example], expected.diagonal(), rtol=1e-6, atol=1e-9)
        logits = posterior.model(x[example : example + 1])[0]
        assert chosen.tolist() == logits.topk(4).indices.tolist()


def test_ten_largest_are_the_default_of_many_classes_alone() -> None:
    torch.manual_seed(0)
    x = numbers()
    many, few = posterior_over(mlp(3, 4, CLASSES), x), posterior_over(mlp(3, 4, 5), x)
    assert many.predict(x, likelihood="classification").mean.shape == (4, 10)
    assert many.predict(x, likelihood="classification").probs.shape == (4, CLASSES)
    assert many.predict(x, likelihood="classification", outputs="all").mean.shape == (4, CLASSES)
    assert few.predict(x, likelihood="classification").mean.shape == (4, 5)
    assert few.predict(x, likelihood="classification", outputs="top").mean.shape == (4, 5)
    assert many.predict(x, likelihood="regression").mean.shape == (4, CLASSES)


@pytest.mark.parametrize("of_each", [False, True])
def test_numbers_and_combinations_have_the_dense_moments(of_each: bool) -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(mlp(3, 4, 6), x).replace(noise_variance=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    whole = torch.stack([dense_covariance(posterior, row) for row in x])
    chosen = torch.tensor([[1, 4], [0, 5], [2, 3], [3, 1]]) if of_each else torch.tensor([4, 1])
    found = posterior.predict(x, likelihood="regression", outputs=chosen, covariance=True)
    for example, own in enumerate(chosen if of_each else chosen.expand(4, -1)):
        assert_close(found.covariance[example], whole[example][own][:, own], rtol=1e-6, atol=1e-9)
        assert_close(found.noise_variance[example], 0.1 * (own + 1).double(), rtol=1e-5)
    margin = torch.randn(4, 2, 6).double() if of_each else torch.randn(2, 6).double()
    found = posterior.predict(x, outputs=margin, likelihood="classification")
    assert type(found) is NumericPredictive
    rows = margin if of_each else margin.expand(4, -1, -1)
    assert_close(found.variance, (rows @ whole @ rows.mT).diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-9)
    assert_close(found.mean, (rows @ posterior.model(x).unsqueeze(-1)).squeeze(-1))
    sigma2 = 0.1 * torch.arange(1, 7).double()
    for kind in ("linearised", "linearised-sampled"):
        with_noise = posterior.predict(x, likelihood="regression", outputs=margin, predictive=kind)
        assert_close(with_noise.noise_variance, rows.square() @ sigma2, rtol=1e-5)


def test_targets_of_two_outputs_are_chosen_with_both() -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(mlp(3, 4, 6), x)
    whole = posterior.predict(x, likelihood="heteroscedastic")
    found = posterior.predict(x, likelihood="heteroscedastic", outputs=[2, 0])
    assert_close(found.variance, whole.variance[:, [2, 0, 5, 3]])
    assert_close(found.predicted_mean, whole.predicted_mean[:, [2, 0]])


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["last", "numbers", "mask", "all"])
@pytest.mark.slow
def test_places_have_the_dense_moments(positions: str) -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids)
    whole = torch.stack([dense_covariance(posterior, row).diagonal().view(5, CLASSES) for row in ids])
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 1] = mask[0, 3] = mask[2, 0] = True
    given: Any = {"numbers": torch.tensor([0, -1, 2]), "mask": mask}.get(positions, positions)
    found = posterior.predict(ids, likelihood="classification", positions=given, outputs=ba.Top(3), n_samples=10**6)
    rows = {
        "last": whole[:, -1],
        "numbers": torch.stack([whole[0, 0], whole[1, -1], whole[2, 2]]),
        "mask": whole[mask],
        "all": whole,
    }[positions]
    assert "backward directions" in found.plan
    assert_close(found.variance, rows.gather(-1, found.outputs), rtol=1e-6, atol=1e-9)
    assert found.probs.shape == rows.shape
    assert_close(found.probs.sum(dim=-1), torch.ones(rows.shape[:-1]).double())
    assert found.novelty.shape == rows.shape[:1]


def test_the_head_is_run_at_the_place_alone() -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids)
    seen: list[torch.Size] = []
    posterior.model.head.register_forward_hook(lambda m, a, z: seen.append(z.shape))
    posterior.predict(ids, likelihood="classification", positions="last")
    seen.clear()
    posterior.predict(ids, likelihood="classification", positions="last")
    assert torch.Size((3, CLASSES)) in seen
    # The one pass that leverage takes.
    assert seen.count(torch.Size((3, 5, CLASSES))) == 1


def test_the_last_place_is_that_of_the_attention_mask() -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["ids"])

    options: Any = {"likelihood": "classification", "outputs": "top"}
    batch = {"ids": ids, "attention_mask": mask}
    found = posterior.predict(batch, positions="last", forward=forward, **options)
    expected = posterior.predict(ids, positions=torch.tensor([4, 1, 0]), **options)
    assert_close(found.variance, expected.variance)


@pytest.mark.slow
def test_draws_at_all_places_are_near_the_exact_moments() -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids)
    options: Any = {"likelihood": "classification", "outputs": ba.Top(3), "generator": torch.Generator().manual_seed(0)}
    exact = posterior.predict(ids, positions="all", n_samples=10**6, covariance=True, probes=500, **options)
    drawn = posterior.predict(ids, predictive="linearised-sampled", n_samples=2000, **options)
    assert "draws" in drawn.plan
    assert_close(drawn.outputs, exact.outputs)
    ratio = drawn.variance / exact.variance
    assert float((ratio - 1).abs().max()) < 6 * math.sqrt(2 / 2000)
    away = (drawn.score.value - exact.score.value) / (drawn.score.error**2 + exact.score.error**2).sqrt()
    assert float(away.abs().max()) < 5


# --- sketches -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_probes_are_unbiased_and_know_their_error() -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(mlp(3, 4, 7), x)
    truth = posterior.predict(x, likelihood="classification", covariance=True).epistemic
    repeats = 1000
    scores = [
        posterior.epistemic(x, likelihood="classification", probes=2, generator=torch.Generator().manual_seed(seed))
        for seed in range(repeats)
    ]
    values = torch.stack([score.value for score in scores])
    error = values.std(dim=0) / math.sqrt(repeats)
    assert float(((values.mean(dim=0) - truth) / error).abs().max()) < 4
    told = torch.stack([score.error for score in scores]).square().mean(dim=0).sqrt()
    assert_close(told, values.std(dim=0), rtol=0.15)


@pytest.mark.parametrize("likelihood", ["regression", "binary", "poisson", "heteroscedastic"])
def test_probes_agree_with_the_exact_score(likelihood: Any) -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(mlp(3, 4, 4), x).replace(noise_variance=0.3)
    truth = posterior.predict(x, likelihood=likelihood).epistemic
    found = posterior.epistemic(x, likelihood=likelihood, probes=300, generator=torch.Generator().manual_seed(0))
    assert float(((found.value - truth) / found.error).abs().max()) < 4


def test_the_score_of_a_sequence_is_the_sum_over_its_places() -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids)
    truth = posterior.predict(ids, likelihood="classification", outputs="all", covariance=True).epistemic
    mask = torch.tensor([[True, False, True, False, False], [False] * 5, [True] * 5])
    for positions, expected in ((None, truth.sum(dim=1)), (mask, (truth * mask).sum(dim=1)), ("last", truth[:, -1])):
        generator = torch.Generator().manual_seed(0)
        found = posterior.epistemic(
            ids, likelihood="classification", positions=positions, probes=400, generator=generator
        )
        assert float(((found.value - expected).abs() - 4 * found.error).max()) <= 1e-12


def test_a_score_that_cannot_be_told_says_what_to_do() -> None:
    torch.manual_seed(0)
    x = numbers()
    found = posterior_over(mlp(3, 4, 30), x).predict(x, likelihood="classification")
    with pytest.raises(SettingError, match="probes=2"):
        _ = found.epistemic


# --- probabilities --------------------------------------------------------------------------------------------------


def test_the_mean_network_is_used_where_data_prefer_it() -> None:
    torch.manual_seed(0)
    ids = words()
    posterior = posterior_over(Language(), ids).replace(averaged=False, temperature=1.7)
    expected = (posterior.model(ids) / 1.7).softmax(dim=-1)
    for positions, rows in ((None, expected), ("last", expected[:, -1])):
        found = posterior.predict(ids, likelihood="classification", positions=positions, n_samples=2)
        assert_close(found.probs, rows)


def test_scores_of_classes_are_of_all_of_them() -> None:
    torch.manual_seed(0)
    x = numbers()
    found = posterior_over(mlp(3, 4, CLASSES), x).predict(x, likelihood="classification")
    y = torch.tensor([0, 5, 50, 119])
    assert_close(found.log_prob(y), found.probs.gather(1, y[:, None]).squeeze(1).log())
    assert_close(found.entropy(), torch.special.entr(found.probs).sum(dim=1))
    assert found.mutual_information().shape == (4,)


def test_members_of_a_mixture_are_asked_for_the_same_classes() -> None:
    x = numbers()
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        members.append(posterior_over(mlp(3, 4, CLASSES), x))
    found = ba.Mixture(members).predict(x, likelihood="classification")
    assert isinstance(found, LogitPredictive)
    mean = torch.stack([m.model(x).softmax(dim=1) for m in members]).mean(dim=0)
    assert torch.equal(found.outputs, mean.topk(10).indices)
    each = [m.predict(x, likelihood="classification", outputs=found.outputs) for m in members]
    assert_close(found.probs, (each[0].probs + each[1].probs) / 2)
    assert found.outputs.dtype == torch.int64


def test_the_score_of_a_mixture_has_what_members_disagree_on() -> None:
    ids = words()
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        members.append(posterior_over(Language(), ids))
    mixture = ba.Mixture(members, weights=[1, 3])
    whole = mixture.predict(ids, likelihood="classification", outputs="all", covariance=True)
    for positions, expected in ((None, whole.epistemic.sum(dim=1)), ("last", whole.epistemic[:, -1])):
        generator = torch.Generator().manual_seed(0)
        found = mixture.epistemic(
            ids, likelihood="classification", positions=positions, probes=400, generator=generator
        )
        assert float(((found.value - expected) / found.error).abs().max()) < 4
    within = sum(
        w * m.predict(ids, likelihood="classification", outputs="all", covariance=True).epistemic
        for w, m in zip((0.25, 0.75), members, strict=True)
    )
    assert float((whole.epistemic - within).min()) > 0


def test_novelty_of_some_classes_is_that_of_all() -> None:
    torch.manual_seed(0)
    x = numbers()
    posterior = posterior_over(mlp(3, 4, CLASSES), x)
    found = posterior.predict(x, likelihood="classification", outputs="top")
    assert_close(found.novelty, posterior.novelty(x, likelihood="classification"))
    assert bool((found.novelty > 0).all())
    assert bool((found.novelty <= math.log(CLASSES)).all())


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"outputs": "some"}, SettingError, "'all', 'top', how many of the largest"),
        ({"outputs": torch.ones(4)}, SettingError, "rows|real combinations"),
        ({"outputs": [0, 6]}, MatchError, "indices 0 to 5"),
        ({"outputs": torch.ones(1, 5)}, MatchError, "of 5 outputs, and the network has 6"),
        ({"outputs": torch.zeros(2, 1, dtype=torch.int64)}, MatchError, "of 2 examples"),
        ({"positions": "first"}, SettingError, "'all', 'last'"),
        ({"positions": "last"}, MatchError, "positions"),
        ({"probes": -1}, SettingError, "probes"),
    ],
)
def test_bad_requests_say_what_is_wanted(options: Any, error: type[Exception], message: str) -> None:
    torch.manual_seed(0)
    x = numbers()
    with pytest.raises(error, match=message):
        posterior_over(mlp(3, 4, 6), x).predict(x, **{"likelihood": "regression", **options})


def test_a_score_takes_a_probe() -> None:
    torch.manual_seed(0)
    x = numbers()
    with pytest.raises(SettingError, match="at least one probe"):
        posterior_over(mlp(3, 4, 6), x).epistemic(x, likelihood="classification", probes=0)


def test_a_posterior_too_wide_to_be_sampled_is_told_of() -> None:
    torch.manual_seed(0)
    x = numbers(40)
    posterior = posterior_over(mlp(3, 4, 6), x, prior_precision=1e-6)
    with pytest.warns(ba.errors.CollapsedPredictionWarning):
        posterior.predict(x, likelihood="classification", predictive="sampled", outputs=[0, 1])


def test_at_least_one_is_the_largest() -> None:
    with pytest.raises(SettingError, match="at least 1"):
        ba.Top(0)
