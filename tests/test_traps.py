"""Mistakes that would pass in silence: each as a user makes it, and beside it what is no mistake."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibration.leaked import balance
from bayesadam.errors import BayesAdamWarning, HeldOutWarning, InputRangeWarning, MatchError, SettingError
from bayesadam.inspecting import diagnose_checkpoint
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.posterior.inputs import InputRange, departure, inside, ranges_of
from cases import mlp, train
from floats import assert_close


def images(n: int, seed: int = 0) -> Tensor:
    """Pixels from 0 to 1, most of them 0, as of digits; three channels of 4 × 4."""
    x = torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (2 * x - 1).clamp(min=0)


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def calibrated(x: Any, model: nn.Module | None = None) -> ba.Posterior:
    torch.manual_seed(0)
    first = x if isinstance(x, Tensor) else next(iter(x.values())) if isinstance(x, dict) else x[0]
    y = torch.randint(3, (len(first),))
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(first[0].numel(), 3))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        found = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        nn.functional.cross_entropy(found, y).backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=60, likelihood="classification")
    return ba.calibrate(posterior, [(x, y)])


# --- inputs that left the range of the held-out ones ----------------------------------------------------------------

normalised = lambda x: (x - 0.13) / 0.31  # noqa: E731
MISTAKES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "pixels of 0 to 255": (
        lambda x: x,
        lambda x: 255 * x,
        r"between 0 and 2\d\d, the held-out ones between 0 and 1: scale",
    ),
    "divided twice": (lambda x: x, lambda x: x / 255, "between 0 and 0.0039"),
    "not normalised": (normalised, lambda x: x, "between 0 and 0.999, the held-out ones between -0.419 and 2.81"),
    "normalised twice": (normalised, lambda x: normalised(normalised(x)), "normalise them as in training"),
    "normalised by ½ twice": (lambda x: 2 * x - 1, lambda x: 2 * (2 * x - 1) - 1, "between -3 and 0.995"),
    "not brought to ±1": (lambda x: 2 * x - 1, lambda x: x, "the held-out ones between -1 and 0.999"),
    "NaN": (lambda x: x, lambda x: x.where(x < 0.5, torch.nan), "NaN or infinities in 8 of 8"),
    "channels last": (
        lambda x: x,
        lambda x: x.permute(0, 2, 3, 1),
        r"shape \(4, 4, 3\), the held-out ones \(3, 4, 4\)",
    ),
    "bytes": (lambda x: x, lambda x: (255 * x).to(torch.uint8), "uint8, the held-out ones float32: convert"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("size", [1, 8])
def test_a_batch_that_left_the_range_is_told_with_the_remedy(name, size):
    usual, mistake, words = MISTAKES[name]
    ranges = ranges_of([usual(images(50)), usual(images(30, 1))])
    difference = departure(ranges, mistake(images(8, 2)[:size]))
    assert difference is not None
    assert size == 1 or re.search(words, difference), difference
    assert not inside(ranges, mistake(images(8, 2))).any()


@pytest.mark.parametrize(
    "usual",
    [
        lambda n, seed: images(n, seed),
        lambda n, seed: normalised(images(n, seed)) + 0.3 * torch.randn(n, 3, 4, 4),
        rows,
        lambda n, seed: rows(n, seed)[:, :1],
        lambda n, seed: rows(n, seed) > 0,
        lambda n, seed: (rows(n, seed) > 0).float(),
        lambda n, seed: (1000 * rows(n, seed)).long(),
        lambda n, seed: {"a": rows(n, seed), "b": (images(n, seed), rows(n, seed).half())},
    ],
)
def test_ordinary_batches_are_in_range(usual):
    ranges = ranges_of([usual(100, 0)])
    for seed in range(1, 40):
        assert departure(ranges, usual(1 + seed % 5, seed)) is None


def test_the_bounds_of_an_example_by_hand():
    # Least values 0 and 1, greatest 4 and 10: the widths are 4 and 9 of a range of 10.
    (known,) = ranges_of([torch.tensor([[0.0, 4.0, 0.5], [1.0, 10.0, 2.0]]).repeat(10, 1)])
    assert known == InputRange("", "float32", (3,), 0.0, 10.0, 1.0, 4.0, 4.0)
    low = torch.tensor([-7.4, -7.6, 0.0, 0.0, 3.4, 3.6, 0.0, 0.0, 2.0])
    high = torch.tensor([5.0, 5.0, 17.4, 17.6, 9.0, 9.0, 1.6, 1.4, 2.9])
    assert known.holds(low, high).tolist() == [True, False, True, False, True, False, True, False, False]


def test_what_varied_or_was_not_finite_is_not_compared():
    ranges = ranges_of(
        [{"x": rows(20), "z": torch.full((20, 2), torch.nan)}, {"x": rows(5)[:, :4], "z": rows(5)[:, :2]}]
    )
    assert [(each.name, each.shape, each.bounded) for each in ranges] == [("x", (None,), True), ("z", (2,), False)]
    assert departure(ranges, {"x": rows(3, 1)[:, :2], "z": 1e9 * rows(3)[:, :2]}) is None
    assert departure(ranges_of([rows(19)]), 100 * rows(3)) is None
    # A line that is drawn beyond the data is meant to be.
    ranges = ranges_of([torch.linspace(0, 1, 50)[:, None]])
    assert departure(ranges, torch.linspace(-3, 4, 50)[:, None]) is None
    assert departure(ranges, torch.linspace(0, 255, 50)[:, None]) is not None
    # A token never seen, a longer text and a mask without padding are nothing unusual.
    texts = ranges_of([{"input_ids": torch.randint(50, (30, 12)), "attention_mask": torch.ones(30, 12).tril()}])
    assert departure(texts, {"input_ids": torch.full((1, 30), 900), "attention_mask": torch.ones(1, 30)}) is None


@pytest.mark.parametrize("form", [lambda ids, mask: (ids, mask), lambda ids, mask: {"input_ids": ids, "mask": mask}])
def test_texts_without_the_mask_that_they_were_calibrated_with_are_told(form: Callable[..., Any]) -> None:
    ids, mask = torch.randint(9, (30, 5)), torch.ones(30, 5, dtype=torch.int64)
    ranges = ranges_of([{"input_ids": ids, "attention_mask": mask}])
    assert departure(ranges, {"attention_mask": mask, "input_ids": ids}) is None
    told = departure(ranges, form(ids, mask))
    assert told is not None
    assert told.startswith("pass mappings with 'attention_mask' to calibrate and to predict")
    assert departure(ranges_of([form(ids, mask)]), form(ids, mask)) is None


def test_predict_warns_once_and_of_a_mixture_too(tmp_path):
    posterior, x = calibrated(images(60)), images(9, 1)
    posterior.predict(x)
    with pytest.warns(InputRangeWarning, match="scale and normalise them as in training") as told:
        posterior.predict(255 * x)
    assert told[0].filename == __file__
    with pytest.warns(InputRangeWarning) as told:
        assert len(list(posterior.predict([(255 * x, torch.zeros(9))] * 3))) == 3
    assert len(told) == 1
    with pytest.warns(InputRangeWarning):
        ba.Mixture([posterior, posterior]).predict(255 * x)
    posterior.save(tmp_path / "posterior.safetensors")
    again = ba.Posterior.load(tmp_path / "posterior.safetensors", posterior.model)
    assert again.calibration.inputs == posterior.calibration.inputs
    with pytest.warns(InputRangeWarning):
        again.predict(255 * x)
    header = {key: value for key, value in posterior.calibration.header().items() if key != "inputs"}
    assert type(posterior.calibration).of(header, {}).inputs == ()


def test_a_deployed_network_says_which_examples_are_in_range(tmp_path):
    posterior, x = calibrated(images(60)), images(4, 1)
    mixed = torch.cat([x[:2], 255 * x[2:]])
    served = ba.deploy(posterior)
    with torch.no_grad():
        assert served(mixed).in_range.tolist() == [True, True, False, False]
    served.save(tmp_path / "served.pt2")
    program = torch.export.load(tmp_path / "served.pt2").module()
    assert program(mixed)["in_range"].tolist() == [True, True, False, False]
    assert_close(program(x)["probs"], posterior.predict(x).probs)


def test_an_example_is_made_where_shapes_are_known(tmp_path):
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 4), nn.Linear(5, 3)

        def forward(self, tokens: Tensor, size: Tensor) -> Tensor:
            return self.head(torch.cat([self.table(tokens).mean(dim=1), size], dim=1))

    batch = {"tokens": torch.randint(20, (60, 7)), "size": rows(60)[:, :1]}
    served = ba.deploy(calibrated(batch, Pooled()))
    served.save(tmp_path / "served.pt2")
    program = torch.export.load(tmp_path / "served.pt2").module()
    assert_close(program(batch)["probs"], served(batch).probs)
    served.ranges = ()
    with pytest.raises(SettingError, match="pass an example"):
        served.save(tmp_path / "other.pt2")


# --- training data instead of held-out ones ---------------------------------------------------------------------------


def overfitted(likelihood: str) -> tuple[ba.Posterior, Any, Any]:
    """A network trained to rest on 120 examples, with those and 120 others; labels are noisy."""
    torch.manual_seed(0)
    x = torch.randn(240, 4)
    y = (x[:, 0] + 0.7 * torch.randn(240) > 0).long() + (x[:, 1] > 0.5).long()
    y = y if likelihood == "classification" else y[:, None] + 0.3 * torch.randn(240, 1)
    model, record = mlp(4, 16, 3 if likelihood == "classification" else 1), likelihood_of(likelihood)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 800)
    for _ in range(800):
        optimizer.zero_grad()
        record.loss(model(x[:120])[None], y[:120][None]).sum().backward()
        optimizer.step()
        schedule.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=120, likelihood=likelihood)
    return posterior, (x[:120], y[:120]), (x[120:], y[120:])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_calibrating_on_the_training_data_is_told(likelihood):
    posterior, seen, held_out = overfitted(likelihood)
    with pytest.warns(HeldOutWarning, match="look like the training data.*120 examples, as many as n_data"):
        ba.calibrate(posterior, seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeldOutWarning)
        ba.calibrate(posterior, held_out)


def test_data_that_were_not_trained_on_have_uniform_probabilities():
    # Slopes of mean 0 that do not know the inputs: P(χ² ≤ s) is uniform, so that one in 10⁴ would warn.
    record, generator = likelihood_of("regression"), torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        y, a = torch.randn(200, 3, generator=generator), torch.randn(200, 10, generator=generator)
        found.append(balance(record, torch.zeros(200, 3), y, a))
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    assert_close(torch.quantile(torch.tensor(found), levels), levels, rtol=0, atol=0.08)
    # Least squares leaves nothing of the slopes' sum.
    a = torch.cat([a, torch.ones(200, 1)], dim=1)
    assert balance(record, a @ torch.linalg.lstsq(a, y).solution, y, a[:, :-1]) < 1e-12




# --- weights of one epoch with the state of another -------------------------------------------------------------------


def saved(folder: Path, steps: int = 30) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(3, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    train(model, optimizer, steps=steps)
    folder.mkdir(parents=True, exist_ok=True)
    return model, optimizer


NAMES = {
    "epochs in names": ("model_epoch_12.pt", "optimizer_epoch_11.pt", "epoch 12, .* epoch 11"),
    "numbers alone": ("model_12.pt", "optimizer_11.pt", "model_12.pt and optimizer_11.pt are not of one save"),
    "folders": ("checkpoint-20/model.pt", "checkpoint-10/optimizer.pt", "checkpoint 20, .* checkpoint 10"),
}
TOGETHER = {
    "same epoch": ("model_epoch_12.pt", "optimizer_epoch_12.pt"),
    "a number of the architecture": ("resnet50_epoch_3.pt", "optimizer_epoch_3.pt"),
    "other names": ("model_v2.pt", "optimizer_1000.pt"),
}


def read(path: Path, optimizer_path: Path | None, model: nn.Module) -> ba.Posterior:
    return ba.Posterior.from_checkpoint(path, model, 100, optimizer_path=optimizer_path)


@pytest.mark.parametrize("name", [*NAMES, *TOGETHER])
def test_two_files_by_their_names(name, tmp_path):
    one, other, *words = {**NAMES, **TOGETHER}[name]
    model, optimizer = saved(tmp_path)
    for file, content in ((one, model.state_dict()), (other, optimizer.state_dict())):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        torch.save(content, tmp_path / file)
    paths = tmp_path / one, tmp_path / other
    if not words:
        read(*paths, model)
        assert "other-epoch" not in diagnose_checkpoint(paths[0], optimizer_path=paths[1]).codes()
        return
    with pytest.warns(BayesAdamWarning, match=f"another moment of training.*{words[0]}.*pass the state"):
        read(*paths, model)
    with pytest.warns(BayesAdamWarning, match="another moment"):
        ba.GaussianWeights.open(paths[0], 100, optimizer_path=paths[1])
    assert "other-epoch" in diagnose_checkpoint(paths[0], optimizer_path=paths[1]).codes()


@pytest.mark.parametrize("epoch", [3, 4])
def test_two_files_by_what_they_say(epoch, tmp_path):
    model, optimizer = saved(tmp_path)
    torch.save({"model": model.state_dict(), "epoch": 4}, tmp_path / "best.pt")
    torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, tmp_path / "last.pt")
    if epoch == 4:
        read(tmp_path / "best.pt", tmp_path / "last.pt", model)
        return
    with pytest.warns(BayesAdamWarning, match="best.pt says epoch 4, .*last.pt epoch 3"):
        read(tmp_path / "best.pt", tmp_path / "last.pt", model)


@pytest.mark.parametrize(("counted", "apart"), [(30, False), (45, False), (60, True), (20, True)])
def test_the_folder_of_a_trainer_by_its_steps(counted, apart, tmp_path):
    model, optimizer = saved(tmp_path)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": counted, "epoch": 1.0}))
    if not apart:
        read(tmp_path, None, model)
        return
    with pytest.warns(BayesAdamWarning, match=f"counts {counted} steps, the optimiser 30"):
        read(tmp_path, None, model)
    assert "other-epoch" in diagnose_checkpoint(tmp_path).codes()


# --- what counts examples, and what comes first ---------------------------------------------------------------------


def stepped(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer, x, y = torch.optim.Adam(model.parameters()), rows(8), torch.randint(3, (8,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def test_the_number_of_batches_for_that_of_examples_is_told(tmp_path):
    model, optimizer = stepped(3 * 117)
    file = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    told = r"^give n_data= the number of training examples.* the 351 steps .* 3 times 117$"
    with pytest.warns(BayesAdamWarning, match=told):
        ba.Posterior.from_optimizer(model, optimizer, n_data=117, likelihood="classification")
    with pytest.warns(BayesAdamWarning, match=told):
        ba.Posterior.from_optimizer(model, optimizer, n_data=117, batch_size=8, likelihood="classification")
    with pytest.warns(BayesAdamWarning, match=told):
        ba.GaussianWeights.open(file, n_data=117)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n, batch_size in ((936, None), (118, None), (117, 1), (13, None)):
            ba.Posterior.from_optimizer(model, optimizer, n, batch_size=batch_size, likelihood="classification")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_targets_before_inputs_are_told(likelihood):
    model, optimizer = stepped(5)
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=64, likelihood=likelihood)
    x, y = rows(64), torch.randint(3, (64,)) if likelihood == "classification" else rows(64)[:, :3]
    for held_out in ((y, x), [(y[:32], x[:32]), (y[32:], x[32:])]):
        with pytest.raises(MatchError, match=r"^pass \(inputs, targets\), not \(targets, inputs\)"):
            ba.calibrate(posterior, held_out)
    # What neither of the pair explains is the network's own to say.
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ba.calibrate(posterior, (x[:, :4], y))


def test_batch_norms_that_were_trained_on_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer, x, y = torch.optim.Adam(model.parameters(), lr=0.01), rows(60), torch.arange(60) % 3

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(x), y).backward()
        optimizer.step()
        model.eval()

    step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 60, likelihood="classification")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.predict(x)
    step()
    with pytest.warns(BayesAdamWarning, match="^read the posterior again, .* '1.running_mean'"):
        posterior.predict(x)
