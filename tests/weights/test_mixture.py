"""Mixtures of posteriors against torch's own mixture of dense Gaussians in float64."""

from __future__ import annotations

import copy
import json
import math
from functools import cache

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import bayesadam as ba
from bayesadam import _storage as storage
from bayesadam.errors import BayesAdamWarning, FileError, ImproperError, MatchError, SettingError
from bayesadam.posterior.mixture import Mixture
from cases import mlp, orthonormal, soap, train, trained
from floats import approx, assert_close

# Which probabilities made-up data prefer does not matter here.

N, DELTA = 50, 0.7
WEIGHTS = (0.5, 0.2, 0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def diagonal(seed: int = 0, dtype: torch.dtype = torch.float64, **options: object) -> ba.Posterior:
    model, optimizer = trained(3, 4, 2, dtype=dtype, seed=seed)
    return ba.Posterior.from_optimizer(model, optimizer, N, **{"prior_precision": DELTA, **options})


@cache
def kronecker(seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(3, 4, 2).double()
    optimizer = soap(model.parameters(), lr=1e-2, precondition_every=2)
    train(model, optimizer, seed=seed)
    return ba.Posterior.from_optimizer(model, orthonormal(optimizer), N, prior_precision=DELTA, structure="kronecker")


def members() -> list[ba.Posterior]:
    """Of different structures and forms."""
    return [diagonal(0), kronecker(1), diagonal(2, form="likelihood", prior_precision=2.0)]


def mixture(weights: tuple[float, ...] | None = WEIGHTS) -> Mixture:
    return Mixture(members(), weights)


def flat(named: dict[str, Tensor]) -> Tensor:
    """(..., P), in the order of the parameters' names."""
    return torch.cat(
        [named[name].flatten(named[name].dim() - (1 if "bias" in name else 2)) for name in sorted(named)], -1
    )


def dense(posterior: ba.Posterior) -> MultivariateNormal:
    """The member from its definition: θ, v̂ and eigenbases, with the whole of Σ in memory."""
    settings, blocks, centres = posterior.settings, [], []
    for name in sorted(posterior.mode):
        delta = posterior.prior_precision[name]
        precision = torch.diag(settings.weight * posterior.structure.second_moment[name].flatten().sqrt() + delta)
        if name in posterior.structure.bases:
            basis = posterior.structure.bases[name]
            both = torch.kron(basis.left, basis.right)
            precision = both @ precision @ both.T
        sigma, theta = precision.inverse(), posterior.mode[name].flatten()
        pulled = theta if settings.form == "map" else theta - delta * (sigma @ theta)
        blocks.append((sigma + sigma.T) / 2)
        centres.append(pulled)
    return MultivariateNormal(torch.cat(centres), torch.block_diag(*blocks))


def reference(mixed: Mixture, weights: tuple[float, ...]) -> MixtureSameFamily:
    gaussians = [dense(member) for member in mixed.members]
    stacked = MultivariateNormal(
        torch.stack([g.loc for g in gaussians]), torch.stack([g.covariance_matrix for g in gaussians])
    )
    return MixtureSameFamily(Categorical(torch.tensor(weights, dtype=torch.float64)), stacked)


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (t.data_ptr(), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# --- moments and densities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [WEIGHTS, None])
def test_moments_and_densities_are_those_of_the_dense_mixture(weights):
    mixed = mixture(weights)
    expected = reference(mixed, weights or (1 / 3, 1 / 3, 1 / 3))
    assert_close(flat(mixed.mean), expected.mean, rtol=1e-9, atol=1e-12)
    assert_close(flat(mixed.variance), expected.variance, rtol=1e-9, atol=1e-12)
    assert_close(flat(mixed.stddev), expected.stddev, rtol=1e-9, atol=1e-12)
    assert_close(flat(mixed.snr()), expected.mean.abs() / expected.stddev, rtol=1e-9, atol=1e-12)
    # Near each of the members, between them, and with any leading dimensions.
    values = {name: torch.stack([m.mean[name] for m in mixed] + [mixed.mean[name]]) + 0.1 for name in mixed.mean}
    assert_close(mixed.log_prob(values), expected.log_prob(flat(values)), rtol=1e-9, atol=1e-9)
    grid = {name: value.view(2, 2, *value.shape[1:]) for name, value in values.items()}
    assert torch.equal(mixed.log_prob(grid), mixed.log_prob(values).view(2, 2))
    assert mixed.log_prob(mixed.mean).shape == ()


def test_the_density_is_a_sum_of_densities_where_they_underflow():
    """Far from every member all densities are 0 in float64; their logarithms are not."""
    mixed = mixture()
    far = {name: mean + 1e4 for name, mean in mixed.mean.items()}
    scores = torch.stack([member.log_prob(far) for member in mixed])
    assert scores.max() < -1e6
    found = mixed.log_prob(far)
    best = int(scores.argmax())
    assert float(found) == approx(float(scores[best]) + math.log(WEIGHTS[best]), rel=1e-12)


def test_the_density_is_summed_in_float64():
    single = [diagonal(seed, torch.float32) for seed in range(3)]
    mixed = Mixture(single, WEIGHTS)
    at = {name: theta + 0.01 for name, theta in single[1].mean.items()}
    double = mixed.to(dtype=torch.float64).log_prob({name: value.double() for name, value in at.items()})
    assert mixed.log_prob(at).dtype == torch.float64
    assert float(mixed.log_prob(at)) == approx(float(double), rel=1e-5)


def test_equal_members_are_one_posterior():
    one = kronecker()
    mixed = Mixture([one, one, copy.deepcopy(one)], (0.1, 0.6, 0.3))
    for name, mean in one.mean.items():
        assert_close(mixed.mean[name], mean, rtol=1e-14)
        assert_close(mixed.variance[name], one.variance[name], rtol=1e-14)
        assert_close(mixed.snr()[name], one.snr()[name], rtol=1e-13)
    values = one.sample(5, generator=seeded())
    assert_close(mixed.log_prob(values), one.log_prob(values), rtol=1e-13)
    single = Mixture([one])
    assert torch.equal(single.log_prob(values), one.log_prob(values))


def test_the_order_of_the_members_does_not_matter():
    forward, backward = Mixture(members(), WEIGHTS), Mixture(members()[::-1], WEIGHTS[::-1])
    values = forward.sample(4, generator=seeded())
    assert_close(forward.log_prob(values), backward.log_prob(values), rtol=1e-13)
    for name in forward.mean:
        assert_close(forward.mean[name], backward.mean[name], rtol=1e-12, atol=1e-15)
        assert_close(forward.variance[name], backward.variance[name], rtol=1e-12, atol=1e-15)


def test_a_variance_without_bound_is_infinite_and_cannot_be_drawn():
    flat_one = copy.deepcopy(diagonal(1, prior_precision=0.0))
    flat_one.structure.second_moment["0.weight"][0, 0] = 0.0
    mixed = Mixture([diagonal(0), flat_one])
    assert mixed.variance["0.weight"][0, 0] == math.inf
    assert mixed.snr()["0.weight"][0, 0] == 0
    model = mixed.members[1].model
    before = snapshot(model)
    for attempt in (
        mixed.sample,
        lambda: mixed.predict(torch.zeros(2, 3).double(), likelihood="regression"),
        lambda: mixed.log_prob(mixed.mean),
    ):
        with pytest.raises(ImproperError, match=r"'0\.weight'"):
            attempt()
    with pytest.raises(ImproperError), mixed.sampled():
        pytest.fail("there is no draw")
    assert_untouched(model, before)


# --- draws ----------------------------------------------------------------------------------------------------------


def test_draws_have_the_mean_and_variance_of_the_mixture():
    mixed = mixture()
    n = 20_000
    draws = flat(mixed.sample(n, generator=seeded(3)))
    expected = reference(mixed, WEIGHTS)
    centred = (draws - expected.mean) / expected.stddev
    assert float(centred.mean(dim=0).abs().max()) < 5 / math.sqrt(n)
    # Var[x²] of a standardised mixture is at most that of two points far apart plus a Gaussian's.
    assert float((centred.square().mean(dim=0) - 1).abs().max()) < 5 * math.sqrt(3 / n)
    nearest = torch.stack([dense(member).log_prob(draws) for member in mixed]).argmax(dim=0)
    shares = torch.bincount(nearest, minlength=3) / n
    assert_close(shares, torch.tensor(WEIGHTS), atol=5 * math.sqrt(0.25 / n))


def test_draws_depend_on_the_generator_alone():
    mixed = mixture()
    draws = mixed.sample(7, generator=seeded(5))
    torch.manual_seed(1)
    torch.randn(3)
    again = Mixture(members(), WEIGHTS)
    assert_same(again.sample(7, generator=seeded(5)), draws)
    # Nor on how many there are, but for rounding: processors differ in what they fuse at the ends of a row.
    more, one = mixed.sample(12, generator=seeded(5)), mixed.sample(generator=seeded(5))
    assert_close({name: v[:7] for name, v in more.items()}, draws, rtol=1e-6, atol=1e-7)
    assert_close(one, {name: v[0] for name, v in draws.items()}, rtol=1e-6, atol=1e-7)
    other = mixed.sample(7, generator=seeded(6))
    assert not any(torch.equal(other[name], draws[name]) for name in draws)
    torch.manual_seed(2)
    first = mixed.sample()
    torch.manual_seed(2)
    assert_same(mixed.sample(), first)


def test_members_of_one_pick_have_different_draws():
    """Each member has a stream of its own, also where two are equal."""
    one = diagonal()
    draws = Mixture([one, one]).sample(50, generator=seeded())["0.weight"]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 50


def test_draws_have_the_models_types():
    mixed = Mixture([diagonal(seed, torch.bfloat16) for seed in range(2)])
    assert mixed.mean["0.weight"].dtype == torch.float32
    assert mixed.sample(3)["0.weight"].dtype == torch.bfloat16
    with mixed.sampled() as model:
        assert model(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "3"])
def test_a_number_of_draws_that_is_none(n):
    with pytest.raises(SettingError, match="n must be"):
        mixture().sample(n)


@pytest.mark.parametrize("shared", [False, True])
def test_sampled_holds_the_draw_and_leaves_no_trace(shared):
    parts = [diagonal(seed) for seed in range(3)]
    if shared:
        parts = [parts[0]] + [over(part, parts[0].model) for part in parts[1:]]
    mixed = Mixture(parts, WEIGHTS)
    before = [snapshot(member.model) for member in mixed]
    seen = set()
    for seed in range(12):
        expected = mixed.sample(generator=seeded(seed))
        with mixed.sampled(generator=seeded(seed)) as model:
            seen.add(id(model))
            assert_same({name: p.detach() for name, p in model.named_parameters()}, expected)
    assert len(seen) == (1 if shared else 3)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), mixed.sampled():
            raise error
    for member, old in zip(mixed, before, strict=True):
        assert_untouched(member.model, old)


def over(posterior: ba.Posterior, model: nn.Module) -> ba.Posterior:
    """The same posterior on another model object."""
    return posterior.gathered(model)


# --- building and changing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 2), (0.25, 0.25, 0.5)),
        (torch.tensor([3.0, 3.0, 6.0]), (0.25, 0.25, 0.5)),
        ([5e-324, 5e-324, 5e-324], (1 / 3,) * 3),
        (iter([2, 1, 1]), (0.5, 0.25, 0.25)),
        (None, (1 / 3,) * 3),
    ],
)
def test_weights_are_normalised(weights, expected):
    found = Mixture(members(), weights).weights
    assert found == approx(expected, rel=1e-15)
    assert Mixture(members(), found).weights == found


@pytest.mark.parametrize(
    "weights",
    [
        *[(1, 1), (1, 1, 1, 1), (), (1, 0, 1), (1, -1, 1), (1, math.nan, 1), (1, math.inf, 1), 3, "abc"],
        *[(1, None, 1), torch.ones(())],
    ],
)
def test_weights_that_are_none(weights):
    with pytest.raises(SettingError, match="weights"):
        Mixture(members(), weights)


def test_members_must_be_over_the_same_parameters():
    first = diagonal()
    model, optimizer = trained(3, 5, 2, dtype=torch.float64)
    wide = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    with pytest.raises(MatchError, match=r"'0.weight' is \(4, 3\) on cpu in member 0 and \(5, 3\) on cpu in member 2"):
        Mixture([first, diagonal(1), wide])
    model, optimizer = trained(3, 4, 4, 2, dtype=torch.float64)
    deep = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    shallow_first = pytest.raises(MatchError, match=r"'4.weight' is none in member 0 and \(2, 4\) on cpu in member 1")
    with shallow_first:
        Mixture([over_width(first), deep])
    with pytest.raises(MatchError, match=r"'4.weight' is \(2, 4\) on cpu in member 0 and none in member 1"):
        Mixture([deep, over_width(first)])
    with pytest.raises(SettingError, match="at least one member"):
        Mixture([])
    with pytest.raises(SettingError, match="of several posteriors"):
        Mixture(first)
    with pytest.raises(SettingError, match="one model for all members, got list"):
        Mixture.load("anything.safetensors", [first.model])
    with pytest.raises(MatchError, match="member 1 must be a Posterior, got Mixture"):
        Mixture([first, Mixture([first])])
    with pytest.raises(MatchError, match=r"on cpu in member 0 and \(4, 3\) on meta in member 1"):
        Mixture([first, first.to("meta")])


def over_width(posterior: ba.Posterior) -> ba.Posterior:
    """A posterior over 3-4-4, so that it differs from one over 3-4-4-2 by the names alone."""
    model, optimizer = trained(3, 4, 4, dtype=posterior.mode["0.weight"].dtype)
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)


def test_sharded_members_are_refused(monkeypatch):
    sharded = copy.copy(diagonal())
    monkeypatch.setitem(sharded.__dict__, "is_sharded", True)
    with pytest.raises(SettingError, match=r"a mixture needs whole tensors.*gathered"):
        Mixture([diagonal(), sharded])


def test_it_is_frozen_and_counts_and_shows_its_members():
    mixed = mixture()
    with pytest.raises(AttributeError):
        mixed.weights = (1.0, 1.0, 1.0)
    assert len(mixed) == 3
    assert tuple(mixed) == mixed.members
    assert repr(mixed) == (
        "Mixture(3 x Sequential, diagonal/kronecker, 26 weights in 4 parameters, weights=(0.5, 0.2, 0.3))"
    )


def test_replace_and_to_reach_every_member():
    mixed = mixture()
    changed = mixed.replace(scale=4.0, prior_precision=1.5, noise_variance=0.25)
    assert [m.settings.scale for m in changed] == [4.0] * 3
    assert all(set(m.prior_precision.values()) == {1.5} for m in changed)
    assert all(float(m.noise_variance) == 0.25 for m in changed)
    assert [m.settings.scale for m in mixed] == [1.0] * 3
    assert changed.weights == mixed.weights
    single = mixed.to(dtype=torch.float32)
    assert single.mean["0.weight"].dtype == single.variance["2.bias"].dtype == torch.float32
    with pytest.raises(SettingError, match="cannot replace"):
        mixed.replace(weights=(1, 1, 1))


@pytest.mark.parametrize(("likelihood", "method"), [("regression", "evidence"), ("classification", "validation")])
def test_calibration_is_that_of_each_member(likelihood, method):
    mixed = mixture()
    x = torch.randn(30, 3, generator=seeded(5)).double()
    target = mixed.members[0].model(x).detach()
    y = target + 0.1 if likelihood == "regression" else target.argmax(dim=1)
    # A loader that can be gone through once.
    found = ba.calibrate(mixed, iter([(x, y)]), likelihood=likelihood, method=method)
    assert found.weights == mixed.weights
    for member, its in zip(mixed, found, strict=True):
        alone = ba.calibrate(member, (x, y), likelihood=likelihood, method=method)
        assert its.settings.scale == alone.settings.scale != member.settings.scale
        assert its.prior_precision == alone.prior_precision


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_round_trip_is_exact(tmp_path):
    path = tmp_path / "mixture.safetensors"
    mixed = Mixture([m.replace(noise_variance=[0.1, 0.2 + i]) for i, m in enumerate(members())], (0.1, 0.7, 0.3))
    mixed.save(path)
    model = mlp(3, 4, 2).double()
    loaded = Mixture.load(path, model)
    assert_same(dict(model.named_parameters()), mixed.members[0].mean)
    assert loaded.weights == mixed.weights
    assert [m.structure.kind for m in loaded] == ["diagonal", "kronecker", "diagonal"]
    assert all(member.model is model for member in loaded)
    assert_same(loaded.mean, mixed.mean)
    assert_same(loaded.variance, mixed.variance)
    assert_same(loaded.sample(5, generator=seeded(1)), mixed.sample(5, generator=seeded(1)))
    x = torch.randn(6, 3, generator=seeded(2)).double()
    found, expected = loaded.predict(x, likelihood="regression"), mixed.predict(x, likelihood="regression")
    assert torch.equal(found.total_variance, expected.total_variance)
    assert torch.equal(found.log_prob(expected.mean), expected.log_prob(expected.mean))
    with safe_open(path, framework="pt") as file:
        assert {"0.mode.0.weight", "1.left.0.weight", "2.second_moment.2.bias"} <= set(file.keys())
    assert list(tmp_path.iterdir()) == [path]


def test_members_that_share_tensors_can_be_saved(tmp_path):
    one = diagonal()
    mixed = Mixture([one, one.replace(scale=2.0), one])
    mixed.save(tmp_path / "m")
    loaded = Mixture.load(tmp_path / "m", one.model)
    assert [m.settings.scale for m in loaded] == [1.0, 2.0, 1.0]
    assert_same(loaded.variance, mixed.variance)


class Normed(nn.Module):
    """A network with running statistics and a frozen layer, which differ from one training to another."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(x)).tanh())


def normed(seed: int) -> ba.Posterior:
    torch.manual_seed(seed)
    model = Normed().double()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3).double()).square().mean().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model.eval(), optimizer, N, prior_precision=1.0)


def test_what_the_networks_have_besides_is_kept(tmp_path):
    mixed = Mixture([normed(0), normed(1)])
    x = torch.randn(5, 3, generator=seeded()).double()
    expected = mixed.predict(x, likelihood="regression")
    mixed.save(tmp_path / "m")
    model = Normed().double()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loaded = Mixture.load(tmp_path / "m", model)
    found = loaded.predict(x, likelihood="regression")
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)
    assert_same(dict(model.named_buffers()), buffers)
    for name, mu in mixed.members[0].mean.items():
        assert torch.equal(model.get_parameter(name), mu)
    assert len({id(member.model) for member in loaded} | {id(model)}) == 3
    with pytest.raises(
        MatchError, match=r"another model's.*no parameters \['frozen.bias', 'frozen.weight', 'norm.running"
    ):
        Mixture.load(tmp_path / "m", nn.ModuleDict({"head": nn.Linear(4, 2)}))


def test_one_models_statistics_cannot_serve_two_networks():
    parts = [normed(0), normed(1)]
    with pytest.warns(BayesAdamWarning, match=r"running statistics of 'norm'.*a model of its own"):
        Mixture([parts[0], over(parts[1], parts[0].model)])
    Mixture([parts[0], parts[0].replace(scale=2.0)])


def test_truncated_files(tmp_path):
    path = tmp_path / "m.safetensors"
    mixture().save(path)
    whole = path.read_bytes()
    for keep in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(FileError, match="truncated or not a saved posterior"):
            Mixture.load(path, mlp(3, 4, 2).double())


def rewrite(path, change) -> None:
    """The file with its header and tensors changed."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["bayesadam"])
    change(header, tensors)
    save_file(tensors, path, metadata={"bayesadam": json.dumps(header)})


DAMAGE = {
    "a later format": (lambda h, t: h.update(format=99), "format 99.*upgrade"),
    "no members": (lambda h, t: h.update(members=[], weights=[]), "damaged"),
    "fewer weights": (lambda h, t: h.update(weights=[1.0]), "damaged.*a weight for every member"),
    "weights of no sense": (lambda h, t: h.update(weights=[1, -1, 1]), "damaged.*positive"),
    "weights of no type": (lambda h, t: h.update(weights=[1, None, 1]), "damaged.*positive"),
    "members of no type": (lambda h, t: h.update(members=3), "damaged"),
    "a member of no type": (lambda h, t: h["members"].__setitem__(1, 5), "damaged: member 1"),
    "a member without settings": (lambda h, t: h["members"][1].pop("settings"), "damaged"),
    "settings of no sense": (lambda h, t: h["members"][1]["settings"].update(bogus=1), "damaged"),
    "a tensor missing": (lambda h, t: t.pop("2.mode.0.bias"), r"damaged.*mode\.0\.bias"),
    "a tensor not finite": (lambda h, t: t["0.mode.0.bias"].fill_(math.nan), "damaged.*not finite"),
    "a curvature below zero": (lambda h, t: t["0.second_moment.0.bias"].fill_(-1), "damaged.*negative"),
    "a basis not orthogonal": (lambda h, t: t["1.left.0.weight"].mul_(2), "damaged.*orthogonal"),
    "a member of fewer parameters": (
        lambda h, t: h["members"][2]["parameters"].pop(),
        "damaged.*and none in member 2",
    ),
    "a mixture in a mixture": (lambda h, t: h["members"][0].update(structure="mixture"), "mixture"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(tmp_path, damage):
    path = tmp_path / "m.safetensors"
    mixture().save(path)
    change, match = DAMAGE[damage]
    rewrite(path, change)
    with pytest.raises(FileError, match=match):
        Mixture.load(path, mlp(3, 4, 2).double())


def test_foreign_files(tmp_path):
    mixture().save(tmp_path / "mixture")
    diagonal().save(tmp_path / "posterior")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "pickled")
    model = mlp(3, 4, 2).double()
    with pytest.raises(FileError, match=r"'diagonal' posterior and no mixture.*Posterior\.load"):
        Mixture.load(tmp_path / "posterior", model)
    with pytest.raises(FileError, match=r"holds a mixture.*Mixture\.load"):
        ba.Posterior.load(tmp_path / "mixture", model)
    for name in ("weights", "pickled"):
        with pytest.raises(FileError, match="not a saved posterior"):
            Mixture.load(tmp_path / name, model)
    with pytest.raises(FileError, match="no file at"):
        Mixture.load(tmp_path / "absent", model)
    with pytest.raises(MatchError, match=r"'0.weight' has shape \(4, 3\) in the file and \(6, 3\) in the model"):
        Mixture.load(tmp_path / "mixture", mlp(3, 6, 2))
    with pytest.raises(FileError, match="does not exist"):
        mixture().save(tmp_path / "nowhere" / "m")


def test_saving_replaces_a_file_only_when_complete(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    mixed = mixture()
    mixed.save(path)
    before = path.read_bytes()

    def half_written(file, *_):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(storage, "write_tensors", half_written)
    with pytest.raises(FileError, match="disk full"):
        mixed.replace(scale=2.0).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
