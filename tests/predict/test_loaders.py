"""`predict`, `novelty` and `epistemic` of loaders and arrays, against the same call on a tensor of all examples."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam import _progress
from bayesadam._progress import Bar, progress
from bayesadam.errors import MatchError, SettingError
from cases import mlp
from floats import approx, assert_close

N = 7


def posterior(seed: int = 0, dtype: torch.dtype = torch.float32) -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(3, 5, 2).to(dtype)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    variance = {name: 0.01 + 0.1 * torch.rand_like(p) for name, p in mean.items()}
    return ba.Posterior.from_moments(model, mean, variance, 10)


def distribution(kind: str, familiar: Any = None) -> Any:
    members = [posterior(0), posterior(1)]
    if familiar is not None:
        members = [member.relative_to(familiar) for member in members]
    return members[0] if kind == "posterior" else ba.Mixture(members)


X = torch.randn(N, 3, generator=torch.Generator().manual_seed(2))
Y = torch.arange(N) % 2
Named = namedtuple("Named", ["label", "inputs"])
CUTS = (slice(0, 3), slice(3, 6), slice(6, N))
LOADERS: dict[str, Any] = {
    "DataLoader of pairs": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "DataLoader of inputs": lambda: DataLoader(TensorDataset(X), batch_size=3),
    "list of a loader's batches": lambda: list(DataLoader(TensorDataset(X, Y), batch_size=3)),
    "generator of tensors": lambda: (X[cut] for cut in CUTS),
    "generator of arrays": lambda: (X[cut].double().numpy() for cut in CUTS),
    "mappings with labels": lambda: [{"input": X[cut], "labels": Y[cut]} for cut in CUTS],
    "mappings without labels": lambda: iter([{"input": X[cut]} for cut in CUTS]),
    "named tuples, targets first": lambda: [Named(Y[cut], X[cut]) for cut in CUTS],
    "pairs of arrays": lambda: [(X[cut].numpy(), Y[cut].numpy()) for cut in CUTS],
}


@pytest.mark.parametrize("kind", ["posterior", "mixture"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_a_predictive_for_every_batch(name, kind):
    # Without familiar inputs novelty is relative to the batch.
    q = distribution(kind, familiar=[X])
    whole = q.predict(X, likelihood="classification")
    found = list(q.predict(LOADERS[name](), likelihood="classification"))
    assert [len(p.mean) for p in found] == [3, 3, 1]
    assert {type(p) for p in found} == {type(whole)}
    for part in ("mean", "variance", "probs", "novelty"):
        joined = torch.cat([getattr(p, part) for p in found])
        assert_close(joined, getattr(whole, part), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["posterior", "mixture"])
def test_scores_of_a_loader_are_those_of_all_its_examples(kind):
    q, loader = distribution(kind), LOADERS["DataLoader of pairs"]()
    assert_close(
        q.novelty(loader, likelihood="classification"), q.novelty(X, likelihood="classification"), rtol=1e-5, atol=1e-6
    )
    # Two probes of signs: another batch has others, so the exact score is the reference.
    exact = q.predict(X, likelihood="classification", covariance=True).epistemic
    found = q.epistemic(loader, likelihood="classification", probes=4000, generator=torch.Generator().manual_seed(0))
    assert found.error.shape == (N,)
    assert bool(((found.value - exact).abs() < 5 * found.error + 1e-6).all())
    with pytest.raises(MatchError, match="the loader gave no batch"):
        q.novelty(iter([]), likelihood="classification")


def test_batches_are_predicted_as_they_are_asked_for_and_options_at_once():
    seen: list[int] = []

    def loader() -> Any:
        for number, cut in enumerate(CUTS):
            seen.append(number)
            yield X[cut]

    with pytest.raises(SettingError, match="likelihood must be one of"):
        posterior().predict(loader(), likelihood="classes")
    found = posterior().predict(loader(), likelihood="regression")
    assert seen == []
    next(found)
    assert seen == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_arrays_take_the_models_type(dtype):
    q = posterior(dtype=dtype)
    for array in (
        X.double().numpy(),
        X.numpy(),
        X.double().numpy()[::-1].copy()[::-1],
        X.double().numpy().astype(">f8"),
    ):
        found = q.predict(array, likelihood="regression")
        assert torch.equal(found.mean, q.predict(X.to(dtype), likelihood="regression").mean)
    read_only = X.numpy().copy()
    read_only.flags.writeable = False
    assert torch.equal(
        q.predict(read_only, likelihood="regression").mean, q.predict(X.to(dtype), likelihood="regression").mean
    )
    assert torch.equal(
        q.novelty(X.numpy(), likelihood="classification"), q.novelty(X.to(dtype), likelihood="classification")
    )


def test_tables_and_functions_take_arrays_too():
    q = posterior()
    frames = pytest.importorskip("pandas")
    assert torch.equal(
        q.predict(frames.DataFrame(X.numpy()), likelihood="regression").mean, q.predict(X, likelihood="regression").mean
    )
    assert torch.equal(
        q.predict(X.double().numpy(), likelihood="regression").mean, q.predict(X, likelihood="regression").mean
    )


def test_integers_stay_integers():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    mean = {name: p.detach() for name, p in model.named_parameters()}
    q = ba.Posterior.from_moments(model, mean, {name: torch.ones_like(p) for name, p in mean.items()}, 10)
    tokens = torch.randint(5, (4, 2))
    for dtype in (np.int64, np.int32, np.uint16):
        assert torch.equal(
            q.predict(tokens.numpy().astype(dtype), likelihood="regression").mean,
            q.predict(tokens, likelihood="regression").mean,
        )


@pytest.mark.parametrize(("given", "message"), [
    (np.array([["a"]]), "holds no numbers"),
    (iter(["a"]), r"no tensor with a batch dimension in the inputs \(str\)"),
])  # fmt: skip
def test_what_is_no_batch_is_refused(given, message):
    with pytest.raises(MatchError, match=message):
        next(iter(posterior().predict(given, likelihood="regression")))


def test_lists_and_tuples_of_tensors_are_still_arguments():
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a - b)

    model = Two()
    mean = {name: p.detach() for name, p in model.named_parameters()}
    q = ba.Posterior.from_moments(model, mean, {name: torch.ones_like(p) for name, p in mean.items()}, 10)
    for inputs in ((X, 2 * X), [X, 2 * X], (X.numpy(), 2 * X.numpy())):
        assert_close(q.predict(inputs, likelihood="regression").mean, model(X, 2 * X).detach())


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_calibration_takes_arrays(likelihood):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))
    y = torch.stack([x[:, 0], x[:, 1]], dim=1) if likelihood == "regression" else (x[:, 0] > 0).long()
    q = posterior()
    arrays = x.double().numpy(), y.numpy().astype(np.float64 if likelihood == "regression" else np.int32)
    pairs = [ba.calibrate(q, data, likelihood=likelihood) for data in (arrays, [arrays], (x, y))]
    assert pairs[0].scale == pairs[1].scale == approx(pairs[2].scale, rel=1e-5)
    assert pairs[0].temperature == pairs[1].temperature == approx(pairs[2].temperature, rel=1e-5)


# --- progress -------------------------------------------------------------------------------------------------------


class Terminal:
    """A standard error that says it is a terminal, and keeps what is written."""

    encoding = "utf-8"

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("patience", "is_terminal", "is_shown"), [(0.0, True, True), (60.0, True, False), (0.0, False, False)])  # fmt: skip
def test_a_bar_is_drawn_on_a_terminal_once_the_work_is_long(patience, is_terminal, is_shown, monkeypatch):
    stderr = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "PATIENCE", patience)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert ("counting" in stderr.text) == is_shown
    assert Bar._drawing is None


def test_a_bar_inside_another_only_counts(monkeypatch):
    stderr = Terminal(True)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "PATIENCE", 0.0)
    with Bar("outer") as outer:
        outer.step()
        assert list(progress([1, 2], "inner")) == [1, 2]
    assert "outer" in stderr.text
    assert "inner" not in stderr.text
    assert Bar._drawing is None
