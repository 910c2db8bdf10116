"""Networks of few bits: nearer than rounding to nearest, and in their files what they are in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress import quantise
from bayesadam.errors import FileError, MatchError, SettingError
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
        scale = weight.detach().flatten(1).abs().amax(1).div(2 ** (bits - 1) - 1).view(-1, *[1] * (weight.dim() - 1))
        weight.data = (weight.data / scale).round() * scale
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
