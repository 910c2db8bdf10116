"""Segmentation, whose outputs have the classes in the second dimension, and several labels to an example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from bayesadam.likelihoods.abstention import Abstention, label_abstention
from bayesadam.predict.leverage import chosen
from calibrated.cases_calibrated import seeded, trained
from floats import approx, assert_close

SIZE = 7


def scenes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images (n, 3, 7, 6) of one square, and the class of every pixel; whole images are easy or hard."""
    generator = seeded(seed)
    y = torch.zeros(n, SIZE, SIZE - 1, dtype=torch.long)
    y[:, 2:5, 1:4] = torch.randint(1, 3, (n, 1, 1), generator=generator)
    noise = torch.randn(n, 3, SIZE, SIZE - 1, generator=generator) * torch.rand(n, 1, 1, 1, generator=generator)
    return nn.functional.one_hot(y, 3).movedim(-1, 1) + noise, y


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Conv2d(3, 3, 1))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(2 * torch.eye(3)[:, :, None, None])
    return model


def test_classes_in_the_second_dimension_are_the_same_as_in_the_last(tmp_path):
    model, (x, y) = segmenter(), scenes(60, 0)
    net = ba.calibrate(model, (x, y), likelihood="classification")
    moved = ba.calibrate(model, (x, y), likelihood="classification", forward=lambda m, x: m(x).movedim(1, -1))
    p, other = net(x), moved(x)
    assert p.probs.shape == (60, SIZE, SIZE - 1, 3)
    assert torch.equal(p.probs, other.probs)
    assert torch.equal(p.set(0.9), other.set(0.9))
    assert (p.novelty.shape, p.p_value.shape) == ((60,), (60,))
    assert p.distribution.entropy().shape == (60, SIZE, SIZE - 1)
    net.save(tmp_path / "net.safetensors")
    assert torch.equal(ba.load(tmp_path / "net.safetensors", model)(x).probs, p.probs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_pixels_to_ignore(dtype):
    model, (x, y) = segmenter(), scenes(120, 0)
    left_out = torch.rand(y.shape, generator=seeded(1)) < 0.3
    by_default = ba.calibrate(model, (x, y.masked_fill(left_out, -100)), likelihood="classification")
    masks = (x, y.masked_fill(left_out, 255).to(dtype))
    net = ba.calibrate(model, masks, likelihood="classification", ignore_index=255)
    assert net.report == by_default.report
    assert torch.equal(net.scores, by_default.scores)
    # Of an image without a pixel that counts nothing is scored.
    y[:5] = -100
    scored = ba.calibrate(model, (x, y), likelihood="classification").scores
    assert len(scored) == int((~chosen(len(x)))[5:].sum())


def test_sets_hold_the_class_of_a_pixel_drawn_at_random():
    """Of images that differ, over twenty calibrations, within four standard errors; pixels of one image are alike."""
    model, level, kept = segmenter(), 0.8, []
    for seed in range(20):
        net = ba.calibrate(model, scenes(40, 2 * seed), likelihood="classification")
        x, y = scenes(60, 2 * seed + 1)
        kept.append(net(x).set(level).gather(-1, y[..., None]).double().mean())
    rates = torch.stack(kept)
    assert level - 4 * float(rates.std()) / math.sqrt(20) < float(rates.mean())
    assert float(rates.mean()) < level + 1 / 21 + 4 * float(rates.std()) / math.sqrt(20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, None], r"targets\[:, 0\]"),
        (lambda y: nn.functional.one_hot(y, 3).movedim(-1, 1), "argmax over the classes"),
        (lambda y: y[:, ::2, ::2], "resize"),
        (lambda y: y + 0.5, "no whole numbers"),
        (lambda y: y + 2, "class indices must be 0 to 2, got 2 to 4"),
    ],
)
def test_targets_of_pixels_that_do_not_match(change, message):
    x, y = scenes(30, 0)
    with pytest.raises(MatchError, match=message):
        ba.calibrate(segmenter(), (x, change(y)), likelihood="classification")


def test_tuning_says_how_classes_come_last():
    model = segmenter()
    moments = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    posterior = ba.Posterior.from_second_moment(model, moments, n_data=100, likelihood="classification")
    with pytest.raises(MatchError, match=r"forward=lambda model, x: model\(x\)\.movedim\(1, -1\)"):
        posterior.tune(scenes(30, 0))


# --- labels -----------------------------------------------------------------------------------------------------------


def labels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """One label that is sure, one that is doubtful and one that is chance."""
    x = torch.randn(n, 3, generator=seeded(seed))
    return x, (torch.rand(n, 3, generator=seeded(seed + 1)) < (x * torch.tensor([9.0, 3.0, 0.0])).sigmoid()).float()


def labeller() -> nn.Module:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([9.0, 3.0, 0.0]).diag() + 1e-3)
    return model


def test_each_label_is_answered_or_not(tmp_path):
    model = labeller()
    with pytest.warns(BayesAdamWarning, match="1 of 3 labels are never answered, the first is label 2"):
        net = ba.calibrate(model, labels(2400, 0), likelihood="binary", risk=0.05, by_label=True)
    x, y = labels(4000, 7)
    p = net(x)
    assert p.answered.shape == (4000, 3)
    wrong = (p.probs > 0.5) != (y > 0.5)
    for j in range(2):
        assert float(wrong[:, j][p.answered[:, j]].double().mean()) <= 0.05 + 3 * math.sqrt(0.05 / 1000)
    share = p.answered.double().mean(dim=0)
    assert share[0] > 0.8
    assert 0.3 < share[1] < 0.95
    assert share[2] == 0
    assert_close(p.label_doubt, 1 - p.probs.maximum(1 - p.probs))
    rule = net.report.abstention
    assert float(p.answered.double().mean()) == approx(rule.coverage, abs=0.05)
    assert "of the held-out labels" in str(net.report)
    net.save(tmp_path / "net.safetensors")
    again = ba.load(tmp_path / "net.safetensors", model)
    assert torch.equal(again(x).answered, p.answered)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_programs_of_images_and_of_labels(tmp_path, suffix):
    with pytest.warns(BayesAdamWarning, match="never answered"):
        several = ba.calibrate(labeller(), labels(1000, 0), likelihood="binary", risk=0.05, by_label=True)
    images = ba.calibrate(segmenter(), scenes(40, 0), likelihood="classification")
    for net, (x, _) in ((several, labels(50, 7)), (images, scenes(50, 1))):
        # What is written for onnxruntime is run and compared where it is written.
        net.save(tmp_path / f"net.{suffix}", x[:2])
        if suffix == "pt2":
            again, p = ba.load(tmp_path / "net.pt2")(x), net(x)
            assert_close(again.probs, p.probs, rtol=1e-5, atol=1e-6)
            assert p.answered is None or torch.equal(again.answered, p.answered)


def test_confidence_is_of_all_labels_together():
    """Labels that are wrong at just more than the risk: in at most 1 − confidence of all samples one is answered."""
    doubt, generator, passed = torch.arange(300.0)[:, None].expand(300, 8), seeded(), 0
    for _ in range(40):
        wrong = torch.rand(300, 8, generator=generator) < 0.11
        passed += bool(label_abstention(doubt, wrong, risk=0.1, confidence=0.8).answered)
    assert passed <= 8 + 4 * math.sqrt(40 * 0.2 * 0.8)
    sure = label_abstention(doubt, torch.zeros(300, 8, dtype=torch.bool), risk=0.1, confidence=0.8)
    assert sure == Abstention(0.1, 0.8, None, 300, (299.0,) * 8, 2400, 0)


@pytest.mark.parametrize(("name", "risk"), [("classification", 0.1), ("regression", 0.1), ("binary", None)])
def test_labels_are_of_binary_outputs_and_a_risk(name, risk):
    tolerance = 1.0 if name == "regression" else None
    with pytest.raises(SettingError, match="by_label="):
        ba.calibrate(trained(name), scenes(30, 0), risk=risk, tolerance=tolerance, by_label=True)


def test_where_classes_are_is_not_guessed():
    x, y = torch.randn(30, 3, 5, 5), torch.randint(5, (30, 5, 5))
    with pytest.raises(MatchError, match="say which"):
        ba.calibrate(nn.Conv2d(3, 5, 1), (x, y), likelihood="classification")
    net = ba.calibrate(nn.Conv2d(3, 5, 1), (x, y), likelihood="classification", forward=lambda m, x: m(x))
    assert_close(net(x).probs.sum(dim=-1), torch.ones(30, 5, 5))
    with pytest.raises(SettingError, match="ignore_index=255"):
        ba.calibrate(trained("binary"), (x, y), ignore_index=255)
