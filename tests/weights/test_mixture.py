"""Mixtures of posteriors against torch's own mixture of dense Gaussians in float64."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from functools import cache, partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import bayesadam as ba
from bayesadam import Mixture
from bayesadam.errors import BayesAdamWarning, FileError, ImproperError, MatchError, SettingError
from bayesadam.weights.networks import copy_into
from cases import mlp, rewrite, seeded, state_of, train, trained
from floats import approx, assert_close
from weights.cases_structures import DELTA, N, Net, dense, posterior_of
from weights.cases_structures import flat as flat_as

WEIGHTS = (0.5, 0.2, 0.3)


@cache
def members() -> tuple[ba.Posterior, ...]:
    """Of different structures and forms."""
    shrunk = posterior_of("diagonal", 2).replace(form="likelihood")
    return posterior_of("diagonal", 0), posterior_of("kronecker", 1), shrunk


def mixture(weights: tuple[float, ...] | None = WEIGHTS) -> Mixture:
    return Mixture(members(), weights)


def flat(named: dict[str, Tensor]) -> Tensor:
    return flat_as(members()[0], named)


def reference(weights: tuple[float, ...] = WEIGHTS) -> MixtureSameFamily:
    gaussians = [dense(member) for member in members()]
    covariance = torch.stack([g.covariance_matrix for g in gaussians])
    stacked = MultivariateNormal(torch.stack([g.loc for g in gaussians]), covariance)
    return MixtureSameFamily(Categorical(torch.tensor(weights, dtype=torch.float64)), stacked)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_a_variance_without_bound_cannot_be_drawn():
    improper = copy.deepcopy(members()[0].replace(prior_precision=0.0))
    improper.curvature.second_moment["odd"][0, 0] = 0.0
    mixed = Mixture([members()[0], improper])
    before = state_of(improper.model)
    with pytest.raises(ImproperError, match="'odd'"):
        mixed.sample()
    with pytest.raises(ImproperError), mixed.sampled():
        pytest.fail("there is no draw")
    assert state_of(improper.model) == before


def test_draws_have_the_mean_and_variance_of_the_mixture():
    n, expected = 20_000, reference()
    draws = flat(mixture().sample(n, generator=seeded(3)))
    centred = (draws - expected.mean) / expected.stddev
    assert float(centred.mean(dim=0).abs().max()) < 5 / math.sqrt(n)
    # Var[x²] of a standardised mixture is at most that of two points far apart plus a Gaussian's.
    assert float((centred.square().mean(dim=0) - 1).abs().max()) < 5 * math.sqrt(3 / n)
    nearest = torch.stack([dense(member).log_prob(draws) for member in members()]).argmax(dim=0)
    assert_close(torch.bincount(nearest, minlength=3) / n, torch.tensor(WEIGHTS), atol=5 * math.sqrt(0.25 / n))


def test_draws_depend_on_the_generator_alone():
    mixed = mixture()
    draws = mixed.sample(7, generator=seeded(5))
    torch.manual_seed(1)
    torch.randn(3)
    assert_same(mixture().sample(7, generator=seeded(5)), draws)
    # Nor on how many there are, but for rounding: processors differ in what they fuse at the ends of a row.
    more, one = mixed.sample(12, generator=seeded(5)), mixed.sample(generator=seeded(5))
    assert_close({name: v[:7] for name, v in more.items()}, draws, rtol=1e-12)
    assert_close(one, {name: v[0] for name, v in draws.items()}, rtol=1e-12)
    other = mixed.sample(7, generator=seeded(6))
    assert not any(torch.equal(other[name], draws[name]) for name in draws)
    for n in (0, -1, 2.0, True, "3"):
        with pytest.raises(SettingError, match="n must be"):
            mixed.sample(n)


@pytest.mark.parametrize("shared", [False, True])
def test_sampled_holds_the_draw_and_leaves_no_trace(shared):
    parts = list(members())
    if shared:
        parts = [part.gathered(parts[0].model) for part in parts]
    mixed = Mixture(parts, WEIGHTS)
    before, seen = [state_of(member.model) for member in mixed], set()
    for seed in range(12):
        expected = mixed.sample(generator=seeded(seed))
        with mixed.sampled(generator=seeded(seed)) as model:
            seen.add(id(model))
            assert_same({name: p.detach() for name, p in model.named_parameters()}, expected)
    assert len(seen) == (1 if shared else 3)
    with pytest.raises(KeyboardInterrupt), mixed.sampled():
        raise KeyboardInterrupt
    assert [state_of(member.model) for member in mixed] == before


# --- building and changing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 2), (0.25, 0.25, 0.5)),
        (torch.tensor([3.0, 3.0, 6.0]), (0.25, 0.25, 0.5)),
        ([5e-324, 5e-324, 5e-324], (1 / 3,) * 3),
        (iter([2, 1, 1]), (0.5, 0.25, 0.25)),
    ],
)
def test_weights_are_normalised(weights, expected):
    normalised = Mixture(members(), weights).weights
    assert normalised == approx(expected, rel=1e-15)
    assert Mixture(members(), normalised).weights == normalised


@pytest.mark.parametrize("weights", [(1, 1), (), (1, 0, 1), (1, -1, 1), (1, math.nan, 1), (1, math.inf, 1)])
def test_weights_that_are_none(weights):
    with pytest.raises(SettingError, match="weights"):
        Mixture(members(), weights)


def over(*sizes: int) -> ba.Posterior:
    model, optimizer = trained(*sizes)
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=DELTA)


def test_members_must_be_over_the_same_parameters(monkeypatch):
    first, wide, deep = over(3, 4, 2), over(3, 5, 2), over(3, 4, 2, 1)
    sharded = copy.copy(first)
    monkeypatch.setitem(sharded.__dict__, "is_sharded", True)
    for parts, error, match in (
        (
            [first, first, wide],
            MatchError,
            r"'0.weight' is \(4, 3\) on cpu in member 0 and \(5, 3\) .* in member 2",
        ),
        ([first, deep], MatchError, r"'4.weight' is none in member 0 and \(1, 2\) on cpu in member 1"),
        ([deep, first], MatchError, r"'4.weight' is \(1, 2\) on cpu in member 0 and none in member 1"),
        ([first, first.to("meta")], MatchError, r"on cpu in member 0 and \(4, 3\) on meta in member 1"),
        ([first, Mixture([first])], MatchError, "member 1 must be a Posterior, got Mixture"),
        ([first, sharded], SettingError, r"a mixture needs whole tensors.*gathered"),
        ([], SettingError, "at least one member"),
        (first, SettingError, "of several posteriors"),
    ):
        with pytest.raises(error, match=match):
            Mixture(parts)
    with pytest.raises(MatchError, match="one model for all members must be a Module, got list"):
        Mixture.load("anything.safetensors", [first.model])


def test_it_is_frozen_and_counts_and_shows_its_members():
    mixed = mixture()
    with pytest.raises(AttributeError):
        mixed.weights = (1.0, 1.0, 1.0)
    assert (len(mixed), tuple(mixed)) == (3, mixed.members)
    assert repr(mixed) == "Mixture(3 x Net, weights=(0.5, 0.2, 0.3))"


def test_replace_reaches_every_member():
    mixed = mixture()
    changed = mixed.replace(scale=4.0, prior_precision=1.5, noise_variance=0.25)
    assert [m.scale for m in (*changed, *mixed)] == [4.0] * 3 + [1.0] * 3
    assert all(set(m.prior_precision.values()) == {1.5} and float(m.noise_variance) == 0.25 for m in changed)
    assert changed.weights == mixed.weights
    assert mixed.likelihood is None
    assert mixed.replace(likelihood="poisson").likelihood == "poisson"
    with pytest.raises(SettingError, match="cannot replace"):
        mixed.replace(weights=(1, 1, 1))


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_round_trip_is_exact(tmp_path):
    path, model = tmp_path / "mixture.safetensors", Net().double()
    parts = [m.replace(noise_variance=[0.1, 0.2 + i]) for i, m in enumerate(members())]
    # Members may share tensors.
    mixed = Mixture([*parts, parts[0].replace(scale=2.0)], (0.1, 0.6, 0.2, 0.1))
    mixed.save(path)
    loaded = Mixture.load(path, model)
    assert_same(dict(model.named_parameters()), mixed.members[0].mean)
    assert loaded.weights == mixed.weights
    assert [m.structure for m in loaded] == ["diagonal", "kronecker", "diagonal", "diagonal"]
    assert all(member.model is model for member in loaded)
    for ours, theirs in zip(loaded, mixed, strict=True):
        assert vars(ours.settings) == vars(theirs.settings)
        assert torch.equal(ours.noise_variance, theirs.noise_variance.float())
        assert_same(ours.variance, theirs.variance)
    assert_same(loaded.sample(5, generator=seeded(1)), mixed.sample(5, generator=seeded(1)))
    with safe_open(path, framework="pt") as file:
        assert {"0.mode.odd", "1.left.odd", "2.second_moment.head.bias"} <= set(file.keys())
    assert list(tmp_path.iterdir()) == [path]


def normed() -> nn.Module:
    """A network with running statistics and a frozen layer, which differ from one training to another."""
    layers = {"frozen": nn.Linear(3, 4).requires_grad_(False), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 2)}
    return nn.Sequential(OrderedDict(layers))


def of_normed(seed: int) -> ba.Posterior:
    torch.manual_seed(seed)
    model = normed()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, steps=5, seed=seed)
    return ba.Posterior.from_optimizer(model.eval(), optimizer, N, prior_precision=1.0)


def test_what_the_networks_have_besides_is_kept(tmp_path):
    mixed, model = Mixture([of_normed(0), of_normed(1)]), normed()
    mixed.save(tmp_path / "m")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loaded = Mixture.load(tmp_path / "m", model)
    x = torch.randn(5, 3, generator=seeded())
    for ours, theirs in zip(loaded, mixed, strict=True):
        copy_into(ours.model, ours.mean)
        assert torch.equal(ours.model.eval()(x), theirs.model(x))
    assert_same(dict(model.named_buffers()), buffers)
    assert len({id(member.model) for member in loaded} | {id(model)}) == 3
    with pytest.raises(MatchError, match=r"another model's.*no parameters \['frozen.bias', 'frozen.weight', 'norm"):
        Mixture.load(tmp_path / "m", nn.ModuleDict({"head": nn.Linear(4, 2)}))
    parts = mixed.members
    with pytest.warns(BayesAdamWarning, match=r"'norm.running_mean'.*a model of its own"):
        Mixture([parts[0], parts[1].gathered(parts[0].model)])
    Mixture([parts[0], parts[0].replace(scale=2.0)])


DAMAGE = {
    "a later format": (lambda h, t: h.update(format=99), "format 99.*upgrade"),
    "fewer weights": (lambda h, t: h.update(weights=[1.0]), "damaged.*one positive number"),
    "weights of no sense": (lambda h, t: h.update(weights=[1, -1, 1]), "damaged.*positive"),
    "a member of no type": (lambda h, t: h["members"].__setitem__(1, 5), "damaged"),
    "a member without settings": (lambda h, t: h["members"][1].pop("settings"), "damaged"),
    "a tensor missing": (lambda h, t: t.pop("2.mode.odd"), r"damaged.*mode\.odd"),
    "a member of fewer parameters": (lambda h, t: h["members"][2]["parameters"].pop(), "damaged.*none in member 2"),
    "a mixture in a mixture": (lambda h, t: h["members"][0].update(structure="mixture"), "mixture"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(tmp_path, damage):
    path, (change, match) = tmp_path / "m.safetensors", DAMAGE[damage]
    mixture().save(path)
    rewrite(path, change)
    with pytest.raises(FileError, match=match):
        Mixture.load(path, Net().double())


def test_foreign_files(tmp_path):
    mixture().save(tmp_path / "mixture")
    members()[0].save(tmp_path / "posterior")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    load = partial(Mixture.load, model=Net().double())
    for work, error, match in (
        (lambda: load(tmp_path / "posterior"), FileError, r"'diagonal' posterior and no mixture.*Posterior\.load"),
        (lambda: ba.Posterior.load(tmp_path / "mixture", Net()), FileError, r"holds a mixture.*Mixture\.load"),
        (lambda: load(tmp_path / "weights"), FileError, "not a saved posterior"),
        (lambda: load(tmp_path / "absent"), FileError, "no file at"),
        (lambda: Mixture.load(tmp_path / "mixture", mlp(3, 6, 2)), MatchError, "another model"),
    ):
        with pytest.raises(error, match=match):
            work()
