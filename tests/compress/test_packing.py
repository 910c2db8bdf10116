"""Packed files: what is read is what was written, in about the bits that it takes; damage is refused."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import _storage as storage
from bayesadam.compress import packing
from bayesadam.compress.packing import load_network, load_packed, report_packed
from bayesadam.compress.quantising import Quantised
from bayesadam.compress.rounding import Grid, grid_of, stacked
from bayesadam.errors import FileError, MatchError, MissingExtraError, SettingError
from bayesadam.predict.matrices import Matrix, matrices_of
from compress.cases_compress import posterior_of

Grids = dict[str, tuple[Grid, Matrix]]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.ConvTranspose2d(6, 4, (3, 2), groups=2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(300, 50),
    )


def save_packed(path: Path, tensors: dict[str, Tensor], grids: Grids | None = None) -> None:
    storage.write(path, *packing.packed(tensors, grids or {}, []), packing.KIND)


def quantised(model: nn.Module, bits: int, *, symmetric: bool = True, group: int | None = None) -> Grids:
    """Grids of all matrices, whose values are then the model's weights."""
    grids, weights = {}, dict(model.named_parameters())
    for matrix in (matrix for matrices in matrices_of(model).values() for matrix in matrices):
        blocks = matrix.into(weights[matrix.weight].detach())
        ones = torch.ones(blocks.shape[2])
        grid = stacked([grid_of(block, bits, ones, symmetric=symmetric, group=group) for block in blocks])
        grids[matrix.weight] = grid, matrix
        weights[matrix.weight].data = matrix.out_of(grid.weight().reshape(matrix.size))
    return grids


def pruned(model: nn.Module, fraction: float) -> nn.Module:
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= torch.rand(weight.shape) > fraction
    return model


def same(found: dict[str, Tensor], model: nn.Module) -> None:
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.95, 1.0])
def test_what_is_read_is_what_was_written(bits: int, symmetric: bool, fraction: float, tmp_path: Path) -> None:
    model = pruned(network(), fraction)
    grids = quantised(model, bits, symmetric=symmetric, group=None if symmetric else 32)
    path = tmp_path / "small.safetensors"
    save_packed(path, model.state_dict(), grids)
    same(load_packed(path, network().state_dict()), model)
    same(dict(load_network(path, network()).state_dict()), model)
    report = report_packed(path)
    assert sum(report.bytes.values()) == path.stat().st_size
    grid = grids["4.weight"][0]
    bare = math.ceil(grid.codes.numel() * bits / 8) + grid.scale.nbytes + grid.zero.nbytes
    assert report.bytes["4.weight"] <= bare
    assert {name: n - left for name, (n, left) in report.parameters.items()} == {
        name: int((tensor == 0).sum()) for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.98, 0.999])
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_bytes_are_near_the_entropy(fraction: float, bits: int | None, tmp_path: Path) -> None:
    model = pruned(nn.Linear(1000, 200, bias=False), fraction)
    grids = {} if bits is None else quantised(model, bits)
    spread = -fraction * math.log2(fraction) - (1 - fraction) * math.log2(1 - fraction)
    save_packed(tmp_path / "q", model.state_dict(), grids)
    size = report_packed(tmp_path / "q").bytes["weight"] - (0 if bits is None else 800)
    assert size <= 1.05 * 200_000 / 8 * (spread + (1 - fraction) * (bits or 32)) + 200


def test_wide_gaps_and_short_tensors(tmp_path: Path) -> None:
    tensors = {f"{n}.{k}": torch.zeros(n) for n in (0, 1, 7, 256, 257, 5000) for k in range(3)}
    for name, tensor in tensors.items():
        if name.endswith("1"):
            tensor[-1:] = 1.5
        elif name.endswith("2"):
            tensor[::255] = -2.5
    tensors |= {"nan": torch.tensor([0.0, math.nan, 0, 0]), "count": torch.tensor(7), "half": torch.ones(3).bfloat16()}
    save_packed(tmp_path / "q", tensors)
    found = load_packed(tmp_path / "q", tensors)
    assert all(found[name].equal(t) or name == "nan" for name, t in tensors.items())
    assert found["nan"].isnan().tolist() == [False, True, False, False]
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in tensors.items()}


def test_half_is_for_numbers_that_fit(tmp_path: Path) -> None:
    a = torch.randn(100)
    left = {"large": torch.tensor([1e6, 1.0]), "a": a, "nan": a * math.nan, "whole": torch.arange(9)}
    halves = {"half": a.half().float(), "mask": torch.tensor([0.0, -math.inf]).double(), "none": a[:0]}
    save_packed(tmp_path / "q", left | halves)
    found, sizes = load_packed(tmp_path / "q", left | halves), report_packed(tmp_path / "q").bytes
    assert all(found[name].dtype == tensor.dtype for name, tensor in (left | halves).items())
    assert all(found[name].equal(tensor) or name == "nan" for name, tensor in (left | halves).items())
    assert (sizes["a"], sizes["half"], sizes["mask"]) == (400, 200, 3)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(30, 20), "head": nn.Linear(20, 30, bias=False)})
    model["head"].weight = model["table"].weight
    save_packed(tmp_path / "q", model.state_dict())
    same(load_packed(tmp_path / "q", model.state_dict()), model)
    report = report_packed(tmp_path / "q")
    assert (report.bytes["table.weight"], report.weights, report.parameters.keys()) == (2400, 600, {"table.weight"})


def test_another_network_or_something_else(tmp_path: Path) -> None:
    path, other, state = tmp_path / "q", tmp_path / "other", network().state_dict()
    save_packed(path, state)
    storage.write(other, {}, {})
    for use, error, match in (
        (lambda: load_packed(path, {**state, "weight": torch.zeros(2)}), MatchError, r"another network: \['weight'"),
        (lambda: load_packed(path, {**state, "4.bias": torch.zeros(2)}), MatchError, r"\['4\.bias'\] differ in shape"),
        (lambda: save_packed(path, {}, quantised(network(), 4)), MatchError, "the tensors lack"),
        (lambda: save_packed(path, {"extra": {}}), SettingError, "'extra' is a dict"),  # type: ignore[dict-item]
        (lambda: load_packed(other, {}), FileError, "not a packed network"),
    ):
        with pytest.raises(error, match=match):
            use()


def written(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    model = pruned(nn.Linear(64, 32), 0.9)
    save_packed(path, model.state_dict(), quantised(model, 3))
    return storage.read(path, packing.KIND)


LIKE = nn.Linear(64, 32).state_dict()


def test_hostile_streams_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q"
    parts, header = written(path)
    bomb = torch.frombuffer(bytearray(zlib.compress(bytes(10**7))), dtype=torch.uint8)
    changes = [
        {name: part}
        for name in ("codes.weight", "kept.weight")
        for old in [parts[name]]
        for part in (bomb, old[:-1], old[:0], old.int(), torch.cat([old, old]))
    ]
    changes += [{"scale.weight": torch.zeros(3, 3)}, {"zero.weight": torch.zeros(7, 5)}]
    for change in changes:
        storage.write(path, parts | change, header, packing.KIND)
        with pytest.raises(FileError):
            load_packed(path, LIKE)
    for part in ("codes.weight", "scale.weight"):
        storage.write(path, {name: tensor for name, tensor in parts.items() if name != part}, header, packing.KIND)
        with pytest.raises(FileError):
            load_packed(path, LIKE)


def test_hostile_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q"
    parts, header = written(path)
    grid = header["grids"]["weight"]  # type: ignore[index]
    values = [*({"bits": bits} for bits in (0, 5, 9, 4)), *({"group": n} for n in (0, 7, 10**12)), {"groups": 5}]
    about = [{"grids": {"weight": grid | value}} for value in [*values, {"inputs_first": 1}]]
    about += [{"buffers": [1]}, {"same": {"bias": "none"}}, {"grids": {"weight": {"bits": 3}}}, {"grids": {}}]
    about += [{"shapes": {"weight": shape}} for shape in ([], [10**12, 64], [32, 65], [10**400, 1], [0, 64])]
    for change in about:
        storage.write(path, parts, header | change, packing.KIND)
        with pytest.raises((FileError, MatchError)):
            load_packed(path, LIKE)
    # Of a large tensor of zeros the report says how large it claims to be, and makes none.
    storage.write(path, parts, header | {"shapes": {"weight": [10**12, 64]}}, packing.KIND)
    assert report_packed(path).weights == 64 * 10**12
    # Files of before have no buffers.
    storage.write(path, parts, {key: value for key, value in header.items() if key != "buffers"}, packing.KIND)
    assert report_packed(path).weights == 32 * 65
    for key in ("shapes", "grids", "same"):
        storage.write(path, parts, {other: header[other] for other in header if other != key}, packing.KIND)
        for read in (report_packed, lambda path: load_packed(path, LIKE)):
            with pytest.raises(FileError):
                read(path)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q"
    written(path)
    content = path.read_bytes()
    for length in range(0, len(content), 101):
        path.write_bytes(content[:length])
        with pytest.raises(FileError):
            load_packed(path, LIKE)


def test_load_gives_an_ordinary_module(tmp_path: Path) -> None:
    model = network()
    grids, path = quantised(model, 4), tmp_path / "q.safetensors"
    save_packed(path, model.state_dict(), grids)
    found = ba.load(path, network())
    assert type(found) is nn.Sequential
    for wrong in (nn.Linear, network):
        with pytest.raises(SettingError, match="takes the model, not its class or a function"):
            ba.load(path, wrong)  # type: ignore[call-overload]
    posterior_of(network()).save(path)
    with pytest.raises(FileError, match=r"not a calibrated network.*Posterior\.load\(path, model\) reads"):
        ba.load(path, network())
    same(dict(found.state_dict()), model)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_torchaos_weights_give_the_same_outputs(bits: int, symmetric: bool) -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
    grids = quantised(model, bits, symmetric=symmetric, group=32)
    x = torch.randn(7, 64)
    packed = Quantised(model, grids, {}).torchao()
    assert type(packed[0].weight).__module__.startswith("torchao") or type(packed[0].weight.data) is not Tensor
    torch.testing.assert_close(packed(x), model(x), rtol=1e-5, atol=1e-5)


def test_torchao_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(MissingExtraError, match="torchao"):
        Quantised(nn.Linear(2, 2), {}, {}).torchao()
