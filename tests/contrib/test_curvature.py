"""The reader in contrib gives what bayesadam's own gives, and says what is wrong with a damaged file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam import _storage as storage
from cases import fit, soap
from curvature import Curvature, Fault, check, main, read
from floats import assert_close
from processes import PATIENCE

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "weights" / "release_0_2"
COMPRESSIONS = (None, "bfloat16", "factored")


class Net(nn.Module):
    """Parameters of no, one, two and four dimensions, more than a block of codes, and one without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.last = nn.Linear(27, 40)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.scale * self.last(self.first(x).relu().flatten(1)) + self.empty.sum()


def trained(kind="adamw", dtype=torch.float32, steps=40):
    torch.manual_seed(0)
    model = Net().to(dtype)
    if kind == "soap":
        model.empty.requires_grad_(False)
        used = [p for p in model.parameters() if p.requires_grad]
        optimizer = soap(used, lr=1e-3, weight_decay=0.01, betas=(0.95, 0.97))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.97))
    x = torch.randn(64, 2, 5, 5, dtype=dtype)
    x[:, :, :, 0] = 0
    fit(model, optimizer, steps * [(x, x[:, 0].flatten(1)[:, 1:].argmax(dim=1))], nn.functional.cross_entropy)
    return model, optimizer


@pytest.fixture(scope="module")
def adam():
    return trained()


@pytest.fixture(scope="module")
def rotated():
    return trained("soap")


@pytest.fixture(scope="module")
def double():
    return trained(dtype=torch.float64, steps=5)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("which", ["adam", "rotated", "double"])
def test_it_reads_what_bayesadam_reads(request, tmp_path, which, compress, weights):
    (model, optimizer), structure = request.getfixturevalue(which), "kronecker" if which == "rotated" else "diagonal"
    path = tmp_path / "posterior.safetensors"
    live = ba.Posterior.from_optimizer(
        model, optimizer, 64, batch_size=64, structure=structure, likelihood="classification"
    )
    if structure == "diagonal":
        live = live.replace(prior_precision={name: torch.ones_like(theta) for name, theta in live.mode.items()})
    live.save(path, weights=weights, compress=compress)
    found, header = read(path)
    curvature = ba.Posterior.load(path, model).curvature
    assert list(found) == list(curvature.second_moment)
    # Codes are decoded by another exponential, and sums over bases are in another order.
    double = which == "double" and compress != "bfloat16"
    for name in curvature.second_moment:
        v = curvature.diagonal(name)
        assert found[name].dtype == (np.float64 if double else np.float32)
        assert_close(found[name], v, rtol=1e-12 if double else 1e-5)
        if compress != "factored" and structure == "diagonal":
            assert np.array_equal(found[name] == 0, (v == 0).numpy())
    assert {**header, "sums": None} == {**storage.read(path)[1], "sums": None}
    lines = check(path)
    assert f"{structure} curvature" in lines[1]
    assert ("with weights" if weights else "without weights") in lines[1]
    assert (compress or "uncompressed") in lines[1]
    assert "N = 64, B = 64, power 0.5" in lines[2]


def test_rotated_numbers_are_given_as_they_are_stored_too(rotated, tmp_path):
    live = ba.Posterior.from_optimizer(*rotated, 64, structure="kronecker")
    live.save(tmp_path / "p.safetensors")
    file = Curvature(tmp_path / "p.safetensors")
    for name, v in live.curvature.second_moment.items():
        assert np.array_equal(file.stored(name), v.numpy())
    assert not np.allclose(file.stored("last.weight"), file.moment("last.weight"), rtol=0.1)
    assert any("eigenbases" in line for line in check(tmp_path / "p.safetensors"))


@pytest.mark.parametrize("name", ["diagonal", "compressed", "published", "kronecker"])
def test_files_of_an_earlier_release(name):
    path = OLD / f"{name}.safetensors"
    opened = ba.GaussianWeights.open(path)
    found, _ = read(path)
    for each, v in found.items():
        assert_close(v, opened.curvature.diagonal(each), rtol=1e-5)
    assert check(path)


def test_what_has_no_second_moments_is_refused(capsys):
    assert main([str(OLD / "mixture.safetensors")]) == 1
    assert "read it with bayesadam" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_bayesadam(adam, tmp_path):
    model, optimizer = adam
    path = tmp_path / "posterior.safetensors"
    ba.Posterior.from_optimizer(model, optimizer, 64).save(path, weights=False, compress="factored")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sorted({'torch', 'bayesadam'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, ROOT / "contrib" / "curvature.py", path, tmp_path / "model.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "it belongs to the weights" in done.stdout


@pytest.fixture
def published(adam, tmp_path):
    model, optimizer = adam
    ba.Posterior.from_optimizer(model, optimizer, 64).save(
        tmp_path / "p.safetensors", weights=False, compress="factored"
    )
    return tmp_path / "p.safetensors", {name: t.clone() for name, t in model.state_dict().items()}


def test_the_weights_are_recognised_rounded_and_in_parts(published):
    path, weights = published
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        save_file({name: t.to(dtype) for name, t in weights.items()}, path.with_name("model.safetensors"))
        assert "belongs to" in check(path, [path.with_name("model.safetensors")])[-1]
    shards = [path.with_name(f"{number}.safetensors") for number in range(2)]
    for number, shard in enumerate(shards):
        save_file(dict(list(weights.items())[number::2]), shard)
    assert "belongs to" in check(path, shards)[-1]
    with pytest.raises(Fault, match=r"lacks .*all parts"):
        check(path, shards[:1])
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in weights.items()}, shards[0])
    assert "not compared" in check(path, shards[:1])[-1]


def test_other_weights_are_refused(published, capsys):
    path, weights = published
    other = path.with_name("model.safetensors")
    torch.manual_seed(7)
    save_file(Net().state_dict(), other)
    assert main([str(path), str(other)]) == 1
    assert "does not belong to" in capsys.readouterr().err
    save_file({**weights, "last.weight": torch.zeros(40, 28)}, other)
    with pytest.raises(Fault, match=r"'last.weight' has shape \(40, 27\), and \(40, 28\)"):
        check(path, [other])
    save_file({name: torch.full_like(t, float("nan")) for name, t in weights.items()}, other)
    with pytest.raises(Fault, match="does not belong"):
        check(path, [other])


NAN, INF = float("nan"), float("inf")
ABSENT = object()
V, ROWS, COLUMNS = (f"second_moment{end}.last.weight" for end in ("", "_rows", "_columns"))


def _last(number):
    def change(tensor):
        changed = tensor.clone()
        changed.view(-1)[-1] = number
        return changed

    return change


# A compression, what is changed of the tensors, of the header or its settings, and what is told.
HEADERS = (
    ({"format": ABSENT}, "no format version"),
    ({"format": True}, "no format version"),
    ({"format": 3}, "format 3.*newer curvature.py"),
    ({"structure": "full"}, "'full'.*read it with bayesadam"),
    ({"parameters": ABSENT}, "list of names"),
    ({"parameters": ["scale", "scale"]}, "each once"),
    ({"parameters": ["scale"]}, "object of names"),
    ({"settings": ABSENT}, "settings must be an object"),
    ({"compress": "4bit"}, "'8bit' or 'factored'"),
    ({"compress": "8bit"}, "with compress '8bit' it cannot have"),
    ({"has_weights": "no"}, "has_weights"),
    ({"has_weights": True}, "mode is missing"),
    ({"steps": "many"}, "steps"),
    ({"beta2": 1.5}, "beta2"),
    ({"recorded": "yes"}, "recorded"),
    ({"tracked": ["yes"]}, "tracked must be a text"),
    ({"optimizer": "adamw"}, "optimizer must be a list"),
    ({"omitted": ["scale"]}, "omitted"),
    ({"format": 1}, "format 1 has weights"),
)
SETTINGS = (
    ({"n_data": None}, "n_data must be a positive"),
    ({"n_data": 10**400}, "n_data must be a positive"),
    ({"power": -1}, "power must be a positive"),
    ({"batch_size": [3]}, "batch_size"),
    ({"form": "posterior"}, "form must be"),
    ({"prior_precision": 1.0}, "object of names"),
    ({"prior_precision": {"scale": -1.0}}, "none negative"),
    ({"prior_precision": {}}, "prior precision is missing"),
)
TENSORS = (
    (None, {V: ABSENT}, "no second moment"),
    (None, {V: _last(NAN)}, "'last.weight': second_moment has entries that are not finite"),
    (None, {V: _last(INF)}, "not finite"),
    (None, {V: _last(-1e-9)}, "negative"),
    (None, {V: lambda t: t.to(torch.int32)}, "of type I32"),
    (None, {V: lambda t: t.half()}, "of type F16"),
    (None, {V: lambda t: t[:1, :5].clone()}, r"probe has shape \(16,\) and not \(5,\)"),
    (None, {ROWS: lambda _: torch.ones(40)}, "it cannot have"),
    (None, {"probe.last.weight": ABSENT}, "probe is missing"),
    (None, {"probe.last.weight": lambda t: t[:9].clone()}, r"probe has shape \(9,\)"),
    (None, {"left.last.weight": lambda _: torch.eye(40)}, "has no bases"),
    (None, {"second_moment.stray": lambda _: torch.ones(3)}, "'second_moment.stray'"),
    ("factored", {ROWS: ABSENT}, "it cannot have"),
    ("factored", {ROWS: _last(-1.0)}, "negative"),
    ("factored", {COLUMNS: _last(NAN)}, "not finite"),
    ("factored", dict.fromkeys((ROWS, COLUMNS), lambda t: torch.full_like(t, 1e38)), "product"),
)
DAMAGES = [(None, {}, header, {}, words) for header, words in HEADERS]
DAMAGES += [("factored", {}, {"compress": None}, {}, "with compress None it cannot have")]
DAMAGES += [(None, {}, {}, settings, words) for settings, words in SETTINGS]
DAMAGES += [(compress, tensors, {}, {}, words) for compress, tensors, words in TENSORS]


def changed(whole, changes):
    """Values replaced, or taken away."""
    merged = {**whole, **{k: c(whole.get(k)) if callable(c) else c for k, c in changes.items()}}
    return {key: value for key, value in merged.items() if value is not ABSENT}


@pytest.fixture(scope="module")
def in_order(adam, tmp_path_factory):
    """The tensors and the header of a published file in each compression."""
    model, optimizer = adam
    path = tmp_path_factory.mktemp("whole") / "p.safetensors"
    found = {}
    for compress in COMPRESSIONS:
        ba.Posterior.from_optimizer(model, optimizer, 64).save(path, weights=False, compress=compress)
        found[compress] = storage.read(path)
    return found


@pytest.mark.parametrize(("compress", "tensors", "header", "settings", "words"), DAMAGES)
def test_damages_are_told(compress, tensors, header, settings, words, in_order, tmp_path, capsys):
    path = tmp_path / "p.safetensors"
    storage.write(path, *in_order[compress])
    assert main([str(path)]) == 0
    tensors, header = (changed(*pair) for pair in zip(in_order[compress], (tensors, header), strict=True))
    if settings:
        header["settings"] = changed(header["settings"], settings)
    # `storage.write` would put a format where there is none.
    storage.write_tensors(path, tensors, tensors.__getitem__, lambda sums: {"bayesadam": json.dumps(header)})
    for refusing in (check, read):
        with pytest.raises(Fault, match=words):
            refusing(path)
    capsys.readouterr()
    assert main([str(path)]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.startswith(f"{path}: ")) == ("", True)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 100_000, '{"format": NaN}'])
def test_a_header_that_is_none_is_told(text, in_order, tmp_path):
    path = tmp_path / "p.safetensors"
    storage.write_tensors(path, in_order[None][0], in_order[None][0].__getitem__, lambda sums: {"bayesadam": text})
    with pytest.raises(Fault, match="header"):
        check(path)


def test_damaged_bases_are_told(rotated, tmp_path):
    model, optimizer = rotated
    path = tmp_path / "p.safetensors"
    ba.Posterior.from_optimizer(model, optimizer, 64, structure="kronecker").save(path)
    tensors, header = storage.read(path)
    side = tensors["right.last.weight"]
    for damaged, message in (
        (2 * side, "not orthonormal"),
        (torch.full_like(side, NAN), "not orthonormal"),
        (side[:9, :9].clone(), "has shape"),
    ):
        storage.write(path, {**tensors, "right.last.weight": damaged}, header)
        with pytest.raises(Fault, match=message):
            read(path)
    storage.write(path, {**tensors, "left.first.bias": torch.eye(3)}, header)
    with pytest.raises(Fault, match="left has shape"):
        check(path)


def test_other_files_are_refused(tmp_path, adam):
    model, optimizer = adam
    path = tmp_path / "x.safetensors"
    with pytest.raises(Fault, match="no such file"):
        check(path)
    with pytest.raises(Fault, match="no such file"):
        check(tmp_path)
    save_file(model.state_dict(), path)
    with pytest.raises(Fault, match="bayesadam export"):
        check(path)
    torch.save(optimizer.state_dict(), path)
    with pytest.raises(Fault, match="not a safetensors file"):
        check(path)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_a_truncated_or_scrambled_file_is_a_fault_and_never_a_traceback(compress, in_order, tmp_path):
    whole, path = tmp_path / "whole.safetensors", tmp_path / "p.safetensors"
    storage.write(whole, *in_order[compress])
    content = whole.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(Fault, match="truncated"):
            check(path)
    path.write_bytes(content + b"more")
    with pytest.raises(Fault, match="truncated"):
        check(path)
    random = np.random.default_rng(0)
    faults = 0
    for _ in range(300):
        changed = bytearray(content)
        for place in random.integers(0, 4000, 3):
            changed[place % len(changed)] = random.integers(256)
        path.write_bytes(changed)
        try:
            check(path)
            read(path)
        except Fault:
            faults += 1
    assert faults > 100


def test_a_file_that_claims_to_be_large_is_checked_in_the_memory_that_it_has(in_order, tmp_path):
    """A million rows and a million columns are eight megabytes on the disk."""
    tensors, header = in_order["factored"]
    path = tmp_path / "p.safetensors"
    storage.write(path, {**tensors, ROWS: torch.ones(1_000_000), COLUMNS: torch.ones(1_000_000)}, header)
    assert "1,000,000,0" in check(path)[1]
    save_file({name: torch.zeros(2) for name in header["parameters"]}, tmp_path / "model.safetensors")
    with pytest.raises(Fault, match="shape"):
        check(path, [tmp_path / "model.safetensors"])


def test_what_stands_behind_the_moment_is_told(in_order, tmp_path):
    tensors, header = in_order[None]
    path, then = tmp_path / "p.safetensors", {"parameters": 6, "gradients": [40, 40], "every": 1, "batch_size": None}
    for tracked in ("by 40 gradients", then):
        storage.write(path, tensors, {**header, "optimizer": ["muon"], "tracked": tracked})
        assert "from muon, tracked beside it, 40 gradients, β₂ = 0.97" in check(path)
    for beta, words in ((0.9, "v̂ is that of the last 10 gradients"), (0.999, "fewer gradients")):
        storage.write(path, tensors, {**header, "beta2": beta})
        assert any(f"take care: v̂ {words}" in line or words in line for line in check(path))
    # The file itself is not changed by what becomes of the arrays.
    found, _ = read(path)
    found["last.weight"][:] = 7
    assert not (load_file(path)[V] == 7).any()
