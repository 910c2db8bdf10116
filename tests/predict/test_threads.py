"""Several threads on one model, and on several: the numbers of one thread alone, and a model left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.predict import linearised
from cases import mlp, state_of, trained
from floats import assert_close
from predict.cases_networks import METHODS, Then, encoder, posterior_over
from processes import PATIENCE


@pytest.fixture
def posterior() -> ba.Posterior:
    model, optimizer = trained(10, 20, 2)
    return ba.Posterior.from_optimizer(model, optimizer, 400, prior_precision=50.0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(50, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """The flags of the whole process are as before after every test."""

    cuda = torch.backends.cuda
    flags = torch.backends.mha.get_fastpath_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled
    before = [read() for read in (*flags, cuda.math_sdp_enabled)]
    yield
    assert [read() for read in (*flags, cuda.math_sdp_enabled)] == before


def at_once(work: Callable[[int], Any], times: int, threads: int = 4) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(times)))


@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_one_model_from_several_threads(posterior, x, method: str):
    def outcome(_: int) -> Tensor:
        found = METHODS[method](posterior, x)
        return torch.stack([found.mean, found.variance])

    posterior.model.train()
    posterior.model[1].eval()
    expected, before = outcome(0), state_of(posterior.model)
    assert all(torch.equal(found, expected) for found in at_once(outcome, 40))
    assert state_of(posterior.model) == before


def test_a_changed_posterior_does_not_look_into_the_model(posterior, monkeypatch):
    """Another thread may have other tensors in it."""
    monkeypatch.setattr("bayesadam.weights.posterior.padding_rows", lambda model: pytest.fail("it was looked into"))
    changed = posterior.replace(scale=2.0).to(dtype=torch.float64)
    assert changed.padding == posterior.padding == {}
    changed.sample()


@pytest.fixture(scope="module")
def fifty() -> list[ba.Posterior]:
    """Posteriors of fifty models, some of which change settings of the process that several of them share."""
    posteriors = []
    others = {
        **dict.fromkeys((10, 11, 12), lambda: encoder(1, batch_first=True)),
        20: lambda: Then(nn.LSTM(4, 3, batch_first=True), lambda z: z[0]),
        30: lambda: torch.compile(mlp(4, 3, 2), backend="eager"),
    }
    for seed in range(50):
        torch.manual_seed(seed)
        posteriors.append(posterior_over(others.get(seed, lambda: mlp(4, 3, 2))()))
    return posteriors


@pytest.mark.parametrize("method", METHODS)
def test_fifty_threads_on_models_of_their_own_predict_at_the_same_time(method: str, fifty: list[ba.Posterior]):
    """Each waits within its model until all fifty are there; the answers are those of one thread alone."""
    x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    expected = [METHODS[method](q, x) for q in fifty]
    everyone, arrived = threading.Barrier(50, timeout=PATIENCE), threading.local()

    def meet(model: nn.Module, batch: Tensor) -> Tensor:
        if not hasattr(arrived, "place"):
            arrived.place = everyone.wait()
        return model(batch)

    together = at_once(lambda n: METHODS[method](fifty[n], x, forward=meet), 50, threads=50)
    for f, alone in zip(together, expected, strict=True):
        assert_close(f.mean, alone.mean)
        assert_close(f.variance, alone.variance)


def test_inside_sampled_the_same_thread_may_predict_and_sample(posterior, x):
    variance = linearised(posterior, x).variance
    with posterior.sampled() as model:
        drawn = model[0].weight.detach().clone()
        assert torch.equal(linearised(posterior, x).variance, variance)
        with posterior.sampled():
            linearised(posterior, x)
        assert torch.equal(model[0].weight, drawn)
    assert torch.equal(posterior.model[0].weight, posterior.mode["0.weight"])


def test_another_thread_waits_while_a_draw_is_in_the_model_and_no_longer(posterior, x):
    variance, done = linearised(posterior, x).variance, threading.Event()
    found: list[Tensor] = []

    def ask() -> None:
        found.append(linearised(posterior, x).variance)
        done.set()

    other = posterior.replace(prior_precision=1.0)
    with other.sampled():
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        # Draws do not need the model.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(posterior.sample).result(PATIENCE)
        assert not done.wait(0.2)
    assert done.wait(PATIENCE)
    assert torch.equal(found[0], variance)
