"""Posteriors over several processes: the same draws and densities as over one, and each its part alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesadam as ba
from bayesadam.weights.networks import copy_into
from floats import assert_close
from ranks import found_by_ranks
from weights.distributed_worker import (
    N_DATA,
    NETWORKS,
    SETTINGS,
    Checks,
    fresh,
    inputs,
    priors,
    seeded,
    statistics,
    train,
)

# Every test looks at what two processes did together.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CHECKS = [name for name in vars(Checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def plain() -> dict[str, ba.Posterior]:
    """The posteriors that one process without any distribution has."""
    models = {network: fresh(network) for network in NETWORKS}
    return {
        network: ba.Posterior.from_optimizer(model, train(model), N_DATA, **SETTINGS).replace(form="likelihood")
        for network, model in models.items()
    }


@pytest.fixture(scope="module")
def folder(plain: dict[str, ba.Posterior], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes are given, and where they leave what they find."""
    folder = tmp_path_factory.mktemp("distributed")
    for network in NETWORKS:
        model = fresh(network)
        optimizer = train(model)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{network}.pt")
    plain["linear"].save(folder / "plain.safetensors")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By the number of processes; one loads what two have saved."""
    return {world: found_by_ranks(HERE / "distributed_worker.py", world, folder) for world in (2, 1)}


@pytest.fixture
def found(results: dict[int, list[dict[str, Any]]], request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """What the first of two processes, and a single one, found in a check."""
    return tuple(results[world][0][f"check_{request.param}"]["found"] for world in (2, 1))


def same(ours: Any, truth: Any, *, exactly: bool = True) -> None:
    """Compare nested dicts and lists of tensors, and tell where they differ."""
    if isinstance(truth, Tensor):
        tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 2e-5, "atol": 1e-6}
        assert_close(ours, truth, **tolerance)
        return
    assert len(ours) == len(truth)
    for key in truth if isinstance(truth, dict) else range(len(truth)):
        # Sums over many weights depend on their order, but for rounding.
        same(ours[key], truth[key], exactly=exactly and key != "log_prob")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_hold_in_every_process(results, name, world):
    for result in results[world]:
        assert "error" not in result[name], result[name]["error"]


@pytest.mark.parametrize("found", ["statistics", "gathered"], indirect=True)
def test_one_or_more_processes_draw_and_score_the_same(found, plain):
    expected = statistics(plain["linear"])
    for ours in found:
        same(ours, expected)


@pytest.mark.parametrize("found", ["tensor_priors"], indirect=True)
def test_a_prior_by_weight_is_spread_with_the_weights(found, plain):
    expected = statistics(plain["linear"].replace(prior_precision=priors()))
    for ours in found:
        same(ours, expected)


@pytest.mark.parametrize("found", ["sampled"], indirect=True)
def test_a_forward_inside_sampled_uses_the_draw(found, plain):
    posterior = plain["linear"]
    with torch.no_grad(), posterior.sampled(generator=seeded()) as model:
        drawn = model(inputs())
    other = posterior.gathered(fresh("linear"))
    copy_into(other.model, other.mean)
    for ours in found:
        same(ours, {"drawn": drawn, "at_mean": other.model(inputs()).detach()}, exactly=False)
    assert (drawn - other.model(inputs())).abs().max() > 1e-3


@pytest.mark.parametrize("found", ["training"], indirect=True)
def test_training_as_shards_gives_the_posterior_of_plain_training(found, plain):
    expected = statistics(plain["linear"])
    for ours in found:
        same(ours, {key: expected[key] for key in ours}, exactly=False)


# --- on disk --------------------------------------------------------------------------------------------------------


def saved_posterior(plain: dict[str, ba.Posterior]) -> ba.Posterior:
    """What the processes save."""
    return plain["linear"].replace(prior_precision=priors() | {"0.bias": 0.5}, scale=0.25, noise_variance=0.1)


@pytest.mark.parametrize("found", ["saving"], indirect=True)
def test_a_round_trip_is_exact(found, plain):
    for ours in found:
        same(ours, statistics(saved_posterior(plain)))


@pytest.mark.parametrize("found", ["loading"], indirect=True)
def test_other_numbers_of_processes_load_it(found, plain):
    two, (from_file, from_two, from_two_to_plain) = found
    for ours in (*two, from_file):
        same(ours, statistics(plain["linear"]))
    for ours in (from_two, from_two_to_plain):
        same(ours, statistics(saved_posterior(plain)))
