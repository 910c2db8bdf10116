"""Networks of few bits: nearer than rounding to nearest, and in their files what they are in memory."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress import quantise
from bayesadam.compress.rounding import Grid, grid_of, round_to, stacked
from bayesadam.errors import BayesAdamWarning, FileError, MatchError, SettingError
from compress.cases_compress import error, posterior_of
from floats import assert_close
from predict.cases_networks import Lambda


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """With buffers, a grouped convolution and a layer without a bias."""
    layers = [nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 20, bias=False)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(20, 5)).to(dtype).eval()
    model[1].running_mean += 0.1
    return model


def images(n: int = 200, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 4, 5, 5).cumsum(-1).to(dtype)


def nearest(model: nn.Module, bits: int) -> nn.Module:
    """Each weight rounded to a multiple of its output's scale."""
    model = copy.deepcopy(model)
    for weight in (p for p in model.parameters() if p.dim() > 1):
        rows = weight.detach().flatten(1)
        weight.data = to_nearest(rows, plain(rows, bits), bits).view_as(weight)
    return model


def reloaded(small: Any, path: Path, model: nn.Module) -> nn.Module:
    small.save(path / "small.safetensors")
    return ba.load(path / "small.safetensors", model)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("symmetric", "group"), [(True, None), (False, 16)])
def test_outputs_are_nearer_than_rounded_ones(bits: int, symmetric: bool, group: int | None, tmp_path: Path) -> None:
    dense, x = posterior_of(network()), images()
    before = copy.deepcopy(dense.model.state_dict())
    small = quantise(dense, bits, inputs=x, symmetric=symmetric, group=group)
    assert error(small.model, dense.model, x) < 0.5 * error(nearest(dense.model, bits), dense.model, x)
    for weight in (small.model[0].weight, small.model[4].weight, small.model[6].weight):
        for row in weight.flatten(1).split(group or 72, dim=1):
            assert max(len(part.unique()) for part in row) <= 2**bits
    assert equal(reloaded(small, tmp_path, network()), small.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [16, 4])
def test_other_types_are_saved_as_they_are(dtype: torch.dtype, bits: int, tmp_path: Path) -> None:
    dense, x = posterior_of(network(dtype)), images(dtype=dtype)
    small = quantise(dense, bits, inputs=x)
    assert {p.dtype for p in small.model.parameters()} == {dtype}
    assert error(small.model, dense.model, x) < 0.02 * float(dense.model(x).detach().double().var())
    assert equal(reloaded(small, tmp_path, network(dtype)), small.model)


def test_half_precision_is_what_the_file_holds(tmp_path: Path) -> None:
    dense, x = posterior_of(network()), images()
    small = quantise(dense, 16)
    assert all(torch.equal(p, dense.mode[name].half().float()) for name, p in small.model.named_parameters())
    assert equal(found := reloaded(small, tmp_path, network()), small.model)
    assert torch.equal(found(x), small.model(x))
    assert small.report.bytes["4.weight"] == 2 * 72 * 20


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (3, False), (2, True), (2, False)])
def test_a_pruned_network_stays_as_sparse(bits: int, symmetric: bool, tmp_path: Path) -> None:
    dense, x = posterior_of(network(), delta=1.0), images()
    pruned = ba.prune(dense, 0.6, inputs=x, rounds=2)
    small = quantise(pruned, bits, inputs=x, symmetric=symmetric)
    for name, weight in pruned.model.named_parameters():
        assert not small.model.get_parameter(name)[weight == 0].any()
    assert equal(reloaded(small, tmp_path, network()), small.model)
    assert error(small.model, pruned.model, x) < error(nearest(pruned.model, bits), pruned.model, x)


@pytest.mark.parametrize("power", [-6, 9])
@pytest.mark.parametrize("bits", [16, 8, 3])
@pytest.mark.parametrize(("symmetric", "with_inputs"), [(True, True), (False, False)])
def test_weights_of_any_size_are_rounded_alike(
    power: int, bits: int, symmetric: bool, with_inputs: bool, tmp_path: Path
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), torch.randn(200, 8)
    scaled = copy.deepcopy(model)
    for name, factor in (("0.weight", 10.0**power), ("0.bias", 10.0**power), ("2.weight", 10.0**-power)):
        scaled.get_parameter(name).data *= factor
    usual, small = (
        quantise(posterior_of(each), bits, inputs=x if with_inputs else None, symmetric=symmetric)
        for each in (model, scaled)
    )
    assert error(small.model, scaled, x) <= 10 * error(usual.model, model, x)
    assert equal(reloaded(small, tmp_path, scaled), small.model)
    types = [each.grids["0.weight"][0].scale.dtype for each in (usual, small) if bits < 16]
    assert types == [torch.float16, torch.float32][: len(types)]


@pytest.mark.parametrize("bits", [16, 4])
def test_the_file_has_the_size_of_the_report(bits: int, tmp_path: Path) -> None:
    dense = posterior_of(nn.Sequential(nn.Linear(600, 200), nn.BatchNorm1d(200)).eval())
    small = quantise(dense, bits, inputs=torch.randn(200, 600))
    small.save(path := tmp_path / "small.safetensors")
    report, total = ba.inspect(small), path.stat().st_size
    assert replace(report, moved={}) == ba.inspect(path)
    assert sum(report.bytes.values()) == total
    assert total < 1.02 * (120_000 * bits / 8 + 200 * (4 + 2 * 2)) + 6000
    lines = [line.split() for line in str(report).splitlines()][bits < 16 :]
    moved = ["outputs", "moved"] if bits < 16 else []
    assert lines[0] == ["parameter", "weights", "kept", "removed", "bytes", *moved]
    assert lines[-1][:2] == ["total", "120,600"]
    assert [name for name, *_ in lines[1:]] == [*small.model.state_dict(), "(header)", "total"]
    rows = {name: cells for name, *cells in lines[1:-1]}
    assert sum(int(cells[0].replace(",", "")) for name, cells in rows.items() if name in report.parameters) == 120_600
    sizes = {name: cells[3 if name in report.parameters else 0] for name, cells in rows.items()}
    assert sum(int(size.replace(",", "")) for size in sizes.values()) == total == int(lines[-1][4].replace(",", ""))


def test_moved_is_of_each_layer_on_what_it_gets() -> None:
    dense, x = posterior_of(network()), images()
    small = quantise(dense, 3, inputs=x)
    for index in (0, 4, 6):
        with torch.no_grad():
            z, moved = dense.model[: index + 1](x).double(), small.model[: index + 1](x).double()
        expected = float((moved - z).square().sum() / z.square().sum())
        assert small.moved[f"{index}.weight"] == pytest.approx(expected, rel=1e-2)


def mixed() -> nn.Module:
    """A tied table and head, attention in one and in four matrices, and a layer that no input reaches."""
    table, attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
    head, unused = nn.Linear(8, 11, bias=False), nn.Linear(8, 8)
    head.weight = table.weight
    forward = lambda self, tokens: self.head(self.attend(*[self.table(tokens)] * 3)[0])  # noqa: E731
    return Lambda(forward, table=table, attend=attend, head=head, unused=unused)


@pytest.mark.parametrize("structure", ["walk", "diagonal", "inputs"])
@pytest.mark.filterwarnings("ignore:no input reaches unused")
def test_shared_weights_are_left_and_unreached_ones_rounded(structure: str, tmp_path: Path) -> None:
    model, tokens = mixed(), torch.randint(11, (90, 4))
    dense = posterior_of(model, delta=1.0)
    if structure == "inputs":
        dense = dense.with_inputs(tokens)
    small = quantise(dense, 4, inputs=tokens if structure == "walk" else None)
    assert set(small.grids) == {"attend.in_proj_weight", "attend.out_proj.weight", "unused.weight"}
    assert small.model.head.weight is small.model.table.weight
    assert torch.equal(small.model.table.weight, model.table.weight)
    assert error(small.model, model, tokens) < 0.1 * float(model(tokens).detach().var())
    assert small.moved.keys() == ({"attend.in_proj_weight", "attend.out_proj.weight"} if structure == "walk" else set())
    assert equal(reloaded(small, tmp_path, mixed()), small.model)


@pytest.mark.parametrize("exclude", ["4.*", ("4.weight", "norms"), "biases"])
def test_what_is_excluded_is_not_rounded(exclude: Any) -> None:
    dense = posterior_of(network())
    small = quantise(dense, 2, exclude=exclude, inputs=images())
    is_left = exclude != "biases"
    assert torch.equal(small.model[4].weight, dense.mode["4.weight"]) == is_left
    assert ("4.weight" in small.grids) != is_left
    assert "0.weight" in small.grids


def test_where_little_can_change_it_is_told() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = nn.LSTM(6, 20, batch_first=True), nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.steps(x)[0][:, -1])

    posterior, x = posterior_of(Steps()), torch.randn(60, 5, 6)
    with pytest.warns(BayesAdamWarning, match=r"60 of 2,303 weights are rounded .* of steps.weight_hh_l0, .* none is"):
        quantise(posterior, 4)
    with pytest.warns(BayesAdamWarning, match="60 of 2,303 weights are pruned with inputs"):
        ba.prune(posterior, 0.5, inputs=x)
    quantise(posterior, 4, exclude="steps.*")
    ba.prune(posterior, 0.5, inputs=x, exclude="steps.*")


def test_without_inputs_the_bias_follows_only_what_is_known() -> None:
    model = nn.Sequential(nn.Linear(30, 10))
    x = F.pad(torch.randn(200, 29), (1, 0), value=3.0).cumsum(-1)
    dense = posterior_of(model, delta=1.0)
    known, unknown = quantise(dense.with_inputs(x), 3), quantise(dense, 3)
    assert torch.equal(unknown.model[0].bias, model[0].bias)
    assert not torch.equal(known.model[0].bias, model[0].bias)
    assert error(known.model, model, x) < 0.5 * error(unknown.model, model, x)
    assert_close(error(known.model, model, x), error(quantise(dense, 3, inputs=x).model, model, x), rtol=0.05)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"bits": 5}, r"bits must be one of \(2, 3, 4, 8, 16\), got 5"),
        ({"bits": "4"}, "bits must be one of .* got '4'"),
        ({"group": 0}, "group must be"),
        ({"group": -8}, "group must be"),
    ],
)
def test_wrong_settings_are_named(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        quantise(posterior_of(network()), **{"bits": 4, **keys})
    with pytest.raises(MatchError, match="matches no parameter"):
        quantise(posterior_of(network()), 4, exclude="nothing")
    with pytest.raises(FileError, match=r"small\.pt: .* end the path in \.safetensors"):
        quantise(posterior_of(network()), 4).save("small.pt")


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("inputs", [None, images(3)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, inputs: Tensor | None, bits: int) -> None:
    dense = posterior_of(network())
    dense.mode["6.bias"][1] = value
    with pytest.raises(MatchError, match=r"weights of 6\.bias are NaN or infinite"):
        quantise(dense, bits, inputs=inputs)


def test_the_network_of_the_mean_is_rounded() -> None:
    shrunk = posterior_of(network(), delta=5.0, form="likelihood")
    x, model = images(), network()
    model.load_state_dict({**shrunk.model.state_dict(), **shrunk.mean})
    small, expected = quantise(shrunk, 4, inputs=x), quantise(posterior_of(model), 4, inputs=x)
    assert_close(dict(small.model.named_parameters()), dict(expected.model.named_parameters()))


@pytest.mark.parametrize("inputs", [None, torch.randn(30, 3)])
@pytest.mark.filterwarnings("ignore:no input reaches unused")
def test_matrices_that_were_not_trained_are_rounded(inputs: Tensor | None) -> None:
    model = nn.Linear(3, 4)
    model.unused = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    small = quantise(ba.Posterior.from_optimizer(model, optimizer, 8), 8, inputs=inputs)
    assert small.grids.keys() == {"weight", "unused.weight"}
    assert_close(small.model.unused.weight, model.unused.weight, rtol=0.01)


# --- rounding to grids, beside all codes of a small row, GPTQ and plain rounding written anew -------------------------


def layer(inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights, and the second moments of correlated inputs with a small λ."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) * torch.arange(1, inputs + 1) ** -0.7
    x = (torch.randn(4 * inputs, inputs, generator=generator) @ mix).relu().double()
    a = x.T @ x / len(x)
    return torch.randn(outputs, inputs, generator=generator), a + 0.01 * a.diagonal().mean() * torch.eye(inputs)


def errors(q: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """(q − w) A (q − w)ᵀ of each row."""
    off = (q - w).double()
    return ((off @ a) * off).sum(1)


def plain(w: Tensor, bits: int) -> Tensor:
    """The scale of the largest weight, for each row."""
    return w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)


def to_nearest(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (w / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def gptq(w: Tensor, a: Tensor, bits: int) -> Tensor:
    """Columns in order, by the upper Cholesky factor of A⁻¹."""
    u = torch.linalg.cholesky(torch.linalg.inv(a), upper=True)
    w, scale, q = w.double(), plain(w, bits).double(), torch.zeros_like(w)
    for j in range(w.shape[1]):
        rounded = to_nearest(w[:, j : j + 1], scale, bits)
        q[:, j : j + 1] = rounded
        w = w - (w[:, j : j + 1] - rounded) / u[j, j] * u[j]
    return q


def test_beside_every_code_of_a_small_row() -> None:
    w, a = layer(5, 20)
    codes = torch.tensor(list(itertools.product(range(4), repeat=5))).double()
    best = torch.full((20,), torch.inf, dtype=torch.float64)
    for zero in (1.5, 2.0):
        v = codes - zero
        scale = (v @ a @ w.double().T) / ((v @ a) * v).sum(1, keepdim=True).clamp(min=1e-12)
        least = torch.stack([errors(s[:, None] * v, row, a) for s, row in zip(scale.T, w, strict=True)])
        best = torch.minimum(best, least.amin(1))
    found = errors(round_to(w, a, 2).weight(), w, a)
    assert (found >= best * 0.999).all()
    assert float((found / best).median()) < 1.02
    assert float(found.sum() / best.sum()) < 1.15


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_worse_than_gptq_and_plain_rounding(bits: int, symmetric: bool, seed: int) -> None:
    w, a = layer(150, 12, seed)
    found = errors(round_to(w, a, bits, symmetric=symmetric).weight(), w, a)
    own = grid_of(w, bits, a.diagonal(), symmetric=symmetric).weight()
    assert (found <= errors(own, w, a)).all()
    for other in (to_nearest(w, plain(w, bits), bits), gptq(w, a, bits)):
        assert found.sum() < errors(other, w, a).sum()


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_sweep_increases_no_rows_error(symmetric: bool, group: int | None) -> None:
    w, a = layer(150, 12)
    keys = {"symmetric": symmetric, "group": group}
    found = [errors(round_to(w, a, 3, sweeps=n, **keys).weight(), w, a) for n in range(5)]  # type: ignore[arg-type]
    assert all((later <= before * (1 + 1e-4)).all() for before, later in itertools.pairwise(found))
    assert found[-1].sum() < 0.99 * found[0].sum()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_removed_weights_stay_exactly_zero(bits: int, symmetric: bool, whole: bool) -> None:
    w, a = layer(60, 9)
    mask = torch.rand(w.shape) < 0.3
    mask[3] = False
    given = w if whole else w * mask
    q = round_to(given, a, bits, mask=mask, symmetric=symmetric, group=16).weight()
    assert (q[~mask] == 0).all()
    assert (q[mask] != 0).any()
    # Where they are, the others make up for them.
    if whole:
        assert errors(q, w, a).sum() < 0.8 * errors(grid_of(w * mask, bits, a.diagonal()).weight(), w, a).sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_without_correlations_it_is_rounding_at_the_best_scale(bits: int) -> None:
    w, eye = layer(40, 6)[0], torch.eye(40, dtype=torch.float64)
    found = errors(round_to(w, eye, bits).weight(), w, eye)
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    for zero in (2 ** (bits - 1), (2**bits - 1) / 2 if bits < 4 else 2 ** (bits - 1)):
        for share in torch.linspace(-1.2, 1.2, 2001):
            scale = plain(w, bits) * share
            q = ((w / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale
            best = torch.minimum(best, errors(q, w, eye))
    assert (found <= best * 1.06).all()
    assert found.sum() <= best.sum() * 1.02


def test_the_bias_follows_and_is_not_rounded() -> None:
    w, a = layer(31, 5)
    grid = round_to(w, a, 3, bias=True)
    assert grid.bias is not None
    q = torch.cat([grid.weight(), grid.bias[:, None]], 1)
    # At the minimum over the bias the error does not depend on it.
    assert_close((q - w).double() @ a[:, -1], torch.zeros(5), atol=1e-5)
    worse = torch.cat([grid.weight(), w[:, -1:]], 1)
    assert errors(q, w, a).sum() < errors(worse, w, a).sum()
    assert round_to(w[:, :-1], a[:-1, :-1], 3).bias is None


def test_a_grid_is_what_it_stores() -> None:
    w, a = layer(50, 7)
    grid = round_to(w, a, 3, symmetric=False, group=16)
    assert (grid.codes.dtype, grid.scale.dtype, grid.zero.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert grid.scale.shape == grid.zero.shape == (7, 4)
    assert int(grid.codes.max()) <= 7
    for row, column in ((0, 0), (3, 15), (6, 49)):
        scale, zero = grid.scale[row, column // 16].float(), grid.zero[row, column // 16].float()
        assert grid.weight()[row, column] == scale * (grid.codes[row, column].float() - zero)
    both = stacked([grid, grid])
    assert both.weight().equal(torch.cat([grid.weight()] * 2))
    assert round_to(w, a, 4).zero.shape == (7, 1)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_degenerate_layers(bits: int, symmetric: bool) -> None:
    def rounded(w: Tensor, a: Tensor, **keys: int) -> Tensor:
        q: Grid = round_to(w, a, bits, symmetric=symmetric, **keys)  # type: ignore[arg-type]
        assert q.weight().isfinite().all()
        return q.weight()

    assert (rounded(torch.zeros(3, 4), torch.eye(4)) == 0).all()
    assert_close(rounded(torch.tensor([[0.7], [-0.2]]), torch.eye(1)), torch.tensor([[0.7], [-0.2]]), rtol=2e-3)
    constant = torch.full((2, 6), 0.3)
    assert_close(rounded(constant, torch.eye(6)), constant, rtol=2e-2)
    # Inputs that are always the same, always 0, or fewer than there are columns.
    w, a = layer(12, 4)
    x = torch.randn(3, 12, dtype=torch.float64)
    x[:, 2] = 0
    rounded(w, x.T @ x)
    rounded(w, torch.ones(12, 12))
    rounded(w, torch.zeros(12, 12), group=5)
    rounded(torch.full((2, 12), 1e6), a)
