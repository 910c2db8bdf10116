"""Merging networks: of posteriors, of files, streamed; what is checked, said and warned of."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayesadam as ba
from bayesadam.merging import merge, merge_checkpoints
from bayesadam.merging import merged as merging
from bayesadam.weights.gaussian import GaussianWeights
from cases import fit, soap
from floats import approx, assert_close, close


def network(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))


def fine_tuned(base, seed, *, steps=60, betas=(0.9, 0.97), keep=None, kind=torch.optim.Adam):
    """A copy of the base, trained on a task of its own, its optimiser and recorder."""
    model = copy.deepcopy(base).train()
    optimizer = kind(model.parameters(), lr=1e-2, betas=betas)
    recorder = ba.Recorder(optimizer, keep=keep, every=1) if keep else None
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(4, 3, generator=draw)
    fit(model, optimizer, ((x, x @ target) for x in torch.randn(steps, 16, 4, generator=draw)))
    return model, optimizer, recorder


@pytest.fixture(scope="module")
def tuned():
    torch.manual_seed(0)
    base = network()
    return base, [fine_tuned(base, seed) for seed in range(3)]


def posteriors(tuned, n_data=(960.0,) * 3, **options):
    return [
        ba.Posterior.from_optimizer(model, optimizer, n, prior_precision=1.0, **options)
        for (model, optimizer, _), n in zip(tuned[1], n_data, strict=True)
    ]


def moments(tuned, name):
    """v̂ of every model, by Adam's own equation."""
    found = []
    for model, optimizer, _ in tuned[1]:
        state = optimizer.state[dict(model.named_parameters())[name]]
        found.append(state["exp_avg_sq"].double() / (1 - 0.97 ** float(state["step"])))
    return torch.stack(found)


def weights(tuned, name):
    return torch.stack([model.state_dict()[name].double() for model, _, _ in tuned[1]])


def saved(tuned, folder):
    paths = []
    for number, (model, optimizer, _) in enumerate(tuned[1]):
        path = folder / f"{number}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        paths.append(path)
    return paths


@pytest.mark.parametrize("method", [None, "fisher"])
def test_each_weight_is_merged_by_its_curvature_running_statistics_averaged(tuned, method):
    merged = merge(posteriors(tuned), method=method, weights=[1, 2, 3])
    alpha = torch.tensor([1.0, 2.0, 3.0]).double()
    for name, _ in tuned[0].named_parameters():
        v = moments(tuned, name)
        v = v if method else 1 + v / v.flatten(1).mean(1).view(-1, *[1] * (v.dim() - 1))
        share = v * alpha.reshape(-1, *[1] * (v.dim() - 1))
        assert_close(merged[name].double(), (share * weights(tuned, name)).sum(0) / share.sum(0), atol=1e-5)
    mean = (alpha @ weights(tuned, "1.running_mean")) / 6
    assert_close(merged["1.running_mean"].double(), mean, atol=1e-6)
    assert merged["1.num_batches_tracked"] == 60
    other = network()
    other.load_state_dict(merged)
    notes = " ".join(merged.report.notes)
    assert "2 tensors that no model trained were averaged: 1.running_mean, 1.running_var" in notes
    assert "1 tensors of integers are those of model 1" in notes


def test_nothing_of_the_models_is_changed_or_shared(tuned):
    before = [copy.deepcopy(model.state_dict()) for model, _, _ in tuned[1]]
    merged = merge(posteriors(tuned))
    for tensor in merged.values():
        tensor.zero_()
    for (model, _, _), held in zip(tuned[1], before, strict=True):
        assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())


def test_gradient_matching_takes_n_and_b(tuned):
    merged = merge(posteriors(tuned, n_data=(100.0, 200.0, 400.0), batch_size=16), base=tuned[0])
    assert merged.report.method == "gradient-matching"
    scale = 16 * torch.tensor([100.0, 200.0, 400.0]).double()
    names = [name for name, _ in tuned[0].named_parameters()]
    curvatures = {n: (v := moments(tuned, n)) * scale.reshape(-1, *[1] * (v.dim() - 1)) for n in names}
    delta = merging.MATCHING_SHARE * float(torch.cat([f.flatten() for f in curvatures.values()]).mean())
    for name, start in tuned[0].named_parameters():
        every, start = curvatures[name] + delta, start.detach().double()
        change = ((delta + every) * (weights(tuned, name) - start)).sum(0)
        assert_close(merged[name].double(), start + change / (delta + every.sum(0)), atol=1e-5)
    # A factor that all have in common changes nothing.
    few = merge(posteriors(tuned, n_data=(10.0,) * 3, batch_size=2), base=tuned[0])
    many = merge(posteriors(tuned, n_data=(1e5,) * 3, batch_size=64), base=tuned[0])
    assert all(close(few[name], many[name], atol=1e-5) for name in few)


def test_a_base_with_a_state_counts_as_more_than_one_without(tuned, tmp_path):
    model, optimizer, _ = fine_tuned(tuned[0], 9)
    base = ba.Posterior.from_optimizer(model, optimizer, 960, prior_precision=1.0)
    known, unknown = merge(posteriors(tuned), base=base), merge(posteriors(tuned), base=model)
    assert not close(known["0.weight"], unknown["0.weight"], atol=1e-4)
    merged = merge([posteriors(tuned)[0], *saved(tuned, tmp_path)[1:]], base=tuned[0])
    assert "the number of training examples of 1.pt, 2.pt is not known" in " ".join(merged.report.notes)


@pytest.mark.parametrize("method", ["fisher", "gradient-matching"])
def test_trimmed_changes_do_not_count(tuned, method):
    merged = merge(posteriors(tuned), method=method, base=tuned[0], trim=0.6)
    assert not close(merged["0.weight"], merge(posteriors(tuned), base=tuned[0])["0.weight"], atol=1e-4)
    name, start = "0.weight", tuned[0][0].weight.detach().double().flatten()
    theta, v = weights(tuned, name).flatten(1), moments(tuned, name).flatten(1)
    size = (theta - start).square() * v
    kept = size.argsort(dim=1).argsort(dim=1) >= 12
    if method == "fisher":
        change = torch.where(kept, v * (theta - start), 0).sum(0) / torch.where(kept, v, 0).sum(0).clamp(min=1e-300)
        assert_close(merged[name].double().flatten(), start + change, atol=1e-5)
    # What no model kept is the base's.
    assert torch.equal(merged[name].flatten()[~kept.any(0)], start.float()[~kept.any(0)])
    assert (~kept.any(0)).any()


def recorded(base, keep=60, n_data=960.0):
    found = []
    for seed in range(2):
        model, _, recorder = fine_tuned(base, seed, keep=keep, steps=keep)
        found.append(ba.Posterior.from_recorder(model, recorder, n_data, batch_size=16, power=0.5))
    return found


def test_kronecker_solves_the_dense_equation(tuned):
    models = recorded(tuned[0])
    merged, start = merge(models, method="kronecker"), merge(models, method="fisher")
    for name in ("0.weight", "3.bias"):
        whole, right = torch.zeros(start[name].numel(), start[name].numel()).double(), 0.0
        for model in models:
            basis, v = model.curvature.bases[name], model.curvature.second_moment[name].double()
            turn = basis.right.double() if basis.left is None else torch.kron(basis.left.double(), basis.right.double())
            k = 960 * turn @ torch.diag(v.flatten()) @ turn.T
            whole, right = whole + k, right + k @ (model.mode[name] - start[name]).double().flatten()
        whole += merging.KRONECKER_SHARE * whole.diagonal().mean() * torch.eye(len(whole)).double()
        expected = start[name].double() + torch.linalg.solve(whole, right).view(start[name].shape)
        assert (merged[name] - expected).norm() < 0.01 * (expected - start[name]).norm() + 1e-6
    assert not close(merged["0.weight"], start["0.weight"], atol=1e-5)


def test_kronecker_needs_bases_of_enough_gradients(tuned, tmp_path):
    with pytest.raises(ba.errors.SettingError, match="needs eigenbases, and model 1 has none"):
        merge(posteriors(tuned), method="kronecker")
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for posterior, path in zip(recorded(tuned[0], keep=20), files, strict=True):
        posterior.save(path)
    with pytest.raises(ba.errors.SettingError, match=r"0\.safetensors come from 20 recorded gradients"):
        merge(files, method="kronecker")


def test_soap_is_merged_by_its_bases_live_and_saved(tuned, tmp_path):
    found = [fine_tuned(tuned[0], seed, kind=soap) for seed in range(2)]
    live = [
        ba.Posterior.from_optimizer(m, o, 960, structure="kronecker", prior_precision=1.0, batch_size=16)
        for m, o, _ in found
    ]
    paths = saved((None, found), tmp_path)
    merged = merge(live, method="kronecker")
    merge_checkpoints(paths, tmp_path / "out.safetensors", method="kronecker")
    file = load_file(tmp_path / "out.safetensors")
    assert all(close(file[name], merged[name], atol=1e-4) for name in merged)
    assert not close(file["0.weight"], merge(live, method="fisher")["0.weight"], atol=1e-4)


@pytest.mark.parametrize("matching", [False, True])
def test_files_give_what_posteriors_give(tuned, tmp_path, matching):
    base = tuned[0] if matching else None
    if matching:
        torch.save(tuned[0].state_dict(), tmp_path / "base.pt")
    merged = merge(posteriors(tuned), base=base)
    paths = saved(tuned, tmp_path)
    out = tmp_path / "a" / "new" / "merged.safetensors"
    report = merge_checkpoints(paths, out, base=tmp_path / "base.pt" if matching else None)
    file = load_file(out)
    assert file.keys() == merged.keys()
    assert all(close(file[name], merged[name], atol=1e-6) for name in file)
    assert report.labels == ("0.pt", "1.pt", "2.pt")
    assert all(shares == approx(merged.report.layers[name], abs=1e-6) for name, shares in report.layers.items())
    opened = merge([GaussianWeights.open(path, 960) for path in paths], base=base)
    assert all(close(opened[name], merged[name], atol=1e-6) for name in file)


def test_pairs_of_files_and_saved_posteriors_are_read(tuned, tmp_path):
    merged = merge(posteriors(tuned)[:2])
    sources = []
    for number, (model, optimizer, _) in enumerate(tuned[1][:2]):
        names = [name for name, _ in model.named_parameters()]
        state = optimizer.state_dict()
        state["param_groups"][0]["param_names"] = names
        torch.save(model.state_dict(), tmp_path / f"w{number}.pt")
        torch.save(state, tmp_path / f"s{number}.pt")
        sources.append((tmp_path / f"w{number}.pt", tmp_path / f"s{number}.pt"))
    found = merge(sources)
    assert all(close(found[name], merged[name], atol=1e-6) for name in merged)
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for posterior, path in zip(posteriors(tuned), files, strict=False):
        posterior.save(path)
    again = merge(files)
    assert again.keys() == dict(tuned[0].named_parameters()).keys()
    assert all(close(again[name], merged[name], atol=1e-6) for name in again)


def test_the_report_has_mean_shares(tuned, tmp_path):
    merged = merge(posteriors(tuned), method="fisher")
    report = merged.report
    v = torch.cat([moments(tuned, f"0.{key}").flatten(1) for key in ("weight", "bias")], dim=1)
    assert report.layers["0"] == approx((v / v.sum(0)).mean(dim=1).tolist(), abs=1e-5)
    assert all(sum(shares) == approx(1) for shares in report.layers.values())
    assert "model 3" in str(report)
    assert report.method == "fisher"
    assert merge(posteriors(tuned)).report.method == "damped"
    torch.save(merged, tmp_path / "m.pt")
    read = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in merged.items())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))[:, :3]


def test_tied_tensors_are_merged_once(tmp_path):
    found = [fine_tuned(Tied(), seed) for seed in range(2)]
    models = posteriors((None, found), n_data=(960.0, 960.0))
    merged = merge(models)
    assert merged["first.weight"] is merged["last.weight"]
    assert list(merged.report.layers) == ["first"]
    merge_checkpoints(saved((None, found), tmp_path), tmp_path / "out.safetensors")
    file = load_file(tmp_path / "out.safetensors")
    assert torch.equal(file["first.weight"], file["last.weight"])
    assert_close(file["first.weight"], merged["first.weight"], atol=1e-6)


def test_what_only_one_model_trained_is_its_own(tuned):
    frozen = copy.deepcopy(tuned[0])
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(False)
    found = [tuned[1][0], fine_tuned(frozen, 5)]
    merged = merge(posteriors((None, found), n_data=(960.0, 960.0)))
    v = moments((None, found[:1]), "0.weight")[0]
    alone = found[0][0].state_dict()["0.weight"]
    assert torch.equal(merged["0.weight"][v > 0], alone[v > 0])
    assert "2 tensors that not every model trained come from those that did" in " ".join(merged.report.notes)


def test_other_architectures_are_refused_by_the_first_name(tuned):
    wide = ba.Posterior.from_optimizer(*fine_tuned(network(6), 0)[:2], 960, prior_precision=1.0)
    with pytest.raises(ba.errors.MatchError, match=r"'0.weight' is of shape \(5, 4\) in the one and of shape \(6, 4\)"):
        merge([posteriors(tuned)[0], wide])
    deep = nn.Sequential(*copy.deepcopy(tuned[0]), nn.Linear(3, 3))
    deeper = ba.Posterior.from_optimizer(*fine_tuned(deep, 0)[:2], 960, prior_precision=1.0)
    with pytest.raises(ba.errors.MatchError, match=r"'4\.weight' is missing in the one and of shape"):
        merge([posteriors(tuned)[0], deeper])
    with pytest.raises(ba.errors.MatchError, match="model 1 and the base are of different architectures"):
        merge(posteriors(tuned), base=network(6))


def test_a_file_with_bad_moments_is_refused_and_nothing_is_written(tuned, tmp_path):
    paths = saved(tuned, tmp_path)
    tree = torch.load(paths[1], weights_only=True)
    tree["optimizer"]["state"][2]["exp_avg_sq"][0] = float("nan")
    torch.save(tree, paths[1])
    out = tmp_path / "merged.safetensors"
    with pytest.raises(ba.errors.MatchError, match=r"1.pt: .*'1.weight'"):
        merge_checkpoints(paths, out)
    with pytest.raises(ba.errors.FileError, match="safetensors"):
        merge_checkpoints(paths, tmp_path / "merged.pt")
    posteriors(tuned)[0].save(out.with_stem("own"))
    with pytest.raises(ba.errors.FileError, match="overwrite"):
        merge_checkpoints([out.with_stem("own"), paths[0]], out.with_stem("own"))
    assert not out.exists()


def test_an_error_says_which_file(tuned, tmp_path):
    paths = saved(tuned, tmp_path)
    sgd = torch.optim.SGD(tuned[0].parameters(), lr=0.1, momentum=0.9)
    for state, said in ((sgd.state_dict(), "SGD"), (torch.optim.Adam(tuned[0].parameters()).state_dict(), "step")):
        torch.save({"model": tuned[0].state_dict(), "optimizer": state}, tmp_path / "bad.pt")
        with pytest.raises(ba.errors.MatchError, match=rf"^bad\.pt: .*{said}"):
            merge([paths[0], tmp_path / "bad.pt"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "mean"}, "method must be one of"),
        ({"method": "gradient-matching"}, "needs base="),
        ({"method": "fisher", "base": {"a": torch.ones(1)}}, "'fisher' have none"),
        ({"trim": 0.5}, "trim must be a share"),
        ({"trim": 1.5, "base": {"a": torch.ones(1)}}, "trim must be a share"),
        ({"weights": [1.0]}, "one number for each of the 3 models"),
        ({"weights": [1.0, 0.0, 1.0]}, "positive finite number"),
        ({"models": lambda every: every[0]}, "one list"),
        ({"models": lambda every: every[:1]}, "two or more"),
        ({"models": lambda every: [every[0].model] * 2}, "A model alone has no curvature"),
    ],
)
def test_settings_without_a_meaning_are_refused(tuned, change, said):
    models = change.get("models", list)(posteriors(tuned))
    with pytest.raises(ba.errors.SettingError, match=said):
        merge(**{**change, "models": models})


@pytest.mark.parametrize(
    ("options", "said"), [({"betas": (0.9, 0.95)}, "β₂ = 0.95"), ({"steps": 10}, "trained for 10 steps")]
)
def test_poor_states_are_warned_of(tuned, tmp_path, options, said):
    pairs = [tuned[1][0], fine_tuned(tuned[0], 1, **options)]
    with pytest.warns(ba.errors.BayesAdamWarning, match=said):
        merge(saved((None, pairs), tmp_path))
    live = [ba.Posterior.from_optimizer(m, o, 960, prior_precision=1.0) for m, o, _ in pairs]
    for number, posterior in enumerate(live):
        posterior.save(tmp_path / f"{number}.safetensors")
    with pytest.warns(ba.errors.BayesAdamWarning, match=f"model 2 was .*{said}"):
        merge([ba.Posterior.load(tmp_path / f"{n}.safetensors", m) for n, (m, _, _) in enumerate(pairs)])


def test_one_state_does_not_stand_for_all(tuned, tmp_path):
    path, (model, optimizer, _) = saved(tuned, tmp_path)[0], tuned[1][1]
    torch.save(model.state_dict(), tmp_path / "w.pt")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    with pytest.raises(ba.errors.SettingError, match=r"pass the pair \(weights, state\)"):
        merge([path, tmp_path / "w.pt"], optimizer_path=tmp_path / "o.pt")
    with pytest.raises(ba.errors.FileError, match=r"holds no optimiser state.*a pair \(weights, state\).*base="):
        merge([path, tmp_path / "w.pt"])
