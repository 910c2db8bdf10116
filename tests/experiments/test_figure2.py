"""Figure 2 in small: the curves against masks applied one by one, the rankings, the files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import bayesadam as ba
from bayesadam.engine.network import Network, member
from cases import jacobian
from experiments import figure2
from experiments.__main__ import main
from experiments.baselines import Training, diagonal_ggn, read
from experiments.data import Images
from experiments.figure2 import FRACTIONS, curves_of, path_scores, problem_of
from floats import approx, assert_close

QUICK = Training(epochs=2, batch_size=16, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.99999))


@pytest.fixture
def images() -> Images:
    source = torch.Generator().manual_seed(0)
    x = torch.rand(200, 6, generator=source)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()
    return Images(x[:150], y[:150], x[150:], y[150:])


def problem(images: Images, seeds=(1, 2), **changes):
    return problem_of(images, Network(6, (8, 7), 3, dropout=0.2), replace(QUICK, **changes), seeds, "cpu")


def test_the_curve_is_that_of_the_lowest_scores_set_to_zero(images):
    given = problem(images)
    curves = curves_of("badam", given)
    assert set(curves) == {"snr", "magnitude", "path-snr"}
    for index, posterior in enumerate(read(given, prior_precision=0.0)):
        mean = posterior.mean
        precision = {name: 1 / variance for name, variance in posterior.variance.items()}
        scores = {"snr": {n: mean[n].abs() * precision[n].sqrt() for n in mean}, "magnitude": mean}
        for ranking, place in ((r, p) for r in scores for p in (0, 3, 7, 9)):
            flat = torch.cat([scores[ranking][name].abs().flatten() for name in mean])
            removed = flat.argsort(stable=True)[: round(FRACTIONS[place] * len(flat))]
            pruned = torch.cat([mean[name].flatten() for name in mean]).index_fill(0, removed, 0.0)
            pieces = pruned.split([t.numel() for t in mean.values()])
            weights = {name: piece.view_as(mean[name]) for name, piece in zip(mean, pieces, strict=True)}
            outputs = torch.func.functional_call(posterior.model.eval(), weights, (images.test_x,))
            right = (outputs.argmax(dim=1) == images.test_y).double().mean()
            assert curves[ranking]["accuracy"][index][place] == approx(float(right))


def test_conditioned_curves_are_those_of_pruned_posteriors(images, monkeypatch):
    monkeypatch.setattr(figure2, "SHOWN", (0.0, 0.5))
    monkeypatch.setattr(figure2, "BY", ("snr",))
    given = problem(images)
    (curve,) = curves_of(figure2.CONDITIONED, given).values()
    assert curve["fractions"] == [0.5]
    for accuracy, posterior in zip(curve["accuracy"], read(given, prior_precision=0.0), strict=True):
        small = ba.prune(posterior, 0.5, inputs=images.train_x, ranking="snr").model.double().eval()
        layers = [
            (layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in small if hasattr(layer, "weight")
        ]
        assert sum((weight == 0).sum() for weight, _ in layers) == round(0.5 * (6 * 8 + 8 * 7 + 7 * 3))
        outputs = images.test_x.double().numpy()
        for weight, bias in layers:
            outputs = np.maximum(outputs, 0) @ weight.T + bias
        assert accuracy == [approx((outputs.argmax(axis=1) == images.test_y.numpy()).mean())]


def test_path_scores_are_products_over_paths():
    """Of a network 2-3-2-1, unit by unit, as loops would sum them."""
    network = Network(2, (3, 2), 1)
    snr = {name: torch.rand(1, *shape) for name, shape in network.shapes().items()}
    weights, biases = ([snr[f"layer{k}.{what}"][0] for k in range(3)] for what in ("weight", "bias"))

    def one(values):
        tensor = torch.tensor(values)
        return tensor / tensor.mean()

    a = [torch.ones(2)]
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        a.append(one([float(((row * a[-1]).square().sum() + bias**2).sqrt()) for row, bias in zip(w, b, strict=True)]))
    b = [torch.ones(1)]
    for w in weights[:0:-1]:
        b.insert(0, one([float((column * b[0]).square().sum().sqrt()) for column in w.T]))
    scores = path_scores(snr)
    for k in range(3):
        assert_close(scores[f"layer{k}.weight"][0], b[k][:, None] * weights[k] * a[k])
        assert_close(scores[f"layer{k}.bias"][0], b[k] * biases[k])


@pytest.mark.parametrize("method", [m for m in figure2.METHODS if m not in (figure2.CONDITIONED, figure2.RELEASED)])
def test_every_method_has_its_curves_and_a_seed_its_own(images, method):
    together, alone = curves_of(method, problem(images, (1, 2))), curves_of(method, problem(images, (2,)))
    for ranking, curve in together.items():
        one, other = curve["accuracy"], alone[ranking]["accuracy"]
        assert len(one) == 2
        assert all(0 <= a <= 1 for row in one for a in row)
        # Rounding may reorder near-equal scores, and move one of fifty images.
        assert sum(abs(a - b) > 0.021 for a, b in zip(one[1], other[0], strict=True)) <= 2


def test_the_diagonal_ggn_is_the_sum_of_squared_jacobians(images):
    network = Network(6, (5, 4), 3, "tanh")
    given = problem_of(images, network, QUICK, (3, 4), "cpu")
    x = images.train_x[:20].double()
    params = {name: t.double() for name, t in given.optimum.params.items()}
    ggn = diagonal_ggn(network, params, x, at_once=8)
    for index in range(2):
        model = network.build(member(given.optimum.params, index)).double()
        j, p = jacobian(model, x), model(x).detach().softmax(dim=1)
        total = torch.einsum("ncp,ncd,ndp->p", j, torch.diag_embed(p) - p[:, :, None] * p[:, None], j)
        found = torch.cat([member(ggn, index)[name].flatten() for name, _ in model.named_parameters()])
        assert_close(found, total, rtol=1e-5, atol=1e-12)


def test_the_command_writes_its_picture_and_metrics(images, tmp_path, monkeypatch):
    monkeypatch.setattr(figure2, "load_images", lambda *_: images)
    options = ["--methods", "badam", "--epochs", "1", "--seeds", "1", "--device", "cpu"]
    assert main(["figure2", *options, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure2.png").read_bytes()[:4] == b"\x89PNG"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["command"] == "figure2"
    assert set(metrics["results"]["badam"]) == {"snr", "magnitude", "path-snr"}
    assert metrics["results"]["badam"]["snr"]["fractions"] == list(FRACTIONS)
