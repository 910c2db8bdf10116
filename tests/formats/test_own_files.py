"""Damaged files of the library itself, a few of each kind."""

import json
from pathlib import Path
from typing import Any

import pytest

import bayesadam as ba
from bayesadam._schema import Count, NotNegative, PosteriorHeader, Share, typed
from bayesadam._storage import POSTERIOR, read, write
from bayesadam.errors import FileError
from cases import mlp, trained
from formats.own_files import joined, outcomes, parts, unsealed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_damage_is_refused_or_does_no_harm(seed: int, tmp_path: Path) -> None:
    there = list(outcomes(tmp_path, seed, range(2200)))
    assert [outcome for outcome in there if outcome.what not in ("loaded", "refused")] == []
    assert len({outcome.name for outcome in there if outcome.what == "refused"}) > 16
    assert {outcome.what for outcome in there} == {"loaded", "refused"}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("own") / "q.safetensors"
    ba.Posterior.from_optimizer(*trained(seed=1), 321, prior_precision=1.5).save(path)
    return path.read_bytes()


def test_no_bit_can_be_flipped(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(content)
    whole = ba.GaussianWeights.open(path).mean
    for place in range(0, len(content), 7):
        path.unlink()
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            opened = ba.GaussianWeights.open(path)
            mean, _ = opened.mean, opened.variance
        except FileError:
            continue
        assert all(mean[name].equal(theta) for name, theta in whole.items())


def test_a_tensor_is_compared_with_its_sum_when_it_is_used(content: bytes, tmp_path: Path) -> None:
    path, header = tmp_path / "q.safetensors", parts(content)[0]
    start = header["second_moment.2.weight"]["data_offsets"][0] - len(parts(content)[1])
    path.write_bytes(content[:start] + bytes(4) + content[len(content) + start + 4 :])
    opened = ba.GaussianWeights.open(path)
    assert opened.part("0.weight").variance["0.weight"].shape == (5, 3)
    with pytest.raises(FileError, match=r"damaged: 'second_moment\.2\.weight' is not what was written"):
        _ = opened.variance
    with pytest.raises(FileError, match="is not what was written"):
        ba.Posterior.load(path, mlp(3, 5, 2))


def test_a_changed_header_is_told_from_one_of_a_release_without_sums(content: bytes, tmp_path: Path) -> None:
    path, (header, data) = tmp_path / "q.safetensors", parts(content)
    about = header["__metadata__"]
    header["__metadata__"] = about | {"bayesadam": about["bayesadam"].replace('"n_data": 321', '"n_data": 322')}
    path.write_bytes(joined(header, data))
    with pytest.raises(FileError, match="its header is not what was written"):
        ba.GaussianWeights.open(path)
    path.write_bytes(unsealed(joined(header, data)))
    assert ba.GaussianWeights.open(path).n_data == 322


def test_what_is_written_again_has_sums_of_its_own(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(content)
    write(tmp_path / "again", *read(path))
    assert json.loads(parts((tmp_path / "again").read_bytes())[0]["__metadata__"]["bayesadam"])["sums"]
    assert (tmp_path / "again").read_bytes() == content


@pytest.mark.parametrize(
    ("value", "kind", "match"),
    [
        (True, int, "must be int, got True"),
        (1.5, Count, "must be int"),
        (0, Count, "must be at least 1"),
        (float("nan"), float, "must be float, got nan"),
        (10**400, float, "must be float"),
        (1.0, Share, "between 0 and 1"),
        (-1, NotNegative | None, "at least 0, got -1"),
        ([1, "x"], tuple[int, int], "must be int, got 'x'"),
        ([1], tuple[int, int], r"must be tuple\[int, int\], got \[1\]"),
        ({"settings": {"power": -1}}, PosteriorHeader, "'power' of 'settings' of the header must be positive"),
        ({"settings": {"form": "mop"}}, PosteriorHeader, r"Literal\['map', 'likelihood'\], got 'mop'"),
        ({"members": [{"parameters": 5}]}, PosteriorHeader, r"'parameters' of 'members' of the header must be list"),
    ],
)
def test_values_of_other_types(value: object, kind: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        typed(value, kind)


def test_values_of_the_types() -> None:
    assert typed({"steps": [3], "other": 1}, POSTERIOR.schema) == {"steps": [3], "other": 1}
    assert typed({"inputs": {"a": [None, True]}}, POSTERIOR.schema) == {"inputs": {"a": (None, True)}}
    assert typed([1, 2], tuple[int, ...]) == (1, 2)
